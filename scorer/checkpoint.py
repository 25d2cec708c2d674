"""Checkpoint folders: what is in them, who they are, and their weights."""

import hashlib
import json
import logging
import re
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge.scorer.chat import first_line
from weighbridge.scorer.contract import Contract, read_contract
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.temperature import read_ready

logger = logging.getLogger(__name__)

DEFAULT_MAX_INPUT_TOKENS = 4096

IDENTITY_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "schema_config.json",
    "system_prompt.txt",
)
"""Beside the weights, what a decision depends on. READY.json is not among them:
it selects a temperature, and a temperature is applied to a decision later."""

ADAPTER_FILES = ("adapters.safetensors", "adapter_model.safetensors")

_HEADER_LIMIT = 100 * 2**20
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint folder, described without loading its weights.

    Attributes:
        folder: Where it is.
        fingerprint: sha256 over names and hashes of configuration, tokenizer,
            weights and adapter.
        model_id: From the caller or READY.json.
        revision: Likewise.
        architecture: `model_type` of the configuration.
        dtype: Most frequent float type of the weights as stored.
        quantization: Such as `4-bit affine, groups of 64`, None for plain weights.
        adapter_sha256: From READY.json.
        contract: The trained prompt contract, None for plain instruct models.
        max_input_tokens: The contract's limit, else 4096, and at most the context.
        context_tokens: Positions of the model, None where it does not say.
    """

    folder: Path
    fingerprint: str
    model_id: str | None
    revision: str | None
    architecture: str
    dtype: str
    quantization: str | None
    adapter_sha256: str | None
    contract: Contract | None
    max_input_tokens: int
    context_tokens: int | None

    @property
    def name(self) -> str:
        """What a person calls it: the model id, else the folder's name."""
        return self.model_id or self.folder.name

    @property
    def layout(self) -> Layout:
        """The layout when the caller names none."""
        return Layout.CONTEXT_FIRST if self.contract else Layout.SCHEMA_FIRST

    @property
    def encoding(self) -> Encoding:
        """The encoding when the caller names none."""
        return Encoding.CODES if self.contract else Encoding.LABELS


def inspect_checkpoint(
    folder: str | Path,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    hash_cache: Path | None = None,
) -> CheckpointInfo:
    """Describe a checkpoint folder without loading its weights.

    Args:
        folder: A folder with config.json, a tokenizer and safetensors weights.
        model_id: What the caller calls it.
        revision: Likewise.
        hash_cache: A file that keeps hashes of files by size and time of change.

    Raises:
        CheckpointError: The folder is missing or is not such a checkpoint.
    """
    try:
        path = Path(folder).expanduser()
    except RuntimeError:  # `~name` of nobody here
        path = Path(folder)
    try:
        there = path.is_dir()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise CheckpointError(
            f"a checkpoint must be an existing folder, got {str(folder)!r}",
            hint="weighbridge checkpoint demo builds the embedded one",
        )
    path = path.resolve()
    config = _read_json(path / "config.json")
    weights = weight_files(path)
    adapters = [name for name in ADAPTER_FILES if (path / name).exists()]
    if adapters:
        raise CheckpointError(
            f"a checkpoint must be merged, got an adapter beside the weights ({adapters[0]})",
            hint="merge it into the weights first: python -m mlx_lm fuse --help",
        )
    ready = read_ready(path)
    contract = read_contract(path)
    text_config = config.get("text_config")
    quantization = config.get("quantization") or config.get("quantization_config")
    context = _context_tokens(config, text_config)
    limit = (contract and contract.max_length) or DEFAULT_MAX_INPUT_TOKENS
    return CheckpointInfo(
        folder=path,
        fingerprint=fingerprint(path, hash_cache),
        model_id=model_id or ready.model,
        revision=revision or ready.revision,
        architecture=str(
            config.get("model_type")
            or (isinstance(text_config, dict) and text_config.get("model_type"))
            or "unknown"
        ),
        dtype=_stored_dtype(weights),
        quantization=_describe_quantization(quantization),
        adapter_sha256=ready.adapter_sha256,
        contract=contract,
        max_input_tokens=min(limit, context or limit),
        context_tokens=context,
    )


def fingerprint(folder: Path, hash_cache: Path | None = None) -> str:
    """Hash names and contents of all files that a decision depends on.

    Args:
        folder: A checkpoint folder.
        hash_cache: A file that keeps hashes of files by size and time of change.

    Raises:
        CheckpointError: There are no weights, or a file cannot be read.
    """
    identity = [folder / name for name in IDENTITY_FILES if (folder / name).is_file()]
    return _fingerprint([*identity, *weight_files(folder)], hash_cache)


