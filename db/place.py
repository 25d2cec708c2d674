"""Whether a store can be where a URL says, found out without creating anything there."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from weighbridge.db.engine import connect_readonly, no_access, require_file, translate
from weighbridge.db.location import store_path


def require_place(url: str) -> None:
    """Refuse a place where no store can be; a server is not asked.

    What only writing can show, such as a full disk or a lock, shows when the store is opened.

    Raises:
        StoreError: It is a folder or another kind of file, it or its folder cannot be
            written, or the path leads nowhere.
    """
    path = store_path(url)
    if path is None:
        return
    require_file(path)
    try:
        there = path.exists()
        folder = path if there else next(each for each in path.parents if each.exists())
    except OSError as error:
        raise no_access(path, error.strerror or str(error)) from error
    if there:
        _require_sqlite(path)
    elif not folder.is_dir():
        raise no_access(path, f"{folder} is not a folder")
    if not os.access(folder, os.R_OK | os.W_OK):
        raise no_access(path, "permission denied")


def _require_sqlite(path: Path) -> None:
    try:
        with closing(connect_readonly(path)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError:
        pass  # a lock, or a log that cannot be read without writing: opening the store tells
    except sqlite3.DatabaseError as error:
        raise translate(error, str(path)) from error
