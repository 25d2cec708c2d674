"""How far a flow is, as lines in a log and as a bar on a terminal."""

import io
import re

import pytest
from rich.console import Console

from weighbridge.deployments import progress
from weighbridge.deployments.progress import progress_bar
from weighbridge.flows.progress import Progress, listening, report


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that lines go by; the last entry is now."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    return now


def test_lines_come_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]):
    def at(seconds: float, done: int, total: int | None = 1000) -> str:
        clock.append(100.0 + seconds)
        listener(Progress("scoring", done, total))
        return capsys.readouterr().err

    with progress_bar() as listener:
        assert at(0, 0, None) == ""  # nothing is known yet
        assert at(50, 400) == ""  # a run that goes on begins with what was recorded before
        assert at(55, 420) == ""  # the first batch, which loaded the model: time counts from here
        # 20 in 5 s are 4 a second, 560 are left: 140 s.
        assert at(60, 440) == "440 of 1000 documents, 4.0 documents/s, 2 min left\n"
        assert at(61, 441) == ""
        # 180 in 15 s, 400 left: 33 s.
        assert at(70, 600) == "600 of 1000 documents, 12.0 documents/s, 33 s left\n"
        # 181 in 9,995 s, 399 left: 22,033 s.
        assert at(10_050, 601) == "601 of 1000 documents, 0.0 documents/s, 6.1 h left\n"
        # The end is told by the command itself.
        assert at(20_000, 1000) == ""


def test_before_the_first_batch_no_time_is_promised(
    clock: list[float], capsys: pytest.CaptureFixture[str]
):
    with progress_bar() as listener:
        listener(Progress("loading the model", 0, 8))
        clock.append(130.0)
        listener(Progress("loading the model", 0, 8))
        clock.append(160.0)
        listener(Progress("scoring", 2, 8))
    assert capsys.readouterr() == ("", "0 of 8 documents\n2 of 8 documents\n")


def test_a_terminal_has_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(progress, "progress_console", lambda: console)
    with progress_bar() as listener:
        listener(Progress("checking the schema"))
        listener(Progress("scoring", 3, 8))
    shown = screen.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "3/8" in plain
    assert "scoring" in plain
    assert all(len(line.rstrip()) <= 80 for line in re.split(r"[\r\n]", plain))
    # Its last act is to clear its line, so that the answers stand alone.
    assert shown.endswith("\x1b[1A\x1b[2K")


def test_only_what_runs_within_is_listened_to():
    seen: list[Progress] = []
    report(Progress("before"))
    with listening(seen.append):
        report(Progress("within"))
        with listening(lambda _: None):
            report(Progress("for another"))
    report(Progress("after"))
    assert [each.stage for each in seen] == ["within"]


def test_counts_without_an_end_come_now_and_then(
    clock: list[float], capsys: pytest.CaptureFixture[str]
):
    with progress.counting("looked at") as tell:
        said: list[str] = []
        for seconds, done in ((0, 1), (9.9, 500), (10, 501), (19, 900), (20, 1000)):
            clock.append(100.0 + seconds)
            tell(done)
            said.append(capsys.readouterr().err)
    # Ten seconds after it began, and ten after that.
    assert said == ["", "", "501 documents looked at\n", "", "1000 documents looked at\n"]


def test_counts_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        progress, "progress_console", lambda: Console(file=screen, force_terminal=True, width=80)
    )
    with progress.counting("looked at") as tell:
        tell(1234)
    assert "1,234 documents looked at" in re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
