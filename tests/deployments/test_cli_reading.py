"""Reading commands on a real store: the answer on stdout, the rest on stderr, clear next steps."""

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from weighbridge.db.engine import open_engine
from weighbridge.db.records import (
    AnswerRecord,
    BatchRecord,
    CheckpointRow,
    ChoiceRecord,
    DocumentRecord,
    ItemRecord,
    RunStart,
    SchemaRow,
)
from weighbridge.db.store import Store
from weighbridge.deployments.cli import main

RESULT_KEYS = [
    *("run_id", "position", "external_id", "document_id", "field", "kind", "value"),
    *("probability", "margin", "expected_value", "temperature", "checkpoint", "schema"),
]


def choices(**logits: float) -> tuple[ChoiceRecord, ...]:
    return tuple(ChoiceRecord(choice, logit) for choice, logit in logits.items())


def record_run(url: str, items: tuple[ItemRecord, ...]) -> None:
    engine = open_engine(url)
    store = Store(engine)
    start = RunStart(
        flow_run_id=None,
        name="score-triage",
        host=socket.gethostname(),
        pid=os.getpid(),
        schema=SchemaRow("5c" * 32, "triage", "{}"),
        checkpoint=CheckpointRow("c0" * 32, "tiny"),
        temperature=1.0,
        temperature_kind="default",
        temperature_source="nothing is known",
        documents_source="tickets.jsonl",
        mode="parallel",
        layout="schema-first",
        encoding="labels",
        contract=None,
        dtype="float32",
        prompt_version="1",
        max_input_tokens=4096,
        backend="cpu",
    )
    run_id = store.begin_run(start).run_id
    store.record_batch(run_id, BatchRecord(datetime.now(UTC), None, "parallel", "cpu", items))
    store.finish_run(run_id, "completed")
    engine.dispose()


SCORED = ItemRecord(
    position=0,
    line=1,
    external_id="t-1\x1b[2J",
    document=DocumentRecord("d0" * 32, "the page is down", 16),
    status="scored",
    answers=(
        AnswerRecord("queue", "enum", choices(billing=0.0, outage=0.0), 1, 0.0),
        AnswerRecord("urgent", "boolean", choices(false=1.0, true=3.0), 1, 2.0),
    ),
)
REJECTED = ItemRecord(
    position=1,
    line=2,
    external_id=None,
    document=None,
    status="rejected",
    code="document.empty",
    message='"text" on line 2 must not be blank, got no characters',
)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store that the settings name; it does not exist yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answers.db"
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{path}")
    return path


@pytest.fixture
def filled(database: Path) -> Path:
    record_run(f"sqlite:///{database}", (SCORED,))
    record_run(f"sqlite:///{database}", (SCORED, REJECTED))
    return database


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return json.loads(out)


def test_results_json_has_the_promised_keys(filled: Path, capsys: pytest.CaptureFixture[str]):
    rows = answer(capsys, "results")
    assert [list(row) for row in rows] == [RESULT_KEYS, RESULT_KEYS]
    assert {row["run_id"] for row in rows} == {2}  # the latest
    # Two equal logits share the probability; 1 and 3 give 1 / (1 + exp(-2)).
    assert [row["probability"] for row in rows] == pytest.approx([0.5, 0.8807970779778823])
    assert [row["value"] for row in rows] == ["outage", "true"]
    assert [row["run_id"] for row in answer(capsys, "results", "1")] == [1, 1]


