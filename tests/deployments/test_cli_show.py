"""show and diff on a real store: a run, a document in all its runs, two runs compared."""

import json
import runpy
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from weighbridge.db import CheckpointRow, Store, open_engine
from weighbridge.deployments.cli import main
from weighbridge.deployments.comparison import holm, mcnemar

make = runpy.run_path(str(Path(__file__).parents[1] / "db" / "conftest.py"))["Builders"]()
WINS = {"billing": {"billing": 2.0, "login": 0.0, "other": 0.0}}
WINS["login"] = {"billing": 0.0, "login": 2.0, "other": 0.0}


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs over ten documents; the second says login where it is so, but for one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answers.db"
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{path}")
    engine = open_engine(f"sqlite:///{path}")
    store = Store(engine)
    starts = make.start(), make.start(checkpoint=CheckpointRow("d" * 64, "big"), temperature=2.0)
    for number, start in enumerate(starts):
        run = store.begin_run(make.start(**{**vars(start), "host": socket.gethostname()})).run_id
        items = [
            make.scored(
                n,
                f"document {n}\nwith a second line",
                external_id=["2", "T-1", None][n] if n < 3 else f"T-{n}",
                metadata={"truth": "login" if n else "billing", "\x1b[2J": "\x1b[31m"},
                answers=make.answers(topic=WINS["login" if number and n != 9 else "billing"]),
            )
            for n in range(10)
        ]
        more = [make.scored(11)] if number else [make.rejected(10)]
        store.record_batch(run, make.batch(*items, *more))
        store.finish_run(run, "completed")
    engine.dispose()
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    found = main(list(arguments))
    out, err = capsys.readouterr()
    assert (found, "\x1b" in out + err) == (code, False), err
    return out, err


def value(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    out, err = run(capsys, *arguments, "--json")
    assert err == ""
    return json.loads(out)


def test_a_run(database: Path, capsys: pytest.CaptureFixture[str]):
    out, err = run(capsys, "show", "1")
    lines = out.splitlines()
    for line in (
        "run          1, test",
        "status       completed",
        "documents    11: 10 scored, 0 reused, 1 rejected",
        "schema       triage (555555555555)",
        "view         answers_triage",
        "checkpoint   smollm2-135m (cccccccccccc)",
        "temperature  1 (default): no temperature is known for this checkpoint",
        "timings      0.5 s prefill, 0.2 s branches, 0.8 s scoring in all, in 1 batch",
    ):
        assert line in lines
    assert any(line.startswith("topic   billing         10  █████") for line in lines)
    assert lines[-1].split() == ["document.empty", "1"]
    assert err == "hint: weighbridge results 1 shows each answer\n"
    told = value(capsys, "show", "1")
    assert (told["run_id"], told["fingerprint"], told["view"]) == (1, "c" * 64, "answers_triage")
    assert told["rejected_codes"] == {"document.empty": 1}
    # The latest run, if none is named.
    assert value(capsys, "show")["run_id"] == 2


def test_a_document_in_every_run_the_newest_first(
    database: Path, capsys: pytest.CaptureFixture[str]
):
    told = value(capsys, "show", "T-1")
    assert [(item["run_id"], item["position"]) for item in told] == [(2, 1), (1, 1)]
    topic = told[0]["answers"][0]
    assert (topic["value"], topic["margin"]) == ("login", 2.0)
    # At this run's own temperature of 2: 1, e and 1, of e + 2.
    assert [choice["probability"] for choice in topic["choices"]] == pytest.approx(
        [0.2119416, 0.5761169, 0.2119416]
    )
    assert told[0]["text"] == "document 1\nwith a second line"
    out, _ = run(capsys, "show", "T-1")
    said = [" ".join(line.split()) for line in out.splitlines()]
    assert "text document 1 with a second line" in said
    assert "metadata \\x1b[2J \\x1b[31m" in said
    out, _ = run(capsys, "show", "T-1", "--text", "--limit", "1")
    assert out.endswith("\ndocument 1\nwith a second line\n")


def test_a_number_is_a_run_if_there_is_one(database: Path, capsys: pytest.CaptureFixture[str]):
    assert value(capsys, "show", "2")["run_id"] == 2
    assert [item["position"] for item in value(capsys, "show", "2", "--document")] == [0, 0]
    _, err = run(capsys, "show", "99", code=1)
    assert "there is no '99'" in err
    assert "hint: a document by its place is RUN:POSITION, such as 2:99" in err
    _, err = run(capsys, "show", "--document", code=2)
    assert "needs the id of one" in err


def test_an_id_in_another_case_is_asked_for(database: Path, capsys: pytest.CaptureFixture[str]):
    _, err = run(capsys, "show", "t-1", code=1)
    assert "hint: did you mean T-1?" in err.splitlines()
    _, err = run(capsys, "show", "x-1", code=1)
    assert "did you mean" not in err


def test_nothing_is_said_twice(database: Path, capsys: pytest.CaptureFixture[str]):
    out, _ = run(capsys, "show", "T-1")
    assert "logit" in out
    assert "flip rate" not in out
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(
            "update run set temperature_source = 'default: none', backend = 'cpu float32', "
            "dtype = 'float32', documents_source = 'a.db: ' || ? where id = 1",
            ["select something from somewhere where something " * 5],
        )
        connection.commit()
    out, _ = run(capsys, "show", "1")
    lines = out.splitlines()
    assert "temperature  1 (default): none" in lines
    assert "computed     cpu float32" in lines
    assert "source       a.db: select something from somewhere where something select" in lines
    assert max(map(len, lines)) <= 80


def test_a_document_without_an_id_by_its_place(database: Path, capsys: pytest.CaptureFixture[str]):
    (item,) = value(capsys, "show", "1:2")
    assert (item["external_id"], item["document_sha256"]) == (
        None,
        make.sha("document 2\nwith a second line"),
    )
    (item,) = value(capsys, "show", "1:10")
    assert (item["status"], item["code"], item["answers"]) == ("rejected", "document.empty", [])
    assert "rejected    document.empty: " in run(capsys, "show", "1:10")[0]


def test_two_runs_compared(database: Path, capsys: pytest.CaptureFixture[str]):
    told = value(capsys, "diff", "1", "2")
    assert {row["name"] for row in told["differences"]} == {"checkpoint", "temperature"}
    assert told["documents"] == {"paired": 10, "only_first": 0, "only_second": 1}
    assert [row["external_id"] for row in told["unpaired"]["second"]] == ["T-11"]
    topic, urgent, _ = told["fields"]
    assert topic["changes"] == [{"first": "billing", "second": "login", "count": 9}]
    assert (topic["same"], topic["agreement"], urgent["changed"]) == (1, 0.1, 0)
    # Nine of nine went one way: 2 / 2**9. Holm over three values, of which two are alike.
    billing, login, other = topic["values"]
    assert (billing["only_first"], billing["only_second"]) == (9, 0)
    assert billing["p"] == login["p"] == pytest.approx(2 / 2**9)
    assert (billing["p_holm"], other["p"]) == (pytest.approx(6 / 2**9), 1.0)
    out, err = run(capsys, "diff", "1", "2", "--changed", "--limit", "2")
    said = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("topic 10 1 9 0.100 ") for line in said)
    # e**2 / (e**2 + 2) at temperature 1, e / (e + 2) at 2.
    assert len([line for line in said if line.endswith("billing 0.79 login 0.58")]) == 2
    assert all(len(line) <= 80 for line in (out + err).splitlines())
    assert "runs 1 and 2: 10 documents in both" in err
    assert "only run 2 answered 1 document: T-11" in err
    assert "not which run is right" in err


