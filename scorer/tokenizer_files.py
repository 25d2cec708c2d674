"""The tokenizer files of a checkpoint folder, checked without the library that reads them.

A base model in the place of its instruct model, half a clone, a file that was written over:
told from the files themselves, long before weights are loaded.
"""

import json
from pathlib import Path
from typing import Any

from weighbridge.scorer.chat import CHAT_TEMPLATE_JSON, no_chat_template
from weighbridge.scorer.errors import CheckpointError, listed, shown
from weighbridge.scorer.weight_files import (
    LFS_POINTER,
    TOKENIZER_FILES,
    VOCABULARY_FILES,
    lfs_pointer,
    unreadable,
)

_WHOLE = 2**20
"""Bytes of a JSON file that are read as a whole; of a larger one only its ends are looked at."""
_CONFIG = "tokenizer_config.json"


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder whose tokenizer or chat template is missing or cannot be one.

    Args:
        folder: A checkpoint folder.

    Raises:
        CheckpointError: With the file, and what to do about it.
    """
    if not any(path.exists() for pattern in VOCABULARY_FILES for path in folder.glob(pattern)):
        broken = sorted(path.name for path in folder.iterdir() if path.is_symlink())
        raise CheckpointError(
            f"a checkpoint must hold a tokenizer (tokenizer.json), got none in {folder}",
            hint="fetch tokenizer.json and tokenizer_config.json of the same release"
            + (f"; some links lead nowhere: {listed(broken)}" if broken else ""),
        )
    patterns = dict.fromkeys((*TOKENIZER_FILES, "*.jinja"))
    for path in dict.fromkeys(path for each in patterns for path in sorted(folder.glob(each))):
        _refuse_pointer(path)
    if _is_named(folder / "tokenizer.json"):
        _check_vocabulary(folder / "tokenizer.json")
    config = _object(folder / _CONFIG) if _is_named(folder / _CONFIG) else {}
    if not (config.get("chat_template") or _has_template(folder)):
        raise no_chat_template(folder)


def _is_named(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _refuse_pointer(path: Path) -> None:
    if path.is_dir():
        return
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise unreadable(path, error) from error
    if start == LFS_POINTER:
        raise lfs_pointer(path)


def _has_template(folder: Path) -> bool:
    found = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    if any(path.is_file() and path.stat().st_size for path in found):
        return True
    path = folder / CHAT_TEMPLATE_JSON
    return path.is_file() and bool(_object(path).get("chat_template"))


def _check_vocabulary(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            file.seek(max(0, size - 64))
            end = file.read()
    except OSError as error:
        raise unreadable(path, error) from error
    if size <= _WHOLE:
        if not isinstance(_object(path).get("model"), dict):
            raise CheckpointError(
                f'{path.name} must hold a vocabulary under "model", got an object without it',
                hint=f"fetch {path} again",
            )
    elif not (
        start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and end.rstrip().endswith(b"}")
    ):
        raise _no_object(path, f"{size} bytes of something else, or a part")


def _object(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8")
        value: Any = json.loads(text)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        size = path.stat().st_size
        what = f"{size} bytes of something else, or a part" if size else "an empty file"
        raise _no_object(path, what) from error
    if not isinstance(value, dict):
        raise _no_object(path, shown(value))
    return value


def _no_object(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} must be a JSON object, got {what}", hint=f"fetch {path} again"
    )
