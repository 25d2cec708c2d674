"""What mlx-lm and PEFT write into an adapter folder, as low-rank products.

Facts of mlx-lm 0.32.2 (`tuner/lora.py`, `tuner/utils.py`) and PEFT 0.18 (`LoraConfig`,
`get_pattern_key`, `get_peft_model_state_dict`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weighbridge.scorer.errors import CheckpointError, listed, quoted, shown

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Floating-point types of tensors, as safetensors spells them."""

_FUSE = "python -m mlx_lm fuse --model BASE --adapter-path ADAPTER --save-path OUT"
MERGE_WITH_PEFT = (
    "merge it with PEFT (merge_and_unload), save the model, and use that as the checkpoint"
)

_WRAPPERS = frozenset({"model", "language_model", "text_model", "transformer"})

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:"
    r"(?P<linear>[AB])(?:\.(?P<adapter>(?!weight$)[^.]+))?\.weight|"
    r"embedding_(?P<embedding>[AB])(?:\.(?P<name>[^.]+))?)"
)
_WHOLE = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer)?\.weight")

# Features of LoraConfig that a low-rank product cannot say. Other `use_…` switches are
# found by their name: a switch that is not known here may change what the tensors mean.
_UNSUPPORTED = (
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "lora_bias",
)
_KNOWN_SWITCHES = frozenset({"use_rslora"})
# These initializations take the product's start out of the base weights.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LowRank:
    """One product: the weight of a module grows by `scale` times what its tensors make.

    Attributes:
        module: Its path, as the adapter writes it without PEFT's own prefix.
        down: Name of the tensor on the input's side.
        up: Name of the tensor on the output's side.
        rank: Inner size of the product.
        scale: Its factor.
        embedding: Whether the tensors are PEFT's for embeddings, `(r, V)` and `(D, r)`.
    """

    module: str
    down: str
    up: str
    rank: int
    scale: float
    embedding: bool = False


@dataclass(frozen=True, slots=True)
class WholeCopy:
    """A whole weight in an adapter file, as PEFT adds for adapted embeddings.

    It is harmless while it equals the base's; a resized vocabulary is not.
    """

    module: str
    tensor: str


def core_path(path: str) -> str:
    """Return the path of a module without what wraps the text model.

    The wrappers differ between Hugging Face's classes and mlx-lm's: PEFT writes
    `model.language_model.layers.0`, mlx-lm has `language_model.model.layers.0`.
    """
    parts = path.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


@dataclass(frozen=True, slots=True)
class Products:
    """What an adapter's files say it changes; `Adapter` tells of the attributes."""

    low_rank: tuple[LowRank, ...]
    whole: tuple[WholeCopy, ...] = ()
    ties_head: bool = True
    layers: int | None = None
    keys: tuple[str, ...] | None = None


