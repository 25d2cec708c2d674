"""Locks between the processes of this host, held by an open file and gone with the process."""

import fcntl
import os
import re
from pathlib import Path
from typing import IO


def try_lock(path: Path) -> IO[bytes] | None:
    """Lock a file for as long as it is open; None when another process has it.

    Raises:
        OSError: The file cannot be made, or not be locked.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system without locks
        file.close()
        raise
    return file


def take_name(folder: Path, host: str, pool: str) -> tuple[str, IO[bytes]]:
    """Give a worker a name that no other one of this host and pool has.

    The first is called like the host, further ones `host-2`, `host-3`: the same after a
    restart, so that the list of workers in the UI does not grow.

    Returns:
        The name, and the open file that keeps it.
    """
    host = re.sub(r"[/%\s]", "-", host) or "host"
    number = 1
    while True:
        name = host if number == 1 else f"{host}-{number}"
        held = try_lock(folder / f"{re.sub(r'[^A-Za-z0-9._-]', '-', pool)}-{number}.lock")
        if held is not None:
            return name, held
        number += 1
