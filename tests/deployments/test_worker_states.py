"""What a worker does to the states of runs, on the real server, with flows that need no model."""

import asyncio
import gc
import os
import platform
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.runtime import flow_run as this_run
from tests.deployments.conftest import PATIENCE, Way, Yard

from weighbridge.deployments.worker import WeighbridgeWorker
from weighbridge.tasks.stopping import clear_stop

pytestmark = [
    pytest.mark.prefect,
    # Prefect leaves the sockets of its event subscribers to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HERE = f"{platform.node()}:{os.getpid()}"
TAKEN = "taken by the worker process {}"

# What the flow below does in the worker's thread, by flow run.
acts: dict[str, Callable[[], Any]] = {}


@flow(persist_result=False)
def acting() -> Any:
    return acts[str(this_run.id)]()


class Pool:
    """A pool with a deployment of the flow above, and runs in any state."""

    def __init__(self, api: Any) -> None:
        from prefect.client.schemas.actions import WorkPoolCreate

        self.api = api
        self.name = f"states-{uuid4()}"
        api.create_work_pool(
            WorkPoolCreate(
                name=self.name,
                type="weighbridge",
                base_job_template=WeighbridgeWorker.get_default_base_job_template(),
            )
        )
        self.deployment = api.create_deployment(
            api.create_flow(acting),
            "acting",
            work_pool_name=self.name,
            entrypoint=f"{__name__}.acting",
        )

    def flow_run(self, act: Callable[[], Any], *states: Any) -> UUID:
        flow_run: UUID = self.api.create_flow_run_from_deployment(self.deployment).id
        acts[str(flow_run)] = act
        for state in states:
            self.api.set_flow_run_state(flow_run, state, force=True)
        return flow_run

    def history(self, flow_run: UUID) -> list[str]:
        states = self.api.read_flow_run_states(flow_run)
        return [each.name for each in sorted(states, key=lambda each: each.timestamp)]

    def state(self, flow_run: UUID) -> Any:
        return self.api.read_flow_run(flow_run).state

    def at_work(self, do: Callable[[WeighbridgeWorker], Awaitable[Any]]) -> Any:
        """Do something with a worker of this process that polls only when told to."""

        async def run() -> Any:
            async with WeighbridgeWorker(self.name, warm_up=False) as made:
                return await asyncio.wait_for(do(made), PATIENCE)

        try:
            return asyncio.run(run())
        finally:
            clear_stop()
            gc.collect()


async def poll_until(worker: WeighbridgeWorker, true: Callable[[], Any]) -> None:
    while not await asyncio.to_thread(true):
        await worker.get_and_submit_flow_runs()
        await asyncio.sleep(0.05)


@pytest.fixture
def pool(prefect_server: str) -> Iterator[Pool]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as api:
        yield Pool(api)


def nothing() -> None:
    pass


def later() -> Any:
    from datetime import UTC, datetime, timedelta

    from prefect.states import Scheduled

    return Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=1))


def taken_by(place: str) -> Any:
    from prefect.states import Pending

    return Pending(message=TAKEN.format(place))


def test_the_slower_of_two_workers_goes_on(pool: Pool):
    flow_run = pool.flow_run(nothing)
    after = pool.flow_run(nothing)

    async def do(worker: WeighbridgeWorker) -> None:
        found = await worker.client.read_flow_run(flow_run)
        pool.api.set_flow_run_state(flow_run, taken_by("other:1"))
        # It had seen the run before the other one took it.
        await worker._submit_run(found)  # pyright: ignore[reportPrivateUsage]
        await poll_until(worker, lambda: pool.state(after).is_final())

    pool.at_work(do)
    assert pool.history(flow_run) == ["Scheduled", "Pending"]
    assert pool.history(after)[-1] == "Completed"


def test_one_it_took_without_hearing_so_is_put_back(pool: Pool):
    flow_run = pool.flow_run(nothing)
    pool.api.set_flow_run_state(flow_run, later(), force=True)

    async def do(worker: WeighbridgeWorker) -> None:
        found = await worker.client.read_flow_run(flow_run)
        await worker.get_and_submit_flow_runs()  # the first poll recovers; there is none yet
        # As when the answer is lost, and Prefect's client asks again.
        pool.api.set_flow_run_state(flow_run, taken_by(HERE))
        await worker._submit_run(found)  # pyright: ignore[reportPrivateUsage]
        await poll_until(worker, lambda: pool.state(flow_run).is_final())

    pool.at_work(do)
    history = pool.history(flow_run)
    assert "Crashed" not in history
    assert history[:4] == ["Scheduled", "Scheduled", "Pending", "Scheduled"]
    assert history[-1] == "Completed"


def test_a_run_that_another_worker_took_meanwhile_is_its_own(pool: Pool):
    from prefect.exceptions import Abort
    from prefect.states import AwaitingRetry, Running

    def act() -> Any:
        # It puts itself back, and another worker has it before this one looks.
        pool.api.set_flow_run_state(this_run.id, AwaitingRetry(), force=True)
        pool.api.set_flow_run_state(this_run.id, taken_by("other:1"))
        pool.api.set_flow_run_state(this_run.id, Running())
        raise Abort("left")

    flow_run = pool.flow_run(act)
    done = pool.flow_run(nothing)

    async def do(worker: WeighbridgeWorker) -> None:
        await poll_until(worker, lambda: pool.state(done).is_final())

    pool.at_work(do)
    assert pool.history(flow_run)[-3:] == ["AwaitingRetry", "Pending", "Running"]


