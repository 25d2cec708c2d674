"""A wish that runs in this process stop, told from any thread. A leaf.

What is asked to stop is not torn out of its work: a flow looks between two batches, a
wait for the accelerator looks twice a second.
"""


class Stopped(Exception):  # noqa: N818 - named for what happened
    """A run ended before its documents did; all it finished is recorded.

    Attributes:
        message: Why, for people.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


_reason: str | None = None


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