def load_model(folder: Path, dtype: str) -> Any:
    """Load the weights of a checkpoint and cast them. Call on the MLX thread.

    Args:
        folder: A checkpoint folder.
        dtype: Name of the compute dtype, as MLX spells it.

    Returns:
        An evaluated text model of mlx-lm.

    Raises:
        CheckpointError: The weights cannot be loaded.
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model as load

    try:
        model, _ = load(folder, lazy=True, strict=True)
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
    except Exception as error:  # what a foreign configuration makes mlx-lm raise
        raise CheckpointError(
            f"the weights of a checkpoint must load with mlx-lm, got {_in_short(error)}",
            hint=f"compare the files in {folder} with where they came from",
        ) from error
    return model


def _in_short(error: Exception) -> str:
    """Put a foreign error in one line; mlx-lm names tensors below the first one."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"a checkpoint must hold {path.name}, got none in {path.parent}",
            hint="name the folder that holds config.json and the weights",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} must be readable JSON, got: {first_line(error)}",
            hint=f"restore {path}",
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path.name} must be a JSON object, got {type(value).__name__}",
            hint=f"restore {path}",
        )
    return value


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint folder, in order of their names.

    Raises:
        CheckpointError: There are none.
    """
    weights = sorted(folder.glob("model*.safetensors"))  # what mlx-lm loads
    if not weights:
        raise CheckpointError(
            f"a checkpoint must hold model*.safetensors weights, got none in {folder}",
            hint="convert other formats first: python -m mlx_lm convert --hf-path FOLDER",
        )
    return weights


def _context_tokens(*configs: Any) -> int | None:
    for config in configs:
        tokens = isinstance(config, dict) and config.get("max_position_embeddings")
        if type(tokens) is int and tokens > 0:
            return tokens
    return None


def _describe_quantization(config: Any) -> str | None:
    if not isinstance(config, dict):
        return None
    bits, group = config.get("bits", "?"), config.get("group_size", "?")
    return f"{bits}-bit {config.get('mode', 'affine')}, groups of {group}"


def _stored_dtype(weights: list[Path]) -> str:
    counts: Counter[str] = Counter()
    for path in weights:
        counts.update(
            _DTYPES[tensor["dtype"]]
            for name, tensor in safetensors_header(path).items()
            if name != "__metadata__" and tensor["dtype"] in _DTYPES
        )
    return max(counts, key=lambda name: counts[name]) if counts else "unknown"


def safetensors_header(path: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: name, dtype, shape and offsets of its tensors.

    Raises:
        CheckpointError: The file is cut short or of another kind.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 0 < length <= min(_HEADER_LIMIT, size - 8) else b""
    except OSError as error:
        # Such as a link into a hub cache that was cleared.
        raise CheckpointError(
            f"{path.name} must be a readable file, got: {error.strerror or error}",
            hint=f"fetch {path} again",
        ) from error
    try:
        header: dict[str, Any] = json.loads(text)
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        ends = [tensor["data_offsets"][1] for tensor in tensors]
        typed = all(isinstance(tensor["dtype"], str) for tensor in tensors)
        whole = typed and size == 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        header, whole = {}, False
    if not whole:
        raise CheckpointError(
            f"{path.name} must be a whole safetensors file, got {size} bytes that do not fit "
            "its header",
            hint=f"fetch {path} again",
        )
    return header


def _fingerprint(files: list[Path], hash_cache: Path | None) -> str:
    known = _read_hashes(hash_cache)
    digest = hashlib.sha256()
    fresh = False
    for file in files:
        try:
            key = _hash_key(file)
            found = known.get(key)
            if found is None:
                with file.open("rb") as content:
                    found = hashlib.file_digest(content, "sha256").hexdigest()
                # Only the newest state of a path is kept, and none that came about meanwhile.
                known = {old: sha for old, sha in known.items() if _path_of(old) != str(file)}
                if _hash_key(file) == key:
                    known[key] = found
                fresh = True
        except OSError as error:
            raise CheckpointError(
                f"{file.name} must be a readable file, got: {error.strerror or error}",
                hint=f"check the permissions of {file}",
            ) from error
        digest.update(f"{file.name}\0{found}\n".encode())
    if fresh and hash_cache is not None:
        _write_hashes(hash_cache, known)
    return digest.hexdigest()


def _hash_key(file: Path) -> str:
    status = file.stat()
    return f"{file}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"


def _path_of(key: str) -> str:
    return key.rsplit("|", 3)[0]


def _read_hashes(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        known: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {
        key: sha
        for key, sha in known.items()
        if isinstance(sha, str) and re.fullmatch("[0-9a-f]{64}", sha)
    }


def _write_hashes(path: Path, known: dict[str, str]) -> None:
    """Replace the file of hashes at once; without it they are only computed again."""
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, delete=False
        ) as file:
            partial = Path(file.name)
            json.dump(known, file)
        partial.replace(path)
    except OSError as error:
        logger.warning("hashes of weights could not be kept in %s: %s", path, error)
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
