"""Workers that are killed, workers side by side, and a worker that is not ours."""

import signal
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]


def test_killed_in_the_middle_then_continued(yard: Any):
    yard.deploy(concurrency_limit=1)
    worker = yard.start()
    documents = yard.documents([f"Pump {number}." for number in range(200)], "many")
    flow_run = yard.trigger(documents)
    behind = yard.trigger(yard.documents(["Lamp."], "one"))
    yard.until(lambda: yard.run_row(flow_run).get("scored", 0) >= 20)
    worker.signal(signal.SIGKILL)
    assert worker.exit_code() == 128 + signal.SIGKILL
    # Nobody has told the server.
    assert yard.history(flow_run)[-1] == "Running"
    before = yard.run_row(flow_run)
    assert before["status"] == "running"

    restarted = yard.start()
    yard.until(lambda: "Crashed" in yard.history(flow_run), seconds=15)
    # The slot of its deployment is free, or neither it nor the one behind it could run.
    yard.until(lambda: yard.history(flow_run)[-1] == "Completed", seconds=300)
    assert yard.ended(behind) == "Completed"
    after = yard.run_row(flow_run)
    assert (after["id"], after["pid"]) == (before["id"], restarted.pid)
    assert (after["documents"], after["scored"]) == (200, 200)
    assert yard.decided(after["id"]) == (200, 200)
    assert yard.rows("select * from claim") == []
    history = yard.history(flow_run)
    crashed = history.index("Crashed")
    assert history[crashed - 1 : crashed + 2] == ["Running", "Crashed", "AwaitingRetry"]
    tasks = [task.state.name for task in task_runs(yard, flow_run)]
    assert set(tasks) <= {"Completed", "Crashed"}


def test_two_workers_share_documents(yard: Any):
    # Beside the one of the test above, with an accelerator of its own, and as Prefect starts it.
    yard.deploy()
    prefect = [sys.executable, "-m", "prefect"]
    lease = {"WEIGHBRIDGE_LEASE": str(yard.folder / "other-lease")}
    other = yard.start("--type", "weighbridge", program=prefect, env=lease)
    yard.until(lambda: "runs will find" in other.log.read_text())
    documents = yard.documents([f"Crane {number}." for number in range(24)], "shared")
    flow_runs = [yard.trigger(documents, batch_size=4) for _ in range(4)]
    assert [yard.ended(flow_run) for flow_run in flow_runs] == ["Completed"] * 4
    rows = [yard.run_row(flow_run) for flow_run in flow_runs]
    assert len({row["pid"] for row in rows}) == 2
    assert [row["documents"] for row in rows] == [24] * 4
    assert yard.decided(rows[0]["id"]) == (24, 24)
    # Claims keep two runs from scoring the same batch, but for one that a worker had begun.
    assert 24 <= sum(row["scored"] + row["wasted"] for row in rows) <= 24 + 2 * 4
    names = {yard.flow_run(flow_run).infrastructure_pid for flow_run in flow_runs}
    assert len(names) == 2


def test_a_second_signal_stops_at_once(yard: Any):
    (worker, other) = [worker for worker in yard.workers if worker.shell.poll() is None]
    other.signal(signal.SIGTERM)
    assert other.exit_code() == 0, other.log.read_text()
    assert "received SIGTERM: ending after the batch in flight" in other.log.read_text()
    # One batch, which takes seconds.
    documents = yard.documents([f"Crate {number}." for number in range(180)], "crates")
    flow_run = yard.trigger(documents, batch_size=180)
    yard.until(lambda: yard.rows("select * from claim"))
    worker.signal(signal.SIGTERM)
    yard.until(lambda: "ending after the batch in flight" in worker.log.read_text())
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 128 + signal.SIGTERM, worker.log.read_text()
    assert "SIGTERM again: stopping at once" in worker.log.read_text()
    # It is there for the next worker.
    assert yard.history(flow_run)[-1] == "Running"
    assert yard.run_row(flow_run)["scored"] == 0
    with yard.client() as api:
        from prefect.states import Cancelled

        api.set_flow_run_state(flow_run, Cancelled(), force=True)


def test_a_stock_worker_answers_alike(yard: Any):
    from prefect.client.schemas.actions import WorkPoolCreate

    pool = f"{yard.pool}-process"
    with yard.client() as api:
        api.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    yard.deploy(pool)
    documents = yard.documents([f"Pump {number}." for number in range(3)], "few")
    flow_run = yard.trigger(documents, pool=pool, rescore=True)
    prefect = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
    done = subprocess.run(
        [*prefect, "--pool", pool, "--run-once"],
        env=yard.environment,
        cwd=yard.folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert yard.ended(flow_run) == "Completed", done.stdout + done.stderr
    answers = yard.rows(
        "select external_id, choice, round(logit, 3) as logit from choice_probabilities "
        "where run_id = ? order by position, choice",
        yard.run_row(flow_run)["id"],
    )
    (first,) = yard.rows(
        "select id from run where documents = 200 and pid <> ?", yard.run_row(flow_run)["pid"]
    )
    before = yard.rows(
        "select external_id, choice, round(logit, 3) as logit from choice_probabilities "
        "where run_id = ? and position < 3 order by position, choice",
        first["id"],
    )
    assert len(answers) == 6
    assert answers == before


def task_runs(yard: Any, flow_run: Any) -> list[Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with yard.client() as api:
        return api.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])), limit=200
        )
