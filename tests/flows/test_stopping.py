"""A run that is stopped ends between two batches, with what it finished recorded."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import Cancelling, Crashed, Failed, Paused

from weighbridge.db.errors import StoreError
from weighbridge.flows import Progress, listening, score_documents, stopping
from weighbridge.flows.stopping import ask_to_stop, clear_stop
from weighbridge.scorer.resident import release_checkpoints
from weighbridge.tasks.lease import LeasePolicy, set_policy

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

DOCUMENTS = [f"Ticket {number}: it broke again." for number in range(10)]


@pytest.fixture(autouse=True)
def no_stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Before each batch, however fast the machine is.
    monkeypatch.setattr(stopping, "READ_SECONDS", 0.0)
    yield
    clear_stop()


def after_the_first_batch(act: Callable[[UUID], None]) -> Callable[[Progress], None]:
    """Make a listener that acts once, while a run is under way."""
    acted: list[bool] = []

    def listen(progress: Progress) -> None:
        if progress.done and not acted:
            acted.append(True)
            act(UUID(flow_run.id))

    return listen


def set_state(state: State[Any]) -> Callable[[UUID], None]:
    """What a click in the UI does."""

    def act(run: UUID) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run, state, force=True)

    return act


def prefect_states(run: UUID) -> list[str]:
    with get_client(sync_client=True) as client:
        return [str(state.name) for state in client.read_flow_run_states(run)]


def test_cancelled_in_the_ui(bench: Any):
    with (
        listening(after_the_first_batch(set_state(Cancelling()))),
        pytest.raises(CancelledRun, match="cancelled through Prefect; what is recorded is kept"),
    ):
        bench.score(DOCUMENTS, batch_size=2)
    (run,) = bench.rows("select * from run")
    assert (run["status"], run["message"]) == ("cancelled", "cancelled through Prefect")
    assert 0 < run["scored"] < len(DOCUMENTS)
    assert bench.rows("select * from claim") == []
    assert prefect_states(UUID(run["flow_run_id"]))[-2:] == ["Cancelling", "Cancelled"]
    # A new run finishes the rest.
    outcome = bench.score(DOCUMENTS)
    assert (outcome["reused"], outcome["wasted"]) == (run["scored"], 0)
    assert outcome["scored"] == len(DOCUMENTS) - run["scored"]
    bench.assert_accounts_close()


def test_a_pause_is_refused_with_a_reason(bench: Any, caplog: pytest.LogCaptureFixture):
    paused = Paused(timeout_seconds=600)
    with listening(after_the_first_batch(set_state(paused))):
        outcome = bench.score(DOCUMENTS, batch_size=2)
    assert outcome["scored"] == len(DOCUMENTS)
    assert "this run cannot be paused" in caplog.text
    (run,) = bench.rows("select * from run")
    states = prefect_states(UUID(run["flow_run_id"]))
    assert states[-4:] == ["Running", "Paused", "Running", "Completed"]


def test_a_run_that_waits_for_the_model_can_be_cancelled(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    release_checkpoints()
    lease = tmp_path / "lease"
    set_policy(LeasePolicy.WAIT)  # commands of other tests in this process refuse
    monkeypatch.setenv("WEIGHBRIDGE_LEASE", str(lease))
    hold = "import sys; from pathlib import Path; from weighbridge.tasks.lease import take_lease;"
    hold += "take_lease(Path(sys.argv[1]), 'other', say=print); print('has it', flush=True);"
    hold += "sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(lease)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"

        def cancel() -> None:
            while not lease.with_name("lease.wanted").exists():
                time.sleep(0.05)
            (run,) = bench.rows("select flow_run_id from run")
            set_state(Cancelling())(UUID(run["flow_run_id"]))

        thread = threading.Thread(target=cancel, daemon=True)
        thread.start()
        with pytest.raises(CancelledRun, match="cancelled through Prefect"):
            bench.score(DOCUMENTS)
        thread.join()
        other.kill()
    (run,) = bench.rows("select * from run")
    assert (run["status"], run["scored"]) == ("cancelled", 0)
    assert bench.rows("select * from claim") == []


def test_a_run_that_was_taken_for_crashed_goes_on(bench: Any, caplog: pytest.LogCaptureFixture):
    with listening(after_the_first_batch(set_state(Crashed()))):
        outcome = bench.score(DOCUMENTS, batch_size=2)
    assert outcome["scored"] == len(DOCUMENTS)
    assert "this run was taken for crashed, and is alive" in caplog.text
    (run,) = bench.rows("select * from run")
    states = prefect_states(UUID(run["flow_run_id"]))
    assert states[-4:] == ["Running", "Crashed", "Running", "Completed"]


def test_a_run_that_was_ended_in_the_ui_stops(bench: Any):
    with (
        listening(after_the_first_batch(set_state(Failed()))),
        pytest.raises(CancelledRun, match="set to Failed through Prefect"),
    ):
        bench.score(DOCUMENTS, batch_size=2)
    (run,) = bench.rows("select * from run")
    assert (run["status"], run["message"]) == ("cancelled", "set to Failed through Prefect")


def test_cancelled_in_its_last_batch(bench: Any):
    with (
        listening(after_the_first_batch(set_state(Cancelling()))),
        pytest.raises(CancelledRun, match="when all was recorded"),
    ):
        bench.score(DOCUMENTS[:2], batch_size=2)
    (run,) = bench.rows("select * from run")
    assert (run["status"], run["scored"]) == ("completed", 2)
    assert prefect_states(UUID(run["flow_run_id"]))[-2:] == ["Cancelling", "Cancelled"]


def test_a_process_that_ends_cancels_its_own_run(bench: Any):
    with (
        listening(after_the_first_batch(lambda _: ask_to_stop("interrupted"))),
        pytest.raises(CancelledRun, match="interrupted; what is recorded is kept"),
    ):
        bench.score(DOCUMENTS, batch_size=2)
    (run,) = bench.rows("select * from run")
    # With the batch that was scored while the first one was recorded.
    assert (run["status"], run["message"], run["scored"]) == ("cancelled", "interrupted", 4)


def test_a_run_that_is_through_is_done(bench: Any):
    with listening(after_the_first_batch(lambda _: ask_to_stop("interrupted"))):
        outcome = bench.score(DOCUMENTS[:2], batch_size=2)
    assert outcome["scored"] == 2


def test_the_run_of_a_deployment_goes_on_later(bench: Any):
    request = bench.request(DOCUMENTS, batch_size=2)
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(score_documents)
        deployment = client.create_deployment(flow_id, name="stops")
        parameters = {"request": request.model_dump(mode="json", by_alias=True)}
        run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
        with listening(after_the_first_batch(lambda _: ask_to_stop("the worker ends"))):
            state: Any = run_flow(
                score_documents, run, parameters=run.parameters, return_type="state"
            )
        assert state is not None
        assert (state.name, state.message) == (
            "AwaitingRetry",
            "the worker ends; what is recorded is kept",
        )
        (before,) = bench.rows("select * from run")
        assert (before["status"], before["scored"]) == ("cancelled", 4)
        assert bench.rows("select * from claim") == []
        clear_stop()
        again = client.read_flow_run(run.id)
        state = run_flow(score_documents, again, parameters=run.parameters, return_type="state")
    assert state is not None
    assert state.name == "Completed"
    # The same run of the store, which is now complete.
    (after,) = bench.rows("select * from run")
    assert (after["id"], after["status"], after["message"]) == (before["id"], "completed", None)
    assert after["scored"] == len(DOCUMENTS)
    bench.assert_accounts_close()


def test_a_run_that_could_not_be_closed_is_closed_by_the_next_one(bench: Any):
    bench.score(DOCUMENTS[:1])
    bench.change(
        "create trigger full before update of status on run begin select raise(abort, 'disk'); end"
    )
    with pytest.raises(StoreError, match="disk"):
        bench.score(DOCUMENTS[:2])
    assert [run["status"] for run in bench.rows("select status from run")][1] == "running"
    bench.change("drop trigger full")
    bench.score(DOCUMENTS[:2])
    runs = bench.rows("select status, message from run order by id")
    assert [run["status"] for run in runs] == ["completed", "failed", "completed"]
    assert runs[1]["message"] == "its end could not be recorded"
