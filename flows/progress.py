"""How far a flow is, for whoever started it in this process."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        stage: What it is doing, in a few words.
        done: Records recorded so far.
        total: Records in all, None while that is not known.
    """

    stage: str
    done: int = 0
    total: int | None = None


Listener = Callable[[Progress], None]

_listener: ContextVar[Listener | None] = ContextVar("weighbridge_progress", default=None)


@contextmanager
def listening(listener: Listener) -> Generator[None]:
    """Send the progress of flows called within this block to a function."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(progress: Progress) -> None:
    """Tell the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(progress)
