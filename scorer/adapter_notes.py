"""What a person should know of an adapter and its base, though both can be used together."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weighbridge.scorer.adapters import Adapter
from weighbridge.scorer.errors import listed, quoted

_STORAGE = re.compile(r"models--(.+)")
# What conversions add to the name of the model that they were made of.
_CONVERTED = re.compile(
    r"(mlx|hf|awq|gptq|dwq|mxfp4|mxfp8|nvfp4|quantized|packed|dequantized|converted"
    r"|int[48]|fp(8|16|32)|bf16|f(16|32)|bfloat16|float(16|32)|q[2-8]|[2-8]bits?|g(32|64|128)|gs\d+)"
)
_TEMPLATE = "chat_template"
# Of tokenizer_config.json, what changes tokens of a prompt.
_TOKENS = (
    "added_tokens_decoder",
    "additional_special_tokens",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "bos_token",
    "eos_token",
    "extra_special_tokens",
)


def adapter_notes(
    folder: Path, config: Mapping[str, Any], model_id: str | None, adapter: Adapter
) -> tuple[str, ...]:
    """Compare an adapter with the checkpoint it is fused into, by what both say of themselves.

    Args:
        folder: The checkpoint.
        config: Its config.json.
        model_id: What it is called, None where nobody says.
        adapter: The adapter.

    Returns:
        Sentences, none where all agrees.
    """
    notes = (
        _other_base(folder, config, model_id, adapter.base_model),
        *_other_tokenizer(folder, adapter.folder),
    )
    return tuple(note for note in notes if note)


def _other_base(
    folder: Path, config: Mapping[str, Any], model_id: str | None, base: str | None
) -> str | None:
    """Say that an adapter names another base than the checkpoint, None where it does not."""
    wanted = _last_part(base)
    if base is None or not wanted:
        return None
    called = model_id or _repository(folder)
    names = [called] if called else [str(folder), config.get("_name_or_path")]
    if wanted in {_last_part(name) for name in names}:
        return None
    said = f"the adapter says that it was trained on {quoted(base, limit=200)}"
    if called is None:
        return f"{said}; whether {quoted(folder.name)} is that model, nothing here tells"
    if _unconverted(_last_part(called)) == _unconverted(wanted):
        return f"{said}; {quoted(called)} is the same model in another packing, by its name"
    return f"{said}, not on {quoted(called)}: fused into another base, it is not what was trained"


def _unconverted(name: str) -> list[str]:
    """Return the words of a name without those that conversions add."""
    return [word for word in re.split(r"[-_.]+", name) if not _CONVERTED.fullmatch(word)]


def _last_part(name: Any) -> str:
    """Return what a hub id or a path ends with, in lower case; of a cached commit its repository.

    The organisation may differ: copies and conversions are published by others.
    """
    if not isinstance(name, str):
        return ""
    parts = name.replace("\\", "/").rstrip("/").split("/")
    stored = [found[1] for part in parts if (found := _STORAGE.fullmatch(part))]
    return (stored[-1].rpartition("--")[2] if stored else parts[-1]).partition("@")[0].lower()


def _repository(folder: Path) -> str | None:
    """Return the hub id of a commit in the hub's cache."""
    found = [match[1] for part in folder.parts if (match := _STORAGE.fullmatch(part))]
    return found[-1].replace("--", "/", 1) if found else None


def _other_tokenizer(base: Path, adapter: Path) -> list[str]:
    """Name what lies beside an adapter and is another than the base's, which is what is used."""
    notes: list[str] = []
    ours, theirs = _read(base), _read(adapter)
    template = _template(adapter, theirs)
    if template is not None and template != _template(base, ours):
        notes.append(
            f"the adapter brings another chat template than its base, whose own is used; if it was "
            f"trained with its own, copy it from {adapter} into {base}"
        )
    others = [key for key in _TOKENS if key in ours and key in theirs and ours[key] != theirs[key]]
    if others:
        notes.append(
            f"tokenizer_config.json of the adapter differs from its base's in {listed(others)}; "
            "the base's is used"
        )
    return notes


def _template(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return the chat template of a folder, without the line breaks around it; None for none."""
    try:
        text: Any = (folder / f"{_TEMPLATE}.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = config.get(_TEMPLATE)
    return text.strip() if isinstance(text, str) else text


def _read(folder: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
