"""db backup, prune, forget and vacuum as they are typed; what doctor says of the store."""

import io
import json
import os
import platform
import pty
import runpy
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from weighbridge.db import Store, open_engine, sqlite_url
from weighbridge.deployments.cli import main
from weighbridge.deployments.cli.db import readable_bytes

BUILDERS = runpy.run_path(str(Path(__file__).parents[1] / "db" / "conftest.py"))["Builders"]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of an old run of three documents and a new one that uses one of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WEIGHBRIDGE_CHECKPOINT", raising=False)
    path = tmp_path / "store.db"
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", sqlite_url(path))
    make = BUILDERS()
    engine = open_engine(sqlite_url(path))
    old = [make.scored(i) for i in range(3)]
    for age, items in ((100, old), (1, [make.reused(0), make.scored(5)])):
        writer = Store(engine, clock=lambda age=age: datetime.now(UTC) - timedelta(days=age))
        run_id = writer.begin_run(make.start(host=platform.node())).run_id
        writer.record_batch(run_id, make.batch(*items))
        writer.finish_run(run_id, "completed")
    engine.dispose()
    return path


def count(store: Path, table: str) -> int:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute(f"select count(*) from {table}").fetchone()[0]


PRUNE = ["db", "prune", "--older-than", "90d"]
PRUNED = """\
runs          1
batches       1
items         3
decisions     2
answers       6
documents     2
schemas       0
checkpoints   0
temperatures  0
"""


def test_a_dry_run_prints_what_the_prune_then_removes(
    store: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*PRUNE, "--dry-run"]) == 0
    assert capsys.readouterr() == (f"would be removed:\n{PRUNED}", "")
    assert count(store, "run") == 2
    assert main([*PRUNE, "--yes"]) == 0
    assert capsys.readouterr() == (f"removed:\n{PRUNED}", "")
    assert count(store, "run") == 1
    assert main([*PRUNE, "--yes"]) == 0
    assert capsys.readouterr().out.startswith("nothing to remove: no finished run began before 2")


