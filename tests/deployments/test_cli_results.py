"""results and runs on a real store: filters, pages, forms, files; nothing raw on a terminal."""

import csv
import io
import json
import os
import pty
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from weighbridge.db import CheckpointRow, SchemaRow, Store, open_engine
from weighbridge.deployments.cli import main
from weighbridge.deployments.cli.runs import moment_of

TESTS = Path(__file__).parents[1]
make = runpy.run_path(str(TESTS / "db" / "conftest.py"))["Builders"]()
HOSTILE = "=1+1\x1b[2J\u202e" + "x" * 10_000
DOCUMENTS = 60


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs: 60 documents and one with a hostile id; then one of another schema."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answers.db"
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{path}")
    engine = open_engine(f"sqlite:///{path}")
    # Begun a month ago and now: what --since tells apart.
    moments = iter([datetime.now(UTC) - timedelta(days=30)] * 3)
    old = Store(engine, clock=lambda: next(moments))
    host = {"host": socket.gethostname()}
    run = old.begin_run(make.start(**host)).run_id
    items = [
        make.scored(n, answers=make.answers(topic={"billing": n / 10, "login": 1.55}))
        for n in range(DOCUMENTS)
    ]
    items.append(make.scored(DOCUMENTS, external_id=HOSTILE))
    old.record_batch(run, make.batch(*items))
    old.finish_run(run, "completed")
    new = Store(engine)
    other = make.start(
        schema=SchemaRow("6" * 64, "mood", "{}"), checkpoint=CheckpointRow("d" * 64, "big"), **host
    )
    run = new.begin_run(other).run_id
    new.record_batch(run, make.batch(make.scored(0), make.rejected(1)))
    new.finish_run(run, "failed", message="the disk was full")
    engine.dispose()
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    found = main(list(arguments))
    out, err = capsys.readouterr()
    assert (found, "Traceback" in err) == (code, False), err
    return out, err


