"""Workers that are killed, workers side by side, and a worker that is not ours."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
from tests.deployments.conftest import PATIENCE

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]


def test_killed_in_the_middle_then_continued(yard: Any):
    yard.deploy(concurrency_limit=1)
    worker = yard.start()
    with yard.caught("Pump", 80, scored=6) as run:
        behind = yard.trigger(yard.documents(["Lamp."], "one"))
        # The server hears of tasks by events, a moment later.
        yard.until(lambda: at_rest(lambda: task_states(yard, run.id)))
        worker.signal(signal.SIGKILL)
        assert worker.exit_code() == 128 + signal.SIGKILL
    # Nobody has told the server.
    assert yard.history(run.id)[-1] == "Running"
    left = {task for task, state in task_states(yard, run.id).items() if state != "Completed"}
    before = yard.run_row(run.id)
    assert before["status"] == "running"

    restarted = yard.start()
    yard.until(lambda: "Crashed" in yard.history(run.id))
    # The slot of its deployment is free, or neither it nor the one behind it could run.
    yard.until(lambda: yard.history(run.id)[-1] == "Completed")
    assert yard.ended(behind) == "Completed"
    after = yard.run_row(run.id)
    assert (after["id"], after["pid"]) == (before["id"], restarted.pid)
    assert (after["documents"], after["scored"]) == (run.count, run.count)
    assert yard.decided(after["id"]) == (run.count, run.count)
    assert yard.rows("select * from claim") == []
    history = yard.history(run.id)
    crashed = history.index("Crashed")
    assert history[crashed - 1 : crashed + 2] == ["Running", "Crashed", "AwaitingRetry"]
    # What the killed process was at, nobody else would end.
    states = task_states(yard, run.id)
    assert {states[task] for task in left} <= {"Completed", "Crashed"}


def test_two_workers_share_documents(yard: Any):
    # Beside the one of the test above, with an accelerator of its own, and as Prefect starts it.
    yard.deploy()
    prefect = [sys.executable, "-m", "prefect"]
    lease = {"WEIGHBRIDGE_LEASE": str(yard.folder / "other-lease")}
    other = yard.start("--type", "weighbridge", program=prefect, env=lease)
    yard.until(lambda: "runs will find" in other.log.read_text())
    documents = yard.documents([f"Crane {number}." for number in range(24)], "shared")
    # The first must not be through before the other worker has looked for one.
    with yard.held():
        flow_runs = [yard.trigger(documents, batch_size=4) for _ in range(4)]
        yard.until(lambda: len(places(yard, flow_runs) - {None}) == 2)
    assert [yard.ended(flow_run) for flow_run in flow_runs] == ["Completed"] * 4
    rows = [yard.run_row(flow_run) for flow_run in flow_runs]
    assert len({row["pid"] for row in rows}) == 2
    assert [row["documents"] for row in rows] == [24] * 4
    assert yard.decided(rows[0]["id"]) == (24, 24)
    # Claims keep two runs from scoring the same batch, but for one that a worker had begun.
    assert 24 <= sum(row["scored"] + row["wasted"] for row in rows) <= 24 + 2 * 4
    assert len(places(yard, flow_runs)) == 2


def test_a_second_signal_stops_at_once(yard: Any):
    (worker, other) = [worker for worker in yard.workers if worker.shell.poll() is None]
    other.signal(signal.SIGTERM)
    assert other.exit_code() == 0, other.log.read_text()
    assert "received SIGTERM: ending after the batch in flight" in other.log.read_text()
    with yard.caught("Crate", 60, scored=0, whole=True) as run:
        worker.signal(signal.SIGTERM)
        yard.until(lambda: "ending after the batch in flight" in worker.log.read_text())
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == 128 + signal.SIGTERM, worker.log.read_text()
    assert "SIGTERM again: stopping at once" in worker.log.read_text()
    # It is there for the next worker.
    assert yard.history(run.id)[-1] == "Running"
    assert yard.run_row(run.id)["scored"] == 0
    with yard.client() as api:
        from prefect.states import Cancelled

        api.set_flow_run_state(run.id, Cancelled(), force=True)


def test_a_stock_worker_answers_alike(yard: Any):
    from prefect.client.schemas.actions import WorkPoolCreate

    pool = f"{yard.pool}-process"
    with yard.client() as api:
        api.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    yard.deploy(pool)
    # The documents of the run that was killed and continued.
    (first,) = yard.rows(
        "select id, pid, documents_source from run where documents_source like '%/Pump-%' "
        "order by id desc limit 1"
    )
    flow_run = yard.trigger(first["documents_source"], pool=pool, rescore=True, limit=3)
    prefect = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
    done = subprocess.run(
        [*prefect, "--pool", pool, "--run-once"],
        env=yard.environment,
        cwd=yard.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert yard.ended(flow_run) == "Completed", done.stdout + done.stderr
    assert yard.run_row(flow_run)["pid"] != first["pid"]
    answers, before = (
        yard.rows(
            "select external_id, choice, logit from choice_probabilities "
            "where run_id = ? and position < 3 order by position, choice",
            run_id,
        )
        for run_id in (yard.run_row(flow_run)["id"], first["id"])
    )
    assert len(answers) == 6
    # Batches of other sizes differ in the last digits.
    logits = [pytest.approx(each.pop("logit"), abs=1e-3) for each in before]
    assert [each.pop("logit") for each in answers] == logits
    assert answers == before


def places(yard: Any, flow_runs: Sequence[UUID]) -> set[str | None]:
    """Where flow runs are, by process; None for those that have not been taken."""
    return {yard.flow_run(flow_run).infrastructure_pid for flow_run in flow_runs}


def task_states(yard: Any, flow_run: UUID) -> dict[UUID, str]:
    """The state of each task of a flow run."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with yard.client() as api:
        tasks = api.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])), limit=200
        )
    return {task.id: task.state.name for task in tasks}


def at_rest(found: Callable[[], Any]) -> bool:
    """Whether something stays as it is for two seconds."""
    before = found()
    time.sleep(2)
    return found() == before