def test_without_a_terminal_nothing_is_removed_unasked(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # An answer that is piped in is not one that somebody gave to the question.
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    for command in (PRUNE, ["db", "forget", "T-1"]):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "this needs --yes (or --dry-run)" in err
    assert (count(store, "run"), count(store, "item")) == (2, 5)


@pytest.fixture
def typed(store: Path) -> Callable[..., tuple[int, str, str]]:
    """Run a command whose stdin is a real terminal, where somebody types a line."""

    def run(line: str, *arguments: str) -> tuple[int, str, str]:
        keyboard, terminal = pty.openpty()
        try:
            os.write(keyboard, f"{line}\n".encode())
            done = subprocess.run(
                [sys.executable, "-m", "weighbridge.deployments.cli", *arguments],
                stdin=terminal,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
        finally:
            os.close(keyboard)
            os.close(terminal)
        return done.returncode, done.stdout, done.stderr

    return run


def test_on_a_terminal_it_says_what_goes_and_asks(
    store: Path, typed: Callable[..., tuple[int, str, str]]
):
    code, out, err = typed("n", *PRUNE)
    assert (code, out) == (1, "")
    assert PRUNED in err
    assert "Remove all this, from runs that began before 2" in err
    assert err.endswith("nothing is removed\n")
    assert count(store, "run") == 2
    code, out, _ = typed("y", *PRUNE)
    assert (code, out) == (0, f"removed:\n{PRUNED}")
    code, out, err = typed("y", "db", "forget", "T-5")
    assert (code, out.splitlines()[0]) == (0, "removed:")
    assert "Remove all this of 'T-5'?" in err


@pytest.mark.parametrize("age", ["90", "d", "-90d", "90 d", "1.5d", "90y", "", "٣d", "999999w"])
def test_an_age_is_a_number_and_a_unit(age: str, capsys: pytest.CaptureFixture[str]):
    assert main(["db", "prune", f"--older-than={age}", "--dry-run"]) == 2
    assert "an age must be a number and d, w or h, as in 90d, got" in capsys.readouterr().err


@pytest.mark.parametrize(("age", "runs"), [("36h", 1), ("14w", 1), ("15w", 0), ("0d", 2)])
def test_ages_in_hours_and_weeks(age: str, runs: int, capsys: pytest.CaptureFixture[str]):
    # The runs began 100 days (14.3 weeks) and 1 day ago.
    assert main(["db", "prune", "--older-than", age, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == runs


def test_forget_says_what_is_gone_and_where_it_still_is(
    store: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["db", "forget", "T-0", "--dry-run"]) == 0
    counts = "records    2 (in runs 1, 2)\ntexts      1\ndecisions  1\nanswers    3\n"
    assert capsys.readouterr() == (f"would be removed:\n{counts}", "")
    assert main(["db", "forget", "T-0", "--yes"]) == 0
    out, err = capsys.readouterr()
    assert out == f"removed:\n{counts}"
    assert err == (
        "hint: copies of the store still have it: those that weighbridge named lie beside it "
        "(weighbridge doctor lists them), others are where you put them\n"
    )
    assert b"document 0" not in store.read_bytes()
    assert main(["db", "forget", "T-0", "--yes"]) == 1
    assert "no record has the id 'T-0'" in capsys.readouterr().err


def test_backup_prints_where_and_how_large(store: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["db", "backup", "copy.db"]) == 0
    size = readable_bytes(Path("copy.db").stat().st_size)
    assert capsys.readouterr() == (f"{store.parent}/copy.db ({size}, checked)\n", "")
    assert main(["db", "backup", "copy.db"]) == 1
    assert "hint: name another file, or allow it with --force" in capsys.readouterr().err
    assert main(["db", "backup", "copy.db", "--force", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"path": str(store.parent / "copy.db"), "bytes": Path("copy.db").stat().st_size}


def test_vacuum_says_before_and_after(capsys: pytest.CaptureFixture[str]):
    assert main(["db", "vacuum", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_before"] >= found["bytes_after"] > 0


@pytest.mark.mlx
def test_doctor_says_how_large_the_store_is_and_how_it_grows(
    store: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["db", "backup"]) == 0
    copy = capsys.readouterr().out.split(" (")[0]
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["database"]
    size = found["store"]
    counts = {name: size[name] for name in ("runs", "documents", "decisions", "answers")}
    assert counts == {"runs": 2, "documents": 4, "decisions": 4, "answers": 12}
    assert size["bytes"] >= store.stat().st_size
    assert size["backups"] == [[copy, Path(copy).stat().st_size]]
    # The new run alone began in the last 30 days: two documents, one of them scored.
    assert size["growth"]["documents"] == pytest.approx(2 / 30)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("size ") and "of it free" in line for line in lines)
    assert any(line.endswith("2 runs, 4 documents, 4 decisions, 12 answers") for line in lines)
    assert any(
        line.startswith("growth ") and line.endswith("a day, over 30 days") for line in lines
    )
    # Of both one was scored; the other is in another run.
    assert any("0 documents in runs (0 scored)" in line for line in lines)
    assert any(line.startswith("copy ") and copy in line for line in lines)


def test_bytes_are_read_in_units():
    # By hand: 999 is below a kilobyte, and one more is one.
    assert [readable_bytes(each) for each in (0, 999, 1000, 1_234_567, 5.4e9, 7e12)] == [
        *("0 bytes", "999 bytes", "1.0 kB", "1.2 MB", "5.4 GB", "7000.0 GB")
    ]


def test_commands_on_files_refuse_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", "postgresql://me:secret@host/answers")
    for command in (["backup"], PRUNE[1:], ["forget", "T-0"], ["vacuum"]):
        assert main(["db", *command]) == 1
        err = capsys.readouterr().err
        assert "must be a SQLite file for this, got postgresql://me:***@host/answers" in err


def test_no_command_creates_a_store(capsys: pytest.CaptureFixture[str]):
    for command in (["backup"], PRUNE[1:], ["forget", "T-0"], ["vacuum"]):
        assert main(["db", *command, "--db", "absent.db"]) == 1
        assert "there is no store at" in capsys.readouterr().err
    assert not Path("absent.db").exists()
