"""An adapter written into its base for good: a merged checkpoint folder."""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from weighbridge.scorer.adapters import CONTRACT_FILES, Adapter
from weighbridge.scorer.backend import describe_backend, on_mlx_thread
from weighbridge.scorer.checkpoint import CheckpointInfo, identity_files
from weighbridge.scorer.config_file import CONFIG_FILE, QUANTIZATION_FILE, read_config
from weighbridge.scorer.contract import SYSTEM_FILE, read_contract_file, sha256_of
from weighbridge.scorer.errors import CheckpointError, quoted
from weighbridge.scorer.hashes import hash_files
from weighbridge.scorer.memory import require_room, weight_bytes
from weighbridge.scorer.model_weights import load_model, prompt_logits
from weighbridge.scorer.ready import READY_FILE, read_ready

_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Copied beside what a decision depends on; code (*.py) is never taken along.
_COPIED = ("generation_config.json", "LICENSE*", "NOTICE*")
_NO_FOLDER = (errno.EEXIST, errno.ENOTDIR)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)
# These tell how the weights before were packed.
_MADE_ANEW = (CONFIG_FILE, QUANTIZATION_FILE)


def fuse_checkpoint(
    info: CheckpointInfo,
    out: Path,
    *,
    dtype: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a merged folder: a checkpoint with its adapter fused into its weights.

    Scored in the dtype it is written in, it gives what base and adapter give. It is
    loaded again and compared before it gets its name; killed before, `out` is not there,
    and what was written is removed by the next one that is to be called `out`.

    Args:
        info: The checkpoint, looked at with the adapter.
        out: The new folder; must not exist.
        dtype: Of the merged weights; None takes that of the base's.
        progress: Called with a sentence at each step.

    Returns:
        The folder.

    Raises:
        CheckpointError: There is no adapter, it does not fit or changes nothing, the
            weights do not fit into memory, or `out` exists or cannot be written.
    """
    adapter = info.adapter
    if adapter is None:
        raise CheckpointError(
            f"a checkpoint must have an adapter to be fused, got none with {info.folder}",
            hint="name the adapter's folder",
        )
    say = progress or (lambda _: None)
    try:
        out = Path(os.path.abspath(Path(out).expanduser()))  # noqa: PTH100
        with suppress(FileNotFoundError):
            out.lstat()  # says more than exists() of what no path can be
        _check_out(out)
    except (OSError, ValueError, RuntimeError) as error:  # what no path can be, `~nobody`
        raise _unwritable(out, error) from error
    dtype = _dtype(info, dtype)
    require_room(
        info.name,
        weight_bytes(info.folder, dtype, dequantize=True, adapter=adapter),
        describe_backend(dtype),
        unpacked=info.quantization is not None,
        hint="fuse it on a machine with more memory, or use --adapter when scoring",
    )
    partial: Path | None = None
    lock: int | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out, say)
        partial = out.with_name(f".{out.name}.{token_hex(4)}.partial")
        partial.mkdir()
        lock = _locked(partial)
        _copy_files(info.folder, adapter.folder, partial)
        say(f"fusing {adapter.description}, into {dtype} weights")
        logits, own_head = on_mlx_thread(_write_weights, info.folder, adapter, dtype, partial)
        _write_config(info.folder, partial, dtype, own_head)
        say("loading the merged weights again, to compare")
        apart = float(np.abs(on_mlx_thread(_read_again, partial, dtype) - logits).max())
        if not apart <= 1e-6 * max(float(np.ptp(logits)), 1.0):
            raise CheckpointError(
                f"a merged checkpoint must give the logits of base and adapter, got some that "
                f"differ by {apart:.1e}",
                hint="this architecture cannot be written back: use --adapter when scoring",
            )
        say("hashing")
        _write_json(partial / READY_FILE, _ready(info, adapter, dtype, partial))
        _check_out(out)
        partial.rename(out)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        # After the rename there is nothing of that name.
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    if info.quantization:
        say(f"the base is packed ({info.quantization}); the merged folder holds plain {dtype}")
    return out


def check_not_merged(folder: Path, adapter: Adapter, hash_cache: Path | None = None) -> None:
    """Refuse an adapter that READY.json says is in the weights already.

    Args:
        folder: A checkpoint folder.
        adapter: What is to be fused into it.
        hash_cache: A file that keeps hashes of files by size and time of change.

    Raises:
        CheckpointError: It is.
        TemperatureError: READY.json cannot be trusted.
    """
    if hash_files([adapter.weights], hash_cache) == (read_ready(folder).adapter_sha256,):
        raise CheckpointError(
            f"an adapter must be fused once, and {READY_FILE} in {folder} says that this one "
            "is in the weights already",
            hint="use that folder as it is",
        )


def _remove_stale(out: Path, say: Callable[[str], None]) -> None:
    """Remove what processes left that were killed while they wrote a folder of this name."""
    name = re.compile(re.escape(f".{out.name}.") + r"[0-9a-f]{8}\.partial")
    for path in sorted(out.parent.iterdir()):
        if name.fullmatch(path.name) and (lock := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            say(f"removed {path}, which was left when its process was killed")


def _locked(folder: Path) -> int | None:
    """Lock a folder until its file descriptor is closed or the process ends, however it does.

    Returns:
        The descriptor, None where another process has the lock or the disk knows none.
    """
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _unwritable(out: Path, error: Exception) -> CheckpointError:
    """Describe a folder that cannot be made or written, and what helps."""
    reason = getattr(error, "strerror", None) or str(error)
    named = quoted(str(out), limit=200)
    code = getattr(error, "errno", None)
    blocking = next((path for path in out.parents if code in _NO_FOLDER and path.is_file()), None)
    if blocking is not None:
        reason, hint = f"{quoted(blocking.name)} is a file", "name a place in a folder"
    elif code in _NO_RIGHT:
        hint = "name a folder that you may write to"
    elif isinstance(error, OSError) and code in (None, *_NO_ROOM):  # MLX tells no number
        hint = "name a folder on a disk with room for the weights"
    else:
        hint = "name another folder"
    return CheckpointError(
        f"a merged checkpoint must be written to {named}, got: {reason}", hint=hint
    )


def _check_out(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointError(
            f"the folder of a merged checkpoint must not exist yet, got {quoted(str(out))}",
            hint="name another one, or remove it first",
        )


def _dtype(base: CheckpointInfo, dtype: str | None) -> str:
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
        if not partial.is_dir():  # stopped meanwhile; mlx-lm would make it again
            raise FileNotFoundError(f"{partial} is gone")
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
    more = (path for pattern in _COPIED for path in base.glob(pattern))
    for path in (*identity_files(base), *more):
        if path.is_file() and path.name not in _MADE_ANEW:
            shutil.copyfile(path, partial / path.name)
    if (adapter / CONTRACT_FILES[0]).is_file():
        for name in CONTRACT_FILES:
            (partial / name).unlink(missing_ok=True)
            if (adapter / name).is_file():
                shutil.copyfile(adapter / name, partial / name)


def _write_config(base: Path, partial: Path, dtype: str, own_head: bool) -> None:
    """Write config.json for plain text weights of this dtype."""
    config = read_config(base)
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
    _write_json(partial / CONFIG_FILE, config)


def _ready(info: CheckpointInfo, adapter: Adapter, dtype: str, partial: Path) -> dict[str, Any]:
    weights = sorted(partial.glob("model*.safetensors"))
    before = read_ready(info.folder)
    ready: dict[str, Any] = {
        "adapter_sha256": info.adapter_sha256,
        # What an adapter says it was trained on is not always what it is merged into.
        "base_model": info.model_id,
        "base_revision": info.revision if info.model_id else None,
        "adapter_base_model": adapter.base_model,
        # What was below a base that was merged itself is below this one too.
        "base_adapter_sha256": before.adapter_sha256 or before.base_adapter_sha256,
        "base_quantization": info.quantization or before.base_quantization,
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
    system = folder / SYSTEM_FILE
    if system.is_file():
        return sha256(system.read_bytes()).hexdigest()
    text = (read_contract_file(folder) or {}).get("wide_system_prompt")
    return sha256_of(text) if isinstance(text, str) else None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
