"""What dead workers left is put right, and what others have is left alone; on the real server."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from weighbridge.deployments.orphans import Holder, recover_orphans

pytestmark = pytest.mark.prefect

HERE = platform.node()


@pytest.fixture(scope="module")
def dead() -> int:
    """The pid of no process, above all that are given out: that of one that has ended may be
    given to another at any time."""
    return 2**31 - 1


@pytest.fixture
def alive() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


class Pool:
    """A pool with a deployment of one slot, and flow runs in any state."""

    def __init__(self, api: Any, folder: Path) -> None:
        from prefect import flow
        from prefect.client.schemas.actions import WorkPoolCreate

        self.api = api
        self.name = f"orphans-{uuid4()}"
        self.said: list[str] = []
        api.create_work_pool(WorkPoolCreate(name=self.name, type="weighbridge"))
        flow_id = api.create_flow(flow(name=self.name)(lambda: None))
        self.deployment = api.create_deployment(
            flow_id, "one-slot", work_pool_name=self.name, concurrency_limit=1
        )
        self.parameters = {"request": {"database": str(folder / "no-such-store.db")}}

    def flow_run(self, taken_by: str | None, *states: Any) -> Any:
        from prefect.states import Pending

        flow_run = self.api.create_flow_run_from_deployment(
            self.deployment, parameters=self.parameters
        ).id
        message = taken_by and f"taken by the worker process {taken_by}"
        self.api.set_flow_run_state(flow_run, Pending(message=message))
        for state in states:
            self.api.set_flow_run_state(flow_run, state)
        return flow_run

    def history(self, flow_run: Any) -> list[str]:
        states = sorted(self.api.read_flow_run_states(flow_run), key=lambda each: each.timestamp)
        return [state.name for state in states]

    def slots(self) -> int:
        return self.api.read_deployment(self.deployment).global_concurrency_limit.active_slots

    def recover(self, retries: int = 2) -> int:
        import asyncio

        from prefect.client.orchestration import get_client

        async def allowed(flow_run: Any) -> int:
            return retries

        async def run() -> int:
            async with get_client() as client:
                return await recover_orphans(
                    client, self.name, retries=allowed, say=self.said.append
                )

        return asyncio.run(run())


@pytest.fixture
def pool(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    from prefect.client.orchestration import get_client

    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{tmp_path / 'setting.db'}")
    with get_client(sync_client=True) as api:
        yield Pool(api, tmp_path)
    # Closing runs in a store must not make one.
    assert not (tmp_path / "setting.db").exists()


def test_a_run_of_a_dead_process_crashes_and_is_retried(pool: Pool, dead: int):
    from prefect.states import Running

    flow_run = pool.flow_run(f"{HERE}:{dead}", Running())
    assert pool.slots() == 1
    assert pool.recover() == 1
    assert pool.history(flow_run) == ["Scheduled", "Pending", "Running", "Crashed", "AwaitingRetry"]
    assert pool.slots() == 0
    (said,) = pool.said
    assert said.endswith("crashed with its worker, and goes on: retry 1 of 2 after a crash")
    assert pool.recover() == 0


def test_one_that_was_killed_before_it_ran_is_found_by_its_state(pool: Pool, dead: int):
    # No second call has told the server where it was to run.
    flow_run = pool.flow_run(f"{HERE}:{dead}")
    assert pool.api.read_flow_run(flow_run).infrastructure_pid is None
    assert pool.slots() == 1
    assert pool.recover() == 1
    assert pool.history(flow_run)[-2:] == ["Crashed", "AwaitingRetry"]
    assert pool.slots() == 0


def test_one_that_the_server_does_not_let_go_keeps_no_other_waiting(pool: Pool, dead: int):
    from prefect.states import Running

    stuck = pool.flow_run(f"{HERE}:{dead}", Running())
    flow_id = pool.api.read_deployment(pool.deployment).flow_id
    # Prefect answers 500 to each state of a run that held a slot of it.
    pool.api.delete_deployment(pool.deployment)
    pool.deployment = pool.api.create_deployment(flow_id, "another", work_pool_name=pool.name)
    other = pool.flow_run(f"{HERE}:{dead}", Running())
    pool.recover()
    assert pool.history(other)[-2:] == ["Crashed", "AwaitingRetry"]
    name = pool.api.read_flow_run(stuck).name
    told = [said for said in pool.said if said.startswith(name)]
    assert len(told) == 1
    assert "the server does not let it be closed" in told[0]


def test_one_that_was_paused_when_its_process_died_goes_on(pool: Pool, dead: int):
    from prefect.states import Paused, Running, Suspended

    paused = pool.flow_run(f"{HERE}:{dead}", Running(), Paused(timeout_seconds=600))
    assert pool.recover() == 1
    assert pool.history(paused)[-3:] == ["Paused", "Crashed", "AwaitingRetry"]
    suspended = pool.flow_run(f"{HERE}:{dead}", Running(), Suspended(timeout_seconds=600))
    assert pool.recover() == 0
    assert pool.history(suspended)[-1] == "Suspended"


def test_one_that_was_being_cancelled_is_cancelled(pool: Pool, dead: int):
    from prefect.states import Cancelling, Running

    flow_run = pool.flow_run(f"{HERE}:{dead}", Running(), Cancelling())
    assert pool.recover() == 1
    assert pool.history(flow_run)[-2:] == ["Cancelling", "Cancelled"]
    assert pool.slots() == 0


def test_retries_end(pool: Pool, dead: int):
    from prefect.states import Pending, Running

    flow_run = pool.flow_run(f"{HERE}:{dead}", Running())
    for _ in range(2):
        pool.recover()
        again = Pending(message=f"taken by the worker process {HERE}:{dead}")
        pool.api.set_flow_run_state(flow_run, again)
    pool.recover()
    assert pool.history(flow_run)[-1] == "Crashed"
    assert pool.history(flow_run).count("Crashed") == 3
    assert pool.said[-1].endswith("its 2 retries are used up")


def test_a_retry_that_the_server_did_not_get_is_scheduled_later(pool: Pool, dead: int):
    from prefect.states import Crashed, Running

    gone = "the worker process {} on {} is gone: it was killed or crashed; retry 2 of 3 follows"
    lost = pool.flow_run(f"{HERE}:{dead}", Running(), Crashed(message=gone.format(dead, HERE)))
    theirs = pool.flow_run(None, Crashed(message=gone.format(dead, "elsewhere")))
    failed = pool.flow_run(None, Crashed(message="it failed"))
    assert pool.recover() == 1
    assert pool.history(lost)[-2:] == ["Crashed", "AwaitingRetry"]
    assert [pool.history(each)[-1] for each in (theirs, failed)] == ["Crashed"] * 2
    (said,) = pool.said
    assert said.endswith("goes on: retry 2 of 3 after a crash")


def test_the_message_of_a_crash_is_the_one_that_is_looked_for(pool: Pool, dead: int):
    from prefect.states import Running

    flow_run = pool.flow_run(f"{HERE}:{dead}", Running())
    pool.recover()
    states = pool.api.read_flow_run_states(flow_run)
    (crashed,) = [state for state in states if state.is_crashed()]
    # As if the call after it had failed.
    pool.api.set_flow_run_state(flow_run, crashed, force=True)
    assert pool.recover() == 1
    assert pool.history(flow_run)[-3:] == ["AwaitingRetry", "Crashed", "AwaitingRetry"]
    # Those whose retries are used up are left.
    pool.api.set_flow_run_state(flow_run, Running(), force=True)
    pool.recover(retries=0)
    assert pool.recover() == 0
    assert pool.history(flow_run)[-1] == "Crashed"


def test_no_retry_where_none_is_wanted(pool: Pool, dead: int):
    from prefect.states import Running

    flow_run = pool.flow_run(f"{HERE}:{dead}", Running())
    assert pool.recover(retries=0) == 1
    assert pool.history(flow_run)[-1] == "Crashed"


@pytest.mark.parametrize(
    "place",
    [
        "{here}:{alive}",
        "other-{here}:{dead}",
        "{here}.example.org:{dead}",
        None,  # a worker that is not ours says nothing
    ],
)
def test_runs_of_others_are_not_touched(pool: Pool, alive: int, dead: int, place: str | None):
    from prefect.states import Running

    taken_by = place and place.format(here=HERE, alive=alive, dead=dead)
    flow_run = pool.flow_run(taken_by, Running())
    assert pool.recover() == 0
    assert pool.history(flow_run) == ["Scheduled", "Pending", "Running"]
    assert (pool.slots(), pool.said) == (1, [])


def test_the_last_to_take_a_run_has_it(pool: Pool, dead: int):
    from prefect.states import AwaitingRetry, Pending, Running

    # Its first process was here; `infrastructure_pid` says so still when another host has
    # taken the retry and not come to say where it runs.
    flow_run = pool.flow_run(f"{HERE}:{dead}", Running(), AwaitingRetry())
    pool.api.update_flow_run(flow_run, infrastructure_pid=f"{HERE}:{dead}")
    pool.api.set_flow_run_state(
        flow_run, Pending(message=f"taken by the worker process other:{dead}")
    )
    assert pool.recover() == 0


def test_the_place_alone_is_enough(pool: Pool, dead: int):
    from prefect.states import Running

    flow_run = pool.flow_run(None, Running())
    pool.api.update_flow_run(flow_run, infrastructure_pid=f"{HERE}:{dead}")
    assert pool.recover() == 1
    assert pool.history(flow_run)[-1] == "AwaitingRetry"


def test_another_pool_is_not_touched(pool: Pool, dead: int, tmp_path: Path):
    from prefect.states import Running

    other = Pool(pool.api, tmp_path)
    flow_run = other.flow_run(f"{HERE}:{dead}", Running())
    assert pool.recover() == 0
    assert other.history(flow_run)[-1] == "Running"


def test_a_number_that_was_given_out_again_is_another_process(alive: int):
    now = datetime.now(UTC)
    assert Holder(HERE, alive, now).lives
    assert not Holder(HERE, alive, now - timedelta(hours=1)).lives
    # A worker asks before it has taken anything: its own number is an earlier process.
    assert not Holder(HERE, os.getpid(), now).lives
