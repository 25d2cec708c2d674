"""An adapter written into its base for good: a merged checkpoint folder."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import numpy as np

from weighbridge.scorer.adapters import CONTRACT_FILES, Adapter
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.errors import CheckpointError, quoted
from weighbridge.scorer.hashes import hash_files
from weighbridge.scorer.model_weights import load_model, prompt_logits
from weighbridge.scorer.ready import READY_FILE

logger = logging.getLogger(__name__)

_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Configuration and weights are written anew; code (*.py) is never taken along.
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "*.model",
    "generation_config.json",
    *CONTRACT_FILES,
    "LICENSE*",
    "NOTICE*",
)


class Base(Protocol):
    """What fusing asks of a checkpoint; `CheckpointInfo` is one."""

    @property
    def folder(self) -> Path: ...  # noqa: D102
    @property
    def model_id(self) -> str | None: ...  # noqa: D102
    @property
    def revision(self) -> str | None: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def quantization(self) -> str | None: ...  # noqa: D102
    @property
    def adapter_sha256(self) -> str | None: ...  # noqa: D102


def fuse_checkpoint(
    base: Base,
    adapter: Adapter,
    out: Path,
    *,
    dtype: str | None = None,
    hash_cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a merged folder: the base with an adapter fused into its weights.

    Scored in the dtype it is written in, it gives what base and adapter give. It is
    loaded again and compared before it gets its name; killed before, `out` is not there.

    Args:
        base: The checkpoint that the adapter was trained on.
        adapter: What to fuse.
        out: The new folder; must not exist.
        dtype: Of the merged weights; None takes that of the base's.
        hash_cache: A file that keeps hashes of files by size and time of change.
        progress: Called with a sentence at each step.

    Returns:
        The folder.

    Raises:
        CheckpointError: The adapter does not fit, changes nothing or was merged into this
            base before, or `out` exists or cannot be written.
    """
    say = progress or (lambda _: None)
    out = Path(os.path.abspath(Path(out).expanduser()))  # noqa: PTH100
    _check_out(out)
    (adapter_sha256,) = hash_files([adapter.weights], hash_cache)
    if base.adapter_sha256 == adapter_sha256:
        raise CheckpointError(
            f"an adapter must be fused once, and {base.folder} holds this one merged already",
            hint="use that folder as it is",
        )
    dtype = _dtype(base, dtype)
    partial: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f".{out.name}.{token_hex(4)}.partial")
        partial.mkdir()
        _copy_files(base.folder, adapter.folder, partial)
        say(f"fusing {adapter.description}, into {dtype} weights")
        logits, own_head = on_mlx_thread(_write_weights, base.folder, adapter, dtype, partial)
        _write_config(base.folder, partial, dtype, own_head)
        say("loading the merged weights again, to compare")
        apart = float(np.abs(on_mlx_thread(_read_again, partial, dtype) - logits).max())
        if not apart <= 1e-6 * max(float(np.ptp(logits)), 1.0):
            raise CheckpointError(
                f"a merged checkpoint must give the logits of base and adapter, got some that "
                f"differ by {apart:.1e}",
                hint="this architecture cannot be written back: use --adapter when scoring",
            )
        say("hashing")
        ready = _ready(base, adapter, adapter_sha256, dtype, partial)
        _write_json(partial / READY_FILE, ready)
        _check_out(out)
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(
            f"a merged checkpoint must be written to {out}, got: {error.strerror or error}",
            hint="name a folder on a disk with room for the weights",
        ) from error
    finally:
        # After the rename there is nothing of that name.
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
    if base.quantization:
        say(f"the base is packed ({base.quantization}); the merged folder holds plain {dtype}")
    return out


def _check_out(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointError(
            f"the folder of a merged checkpoint must not exist yet, got {quoted(str(out))}",
            hint="name another one, or remove it first",
        )


def _dtype(base: Base, dtype: str | None) -> str:
    if dtype is None:
        return base.dtype if base.dtype in _DTYPES else "float32"
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"the dtype of weights must be one of {', '.join(_DTYPES)}, got {quoted(dtype)}",
            hint="leave it out to keep that of the base",
        )
    return dtype


def _write_weights(
    folder: Path, adapter: Adapter, dtype: str, partial: Path
) -> tuple[np.ndarray, bool]:
    """Fuse and save; return logits to compare with, and whether the head is a matrix of its own."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import save_model

    with mx.stream(mx.cpu if dtype == "float64" else mx.default_device()):
        model = load_model(folder, dtype, adapter=adapter, dequantize=True)
        logits = prompt_logits(model)
        try:
            save_model(partial, model)
        except RuntimeError as error:  # how MLX tells of a disk that is full
            raise OSError(str(error)) from error
    parameters: Any = tree_flatten(model.parameters())
    return logits, any(name.endswith("lm_head.weight") for name, _ in parameters)


def _read_again(partial: Path, dtype: str) -> np.ndarray:
    import mlx.core as mx

    mx.clear_cache()
    with mx.stream(mx.cpu if dtype == "float64" else mx.default_device()):
        return prompt_logits(load_model(partial, dtype))


def _copy_files(base: Path, adapter: Path, partial: Path) -> None:
    """Copy tokenizer, templates and trained prompt; the adapter's prompt beats the base's."""
    for pattern in _COPIED:
        for path in base.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, partial / path.name)
    if (adapter / CONTRACT_FILES[0]).is_file():
        for name in CONTRACT_FILES:
            (partial / name).unlink(missing_ok=True)
            if (adapter / name).is_file():
                shutil.copyfile(adapter / name, partial / name)


def _write_config(base: Path, partial: Path, dtype: str, own_head: bool) -> None:
    """Write config.json for plain text weights of this dtype."""
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, dict) else (config,):
        for name in ("quantization", "quantization_config", "quantize_activations"):
            part.pop(name, None)
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = dtype
        # An adapter on tied embeddings may have given the head weights of its own.
        if own_head and part.get("tie_word_embeddings"):
            part["tie_word_embeddings"] = False
    # The tower itself is not in the weights.
    config.pop("vision_config", None)
    config.pop("_name_or_path", None)
    _write_json(partial / "config.json", config)


def _ready(
    base: Base, adapter: Adapter, adapter_sha256: str, dtype: str, partial: Path
) -> dict[str, Any]:
    weights = sorted(partial.glob("model*.safetensors"))
    ready: dict[str, Any] = {
        "adapter_sha256": adapter_sha256,
        "base_model": base.model_id or adapter.base_model,
        "base_revision": base.revision,
        "base_adapter_sha256": base.adapter_sha256,
        "base_quantization": base.quantization,
        "prompt_sha256": _prompt_sha256(partial),
        "weight_sha256": {
            file.name: found for file, found in zip(weights, hash_files(weights), strict=True)
        },
        "precision": dtype,
        "merged_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("weighbridge", "mlx", "mlx-lm")},
    }
    return {name: value for name, value in ready.items() if value is not None}


def _prompt_sha256(folder: Path) -> str | None:
    """Hash the trained system text, as its own file or as the contract carries it."""
    config, system = (folder / name for name in CONTRACT_FILES)
    if system.is_file():
        return sha256(system.read_bytes()).hexdigest()
    if config.is_file():
        with suppress(ValueError, RecursionError):
            contract: Any = json.loads(config.read_text(encoding="utf-8"))
            text = contract.get("wide_system_prompt") if isinstance(contract, dict) else None
            if isinstance(text, str):
                return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
