"""Checkpoint folders: what is in them, who they are, and their weights."""

import hashlib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge.scorer.adapter_fit import check_fits
from weighbridge.scorer.adapter_notes import adapter_notes
from weighbridge.scorer.adapters import CONTRACT_FILES, Adapter, check_not_swapped, read_adapter
from weighbridge.scorer.checkpoint_folder import check_folder
from weighbridge.scorer.config_file import CONFIG_FILE, QUANTIZATION_FILE, read_config
from weighbridge.scorer.contract import Contract, read_contract
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.hashes import hash_files
from weighbridge.scorer.packing import check_packing, describe_packing
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.quantization import check_quantization
from weighbridge.scorer.ready import READY_FILE, read_ready
from weighbridge.scorer.weight_files import (
    ADAPTER_FILES,
    TOKENIZER_FILES,
    stored_dtype,
    weight_files,
)

DEFAULT_MAX_INPUT_TOKENS = 4096

IDENTITY_FILES = (
    CONFIG_FILE,
    *TOKENIZER_FILES,
    *CONTRACT_FILES,
    QUANTIZATION_FILE,
)
"""Beside the weights, what a decision depends on; patterns. READY.json is not among them:
it selects a temperature, and a temperature is applied to a decision later."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint folder, described without loading its weights.

    Attributes:
        folder: Where it is.
        adapter: What is fused into the weights when they are loaded, None for nothing.
        fingerprint: sha256 over names and hashes of configuration, tokenizer,
            weights and adapter.
        model_id: From the caller or READY.json.
        revision: Likewise.
        architecture: `model_type` of the configuration.
        dtype: Most frequent float type of the weights as stored.
        quantization: Such as `4-bit affine, groups of 64`, None for plain weights.
        adapter_sha256: Of the adapter in the weights: the one that is fused at load,
            else the one that READY.json says was merged.
        contract: The trained prompt contract, None for plain instruct models.
        max_input_tokens: The contract's limit, else 4096, and at most the context.
        context_tokens: Positions of the model, None where it does not say.
        notes: What a person should know of an adapter and this base.
    """

    folder: Path
    adapter: Adapter | None
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
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a person calls it: model id or name of the folder, and of an adapter's."""
        name = self.model_id or self.folder.name
        return name if self.adapter is None else f"{name} + {self.adapter.folder.name}"

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
    adapter: str | Path | None = None,
    model_id: str | None = None,
    revision: str | None = None,
    hash_cache: Path | None = None,
    accept_prompt: bool = False,
) -> CheckpointInfo:
    """Describe a checkpoint folder without loading its weights.

    Args:
        folder: A folder with config.json, a tokenizer and safetensors weights.
        adapter: A folder with a LoRA adapter, to be fused into the weights at load.
        model_id: What the caller calls the checkpoint.
        revision: Likewise.
        hash_cache: A file that keeps hashes of files by size and time of change.
        accept_prompt: Consent to a system text that is not the one it was trained with.

    Raises:
        CheckpointError: A folder is missing or is no such checkpoint or adapter, or the
            adapter is in the weights already.
        TemperatureError: READY.json cannot be trusted.
    """
    path = _expanded(folder)
    check_not_swapped(path, None if adapter is None else _expanded(adapter))
    check_folder(path)
    path = path.resolve()
    config = read_config(path)
    check_quantization(config)
    check_packing(path, config)
    ready = read_ready(path)
    lora = None if adapter is None else read_adapter(_expanded(adapter))
    merged = ready.adapter_sha256
    if lora is not None:
        check_fits(path, lora)
    own = None if lora is None else hash_files([lora.weights], hash_cache)[0]
    _refuse_unsaid_adapters(path, lora, {merged, own}, hash_cache)
    if own is not None:
        if own == merged:
            raise CheckpointError(
                f"an adapter must be fused once, and {READY_FILE} in {path} says that this one "
                "is in the weights already",
                hint="leave out --adapter",
            )
        merged = own
    # What an adapter was trained on is its own prompt, where it brings one.
    trained = lora.folder if lora and (lora.folder / CONTRACT_FILES[0]).is_file() else path
    contract = read_contract(trained, accept_prompt=accept_prompt)
    context = _context_tokens(config, config.get("text_config"))
    model_id = model_id or ready.model
    limit = (contract and contract.max_length) or DEFAULT_MAX_INPUT_TOKENS
    return CheckpointInfo(
        folder=path,
        adapter=lora,
        fingerprint=fingerprint(path, hash_cache, lora),
        model_id=model_id,
        revision=revision or ready.revision,
        architecture=config["model_type"],  # checked with the folder
        dtype=stored_dtype(weight_files(path)),
        quantization=describe_packing(path, config),
        adapter_sha256=merged,
        contract=contract,
        max_input_tokens=min(limit, context or limit),
        context_tokens=context,
        notes=adapter_notes(path, config, model_id, lora) if lora else (),
    )


def fingerprint(
    folder: Path, hash_cache: Path | None = None, adapter: Adapter | None = None
) -> str:
    """Hash names and contents of all files that a decision depends on.

    Args:
        folder: A checkpoint folder.
        hash_cache: A file that keeps hashes of files by size and time of change.
        adapter: What is fused into its weights.

    Raises:
        CheckpointError: There are no weights, or a file cannot be read.
    """
    named = [(file.name, file) for file in (*identity_files(folder), *weight_files(folder))]
    if adapter is not None:
        named += [(f"adapter/{file.name}", file) for file in adapter.files]
    digest = hashlib.sha256()
    hashes = hash_files([file for _, file in named], hash_cache)
    for (name, _), sha256 in zip(named, hashes, strict=True):
        digest.update(f"{name}\0{sha256}\n".encode())
    return digest.hexdigest()


def identity_files(folder: Path) -> list[Path]:
    """Return the files beside the weights that a decision depends on, each once.

    Args:
        folder: A checkpoint folder.
    """
    found = (path for pattern in IDENTITY_FILES for path in sorted(folder.glob(pattern)))
    return [path for path in dict.fromkeys(found) if path.is_file()]


def _expanded(folder: str | Path) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:  # `~name` of nobody here
        return Path(folder)


def _refuse_unsaid_adapters(
    folder: Path, lora: Adapter | None, known: Set[str | None], hash_cache: Path | None
) -> None:
    """Refuse weights with an adapter beside them, unless it is named or known to be in them.

    Nothing else tells whether it was merged: scored without it, or with it twice, the
    answers would be of another model.
    """
    for name in ADAPTER_FILES:
        file = folder / name
        if not file.exists() or hash_files([file], hash_cache)[0] in known:
            continue
        other = f", which is not the one in {lora.folder}" if lora else ""
        raise CheckpointError(
            f"a checkpoint must be merged or name its adapter, got {name} beside the weights "
            f"in {folder}{other}, and nothing that says whether it is in them",
            hint=f"if it is not, name it with --adapter {folder}"
            + (" alone" if lora else "")
            + "; if it is, or is not to be used, move it elsewhere",
        )


def _context_tokens(*configs: Any) -> int | None:
    for config in configs:
        tokens = isinstance(config, dict) and config.get("max_position_embeddings")
        if type(tokens) is int and tokens > 0:
            return tokens
    return None