def test_cancelled_while_it_waits_then_retried(pool: Pool):
    from prefect.states import AwaitingRetry, Cancelling, Running, Scheduled

    flow_run = pool.flow_run(nothing, taken_by(HERE), Running())
    pool.api.update_flow_run(flow_run, infrastructure_pid=HERE)
    due = AwaitingRetry(scheduled_time=later().state_details.scheduled_time)
    pool.api.set_flow_run_state(flow_run, due, force=True)

    async def do(worker: WeighbridgeWorker) -> None:
        await worker.get_and_submit_flow_runs()  # the first poll recovers
        pool.api.set_flow_run_state(flow_run, Cancelling())
        await poll_until(worker, lambda: pool.state(flow_run).is_final())
        assert pool.history(flow_run)[-2:] == ["Cancelling", "Cancelled"]
        pool.api.set_flow_run_state(flow_run, Scheduled(), force=True)
        await poll_until(worker, lambda: pool.state(flow_run).is_final())

    pool.at_work(do)
    assert pool.history(flow_run)[-1] == "Completed"


def test_cancelled_in_its_last_batch_says_so(pool: Pool):
    from prefect.states import Cancelling

    def act() -> None:
        pool.api.set_flow_run_state(this_run.id, Cancelling())

    flow_run = pool.flow_run(act)

    async def do(worker: WeighbridgeWorker) -> None:
        await poll_until(worker, lambda: pool.state(flow_run).is_final())

    pool.at_work(do)
    state = pool.state(flow_run)
    assert state.name == "Cancelled"
    assert state.message == "cancelled; it was in its last batch; what is recorded is kept"


def test_it_waits_for_the_thread_though_nobody_awaits_it(pool: Pool):
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def act() -> None:
        began.set()
        go_on.wait(PATIENCE)
        ended.set()

    pool.flow_run(act)

    async def do(worker: WeighbridgeWorker) -> None:
        await poll_until(worker, began.is_set)
        # What an error elsewhere in its task group does.
        worker._runs_task_group.cancel_scope.cancel()  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
        threading.Timer(0.5, go_on.set).start()

    pool.at_work(do)
    assert ended.is_set()


def test_an_end_that_the_server_was_away_at_is_settled_later(pool: Pool, way: Way):
    from prefect.exceptions import Abort
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    def act() -> None:
        way.close()
        raise Abort("left")

    flow_run = pool.flow_run(act)

    async def do(worker: WeighbridgeWorker) -> None:
        await poll_until(worker, lambda: way.closed)
        await poll_until(worker, lambda: not worker.limiter.borrowed_tokens)
        assert pool.history(flow_run)[-1] == "Running"
        way.open()
        await poll_until(worker, lambda: pool.state(flow_run).is_final())

    with temporary_settings({PREFECT_API_URL: way.url, PREFECT_CLIENT_MAX_RETRIES: 1}):
        pool.at_work(do)
    state = pool.state(flow_run)
    assert (state.name, state.message) == ("Crashed", "the flow ended without a state")


def test_a_cancellation_that_the_server_was_away_at_is_done_later(pool: Pool, way: Way):
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
    from prefect.states import AwaitingRetry, Cancelling, Running

    flow_run = pool.flow_run(nothing, taken_by(HERE), Running())
    # The server cancels by itself what has no process.
    pool.api.update_flow_run(flow_run, infrastructure_pid=HERE)
    for state in (AwaitingRetry(), Cancelling()):
        pool.api.set_flow_run_state(flow_run, state, force=True)

    async def do(worker: WeighbridgeWorker) -> None:
        worker._recovered = True  # pyright: ignore[reportPrivateUsage]
        way.close()
        await worker._cancel_run(flow_run)  # pyright: ignore[reportPrivateUsage]
        assert pool.history(flow_run)[-1] == "Cancelling"
        way.open()
        await poll_until(worker, lambda: pool.state(flow_run).is_final())

    with temporary_settings({PREFECT_API_URL: way.url, PREFECT_CLIENT_MAX_RETRIES: 1}):
        pool.at_work(do)
    assert pool.state(flow_run).message == "cancelled while it waited for its retry"


def test_told_to_end_while_the_server_is_away_it_ends(yard: Yard, way: Way):
    # Prefect would ask for hours, each time after a longer pause, and not for its minute: so a
    # worker that waits for it is told from a machine that is slow.
    asking = {"PREFECT_API_URL": way.url, "PREFECT_CLIENT_MAX_RETRIES": "12"}
    worker = yard.start("--no-warm-up", env=asking)
    yard.until(lambda: polls(yard))
    way.close()
    yard.until(lambda: way.refused)  # now it asks again and again
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0, worker.log.read_text()
    assert "ended: the worker received SIGTERM" in worker.log.read_text()


def test_a_password_that_was_changed_is_told(yard: Yard, way: Way):
    worker = yard.start("--no-warm-up", env={"PREFECT_API_URL": way.url})
    yard.until(lambda: polls(yard))
    way.refuse()
    assert worker.exit_code() == 1
    late = yard.start("--no-warm-up", env={"PREFECT_API_URL": way.url})
    assert late.exit_code() == 1
    for each in (worker, late):
        log = each.log.read_text()
        assert "answers 401" in log
        assert "hint: set PREFECT_API_AUTH_STRING" in log
        assert "unexpected" not in log


def polls(yard: Yard) -> bool:
    import httpx

    with yard.client() as api:
        try:
            return any(
                each.status == "ONLINE" for each in api.read_workers_for_work_pool(yard.pool)
            )
        except httpx.HTTPStatusError:  # it has not made the pool
            return False
