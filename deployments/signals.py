"""SIGTERM and SIGINT of a worker: the first lets it finish its batch, a second stops at once."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT)


def exit_on_signals() -> None:
    """End this process with 0 on either signal, until `drain_on_signals` takes over.

    A shell lets what it starts in the background ignore SIGINT, and Python then installs
    no handler of its own.
    """
    for number in STOPPING:
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    del number, frame
    sys.exit(0)  # there is no run yet that could be left behind


def drain_on_signals(on_first: Callable[[str], None], on_second: Callable[[str], None]) -> bool:
    """Handle both signals in the running event loop, whoever handled them before.

    Args:
        on_first: Called with the signal's name when the first of either arrives.
        on_second: Called with it before the process ends on the next one.

    Returns:
        Whether they are handled: only the main thread of a process can.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    asked = False

    def received(number: signal.Signals) -> None:
        nonlocal asked
        if not asked:
            asked = True
            on_first(number.name)
            return
        on_second(number.name)
        # Not an exception: whatever caught it would wait for the run that is to be left.
        os._exit(128 + number)

    loop = asyncio.get_running_loop()
    for number in STOPPING:
        loop.add_signal_handler(number, received, number)
    return True
