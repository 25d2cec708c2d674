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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from weighbridge.tasks.errors import TaskError
from weighbridge.tasks.stopping import Stopped, stop_asked

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
        return f"the {self.what} with pid {self.pid} (holds {self.checkpoint})"


_lock = threading.Lock()
_held: dict[Path, IO[str]] = {}
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
        Stopped: This process was asked to stop while it waited.
        TaskError: The lock file cannot be opened or locked.
    """
    with _lock:
        if path not in _held:
            file = _open(path)
            try:
                if not _acquire(file, path, say):
                    file.close()
                    return
            except BaseException:
                file.close()
                raise
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
            _write(file, None)
            file.close()


def lease_wanted(path: Path) -> bool:
    """Return whether another process waits for the lease that this one has."""
    if path not in _held:
        return False
    try:
        with _waiting(path).open() as file:
            return not _locks(file)
    except OSError:
        return False  # nobody ever waited


def lease_holder(path: Path) -> Holder | None:
    """Return which process holds the accelerator, None if it is free."""
    if path in _held:
        return _read(path)
    try:
        with path.open("r+", encoding="utf-8") as file:
            if _locks(file):
                return None
    except OSError:
        return None
    return _read(path)


def _acquire(file: IO[str], path: Path, say: Callable[[str], None]) -> bool:
    """Lock the file by the policy; False if the accelerator is shared without it."""
    for _ in range(_TRIES):  # more than once: `lease_holder` has the lock for a moment as well
        if _locks(file):
            return True
        time.sleep(_POLL_SECONDS / 10)
    if _policy is LeasePolicy.REFUSE:
        raise AcceleratorBusy(
            f"the accelerator must be free to load a model, and {_holder(path)} has it",
            hint="hand it over: weighbridge trigger adhoc; wait for it: --wait; or load a "
            "second model beside it: --anyway",
        )
    if _policy is LeasePolicy.SHARE:
        say(f"loading a second model beside {_holder(path)}")
        return False
    with _open(_waiting(path)) as wish:
        fcntl.flock(wish, fcntl.LOCK_SH)
        _wait(file, path, say)
    return True


def _wait(file: IO[str], path: Path, say: Callable[[str], None]) -> None:
    told = -_SAY_SECONDS
    while not _locks(file):
        if reason := stop_asked():
            raise Stopped(reason)
        if time.monotonic() - told >= _SAY_SECONDS:
            told = time.monotonic()
            say(f"waiting for the accelerator: {_holder(path)} has it")
        time.sleep(_POLL_SECONDS)


def _holder(path: Path) -> Holder | str:
    return _read(path) or "another program"


def _waiting(path: Path) -> Path:
    return path.with_name(f"{path.name}.wanted")


def _open(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")
    except OSError as error:
        raise _unusable(path, error) from error


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # such as a network file system without locks
        raise _unusable(Path(file.name), error) from error
    return True


def _unusable(path: Path, error: OSError) -> TaskError:
    return TaskError(
        f"{path} must be a file that can be locked, got: {error.strerror or error}",
        hint="name another one with WEIGHBRIDGE_LEASE, the same for all programs of this machine",
    )


def _write(file: IO[str], holder: Holder | None) -> None:
    file.seek(0)
    file.truncate()
    if holder is not None:
        file.write(json.dumps(asdict(holder)) + "\n")
    file.flush()


def _read(path: Path) -> Holder | None:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return Holder(**found)
    except (OSError, ValueError, TypeError):  # between being locked and being written
        return None
