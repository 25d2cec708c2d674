"""Hashes of files, kept by size and time of change: weights are large."""

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weighbridge.scorer.errors import CheckpointError

logger = logging.getLogger(__name__)


def hash_files(
    files: Sequence[Path], hash_cache: Path | None = None, *, anew: bool = False
) -> tuple[str, ...]:
    """Return the sha256 of each file's content, in hex.

    Args:
        files: Any files.
        hash_cache: A file that keeps hashes of files by size and time of change.
        anew: Read all files, whatever the cache says of them; it learns what was found.

    Raises:
        CheckpointError: A file cannot be read.
    """
    known = _read_hashes(hash_cache)
    hashes: list[str] = []
    fresh = False
    for file in files:
        try:
            key = _hash_key(file)
            found = None if anew else known.get(key)
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
        hashes.append(found)
    if fresh and hash_cache is not None:
        _write_hashes(hash_cache, known)
    return tuple(hashes)


def _hash_key(file: Path) -> str:
    status = file.stat()
    # The time of modification can be set to any, as copies do; that of the inode's change cannot.
    times = f"{status.st_mtime_ns}|{status.st_ctime_ns}"
    return f"{file}|{status.st_size}|{times}|{status.st_ino}"


def _path_of(key: str) -> str:
    return key.rsplit("|", 4)[0]


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
