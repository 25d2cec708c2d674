"""The worker keeps the model, ends when told to, and leaves nothing half done."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.deployments.conftest import PATIENCE, PROGRAM, URGENT

from weighbridge.flows.stopping import READ_SECONDS

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]


@pytest.fixture(scope="module")
def worker(yard: Any) -> Any:
    """A worker that the tests of this module share."""
    yard.deploy()
    return yard.start()


def texts(name: str, count: int) -> list[str]:
    return [f"{name} {number} broke." for number in range(count)]


def test_runs_share_a_process_and_a_model(yard: Any, worker: Any):
    first = yard.trigger(yard.documents(texts("Pump", 3), "pumps"))
    second = yard.trigger(yard.documents(texts("Lamp", 2), "lamps"))
    assert [yard.ended(first), yard.ended(second)] == ["Completed", "Completed"]
    assert {yard.run_row(run)["pid"] for run in (first, second)} == {worker.pid}
    assert [yard.run_row(run)["scored"] for run in (first, second)] == [3, 2]
    place = yard.flow_run(first).infrastructure_pid
    assert place.endswith(f":{worker.pid}")
    assert sum(" loaded smollm2" in line for line in worker.lines()) == 1
    # The warm-up came before the first run, or no run would have found the model in memory.
    log = worker.log.read_text()
    assert 0 < log.index("runs will find") < log.index(" starts: ")


def test_cancelled_between_batches_and_in_the_queue(yard: Any, worker: Any):
    from prefect.states import Cancelling

    with yard.caught("Valve", scored=2, batch_size=1) as running, yard.client() as api:
        queued = yard.trigger(running.documents, batch_size=1)
        api.set_flow_run_state(queued, Cancelling())
        # One that has not been taken has nothing to stop.
        assert api.read_flow_run(queued).state.name == "Cancelled"
        api.set_flow_run_state(running.id, Cancelling())
        # A run reads its state so often at most. Now it does before its next batch.
        time.sleep(READ_SECONDS + 0.5)
    assert yard.ended(running.id) == "Cancelled"
    row = yard.run_row(running.id)
    assert row["status"] == "cancelled"
    # What was held in its middle is recorded, the batch that was scored meanwhile too, and
    # nothing after them is begun.
    assert running.scored <= row["scored"] <= running.scored + 2
    assert yard.rows("select * from claim") == []
    rest = yard.trigger(running.documents)
    assert yard.ended(rest) == "Completed"
    assert yard.run_row(rest)["reused"] == row["scored"]
    assert yard.run_row(rest)["scored"] == running.count - row["scored"]
    assert yard.run_row(queued) == {}


def test_suspended_and_resumed_it_is_the_same_run(yard: Any, worker: Any):
    from prefect.states import Suspended

    def suspended() -> bool:
        # Prefect tells the run by an event, which takes its time. Until then the run must not
        # get through: of each three seconds it has a moment.
        with yard.held():
            time.sleep(3)
        time.sleep(0.2)
        return "Suspended after" in worker.log.read_text()

    with yard.caught("Belt", 80, batch_size=1) as run, yard.client() as api:
        api.set_flow_run_state(run.id, Suspended(timeout_seconds=3600))
        time.sleep(3)
    yard.until(suspended)
    before = yard.run_row(run.id)
    assert yard.history(run.id)[-1] == "Suspended"
    assert run.scored <= before["scored"] < run.count
    with yard.client() as api:
        api.resume_flow_run(run.id)
    assert yard.ended(run.id) == "Completed"
    assert "Crashed" not in yard.history(run.id)
    after = yard.run_row(run.id)
    kept = (before["id"], "completed", run.count)
    assert (after["id"], after["status"], after["scored"]) == kept


def test_another_program_is_told_or_waits_and_gets_the_model(
    yard: Any, worker: Any, tmp_path: Path
):
    yard.until(lambda: "runs will find" in worker.log.read_text())
    # One of the runs before has loaded it, and idle or not, the worker keeps it.
    command = ["score", "--text", "It broke.", "--schema", json.dumps(URGENT), "--json"]
    database = ["--db", str(tmp_path / "own.db")]

    def score(*options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [PROGRAM, *command, *database, *options],
            env=yard.environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    refused = score()
    assert refused.returncode == 1
    assert f"the worker with pid {worker.pid} (smollm2" in refused.stderr
    assert all(way in refused.stderr for way in ("--wait", "--anyway"))
    assert "Traceback" not in refused.stderr
    waited = score("--wait")
    assert waited.returncode == 0, waited.stderr
    assert json.loads(waited.stdout)["scored"] == 1
    yard.until(lambda: "gave the model up" in worker.log.read_text())
    # The next run takes its turn and loads it again.
    after = yard.trigger(yard.documents(texts("Wheel", 1), "wheels"))
    assert yard.ended(after) == "Completed"
    assert "in memory already" not in worker.log.read_text().partition("gave the model up")[2]


def test_sigterm_ends_it_at_the_batch_and_the_next_one_goes_on(yard: Any, worker: Any):
    with yard.caught("Motor", scored=2, batch_size=1) as run:
        worker.signal(signal.SIGTERM)
        yard.until(lambda: "received SIGTERM" in worker.log.read_text())
    assert worker.exit_code() == 0, worker.log.read_text()
    assert yard.history(run.id)[-1] == "AwaitingRetry"
    before = yard.run_row(run.id)
    assert run.scored <= before["scored"] <= run.scored + 2
    assert yard.rows("select * from claim") == []

    successor = yard.start("--no-warm-up")
    assert yard.ended(run.id) == "Completed"
    after = yard.run_row(run.id)
    assert (after["id"], after["pid"]) == (before["id"], successor.pid)
    assert after["scored"] == run.count
    assert yard.decided(after["id"]) == (run.count, run.count)
    # SIGINT is ignored in the background of a script, unless the worker sees to it.
    successor.signal(signal.SIGINT)
    assert successor.exit_code() == 0, successor.log.read_text()
    assert "ended: the worker received SIGINT" in successor.log.read_text()


def test_an_upgrade_ends_it_between_runs(yard: Any):
    import importlib.metadata
    import shutil

    # The package as Python sees it first: a copy of what was installed.
    folder = yard.folder / "site"
    name = f"weighbridge-{importlib.metadata.version('weighbridge')}.dist-info"
    # Building a wheel leaves another description of the package in the checkout.
    described = importlib.metadata.distributions(name="weighbridge")
    installed = [Path(str(each.locate_file(name))) for each in described]
    shutil.copytree(next(each for each in installed if each.is_dir()), folder / name)
    path = f"{folder}:{yard.environment['PYTHONPATH']}"
    worker = yard.start("--no-warm-up", env={"PYTHONPATH": path})
    # It has looked before it says so, or would not see a change.
    yard.until(lambda: "runs and workers" in worker.log.read_text())
    (folder / name / "RECORD").touch()
    assert worker.exit_code() == 0, worker.log.read_text()
    assert re.search(r"ended: weighbridge \S+ was installed again", worker.log.read_text())


def test_without_its_checkpoint_it_says_so_and_goes_on(yard: Any, embedded: Path):
    worker = yard.start("--checkpoint", str(yard.folder / "missing"))
    flow_run = yard.trigger(yard.documents(texts("Pump", 3), "pumps"), checkpoint=str(embedded))
    assert yard.ended(flow_run) == "Completed"
    log = worker.log.read_text()
    assert "no model was loaded ahead of the runs: " in log
    assert "missing" in log
    assert "Traceback" not in log
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
