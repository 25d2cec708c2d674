"""A wish that runs in this process stop, told from any thread. A leaf.

What is asked to stop is not torn out of its work: a flow looks between two batches, and
whatever waits looks twice a second.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar


class Stopped(Exception):  # noqa: N818 - named for what happened
    """A run ended before its documents did; all it finished is recorded.

    Attributes:
        message: Why, for people.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


_reason: str | None = None


_look: ContextVar[Callable[[], None] | None] = ContextVar("weighbridge_look", default=None)


@contextmanager
def watched(look: Callable[[], None]) -> Generator[None]:
    """Let whatever waits within this block look whether the run should go on.

    Args:
        look: Raises `Stopped` if it should not.
    """
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def check() -> None:
    """Return if the run at hand should go on; called by whatever waits.

    Raises:
        Stopped: This process was asked to stop, or who watches the run says so.
    """
    if _reason is not None:
        raise Stopped(_reason)
    if look := _look.get():
        look()


def ask_to_stop(reason: str) -> None:
    """Ask the runs of this process to stop; the first reason stays."""
    global _reason  # noqa: PLW0603
    # No lock: a signal handler calls this, and may have interrupted whoever holds it.
    _reason = _reason or reason


def stop_asked() -> str | None:
    """Return why the runs of this process should stop, None if they need not."""
    return _reason


def clear_stop() -> None:
    """Take the wish back, for the runs to come."""
    global _reason  # noqa: PLW0603
    _reason = None
