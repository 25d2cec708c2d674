"""Which packed weights mlx-lm reads rightly, told from config.json.

Facts of mlx-lm 0.32.2 (`utils.load_model`) and mlx 0.32.4 (`quantize`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from weighbridge.scorer.adapter_formats import core_path
from weighbridge.scorer.errors import CheckpointError, shown

_CONVERT = (
    "use a release of the model in bfloat16, or one packed by mlx-lm: "
    "python -m mlx_lm convert --hf-path MODEL -q"
)
_BITS = {"affine": (1, 2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
_GROUPS = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
_DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
_AWQ_LAYOUTS = frozenset({"gemm", "exllama", "ipex"})
_COMPRESSED = frozenset({"nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized"})


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuse packed weights that mlx-lm would not read, or would read as something else.

    mlx-lm leaves methods that it does not know out of account, and reads GPTQ, whose
    packing is another, as AWQ.

    Args:
        config: config.json.

    Raises:
        CheckpointError: With the reason.
    """
    own = config.get("quantization")
    if own is not None:
        _check_own(own)
        return
    foreign = _foreign(config)
    if not foreign:
        return
    if not isinstance(foreign, dict) or not isinstance(foreign.get("quant_method"), str):
        raise refused_packing(f"got quantization_config {shown(foreign)} without a quant_method")
    method = foreign["quant_method"]
    judge = _METHODS.get(method)
    reason = (
        judge(foreign)
        if judge
        else f"got quant_method {shown(method)}, which mlx-lm leaves out of account"
    )
    if reason:
        raise refused_packing(reason)


def describe_quantization(config: Mapping[str, Any]) -> str | None:
    """Name the packing of a checkpoint for people, None for plain weights.

    Args:
        config: config.json.
    """
    own = config.get("quantization")
    if not isinstance(own, dict):
        foreign = _foreign(config)
        if not isinstance(foreign, dict):
            return None
        if "bits" not in foreign or "group_size" not in foreign:
            return str(foreign.get("quant_method", "packed"))
        own = foreign
    mode = own.get("mode") or own.get("quant_method") or "affine"
    first = f"{own.get('bits', '?')}-bit {mode}"
    name = f"{first}, groups of {own.get('group_size', '?')}"
    layers = [_params(own, value) for value in own.values() if isinstance(value, dict)]
    others = sorted({f"{bits}-bit {mode}" for mode, bits, _ in layers} - {first})
    return f"{name}, some layers {' and '.join(others)}" if others else name


def group_sizes(config: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """Return the group size of packed weights, and that of modules with one of their own.

    Args:
        config: config.json.
    """
    own = config.get("quantization") or _foreign(config)
    if not isinstance(own, dict):
        return 32, {}
    size = _params(own, own)[2]
    if type(size) is not int:
        size = 32  # of methods that have no choice
    special = {
        path: _params(own, value)[2] for path, value in own.items() if isinstance(value, dict)
    }
    return size, special


def packing_of(config: Mapping[str, Any], module: str) -> set[tuple[int, int]]:
    """Return bits and group size that mlx-lm may take a packed module for.

    Args:
        config: config.json, that passed `check_quantization`.
        module: The core of its path, as `core_path` gives it.
    """
    own = config["quantization"]
    layers = [
        value
        for path, value in own.items()
        if isinstance(value, dict) and core_path(path) == module
    ]
    # A layer that is told by another prefix than mlx-lm's is packed as all others are.
    return {_params(own, value)[1:] for value in (own, *layers)}


def refused_packing(reason: str, hint: str = _CONVERT) -> CheckpointError:
    """Return the error for packed weights that are not read rightly, with its reason."""
    return CheckpointError(
        f"packed weights must be of a kind that is read rightly, {reason}", hint=hint
    )


def _foreign(config: Mapping[str, Any]) -> Any:
    """Return the settings of another method; mlx-lm looks into the text part for them too."""
    text = config.get("text_config")
    found = config.get("quantization_config")
    return text.get("quantization_config") if found is None and isinstance(text, dict) else found


def _check_own(own: Any) -> None:
    if not isinstance(own, dict):
        raise refused_packing(f"got quantization {shown(own)}, which must be an object")
    layers = {path: value for path, value in own.items() if isinstance(value, dict)}
    for path, value in {"": own, **layers}.items():
        mode, bits, group = _params(own, value)
        where = f" for {path}" if path else ""
        if not isinstance(mode, str) or mode not in _BITS:
            raise refused_packing(f"got the mode {shown(mode)}{where}, none of {', '.join(_BITS)}")
        # True is equal to 1, and is no number of bits.
        whole = type(bits) is int and type(group) is int
        if not whole or bits not in _BITS[mode] or group not in _GROUPS[mode]:
            raise refused_packing(
                f"got {bits!r} bits in groups of {group!r}{where}, and {mode} has "
                f"{_BITS[mode]} bits in groups of {_GROUPS[mode]}"
            )


def _params(own: Mapping[str, Any], value: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return mode, bits and group size; a layer takes what it leaves out from its mode."""
    mode = value.get("mode", "affine")
    if value is own or not isinstance(mode, str) or mode not in _DEFAULTS:
        return mode, value.get("bits"), value.get("group_size")
    bits, group = _DEFAULTS[mode]
    return mode, value.get("bits", bits), value.get("group_size", group)


def _awq(config: Mapping[str, Any]) -> str | None:
    bits, group = config.get("bits", 4), config.get("group_size", 128)
    layout = str(config.get("version", "gemm")).lower()
    if bits != 4 or group not in _GROUPS["affine"]:
        return f"got AWQ with {bits!r} bits in groups of {group!r}: 4 bits in 32, 64 or 128"
    if layout not in _AWQ_LAYOUTS:
        return f"got AWQ in the layout {layout!r}, which would be read as gemm"
    return None


def _modelopt(config: Mapping[str, Any]) -> str | None:
    settings = config.get("quantization", config)
    algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
    return None if algorithm == "NVFP4" else f"got modelopt with {shown(algorithm)}"


def _compressed(config: Mapping[str, Any]) -> str | None:
    """Say why a compressed-tensors configuration is refused, None where it is read rightly."""
    kind = config.get("format")
    if not isinstance(kind, str) or kind not in _COMPRESSED:
        return f"got compressed-tensors in the format {shown(kind)}"
    if kind != "pack-quantized":
        return None
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if (bits, size) != (4, 32) or weights.get("symmetric") is False:
            return (
                f"got compressed-tensors with {bits!r} bits in groups of {size!r}, which "
                "would be read as 4 symmetric bits in groups of 32"
            )
    return None


_METHODS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "mxfp4": lambda _: None,
    "mxfp8": lambda _: None,
    # A few architectures unpack it; where none does, the types tell after loading.
    "fp8": lambda _: None,
    "awq": _awq,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": lambda _: "got GPTQ, whose packing mlx-lm would read as that of AWQ",
    "bitnet": lambda _: "got BitNet, whose layers run on Metal alone and cannot be unpacked",
}
"""For each method that mlx-lm knows, why a configuration is refused; None where it is not."""
