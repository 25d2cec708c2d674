"""What Prefect's server holds after a run: names, artifacts, counts, and nothing of documents."""

import json
import platform
from collections.abc import Callable
from typing import Any

import pytest

from weighbridge.db.errors import StoreError
from weighbridge.flows.progress import Progress, listening
from weighbridge.tasks.sources import SourceError

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

Rows = dict[str, list[dict[str, Any]]]
Kept = Callable[[Callable[[Rows], Any]], Rows]


FAILED = ("refused-run", "headless-run", "broken-run")


def of_run(kept: Rows, name: str) -> dict[str, Any]:
    """Return a flow run by what its documents are called, with its task runs and artifacts."""
    (flow_run,) = [run for run in kept["flow_run"] if name in run["parameters"]]
    return {
        **flow_run,
        "task_runs": [run for run in kept["task_run"] if run["flow_run_id"] == flow_run["id"]],
        "artifacts": {
            each["key"]: each for each in kept["artifact"] if each["flow_run_id"] == flow_run["id"]
        },
        "logs": [log["message"] for log in kept["log"] if log["flow_run_id"] == flow_run["id"]],
    }


def checkpoint_of(bench: Any) -> str:
    """Return what the store calls the checkpoint."""
    (row,) = bench.rows("select name from checkpoint")
    return row["name"]


def test_names_and_artifacts(bench: Any, kept_by_prefect: Kept):
    schema = bench.folder / "mood.json"
    schema.write_text(
        json.dumps(
            {
                "mood|<b>": {
                    "type": "enum",
                    "choices": ["bad", "good"],
                    "description": "The feeling of the text.",
                }
            }
        )
    )
    documents = ["It broke.", "Thanks!", {"text": ""}, {"text": "x\0"}, {"text": " "}]
    outcome = bench.score(documents, schema=str(schema), batch_size=1, source="named-run")
    run_id = outcome["run_id"]

    def whole(kept: Rows) -> bool:
        run = of_run(kept, "named-run")
        done = any(line.startswith(f"run {run_id} is completed") for line in run["logs"])
        return done and len(run["task_runs"]) == 6 and len(run["artifacts"]) == 4

    run = of_run(kept_by_prefect(whole), "named-run")
    assert run["name"].startswith("score-mood-20")
    (row,) = bench.rows("select name, flow_run_id from run")
    assert row["name"] == run["name"]
    assert row["flow_run_id"].replace("-", "") == run["id"].replace("-", "")
    assert run["state_name"] == "Completed"
    assert sorted(task["name"] for task in run["task_runs"]) == [
        "record 1 document",
        "record 4 documents",
        "resolve temperature",
        "score 1 document",
        "score 1 document",
        "validate schema",
    ]
    artifacts = run["artifacts"]
    assert set(artifacts) == {
        f"weighbridge-mood-{what}" for what in ("progress", "summary", "rejected", "outcome")
    }
    progress = artifacts["weighbridge-mood-progress"]
    assert (progress["type"], json.loads(str(progress["data"]))) == ("progress", 100.0)
    assert progress["description"] == f"run {run_id}: 5 of 5 documents"
    table = json.loads(json.loads(artifacts["weighbridge-mood-rejected"]["data"]))
    assert table == [
        {"code": "document.empty", "documents": 2},
        {"code": "document.encoding", "documents": 1},
    ]
    # What `trigger --wait` reads: the numbers of the flow's own outcome.
    (row,) = json.loads(json.loads(artifacts["weighbridge-mood-outcome"]["data"]))
    numbers = ("run_id", "documents", "scored", "reused", "rejected", "wasted")
    said = (*numbers, "seconds", "documents_per_second", "database")
    place = {"host": platform.node(), "output": None}
    assert row == {key: outcome[key] for key in said} | place
    summary = json.loads(artifacts["weighbridge-mood-summary"]["data"])
    assert "**5 documents**: 2 scored, 0 reused, 3 rejected" in summary
    assert "Rejected: 2 × `document.empty`, 1 × `document.encoding`." in summary
    # A name brings no tags (test_summary reads pages with a parser).
    assert "### mood\\|&lt;b&gt;" in summary
    assert "Temperature **1** (default: " in summary
    values = bench.rows("select value, count(*) as n from results group by value")
    for value in values:
        assert f"| {value['value']} | {value['n']} |" in summary
    assert f"    weighbridge results {run_id} --db {bench.database}" in summary
    assert set(json.loads(run["tags"])) == {"schema:mood", f"checkpoint:{checkpoint_of(bench)}"}
    logs = run["logs"]
    assert f"run {run_id}: 5 documents, schema mood, checkpoint {checkpoint_of(bench)}" in logs
    assert (
        f"3 documents rejected (document.empty, document.encoding); to see which: weighbridge "
        f"rejected {run_id}" in logs
    )
    batches = [line for line in logs if line.startswith("batch ")]
    assert [line.partition(" scored in ")[0] for line in batches] == ["batch 1: 1", "batch 2: 1"]
    assert batches[-1].endswith("; 5 of 5 documents done")
    assert any(
        line.startswith(f"run {run_id} is completed: 5 documents, 2 scored, 0 reused, 3 rejected")
        for line in logs
    )


def test_nothing_of_the_documents_reaches_prefect(bench: Any, kept_by_prefect: Kept):
    documents = [
        {"id": "an-id", "text": "MARKERTEXT is broken", "who": "MARKERMETA", "MARKERKEY": 1},
        {"id": "long", "text": "MARKERTEXT " * 3000, "who": "MARKERMETA"},
        {"id": "bad", "text": "MARKERTEXT \0", "who": "MARKERMETA"},
        {"id": "list", "text": ["MARKERTEXT"], "who": "MARKERMETA"},
    ]
    assert bench.score(documents, source="good-run")["scored"] == 1
    # Three of four are rejected, of which there is an event.

    # The store refuses the batch: the database's own error carries the row.
    bench.change(
        "create trigger refuse before insert on item begin select raise(abort, 'disk'); end"
    )
    with pytest.raises(StoreError):
        bench.score(documents, source="refused-run", rescore=True)
    bench.change("drop trigger refuse")

    # A file without a header: its first document stands where names should.
    headless = bench.folder / "headless.csv"
    headless.write_text("1,MARKERTEXT in the first line,MARKERMETA\n")
    with pytest.raises(SourceError):
        bench.score(headless, source="headless-run")

    def fail(progress: Progress) -> None:
        if progress.done:
            raise RuntimeError("in the middle")

    with listening(fail), pytest.raises(RuntimeError):
        bench.score(documents, source="broken-run", rescore=True)

    def whole(kept: Rows) -> bool:
        failed = [of_run(kept, name)["logs"] for name in FAILED]
        told = all(any("Encountered exception" in line for line in logs) for logs in failed)
        return told and any("weighbridge.run." in each["resource_id"] for each in kept["events"])

    kept = kept_by_prefect(whole)
    # The negative control: what may be there is found by the same search.
    assert "good-run" in repr(kept["flow_run"])
    assert "weighbridge.documents.rejected" in repr(kept["events"])
    assert "document.encoding" in repr(kept["artifact"])
    assert "schema:inline" in repr(kept["flow_run"])
    for name in FAILED:
        run = of_run(kept, name)
        assert run["state_type"] == "FAILED"
        assert any("Encountered exception" in message for message in run["logs"])
    for table, rows in kept.items():
        for marker in ("MARKERTEXT", "MARKERMETA", "MARKERKEY"):
            assert marker not in repr(rows), f"{marker} in {table}"
