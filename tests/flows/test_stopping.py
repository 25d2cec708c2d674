"""A run that is stopped ends between two batches, with what it finished recorded."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import Cancelling, Paused

from weighbridge.flows import Progress, listening, score_documents
from weighbridge.flows.stopping import ask_to_stop, clear_stop

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

DOCUMENTS = [f"Ticket {number}: it broke again." for number in range(30)]


@pytest.fixture(autouse=True)
def no_stop() -> Iterator[None]:
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


def test_a_process_that_ends_cancels_its_own_run(bench: Any):
    with (
        listening(after_the_first_batch(lambda _: ask_to_stop("interrupted"))),
        pytest.raises(CancelledRun, match="interrupted; what is recorded is kept"),
    ):
        bench.score(DOCUMENTS, batch_size=2)
    (run,) = bench.rows("select * from run")
    assert (run["status"], run["message"], run["scored"]) == ("cancelled", "interrupted", 2)


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
        assert (before["status"], before["scored"]) == ("cancelled", 2)
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
