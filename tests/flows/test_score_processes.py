"""Runs in processes of their own: fresh, side by side, interrupted and killed."""

import json
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import held

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def arguments(bench: Any) -> Callable[..., list[str]]:
    """The command line of a request."""

    def of(documents: list[str], *more: str) -> list[str]:
        request = bench.request(documents)
        options = ["--schema", request.schema_, "--checkpoint", request.checkpoint]
        return ["score", request.documents, *options, "--json", *more]

    return of


def outcome_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_decided_needs_no_model(
    bench: Any, weighbridge: Run, arguments: Callable[..., list[str]]
):
    documents = ["It broke again.", "Wonderful, thank you!", "It broke again."]
    first = bench.score(documents)
    assert (first["scored"], first["reused"], first["model_loaded"]) == (2, 1, True)
    # A process that never loads the weights cannot have computed anything.
    again = outcome_of(weighbridge(*arguments(documents)))
    assert (again["scored"], again["reused"], again["model_loaded"]) == (0, 3, False)
    warmer = outcome_of(weighbridge(*arguments(documents, "--temperature", "2")))
    assert (warmer["scored"], warmer["reused"], warmer["model_loaded"]) == (0, 3, False)
    assert (warmer["temperature"], warmer["temperature_kind"]) == (2.0, "explicit")
    rows = "select position, choice, logit, probability from choice_probabilities where run_id = ?"
    before, after = (bench.rows(rows, outcome["run_id"]) for outcome in (again, warmer))
    assert [row["logit"] for row in before] == [row["logit"] for row in after]
    assert all(
        one["probability"] != two["probability"] for one, two in zip(before, after, strict=True)
    )
    values = "select position, value from results where run_id = ? order by position"
    assert bench.rows(values, again["run_id"]) == bench.rows(values, warmer["run_id"])


def test_two_runs_at_once_decide_each_text_once(
    bench: Any, start_weighbridge: Start, arguments: Callable[..., list[str]]
):
    command = arguments([f"Ticket {number}: it broke again." for number in range(12)])
    processes = [start_weighbridge(*command, "--anyway") for _ in range(2)]
    outcomes = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        outcomes.append(json.loads(out))
    for outcome in outcomes:
        assert outcome["documents"] == 12
        assert outcome["scored"] + outcome["reused"] == 12
        assert outcome["wasted"] == 0
    assert sum(outcome["scored"] for outcome in outcomes) == 12
    (decisions,) = bench.rows(
        "select count(*) as made, count(distinct document_id) as of from decision"
    )
    assert decisions == {"made": 12, "of": 12}
    bench.assert_accounts_close()


def under_way(bench: Any, run_id: int) -> dict[str, Any]:
    """Return a run with its claims, empty while none of its batches is recorded."""
    if not bench.database.exists():
        return {}
    try:
        rows = bench.rows(
            "select *, (select count(*) from claim where run_id = run.id) as claims from run "
            "where id = ? and scored > 0 and (claims > 0 or status <> 'running')",
            run_id,
        )
    except sqlite3.OperationalError:  # its tables are being made
        return {}
    return rows[0] if rows else {}


@pytest.fixture
def stopped(
    bench: Any, start_weighbridge: Start
) -> Callable[..., "tuple[subprocess.Popen[str], str] | None"]:
    """Start a command and stop it while a batch is scored, with one before and one behind it.

    None comes back if it was through before it could be held: then more documents are needed.
    """

    def stop(
        command: list[str], run_id: int, how: signal.Signals
    ) -> "tuple[subprocess.Popen[str], str] | None":
        process = start_weighbridge(*command)
        deadline = time.monotonic() + 300
        while not under_way(bench, run_id):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with held(bench.database):
            row = under_way(bench, run_id)
            done = not row or row["status"] != "running"
            if done or row["documents"] + row["claims"] >= row_count(command):
                process.kill()
                process.wait()
                return None
            process.send_signal(how)
            if how is signal.SIGKILL:
                process.wait()
        _, err = process.communicate(timeout=300)
        return process, err

    return stop


def row_count(command: list[str]) -> int:
    return len(Path(command[1]).read_text().splitlines())


def test_interrupted_then_killed_then_finished(
    bench: Any,
    stopped: Callable[..., Any],
    weighbridge: Run,
    arguments: Callable[..., list[str]],
):
    for count in (40 << doublings for doublings in range(8)):
        for file in bench.folder.glob("store.db*"):
            file.unlink()
        command = arguments([f"Ticket {number}: it broke again." for number in range(count)])
        if (interrupted := stopped(command, 1, signal.SIGINT)) is None:
            continue
        after_interrupt = bench.rows("select * from run"), bench.rows("select * from claim")
        if (killed := stopped(command, 2, signal.SIGKILL)) is not None:
            break
    else:
        raise AssertionError("every run was through before it could be held")

    process, err = interrupted
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-2:] == [
        "hint: what is recorded is kept: the same command scores only the rest",
        "interrupted",
    ]
    (first,), claims = after_interrupt
    assert (first["status"], first["message"]) == ("cancelled", "interrupted")
    assert 0 < first["scored"] < count
    assert claims == []

    process, _ = killed
    assert process.returncode == -signal.SIGKILL
    second = bench.rows("select * from run")[1]
    assert second["status"] == "running"
    assert second["reused"] == first["scored"]
    assert 0 < second["scored"] < count - first["scored"]

    outcome = outcome_of(weighbridge(*command))
    assert outcome["documents"] == count
    assert outcome["reused"] == first["scored"] + second["scored"]
    assert outcome["scored"] == count - outcome["reused"]
    assert outcome["wasted"] == 0
    statuses = [run["status"] for run in bench.rows("select status from run order by id")]
    assert statuses == ["cancelled", "crashed", "completed"]
    (decisions,) = bench.rows(
        "select count(*) as made, count(distinct document_id) as of from decision"
    )
    assert decisions == {"made": count, "of": count}
    bench.assert_accounts_close()


def test_the_example_is_a_flow_that_runs(bench: Any, tmp_path: Path, prefect_server: str):
    import os
    import sys

    import weighbridge.examples

    request = bench.request(["It broke again.", {"text": ""}, "Thank you!", "It broke again."])
    schema = tmp_path / "mood.json"
    schema.write_text(request.schema_)
    environment = {
        **os.environ,
        "PREFECT_API_URL": prefect_server,
        "WEIGHBRIDGE_DATABASE_URL": f"sqlite:///{bench.database}",
        "WEIGHBRIDGE_CHECKPOINT": request.checkpoint,
        "WEIGHBRIDGE_LEASE": str(tmp_path / "lease"),
    }
    script = str(Path(str(weighbridge.examples.__file__)).parent / "own_flow.py")
    outputs = []
    for program in ([script], ["-m", "weighbridge.examples.own_flow"]):
        done = subprocess.run(
            [sys.executable, "-W", "error", *program, request.documents, str(schema)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    # The second run has nothing to score and says the same.
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 3
    assert all(" sentiment is " in line and line.endswith("%") for line in outputs[0])
    runs = bench.rows("select status, scored, reused, rejected from run order by id")
    assert [tuple(run.values()) for run in runs] == [
        ("completed", 2, 1, 1),
        ("completed", 0, 3, 1),
    ]
    bench.assert_accounts_close()
