"""Backs a store up into one checked file, while others may write to it."""

import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from weighbridge.db.engine import translate
from weighbridge.db.errors import BackupFailed
from weighbridge.db.housekeeping import store_file
from weighbridge.db.migrate import copy_database

_SIDES = ("-wal", "-shm", "-journal")


@dataclass(frozen=True)
class Backup:
    """A backup that was made: where, and how large."""

    path: Path
    bytes: int


def back_up(url: str, target: Path | None = None, *, overwrite: bool = False) -> Backup:
    """Copy the store as it stands at one moment; writers are not kept waiting.

    The copy is one plain file that only its owner can read. It is checked page by page
    before it gets its name, and an existing file is not touched until then.

    Args:
        url: The store.
        target: A file, or a folder for a file named after store and time; by default one
            beside the store.
        overwrite: Replace an existing file.

    Raises:
        BackupFailed: The target exists, is the store itself, cannot be written, or the
            copy is damaged.
        StoreError: The store cannot be opened, or is not a SQLite file.
    """
    path = store_file(url)
    try:
        target = _place(path, target)
        _require_allowed(path, target, overwrite=overwrite)
        # In the same folder, so that giving it its name is one step.
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            copy_database(path, partial)
            _check(partial)
            _name(partial, target, overwrite=overwrite)
        finally:
            with suppress(OSError, ValueError):
                partial.unlink()
        return Backup(target, target.stat().st_size)
    except sqlite3.Error as error:
        raise translate(error, str(target)) from error
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise BackupFailed(
            "a backup must be written to a folder that is there and yours, and"
            f" {str(target)!r:.200} cannot be: {reason!s:.200}",
            hint="name another file: weighbridge db backup FILE",
        ) from error


def _place(path: Path, target: Path | None) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{path.name}.{stamp}.backup"
    if target is None:
        return path.with_name(name)
    target = target.expanduser().absolute()
    return target / name if target.is_dir() else target


def _require_allowed(path: Path, target: Path, *, overwrite: bool) -> None:
    if target.resolve() in {path.resolve().with_name(path.name + end) for end in _SIDES}:
        # SQLite would take a copy under that name for the store's own log.
        raise BackupFailed(
            f"a backup must not have the name of a file that SQLite keeps beside the store, "
            f"got {target}",
            hint="name another file: weighbridge db backup FILE",
        )
    if not target.exists():
        return
    if not overwrite:
        raise BackupFailed(
            f"a backup must not replace a file, and {target} exists",
            hint="name another file, or allow it with --force",
        )
    if not target.is_file():
        raise BackupFailed(f"a backup must be a plain file, and {target} is something else")
    if target.samefile(path):
        raise BackupFailed(f"a backup must be another file than the store, got {target}")
    if target.with_name(f"{target.name}-wal").exists():
        # SQLite would apply that log to the new file and damage it.
        raise BackupFailed(
            f"a backup must not replace a database in use, and {target} has a log beside it",
            hint="end what uses it, or name another file",
        )


def _check(partial: Path) -> None:
    with closing(sqlite3.connect(partial)) as connection:
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise BackupFailed(
            f"a backup must be whole, and SQLite finds: {found}",
            hint="the store itself may be damaged; check it with: sqlite3 STORE 'pragma"
            " integrity_check'",
        )
    # On disk before it has its name, or a power cut could leave an empty file under it.
    handle = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _name(partial: Path, target: Path, *, overwrite: bool) -> None:
    if overwrite:
        partial.replace(target)
        return
    try:
        # In one step, in case somebody made the file meanwhile; nothing half done stays.
        target.hardlink_to(partial)
    except FileExistsError:
        raise BackupFailed(
            f"a backup must not replace a file, and {target} exists now",
            hint="name another file, or allow it with --force",
        ) from None
    partial.unlink()
