"""Checkpoint folders: what is in them, who they are, and their weights."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge.scorer.chat import first_line
from weighbridge.scorer.contract import Contract, read_contract
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.hashes import hash_files
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.temperature import read_ready
from weighbridge.scorer.weight_files import stored_dtype, weight_files

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
        dtype=stored_dtype(weights),
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
    files = [*identity, *weight_files(folder)]
    digest = hashlib.sha256()
    for file, sha256 in zip(files, hash_files(files, hash_cache), strict=True):
        digest.update(f"{file.name}\0{sha256}\n".encode())
    return digest.hexdigest()


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