def test_which_run_is_right(database: Path, capsys: pytest.CaptureFixture[str]):
    told = value(capsys, "diff", "1", "2", "--expected", "topic=truth")
    found = told["fields"][0]["expected"]
    # Billing is right for 0 alone: the first run has it; the second is right for 1 to 8.
    counts = {name: found[name] for name in ("both", "only_first", "only_second", "neither")}
    assert counts == {"both": 0, "only_first": 1, "only_second": 8, "neither": 1}
    assert (found["first_right"], found["second_right"]) == (0.1, 0.8)
    # Of nine, eight or more one way: 2 (1 + 9) / 2**9.
    assert found["p"] == pytest.approx(20 / 2**9)
    out, err = run(capsys, "diff", "1", "2", "--expected", "topic=truth")
    said = [" ".join(line.split()) for line in out.splitlines()]
    assert "topic 10 0.100 0.800 1 8 0.039" in said
    assert "one run is right more often" in err
    for wrong in ("topic", "topic=", "nope=truth", "=truth"):
        _, err = run(capsys, "diff", "1", "2", "--expected", wrong, code=1)
        assert "--expected must be FIELD=COLUMN" in err


def test_what_cannot_be_compared(database: Path, capsys: pytest.CaptureFixture[str]):
    _, err = run(capsys, "diff", "1", "9", code=1)
    assert "there is no run 9" in err
    _, err = run(capsys, "diff", "1", "2", "--field", "nope", code=1)
    assert "neither has it" in err


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (3, 3, 1.0), (5, 0, 2 / 32), (6, 1, 2 * 8 / 128)],
)
def test_the_exact_test_by_hand(first: int, second: int, p: float):
    # Twice the tail of a fair coin, at most 1.
    assert mcnemar(first, second) == mcnemar(second, first) == pytest.approx(p)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.04: times 3, 2 and 1, and never less than the one before.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
