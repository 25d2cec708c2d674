"""The flow from end to end: a real server, a real checkpoint, a real store."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from weighbridge.db.errors import StoreError
from weighbridge.flows.progress import Progress, listening
from weighbridge.scorer.errors import CheckpointError, SchemaError, ScorerError
from weighbridge.tasks.errors import SourceError

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

CASES = Path(__file__).parents[1] / "cases"
OUTCOME_KEYS = [
    *("run_id", "documents", "scored", "reused", "rejected", "wasted", "seconds"),
    *("documents_per_second", "temperature", "temperature_kind", "permutations", "flip_rate"),
    *("model_loaded", "database"),
]


def counts(outcome: dict[str, Any]) -> tuple[int, int, int, int]:
    return tuple(outcome[name] for name in ("scored", "reused", "rejected", "wasted"))  # type: ignore[return-value]


def test_hostile_documents(bench: Any):
    outcome = bench.score(CASES / "documents_hostile.jsonl")
    expected = json.loads((CASES / "documents_hostile_expected.json").read_text())
    records = [each for each in expected if each["status"] != "ignored"]
    items = bench.rows("select * from item order by position")
    assert [item["position"] for item in items] == list(range(len(records)))
    assert [(item["line"], item["status"]) for item in items] == [
        (each["line"], each["status"]) for each in records
    ]
    for item, each in zip(items, records, strict=True):
        if item["status"] == "rejected":
            # The note begins with the code: "document.encoding: NUL, in text, id or metadata".
            assert item["code"] == each["note"].partition(":")[0]
            assert item["message"]
            assert item["decision_id"] is None
    by_line = {item["line"]: item for item in items}
    tokens, limit = re.findall(r"\d{4,}", by_line[11]["message"])
    assert {int(tokens), int(limit)} & {4096}
    assert max(int(tokens), int(limit)) > 4096
    assert "12" in by_line[12]["message"]
    assert by_line[20]["external_id"] == "7"
    # Twins share the decision; a repeated id with another text does not.
    assert by_line[15]["decision_id"] == by_line[1]["decision_id"] != by_line[16]["decision_id"]
    statuses = [each["status"] for each in records]
    assert list(outcome) == OUTCOME_KEYS
    assert counts(outcome) == (
        statuses.count("scored"),
        statuses.count("reused"),
        statuses.count("rejected"),
        0,
    )
    assert outcome["documents"] == len(records)
    assert outcome["database"] == str(bench.database)
    assert stat.S_IMODE(bench.database.stat().st_mode) == 0o600
    bench.assert_accounts_close()
    # Bad records are no reason to do good ones again.
    assert counts(bench.score(CASES / "documents_hostile.jsonl")) == (
        0,
        outcome["scored"] + outcome["reused"],
        outcome["rejected"],
        0,
    )
    bench.assert_accounts_close()


def test_probabilities_follow_the_logits(bench: Any):
    bench.score(["It broke again.", "Wonderful, thank you!"])
    for row in bench.rows("select position, sum(probability) as p from choice_probabilities"):
        assert row["p"] == pytest.approx(2, abs=1e-6)
    (run,) = bench.rows("select * from run")
    assert (run["status"], run["temperature"], run["temperature_kind"]) == (
        "completed",
        1.0,
        "default",
    )
    assert run["temperature_source"]
    assert run["name"].startswith("score-inline-")
    assert json.loads(run["versions"]).keys() >= {"weighbridge", "mlx", "prefect"}
    (batch, *_) = bench.rows("select * from batch")
    assert batch["total_seconds"] >= batch["prefill_seconds"] + batch["branch_seconds"] > 0
    assert batch["suffix_tokens"] > 0


def test_another_temperature_changes_probabilities_alone(bench: Any):
    first = bench.score(["It broke again."])
    second = bench.score(["It broke again."], temperature=2.0)
    assert counts(second) == (0, 1, 0, 0)
    assert (second["temperature"], second["temperature_kind"]) == (2.0, "explicit")
    rows = "select * from choice_probabilities where run_id = ? order by choice"
    one, two = (bench.rows(rows, outcome["run_id"]) for outcome in (first, second))
    assert [row["logit"] for row in one] == [row["logit"] for row in two]
    assert [row["probability"] for row in one] != [row["probability"] for row in two]
    # Twice the temperature halves the log odds.
    odds = [row[0]["probability"] / row[1]["probability"] for row in (one, two)]
    assert odds[0] == pytest.approx(odds[1] ** 2, rel=1e-6)
    values = bench.rows("select run_id, value from results order by run_id")
    assert values[0]["value"] == values[1]["value"]


def test_rescoring_adds_a_generation(bench: Any):
    first = bench.score(["It broke again.", "It broke again."])
    assert counts(first) == (1, 1, 0, 0)
    again = bench.score(["It broke again.", "It broke again."], rescore=True)
    assert counts(again) == (1, 1, 0, 0)
    items = bench.rows("select run_id, decision_id from item order by run_id, position")
    decisions = [item["decision_id"] for item in items]
    assert decisions[0] == decisions[1] != decisions[2] == decisions[3]
    # The same model gives the same logits, and the old run keeps its own rows.
    logits = bench.rows("select choice, logit, run_id from choice_probabilities where position = 0")
    assert len(logits) == 4
    assert len({(row["choice"], round(row["logit"], 4)) for row in logits}) == 2
    bench.assert_accounts_close()


def test_a_limit(bench: Any):
    documents = ["One.", "Two.", "Three."]
    assert counts(bench.score(documents, limit=2)) == (2, 0, 0, 0)
    assert counts(bench.score(documents, limit=0)) == (0, 0, 0, 0)
    # Rejected records count, as the limit is one of records.
    mixed = [{"id": "empty", "text": ""}, *documents]
    assert counts(bench.score(mixed, limit=2)) == (0, 1, 1, 0)


def test_neither_text_nor_metadata_is_kept_when_asked(bench: Any):
    documents = [
        {"id": "visible-id", "text": "MARKERTEXT is broken", "who": "MARKERMETA", "n": {"a": 1}},
        {"id": "twin", "text": "MARKERTEXT is broken", "who": "MARKERMETA"},
        {"id": "bad", "text": "MARKERTEXT \0", "who": "MARKERMETA"},
        {"id": "long", "text": "MARKERTEXT " * 3000, "who": "MARKERMETA"},
        {"id": "none", "text": None, "who": "MARKERMETA"},
    ]
    assert counts(bench.score(documents, store_text=False)) == (1, 1, 3, 0)
    kept = b"".join(path.read_bytes() for path in bench.folder.glob("store.db*"))
    assert b"visible-id" in kept
    assert b"MARKERTEXT" not in kept
    assert b"MARKERMETA" not in kept
    # The negative control, and the way back: a run that may keep them adds them.
    assert counts(bench.score(documents)) == (0, 2, 3, 0)
    kept = b"".join(path.read_bytes() for path in bench.folder.glob("store.db*"))
    assert b"MARKERTEXT" in kept
    assert b"MARKERMETA" in kept


def test_csv_and_other_columns(bench: Any):
    path = bench.folder / "mails.csv"
    path.write_text("number;body;channel\n7;It broke again.;mail\n8;;chat\n")
    outcome = bench.score(path, text_field="body", id_field="number", source="the mail box")
    assert counts(outcome) == (1, 0, 1, 0)
    items = bench.rows("select external_id, metadata, line from item order by position")
    assert items[0] == {"external_id": "7", "metadata": '{"channel": "mail"}', "line": 2}
    assert bench.rows("select documents_source from run") == [{"documents_source": "the mail box"}]


def test_progress_reaches_whoever_started_the_flow(bench: Any):
    seen: list[Progress] = []
    with listening(seen.append):
        bench.score(["One.", "Two.", "Three.", {"text": ""}], batch_size=2)
    # A batch that waited for the model is told once more, when there is something to record.
    told = [each for each in seen if each.total is not None and each.stage != "recording"]
    # Before and after each of two batches; the bad record goes with the first.
    assert [(each.done, each.total) for each in told] == [(0, 4), (3, 4), (3, 4), (4, 4)]
    assert seen[0].stage == "checking the schema"
    heard = len(seen)
    bench.score(["One."])
    assert len(seen) == heard  # nothing afterwards


def test_a_retry_of_a_flow_run_continues_its_run(bench: Any):
    from weighbridge.flows import score_documents

    interrupted: list[int] = []

    def fail_once(progress: Progress) -> None:
        if progress.done and not interrupted:
            interrupted.append(progress.done)
            raise RuntimeError("the power went")

    request = bench.request([f"Document {i} is here." for i in range(5)], batch_size=2)
    retrying = score_documents.with_options(retries=1, retry_delay_seconds=0)
    with listening(fail_once):
        outcome = retrying(request)
    assert interrupted == [2]
    assert counts(outcome) == (5, 0, 0, 0)
    (run,) = bench.rows("select * from run")
    assert (run["status"], run["documents"], run["message"]) == ("completed", 5, None)
    assert run["resumed_at"] is not None
    assert len(bench.rows("select * from batch")) == 3
    bench.assert_accounts_close()


def test_a_new_flow_run_is_a_new_run(bench: Any):
    from weighbridge.flows import score_documents

    def fail(progress: Progress) -> None:
        if progress.done:
            raise RuntimeError("the power went")

    request = bench.request([f"Document {i} is here." for i in range(3)], batch_size=2)
    with listening(fail), pytest.raises(RuntimeError, match="power"):
        score_documents(request)
    assert counts(score_documents(request)) == (1, 2, 0, 0)
    runs = bench.rows("select status, message, documents from run order by id")
    assert [tuple(run.values()) for run in runs] == [
        ("failed", "RuntimeError", 2),
        ("completed", None, 3),
    ]
    bench.assert_accounts_close()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"schema": "nowhere.json"}, SchemaError, "nowhere.json"),
        ({"schema": "{}"}, SchemaError, "field"),
        ({"checkpoint": "nowhere"}, ScorerError, "nowhere"),
        ({"checkpoint": "~nobody-here/model"}, ScorerError, "~nobody-here/model"),
        ({"checkpoint": "."}, CheckpointError, "config.json"),
        ({"documents": Path("nowhere.jsonl")}, SourceError, "nowhere.jsonl"),
        ({"text_field": "id"}, SourceError, "two columns"),
        ({"database": "/proc/nowhere/store.db"}, StoreError, "/proc/nowhere"),
    ],
)
def test_what_cannot_begin_leaves_no_run(
    bench: Any, changes: dict[str, Any], error: type[Exception], words: str
):
    with pytest.raises(error, match=re.escape(words)):
        bench.score(**{"documents": ["One."], **changes})
    if bench.database.exists():
        assert bench.rows("select * from run") == []


def test_a_request_is_small_json_without_secrets(bench: Any):
    from pydantic import ValidationError

    from weighbridge.flows import ScoreRequest

    request = bench.request(["One."])
    parameters = request.model_dump(mode="json", by_alias=True)
    assert ScoreRequest.model_validate(json.loads(json.dumps(parameters))) == request
    for changes in (
        {"database": "postgresql://me:secret@host/db"},
        {"batch_size": 0},
        {"mode": "fastest"},
        {"unknown": 1},
    ):
        with pytest.raises(ValidationError):
            bench.request(["One."], **changes)


def test_settings_are_not_read_from_prefect(bench: Any, monkeypatch: pytest.MonkeyPatch):
    # Without a path in the request the store of the settings is used.
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{bench.folder}/other.db")
    outcome = bench.score(["One."], database=None)
    assert outcome["database"] == f"{bench.folder}/other.db"
    assert (bench.folder / "other.db").exists()
    assert not bench.database.exists()
