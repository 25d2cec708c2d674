"""Shows on stderr how far a flow is: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from weighbridge.deployments.console import print_note, progress_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from weighbridge.flows.progress import Listener, Progress

LINE_SECONDS = 10.0


class _Rate(ProgressColumn):
    """Documents per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} documents/s" if speed else "")


@contextmanager
def progress_bar() -> Generator["Listener"]:
    """Give a listener for the progress of a flow."""
    console = progress_console()
    if not console.is_terminal:
        yield _Lines()
        return
    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def show(progress: "Progress") -> None:
            bar.update(
                task,
                description=progress.stage,
                completed=progress.done,
                total=progress.total,
            )

        yield show


@contextmanager
def counting(what: str) -> Generator["Callable[[int], None]"]:
    """Give a function to be told how many documents were done, when nobody knows of how many.

    Args:
        what: What is done to them, behind "documents".
    """
    console = progress_console()
    if not console.is_terminal:
        yield _CountLines(what)
        return
    with Bar(
        SpinnerColumn(), TextColumn("{task.description}"), _Rate(), console=console, transient=True
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done: bar.update(
            task, description=f"{done:,} documents {what}", completed=done
        )


class _CountLines:
    """Prints a line now and then, for logs."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._printed = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._printed >= LINE_SECONDS:
            self._printed = now
            print_note(f"{done} documents {self._what}")


class _Lines:
    """Prints a line now and then, for logs; the end is told by who started the flow."""

    def __init__(self) -> None:
        self._printed: float | None = None
        self._done_before = 0
        self._began: tuple[float, int] | None = None

    def __call__(self, progress: "Progress") -> None:
        if progress.stage.startswith("waiting"):
            print_note(progress.stage)
        if progress.total is None:
            return
        now = time.monotonic()
        if self._printed is None:
            self._printed, self._done_before = now, progress.done
        if self._began is None and progress.done > self._done_before:
            self._began = now, progress.done  # from here on no model is loaded any more
        left = progress.total - progress.done
        if not left or now - self._printed < LINE_SECONDS:
            return
        self._printed = now
        print_note(f"{progress.done} of {progress.total} documents{self._rate(progress, now)}")

    def _rate(self, progress: "Progress", now: float) -> str:
        began, first = self._began or (now, progress.done)
        if progress.done == first:
            return ""
        rate = (progress.done - first) / (now - began)
        left = (progress.total or 0) - progress.done
        return f", {rate:.1f} documents/s, {_duration(left / rate)} left"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