def read_mlx(config: Mapping[str, Any], header: Mapping[str, Any]) -> Products:
    """Read an adapter of mlx-lm.

    Tensors of a module: `lora_a` (in, r) and `lora_b` (r, out); of experts (E, r, in) and
    (E, out, r); of embeddings (V, r) and (r, D), which mlx-lm applies to a tied head too.

    Args:
        config: adapter_config.json.
        header: Names, dtypes and shapes of the tensors.

    Raises:
        CheckpointError: It is more than LoRA, or its files do not fit each other.
    """
    kind = config.get("fine_tune_type", "lora")
    if kind == "dora":
        raise CheckpointError(
            "an adapter must be plain LoRA, got DoRA (fine_tune_type)",
            hint=f"merge it first: {_FUSE} (and --dequantize on a quantized base)",
        )
    if kind != "lora":
        raise CheckpointError(
            f"an adapter must be plain LoRA, got fine_tune_type {shown(kind)}: whole weights",
            hint=f"write them into a checkpoint first: {_FUSE}",
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise CheckpointError(
            f"lora_parameters of an adapter must be an object, got {shown(parameters)}",
            hint="restore adapter_config.json: rank and scale are told there",
        )
    rank = _count("rank", parameters.get("rank"))
    scale = _factor("scale", parameters.get("scale"))
    pairs: dict[str, dict[str, str]] = defaultdict(dict)
    foreign: list[str] = []
    for name in header:
        module, _, leaf = name.rpartition(".")
        if module and leaf in ("lora_a", "lora_b"):
            pairs[module][leaf] = name
        else:
            foreign.append(name)
    if any(name.endswith(".m") for name in foreign):
        _refuse_tensors("plain LoRA, got magnitudes of DoRA", foreign, f"merge it first: {_FUSE}")
    _refuse_tensors("lora_a and lora_b only, got others", foreign, f"merge it first: {_FUSE}")
    products: list[LowRank] = []
    for module, pair in sorted(pairs.items()):
        down, up = _both(module, pair, ("lora_a", "lora_b"))
        first, second = _shape(header, down), _shape(header, up)
        # Experts keep the rank in the middle of A and at the end of B.
        ranks = (first[1], second[2]) if len(first) == 3 else (first[-1], second[0])
        _check_rank(module, ranks, rank, len(first) == len(second) and len(first) in (2, 3))
        products.append(LowRank(module, down, up, rank, scale))
    layers = config.get("num_layers")
    keys = parameters.get("keys")
    known = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    return Products(
        _some(products),
        layers=layers if type(layers) is int else None,
        keys=tuple(keys) if isinstance(keys, list) and known else None,
    )


def read_peft(config: Mapping[str, Any], header: Mapping[str, Any]) -> Products:
    """Read an adapter of PEFT.

    Tensors of a module: `lora_A` (r, in) and `lora_B` (out, r); of embeddings
    `lora_embedding_A` (r, V) and `lora_embedding_B` (D, r). The factor is alpha / r, with
    `use_rslora` alpha / sqrt(r); patterns change r and alpha by module.

    Args:
        config: adapter_config.json.
        header: Names, dtypes and shapes of the tensors.

    Raises:
        CheckpointError: It is more than LoRA, or its files do not fit each other.
    """
    _check_peft(config)
    rank = _count("r", config.get("r"))
    alpha = _factor("lora_alpha", config.get("lora_alpha"))
    ranks = _patterns(config, "rank_pattern")
    alphas = _patterns(config, "alpha_pattern")
    root = bool(config.get("use_rslora"))
    pairs: dict[str, dict[str, str]] = defaultdict(dict)
    whole: list[WholeCopy] = []
    foreign: list[str] = []
    names: set[str] = set()
    for name in header:
        match = _TENSOR.fullmatch(name)
        if match:
            leaf = f"embedding_{match['embedding']}" if match["embedding"] else match["linear"]
            pairs[match["module"]][leaf] = name
            names.add(match["adapter"] or match["name"] or "")
        elif "lora_" not in name and (copy := _WHOLE.fullmatch(name)):
            whole.append(WholeCopy(copy["module"], name))
        else:
            foreign.append(name)
    if any("lora_magnitude_vector" in name for name in foreign):
        _refuse_tensors("plain LoRA, got magnitudes of DoRA", foreign, MERGE_WITH_PEFT)
    _refuse_tensors("lora_A and lora_B only, got others", foreign, MERGE_WITH_PEFT)
    if len(names) > 1:
        raise CheckpointError(
            f"an adapter file must hold one adapter, got {listed(sorted(names))}",
            hint="save the one that is wanted alone: save_pretrained(FOLDER, "
            "selected_adapters=[NAME])",
        )
    products: list[LowRank] = []
    for module, pair in sorted(pairs.items()):
        embedding = any(leaf.startswith("embedding") for leaf in pair)
        leaves = ("embedding_A", "embedding_B") if embedding else ("A", "B")
        down, up = _both(module, pair, leaves)
        own = _count("rank_pattern", _matching(ranks, module, rank))
        first, second = _shape(header, down), _shape(header, up)
        flat = len(first) == len(second) == 2
        _check_rank(module, (first[0], second[-1]), own, flat)
        factor = _factor("alpha_pattern", _matching(alphas, module, alpha))
        scale = factor / (math.sqrt(own) if root else own)
        products.append(LowRank(module, down, up, own, scale, embedding))
    ties = bool(config.get("ensure_weight_tying"))
    return Products(_some(products), tuple(whole), ties_head=ties)


def _check_peft(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"an adapter must be LoRA, got peft_type {shown(kind)}", hint=MERGE_WITH_PEFT
        )
    bias = config.get("bias", "none")
    if bias != "none":
        raise CheckpointError(
            f"an adapter must leave biases alone, got bias {shown(bias)}", hint=MERGE_WITH_PEFT
        )
    switches = [key for key in config if key.startswith("use_") and key not in _KNOWN_SWITCHES]
    for key in (*_UNSUPPORTED, *switches):
        if config.get(key):
            name = "DoRA (use_dora)" if key == "use_dora" else f"{key}: {shown(config[key])}"
            if isinstance(config[key], list):
                name = f"{key}: {listed(map(str, config[key]))}"
            raise CheckpointError(
                f"an adapter must be plain LoRA, got {name}", hint=MERGE_WITH_PEFT
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise CheckpointError(
            f"an adapter must belong to the plain base weights, got init_lora_weights "
            f"{shown(start)}, which changes them before training",
            hint="save it as plain LoRA (path_initial_model_for_weight_conversion), or "
            + MERGE_WITH_PEFT,
        )


def _patterns(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(
            f"{key} of an adapter must be an object, got {shown(patterns)}",
            hint="restore adapter_config.json",
        )
    return patterns


def _matching(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that ends a path at a dot, or is all of it."""
    for pattern, value in patterns.items():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise CheckpointError(
                f"patterns of an adapter must be regular expressions, got {quoted(pattern)}",
                hint="restore adapter_config.json",
            ) from error
        if found:
            return value
    return otherwise


def _both(module: str, pair: Mapping[str, str], leaves: Sequence[str]) -> tuple[str, str]:
    missing = [leaf for leaf in leaves if leaf not in pair]
    if missing or len(pair) > 2:
        raise CheckpointError(
            f"an adapter must hold two tensors for {quoted(module)}, got {listed(pair.values())}",
            hint="fetch the adapter again: its file is not whole",
        )
    return pair[leaves[0]], pair[leaves[1]]


def _shape(header: Mapping[str, Any], name: str) -> list[int]:
    tensor = header[name]
    if tensor["dtype"] not in FLOATS:
        raise CheckpointError(
            f"tensors of an adapter must be floating-point, got {tensor['dtype']} for "
            f"{quoted(name)}",
            hint="save the adapter in float32 or bfloat16",
        )
    shape: Any = tensor.get("shape")
    sizes = isinstance(shape, list) and all(type(size) is int for size in shape)
    if not sizes or len(shape) < 2:
        got = tuple(shape) if sizes else shown(shape)
        raise CheckpointError(
            f"tensors of an adapter must be matrices, got the shape {got} for {quoted(name)}",
            hint="fetch the adapter again",
        )
    return shape


def _check_rank(module: str, found: tuple[int, int], expected: int, matrices: bool) -> None:
    if not matrices or set(found) != {expected}:
        got = f"ranks {found[0]} and {found[1]}" if matrices else "tensors of other dimensions"
        raise CheckpointError(
            f"the tensors of {quoted(module)} must have the rank {expected} of "
            f"adapter_config.json, got {got}",
            hint="configuration and weights are of two adapters: fetch both again",
        )


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{name} of an adapter must be a whole number above 0, got {shown(value)}",
            hint="restore adapter_config.json",
        )
    return value


def _factor(name: str, value: Any) -> float:
    number = 0.0
    if type(value) in (int, float):
        with suppress(OverflowError):  # JSON has integers that no float can hold
            number = float(value)
    if not math.isfinite(number) or number == 0:
        raise CheckpointError(
            f"{name} of an adapter must be a finite number other than 0, got {shown(value)}",
            hint="restore adapter_config.json: without it the size of the change is unknown",
        )
    return number


def _refuse_tensors(rule: str, names: Sequence[str], hint: str) -> None:
    if names:
        raise CheckpointError(f"an adapter must hold {rule}: {listed(names)}", hint=hint)


def _some(products: Sequence[LowRank]) -> tuple[LowRank, ...]:
    if not products:
        raise CheckpointError(
            "an adapter must change a module at least, got no tensors",
            hint="fetch the adapter again",
        )
    return tuple(products)