def value(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    out, err = run(capsys, *arguments, "--json")
    assert err == ""
    return json.loads(out)


def test_a_table_is_a_page_and_says_where_the_rest_is(
    database: Path, capsys: pytest.CaptureFixture[str]
):
    out, err = run(capsys, "results", "1")
    assert len(out.splitlines()) == 51
    total = 3 * (DOCUMENTS + 1)
    assert err.splitlines() == [
        f"run 1: 50 of {total} answers",
        f"hint: --offset 50 shows the next; --limit {total} all; --output FILE.csv writes all",
    ]
    out, err = run(capsys, "results", "1", "--offset", "180")
    # The last page has the three answers to the last document, and nothing after it.
    assert (len(out.splitlines()), err) == (4, f"run 1: 3 of {total} answers\n")
    assert len(value(capsys, "results", "1")) == total
    assert value(capsys, "results", "1", "--count") == total
    assert run(capsys, "results", "1", "--count") == (f"{total}\n", "")


def test_filters_and_orders(database: Path, capsys: pytest.CaptureFixture[str]):
    topic = ("results", "1", "--field", "topic", "--limit", "2")
    # n / 10 against 1.55: 15 and 16 are nearest, both 0.05 away.
    nearest = value(capsys, *topic, "--uncertain")
    assert [row["position"] for row in nearest] == [15, 16]
    assert value(capsys, *topic, "--sort", "margin") == nearest
    surest = value(capsys, *topic, "--sort", "probability", "--descending")
    assert [row["position"] for row in surest] == [59, 58]
    login = value(capsys, "results", "1", "--field", "topic", "--value", "login")
    assert [row["position"] for row in login] == list(range(16))
    sure = value(capsys, "results", "1", "--field", "topic", "--min-probability", "0.98")
    assert all(row["probability"] >= 0.98 for row in sure)
    assert [row["position"] for row in sure] == list(range(55, 60))
    ids = value(capsys, "results", "1", "--id", "T-7")
    assert [(row["position"], row["field"]) for row in ids] == [
        *((7, "topic"), (7, "urgent"), (7, "anger")),
    ]


def test_wide(database: Path, capsys: pytest.CaptureFixture[str]):
    out, err = run(capsys, "results", "2", "--wide")
    assert out.splitlines() == [
        "position  id   topic    urgent  anger",
        "       0  T-0  billing  true    annoyed",
    ]
    assert err == "run 2: 1 document\n"
    (row,) = value(capsys, "results", "2", "--wide", "--field", "urgent")
    probability = row.pop("urgent_probability")
    assert probability == pytest.approx(0.7310586)
    assert row == {"run_id": 2, "position": 0, "external_id": "T-0", "urgent": "true"}


def test_every_format_has_the_same_rows(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = value(capsys, "results", "1")
    for suffix in ("json", "jsonl", "csv", "parquet"):
        out, err = run(capsys, "results", "1", "--output", f"a.{suffix}")
        assert (out, err.splitlines()[0]) == (
            "",
            f"{len(rows)} rows of run 1 (tickets.jsonl) written to a.{suffix}",
        )
        assert (tmp_path / f"a.{suffix}").stat().st_mode & 0o777 == 0o600
    assert json.loads(Path("a.json").read_text()) == rows
    lines = Path("a.jsonl").read_text().split("\n")
    assert [json.loads(line) for line in lines if line] == rows
    table = pyarrow.parquet.read_table("a.parquet")
    assert table.to_pylist() == rows
    types = {field.name: str(field.type) for field in table.schema}
    assert types["probability"] == types["expected_value"] == "double"
    assert (types["run_id"], types["value"]) == ("int64", "string")
    told = list(csv.DictReader(io.StringIO(Path("a.csv").read_text(), newline="")))
    assert [row["external_id"] for row in told] == [row["external_id"] for row in rows]
    assert [float(row["probability"]) for row in told] == [row["probability"] for row in rows]
    out, _ = run(capsys, "results", "1", "--format", "jsonl")
    assert [json.loads(line) for line in out.split("\n") if line] == rows


def test_formulas_are_told_and_only_changed_when_asked(
    database: Path, capsys: pytest.CaptureFixture[str]
):
    _, err = run(capsys, "results", "1", "--output", "a.csv")
    # The hostile id stands once for each of its three fields.
    assert "3 cells begin with = + - or @, which a spreadsheet runs as a formula" in err
    assert "hint: --escape-formulas" in err
    assert f"\n1,60,{HOSTILE}," in Path("a.csv").read_text()
    _, err = run(capsys, "results", "1", "--output", "a.csv", "--escape-formulas")
    assert err == f"{3 * (DOCUMENTS + 1)} rows of run 1 (tickets.jsonl) written to a.csv\n"
    assert f"\n1,60,'{HOSTILE}," in Path("a.csv").read_text()


def test_another_temperature(database: Path, capsys: pytest.CaptureFixture[str]):
    own, other = (
        value(capsys, "results", "2", "--field", "urgent", *more)[0]
        for more in ((), ("--temperature", "2"))
    )
    # Logits -0.25 and 0.75: sigmoid(1) and sigmoid(0.5).
    assert own["probability"] == pytest.approx(0.7310586)
    assert (other["probability"], other["temperature"]) == (pytest.approx(0.6224593), 2.0)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--field", "nope"), 1, "hint: the fields are: topic, urgent, anger"),
        (("--value", "nope"), 1, "hint: the choices are: "),
        (("--uncertain", "--sort", "margin"), 2, "--uncertain sorts by probability"),
        (("--wide", "--sort", "margin"), 2, "rows are documents"),
        (("--wide", "--temperature", "2"), 2, "leave out --wide"),
        (("--count", "--temperature", "2"), 2, "changes no count"),
        (("--count", "--output", "a.csv"), 2, "--count prints a number"),
        (("--json", "--format", "csv"), 2, "--json prints JSON to stdout"),
        (("--format", "table", "--output", "a.csv"), 2, "a table is for stdout"),
        (("--format", "csv", "--output", "a.json"), 1, "end as its format does"),
        (("--output", "a.xlsx"), 1, "the output must end in .json, .jsonl, .csv, .parquet"),
        (("--output", "absent/a.csv"), 1, "absent cannot be written"),
        (("--temperature", "0"), 1, "finite and above 0"),
        (("--temperature", "2", "--uncertain"), 1, "neither chosen nor sorted"),
        (("--min-probability", "1.5"), 2, "--min-probability"),
        (("--limit", "0"), 2, "--limit"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    database: Path,
    arguments: tuple[str, ...],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
):
    out, err = run(capsys, "results", *arguments, code=code)
    assert (out, words in err) == ("", True), err
    assert err.startswith("error: ")
    assert list(Path().glob("a.*")) == []


def in_terminal(*arguments: str, **environment: str) -> tuple[str, int]:
    """Run a command in a terminal of 80 columns; give what it showed, and its exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "weighbridge.deployments.cli", *arguments],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return shown.decode(), process.wait(300)


@pytest.mark.parametrize(
    "arguments",
    [
        ("results", "1", "--offset", "178"),
        ("results", "1", "--wide", "--offset", "58"),
        ("results", "1", "--offset", "180", "--format", "csv"),
        ("results", "1", "--offset", "180", "--json"),
        ("show", "1:60"),
        ("show", "1"),
        ("runs",),
        ("diff", "1", "2", "--changed"),
    ],
)
def test_nothing_hostile_reaches_a_terminal(database: Path, arguments: tuple[str, ...]):
    shown, code = in_terminal(*arguments, NO_COLOR="1")
    assert code == 0, shown
    plain = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")  # bold headers, no colour
    assert "\x1b" not in plain
    assert "\u202e" not in plain
    if "csv" not in arguments and "--json" not in arguments:
        # 10,000 characters are cut; tables are folded, and pairs run on into a second line.
        assert len(plain) < 8000
        most = 160 if arguments == ("show", "1:60") else 80
        assert max(len(line) for line in plain.splitlines()) <= most


def test_parquet_is_not_for_a_terminal(database: Path):
    shown, code = in_terminal("results", "--format", "parquet", NO_COLOR="1")
    assert code == 1
    assert "Parquet must go to a file" in shown


def test_parquet_into_a_pipe(database: Path, weighbridge: Callable[..., Any], tmp_path: Path):
    with (tmp_path / "a.parquet").open("wb") as file:
        subprocess.run(
            [sys.executable, "-m", "weighbridge.deployments.cli", "results", "--format", "parquet"],
            stdout=file,
            check=True,
        )
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet").num_rows == 3


def test_runs_by_filter(database: Path, capsys: pytest.CaptureFixture[str]):
    def found(*arguments: str) -> list[int]:
        return [each["run_id"] for each in value(capsys, "runs", *arguments)]

    assert found() == [2, 1]
    assert found("--status", "failed") == [2]
    assert found("--schema", "triage") == found("--schema", "5555") == [1]
    assert found("--checkpoint", "big") == found("--checkpoint", "dddd") == [2]
    assert found("--checkpoint", "%") == []
    assert found("--since", "7d") == [2]
    assert found("--since", "9w") == [2, 1]
    # The day it began, which may be over by now.
    began = datetime.fromisoformat(value(capsys, "runs")[0]["started_at"])
    assert found("--since", f"{began.astimezone():%Y-%m-%d}") == [2]
    assert found("--limit", "1", "--offset", "1") == [1]
    out, err = run(capsys, "runs", "--limit", "1")
    assert err == "1 of 2 runs\nhint: --limit 2 shows all of them\n"
    assert all(len(line) <= 80 for line in out.splitlines())
    assert run(capsys, "runs", "--schema", "nope") == ("", "no such runs\n")
    assert run(capsys, "runs", "--offset", "5") == ("", "there are only 2 runs\n")


@pytest.mark.parametrize("since", ["yesterday", "", "7", "-3d", "2026-13-01", "999999w", "7dd"])
def test_a_moment_that_is_none(database: Path, since: str, capsys: pytest.CaptureFixture[str]):
    out, err = run(capsys, "runs", "--since", since, code=2)
    assert "must be a date as 2026-11-30" in err
    assert out == ""


def test_ages():
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    assert moment_of("36h", now) == datetime(2026, 11, 29, 0, tzinfo=UTC)
    assert moment_of("2w", now) == datetime(2026, 11, 16, 12, tzinfo=UTC)
    assert moment_of("2026-11-30T06:00+02:00") == datetime(2026, 11, 30, 4, tzinfo=UTC)