def test_results_as_a_table(filled: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["results"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "position  id          field   value   probability  margin",
        "       0  t-1\\x1b[2J  queue   outage        0.500    0.00",
        "       0  t-1\\x1b[2J  urgent  true          0.881    2.00",
    ]
    assert err == "run 2: 2 answers\n"


def test_rejected(filled: Path, capsys: pytest.CaptureFixture[str]):
    assert answer(capsys, "rejected") == [
        {
            "position": 1,
            "line": 2,
            "external_id": None,
            "code": "document.empty",
            "message": REJECTED.message,
        }
    ]
    assert answer(capsys, "rejected", "1") == []
    assert main(["rejected", "1"]) == 0
    assert capsys.readouterr() == ("", "run 1: 0 documents rejected\n")
    assert main(["rejected"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        f"       1     2      document.empty  {REJECTED.message}"
    )


def test_runs(filled: Path, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "runs")
    assert [run["run_id"] for run in found] == [2, 1]
    assert [run["documents"] for run in found] == [2, 1]
    assert datetime.fromisoformat(found[0]["started_at"]).tzinfo is not None
    assert [run["run_id"] for run in answer(capsys, "runs", "--limit", "1")] == [2]
    assert main(["runs"]) == 0
    header, latest, _ = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["run", "started", "status", "documents"]
    assert latest.split()[3:] == ["completed", "2", "0", "1", "1", "triage"]
    assert len(header) <= 80


def test_query(filled: Path, capsys: pytest.CaptureFixture[str]):
    sql = "select field, probability from results where run_id = 2 order by field"
    assert [row["field"] for row in answer(capsys, "query", sql)] == ["queue", "urgent"]
    assert main(["query", "select 1 as n, 'a' as n, null as x, x'00ff' as b"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["n  n:2  x  b", "1  a       00ff"]
    assert err == ""
    assert answer(capsys, "query", "select 9e999 as big") == [{"big": "inf"}]
    assert main(["query", "select 1.0 / 3 as third, 2 as two"]) == 0
    assert capsys.readouterr().out.splitlines() == [" third  two", "0.3333    2"]
    assert main(["query", "select 1 as n where false"]) == 0
    assert capsys.readouterr() == ("n\n", "0 rows\n")


@pytest.mark.parametrize(
    "sql", ["delete from item", "select 1; select 2", "selec", "attach 'x' as y"]
)
def test_query_refuses_what_is_not_one_reading_statement(
    filled: Path, sql: str, capsys: pytest.CaptureFixture[str]
):
    before = filled.read_bytes()
    assert main(["query", sql]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "unexpected" not in err
    assert filled.read_bytes() == before


def test_another_store_by_option(filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record_run(f"sqlite:///{tmp_path}/other.db", (REJECTED,))
    for option in ("other.db", f"sqlite:///{tmp_path}/other.db"):
        assert [run["run_id"] for run in answer(capsys, "runs", "--db", option)] == [1]
        assert len(answer(capsys, "rejected", "--db", option)) == 1


def test_a_run_that_does_not_exist(filled: Path, capsys: pytest.CaptureFixture[str]):
    for command in ("results", "rejected"):
        assert main([command, "9"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: a run must be one that the store has, and there is no run 9")
        assert "weighbridge runs" in err


def test_a_store_without_runs(database: Path, capsys: pytest.CaptureFixture[str]):
    open_engine(f"sqlite:///{database}").dispose()
    assert answer(capsys, "runs") == []
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("no runs yet\nhint: weighbridge demo")
    assert main(["results"]) == 1
    assert "hint: weighbridge demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["runs"], ["results"], ["rejected"], ["query", "select 1"], ["db", "upgrade"]]
)
def test_without_a_store_nothing_is_created(
    database: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: a store must exist to be ")
    assert f"there is no store at {database}\nhint: " in err
    assert not database.exists()


def test_db_path(database: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["db", "path"]) == 0
    assert capsys.readouterr().out == f"{database}\n"
    assert answer(capsys, "db", "path") == {"path": str(database), "url": f"sqlite:///{database}"}
    assert answer(capsys, "db", "path", "--db", "postgresql://me:s3cret@host/wb") == {
        "path": None,
        "url": "postgresql://me:***@host/wb",
    }


def test_db_upgrade_of_a_new_store(filled: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["db", "upgrade"]) == 0
    out, err = capsys.readouterr()
    assert "has the newest version already" in out
    assert err == ""
