"""Ctrl-C on a command that runs a flow: the batch at hand is finished, then the run ends.

An exception thrown into the middle of whatever runs just then may be taken for another
error by it. So it is thrown only where there is nothing to finish, or at a second Ctrl-C.
"""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weighbridge.flows.progress import Listener, Progress


_interrupted = False


def was_interrupted() -> bool:
    """Return whether there was a Ctrl-C in an `interruptible` block of this process."""
    return _interrupted


@contextmanager
def interruptible(listener: "Listener", *, say: Callable[[str], None]) -> Generator["Listener"]:
    """Make Ctrl-C end flows of this block between two batches.

    Args:
        listener: Is told the progress of the flow.
        say: Told in a sentence, at the first Ctrl-C, that the run is about to end.

    Yields:
        The listener to give to the flow in its place.

    Raises:
        KeyboardInterrupt: There was a Ctrl-C, and anything else that the block raised then
            is its consequence.
    """
    from weighbridge.tasks.stopping import ask_to_stop, clear_stop, stop_asked

    global _interrupted  # noqa: PLW0603
    _interrupted = False
    if threading.current_thread() is not threading.main_thread():
        yield listener
        return
    in_batches = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _interrupted  # noqa: PLW0603
        del number, frame
        _interrupted = True
        if stop_asked() or not in_batches:
            raise KeyboardInterrupt
        ask_to_stop("interrupted")
        say("stopping after this batch; Ctrl-C again stops at once")

    def listen(progress: "Progress") -> None:
        nonlocal in_batches
        # A model that is being loaded is nothing to finish.
        in_batches = progress.total is not None and not progress.stage.startswith("loading")
        listener(progress)

    before = signal.getsignal(signal.SIGINT)
    if before in {signal.SIG_IGN, None}:  # as in the background of a shell
        yield listen
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield listen
    except Exception as error:
        if _interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        clear_stop()
