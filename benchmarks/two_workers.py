"""Two workers on one pool, and many runs over the same documents: is each decided once?

A real Prefect server, two real worker processes with a lease each (on one machine they would
take turns), the embedded checkpoint. Counted: decisions, what was computed in vain, the
processes that took part, and whether anyone was told that the database is locked.

    python benchmarks/two_workers.py --json
"""

import argparse
import contextlib
import json
import sqlite3
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from machine import machine_lines
from residency import (
    RESIDENT,
    SCHEMA,
    SCRIPTS,
    deploy,
    has_ended,
    prepared_environment,
    running,
    server,
    until,
)

WORKERS = 2
BATCH = 16


def main() -> int:
    parser = argparse.ArgumentParser(description="Two workers, many runs, the same documents.")
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = prepared_environment(folder)
        with server(environment, folder), contextlib.ExitStack() as workers:
            deploy(RESIDENT)
            logs = [folder / f"worker-{number}.log" for number in range(WORKERS)]
            command = [SCRIPTS / "weighbridge", "worker", "start", "--pool", RESIDENT]
            for number, log in enumerate(logs):
                own = {**environment, "WEIGHBRIDGE_LEASE": str(folder / f"lease-{number}")}
                workers.enter_context(running(command, own, log))
            for log in logs:
                until(lambda log=log: "runs will find" in log.read_text(), 300)
            states = score_all(arguments.documents, arguments.runs, folder)
            result = {
                "machine": machine_lines(),
                "states": states,
                **counted(folder),
                "locked": sum("database is locked" in log.read_text() for log in logs),
            }
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    right = (
        result["decisions"] == result["decided_documents"] == arguments.documents
        and result["scored"] + result["wasted"] <= arguments.documents + WORKERS * BATCH
        and result["pids"] == WORKERS
        and not result["locked"]
        and set(states) == {"Completed"}
    )
    print("each document decided once, by both workers:", "yes" if right else "NO", file=sys.stderr)
    return 0 if right else 1


def score_all(count: int, runs: int, folder: Path) -> list[str]:
    """Trigger all runs at once, wait for their ends, and return their states."""
    from prefect import get_client  # noqa: PLC0415 - reads its environment when it is imported
    from prefect.deployments import run_deployment  # noqa: PLC0415

    documents = folder / "documents.jsonl"
    documents.write_text(
        "".join(json.dumps({"text": f"Machine {each} broke."}) + "\n" for each in range(count))
    )
    request = {
        "documents": str(documents),
        "schema": json.dumps(SCHEMA),
        "encoding": "codes",
        "batch_size": BATCH,
    }
    made: list[Any] = [
        run_deployment(
            f"score-documents/{RESIDENT}",
            parameters={"request": request},
            timeout=0,
            as_subflow=False,
        )
        for _ in range(runs)
    ]
    with get_client(sync_client=True) as api:
        for each in made:
            until(partial(has_ended, api, each.id), 900)
        return [str(api.read_flow_run(each.id).state_name) for each in made]


def counted(folder: Path) -> dict[str, int]:
    """Count what the store holds."""
    questions = {
        "decisions": "select count(*) from decision",
        "decided_documents": "select count(distinct document_id) from decision",
        "runs": "select count(*) from run where status = 'completed'",
        "items": "select count(*) from item",
        "scored": "select sum(scored) from run",
        "wasted": "select sum(wasted) from run",
        "pids": "select count(distinct pid) from run where scored > 0",
        "claims": "select count(*) from claim",
    }
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as connection:
        return {name: connection.execute(sql).fetchone()[0] for name, sql in questions.items()}


if __name__ == "__main__":
    sys.exit(main())
