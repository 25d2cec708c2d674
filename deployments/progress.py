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


class _Lines:
    """Prints a line now and then, for logs."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None
        self._last = time.monotonic()

    def __call__(self, progress: "Progress") -> None:
        if progress.total is None:
            return
        now = time.monotonic()
        began, first = self._began = self._began or (now, progress.done)
        if now - self._last < LINE_SECONDS and progress.done < progress.total:
            return
        self._last = now
        rate = (progress.done - first) / (now - began) if now > began else 0.0
        left = f", {(progress.total - progress.done) / rate:.0f} s left" if rate else ""
        print_note(f"{progress.done} of {progress.total} documents, {rate:.1f} documents/s{left}")
