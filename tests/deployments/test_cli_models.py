"""Pydantic models on the command line of score: written out before the flow starts."""

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from weighbridge.deployments.cli import main
from weighbridge.flows import ScoreRequest, score_documents
from weighbridge.scorer.schema import Schema

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

MODEL = """
from pydantic import BaseModel, Field

class Mood(BaseModel):
    good: bool = Field(description="Is it good?")
"""
NATIVE = Schema.parse('{"good": {"type": "boolean", "description": "Is it good?"}}')


@pytest.fixture(autouse=True)
def store(
    tmp_path: Path, embedded: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(embedded))
    Path("wb_scored.py").write_text(MODEL)
    Path("one.jsonl").write_text('{"text": "Thank you!"}\n')
    yield tmp_path / "store.db"
    sys.modules.pop("wb_scored", None)


def rows(store: Path, sql: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(store)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_score_takes_a_model(store: Path, prefect_server: str, capsys: pytest.CaptureFixture[str]):
    assert main(["score", "one.jsonl", "--schema", "wb_scored:Mood", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scored"] == 1
    ((name, flow_run),) = rows(store, "select schema_name, flow_run_id from run")
    assert name == "Mood"
    recorded = httpx.get(f"{prefect_server}/flow_runs/{flow_run}").json()
    assert recorded["name"].startswith("score-Mood-")
    # The flow may run where the module is not: its parameters hold the questions.
    request = recorded["parameters"]["request"]
    given = request["schema_"] if "schema_" in request else request["schema"]
    assert Schema.parse(given).sha256 == NATIVE.sha256
    assert "wb_scored" not in json.dumps(recorded["parameters"])
    # The same questions from a file are decided already.
    Path("mood.json").write_text(NATIVE.canonical)
    assert main(["score", "one.jsonl", "--schema", "mood.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"] == 1


def test_a_model_that_cannot_be_imported_starts_no_run(
    store: Path, capsys: pytest.CaptureFixture[str]
):
    Path("wb_scored.py").write_text("import wb_not_there")
    assert main(["score", "one.jsonl", "--schema", "wb_scored:Mood"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: wb_scored:Mood: module wb_scored must be importable")
    assert "Traceback" not in err
    assert not store.exists()


def test_a_flow_takes_a_model_where_it_runs(store: Path):
    made = ScoreRequest(documents="one.jsonl", schema="wb_scored:Mood")
    assert made.schema_label == "Mood"
    assert score_documents(made)["scored"] == 1
    assert rows(store, "select schema_name from run") == [("Mood",)]


@pytest.mark.parametrize(
    ("schema", "name", "label"),
    [
        ("folder/triage.json", None, "triage"),
        (NATIVE.canonical, None, "inline"),
        (NATIVE.canonical, "Mood", "Mood"),
        ("folder/triage.json", "Mood", "Mood"),
    ],
)
def test_a_run_is_named_after_its_schema(schema: str, name: str | None, label: str):
    made = ScoreRequest(documents="one.jsonl", schema=schema, schema_name=name)
    assert made.schema_label == label
