"""The lease on the accelerator: one process of this host holds a model at a time. A leaf.

A locked file says who holds it. The lock goes with its process, whatever ends it, so a
lease is never left behind. It is taken before weights are loaded and kept as long as the
model stays resident. Who waits for it holds a lock of another file meanwhile, so that a
worker with nothing to do can give its model up.
"""

import atexit
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from weighbridge.tasks.errors import TaskError
from weighbridge.tasks.stopping import check

_POLL_SECONDS = 0.5
_SAY_SECONDS = 60.0
_TRIES = 3


class LeasePolicy(StrEnum):
    """What to do while another process holds the accelerator."""

    WAIT = "wait"
    REFUSE = "refuse"
    SHARE = "share"


class AcceleratorBusy(TaskError):  # noqa: N818 - named for what is the case
    """Another process of this host holds a model, and the policy is not to wait."""


@dataclass(frozen=True)
class Holder:
    """Who holds the accelerator.

    Attributes:
        pid: Its process.
        what: What that process is, such as `worker`.
        checkpoint: What it has loaded.
        since: When it took the lease, ISO 8601 in UTC.
    """

    pid: int
    what: str
    checkpoint: str
    since: str

    def __str__(self) -> str:
        """Say it in a few words."""
        return f"the {self.what} with pid {self.pid} ({self.checkpoint})"


_lock = threading.Lock()
_held: dict[Path, IO[bytes]] = {}
_policy = LeasePolicy.WAIT
_what = "program"


def set_policy(policy: LeasePolicy, *, what: str | None = None) -> None:
    """Set what this process does while another one holds the accelerator.

    Args:
        policy: Wait for it, refuse to load, or load a second model beside it.
        what: What others are told that this process is, such as `worker`.
    """
    global _policy, _what  # noqa: PLW0603
    _policy = policy
    _what = what or _what


def take_lease(path: Path, checkpoint: str, *, say: Callable[[str], None]) -> None:
    """Take the lease for this process, or do as the policy says while another has it.

    Args:
        path: The lock file; its folder is made.
        checkpoint: Name of what is about to be loaded.
        say: Told in a sentence whom it waits for.

    Raises:
        AcceleratorBusy: Another process has it and the policy is to refuse.
        Stopped: The run was asked to stop while it waited.
        TaskError: The lock file cannot be opened or locked.
    """
    with _lock:
        if path in _held and not _is_at(_held[path], path):
            _held.pop(path).close()  # somebody deleted it, and others lock a new one
        if path not in _held:
            file = _acquire(path, say)
            if file is None:
                return
            _held[path] = file
        since = datetime.now(UTC).isoformat(timespec="seconds")
        _write(_held[path], Holder(os.getpid(), _what, checkpoint, since))


@atexit.register
def _close() -> None:
    for file in _held.values():
        file.close()


def release_lease(path: Path) -> None:
    """Give the lease back; call once this process holds no weights any more."""
    with _lock:
        file = _held.pop(path, None)
        if file is not None:
            with file:
                _write(file, None)


def lease_wanted(path: Path) -> bool:
    """Return whether another process waits for the lease that this one has."""
    return path in _held and _wished(path)


def lease_holder(path: Path) -> Holder | None:
    """Return which process holds the accelerator, None if it is free."""
    if path in _held and _is_at(_held[path], path):
        return _read(path)
    if not path.is_file():
        return None
    try:
        file = _try(path)
    except TaskError:
        return None
    if file is None:
        return _read(path)
    file.close()
    return None


def _acquire(path: Path, say: Callable[[str], None]) -> IO[bytes] | None:
    """Lock the file by the policy and return it; None if the model is shared without."""
    if _wished(path):
        time.sleep(2 * _POLL_SECONDS)  # who waits comes first
    for _ in range(_TRIES):  # more than once: `lease_holder` has the lock for a moment as well
        if file := _try(path):
            return file
        time.sleep(_POLL_SECONDS / 10)
    if _policy is LeasePolicy.REFUSE:
        raise AcceleratorBusy(
            f"one program of this machine may hold a model, and {_holder(path)} does",
            hint="wait for it (LeasePolicy.WAIT), or load a second one (LeasePolicy.SHARE)",
        )
    if _policy is LeasePolicy.SHARE:
        say(f"loading a second model beside {_holder(path)}")
        return None
    with _open(_waiting(path)) as wish:
        fcntl.flock(wish, fcntl.LOCK_SH)
        return _wait(path, say)


def _wait(path: Path, say: Callable[[str], None]) -> IO[bytes]:
    told = -_SAY_SECONDS
    while (file := _try(path)) is None:
        check()
        if time.monotonic() - told >= _SAY_SECONDS:
            told = time.monotonic()
            say(f"waiting for the model: {_holder(path)} has one")
        time.sleep(_POLL_SECONDS)
    return file


def _wished(path: Path) -> bool:
    waiting = _waiting(path)
    if not waiting.exists():
        return False  # nobody ever waited
    file = _try(waiting)
    if file is not None:
        file.close()
    return file is None


def _holder(path: Path) -> Holder | str:
    return _read(path) or "another program"


def _waiting(path: Path) -> Path:
    return path.with_name(f"{path.name}.wanted")


def _open(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    except OSError as error:
        raise _unusable(path, error) from error


def _try(path: Path) -> IO[bytes] | None:
    """Open and lock a file; None if another process has it locked."""
    file = _open(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:  # such as a network file system without locks
        file.close()
        raise _unusable(path, error) from error
    if not _is_at(file, path):  # deleted between the two calls
        file.close()
        return None
    return file


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _unusable(path: Path, error: OSError) -> TaskError:
    return TaskError(
        f"{path} must be a file that can be locked, got: {error.strerror or error}",
        hint="name another one with WEIGHBRIDGE_LEASE, the same for all programs of this machine",
    )


def _write(file: IO[bytes], holder: Holder | None) -> None:
    text = "" if holder is None else json.dumps(asdict(holder)) + "\n"
    # The lock counts; what stands in the file is for people, and a disk may be full.
    with suppress(OSError):
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), text.encode(), 0)


def _read(path: Path) -> Holder | None:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return Holder(**found)
    except (OSError, ValueError, TypeError, RecursionError):  # locked, and not written yet
        return None
