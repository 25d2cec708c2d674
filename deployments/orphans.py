"""What a worker that was killed leaves behind on the server and in the store, put right.

After kill -9, a crash or a power cut the flow run stays `Running`, or `Pending`, and
holds its deployment's concurrency slot; its run in the store stays `running` and its
claims stay. The next worker on the same host finds such runs before it looks for new ones.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import httpx

from weighbridge.deployments.host_locks import try_lock
from weighbridge.deployments.server_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from uuid import UUID

    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import FlowRun, State

_TAKEN = re.compile(r"^taken by the worker process (?P<host>.+):(?P<pid>\d+)$")
_RETRY_DUE = re.compile(
    r"^the worker process \d+ on (?P<host>.+) is gone: it was killed or crashed; "
    r"(?P<retry>retry \d+ of \d+) follows$"
)
_RECENT = timedelta(days=3)
_LOCK_SECONDS = 0.1
_PAGE = 100


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that a flow run runs in, and when it took the run."""

    host: str
    pid: int
    since: datetime

    @property
    def lives(self) -> bool:
        """Whether it still runs; asked on its own host only.

        A worker asks before it takes its first run, so what carries its own pid was
        left by an earlier process of this number, as in a restarted container.
        """
        from weighbridge.db.processes import process_is_alive

        return self.pid != os.getpid() and process_is_alive(self.pid, self.since)


def this_process() -> str:
    """Return how a flow run names the process that it runs in, `host:pid`."""
    return f"{platform.node()}:{os.getpid()}"


def taken_message() -> str:
    """Return the message of the state in which a worker takes a flow run.

    It arrives together with the state. What is told in a second call, as
    `infrastructure_pid`, is missing after a kill between the two.
    """
    return f"taken by the worker process {this_process()}"


async def holder_of(client: PrefectClient, flow_run: FlowRun) -> Holder | None:
    """Return the process that took a flow run last, None where nothing says which."""
    for state in reversed(await _history(client, flow_run)):
        if found := _TAKEN.match(state.message or ""):
            return Holder(found["host"], int(found["pid"]), state.timestamp)
    host, _, pid = (flow_run.infrastructure_pid or "").rpartition(":")
    if not host or not pid.isdecimal() or flow_run.state is None:
        return None
    return Holder(host, int(pid), flow_run.state.timestamp)


async def recover_orphans(
    client: PrefectClient,
    pool: str,
    *,
    retries: Callable[[FlowRun], Awaitable[int]],
    say: Callable[[str], None],
) -> int:
    """Close what dead processes of this host have left in a pool; schedule its retry.

    Runs of other hosts are never touched. A run that was being cancelled becomes
    `Cancelled`; any other `Crashed`, and, as long as its retries are not used up,
    `AwaitingRetry`, which continues its run in the store.

    Args:
        client: The Prefect API.
        pool: The work pool.
        retries: How many retries after a crash a flow run has.
        say: Told a sentence for each run.

    Returns:
        How many runs there were.
    """
    from weighbridge.tasks.settings import load_settings

    lock = load_settings().cache / "workers" / "recovery.lock"
    # Two workers that start together would each schedule the retry.
    while (held := try_lock(lock)) is None:
        await asyncio.sleep(_LOCK_SECONDS)
    with held:
        found = 0
        for flow_run in await _unfinished(client, pool):
            with _one_run(flow_run, say):
                holder = await holder_of(client, flow_run)
                if holder is None or holder.host != platform.node() or holder.lives:
                    continue
                await _recover(client, flow_run, holder, retries, say)
                found += 1
        for flow_run in await _half_recovered(client, pool):
            with _one_run(flow_run, say):
                await _retry(client, flow_run, say)
                found += 1
        return found


@contextmanager
def _one_run(flow_run: FlowRun, say: Callable[[str], None]) -> Generator[None]:
    """Let other runs go on where one cannot be closed.

    Prefect answers 500 to every state of a run whose deployment was deleted meanwhile.
    """
    from prefect.exceptions import ObjectNotFound

    try:
        yield
    except ObjectNotFound:
        pass  # deleted meanwhile
    except httpx.HTTPStatusError as error:
        say(
            f"{flow_run.name} was left by a dead worker, and the server does not let it be "
            f"closed: {reason_of(error)}; delete it, if it stays"
        )


async def cancelled_waiting(client: PrefectClient, pool: str) -> set[UUID]:
    """Find runs of a pool that have begun once, are being cancelled, and may run nowhere."""
    from prefect.client.schemas.filters import FlowRunFilter

    which = FlowRunFilter.model_validate({"state": {"type": {"any_": ["CANCELLING"]}}})
    found = await _flow_runs(client, pool, which)
    return {flow_run.id for flow_run in found if flow_run.start_time is not None}


async def _unfinished(client: PrefectClient, pool: str) -> list[FlowRun]:
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType

    types = FlowRunFilterStateType(
        any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.PAUSED]
    )
    found = await _flow_runs(client, pool, FlowRunFilter(state=FlowRunFilterState(type=types)))
    # A suspended run has ended, and waits to be resumed; a paused one is refused while it lives.
    return [flow_run for flow_run in found if flow_run.state_name != "Suspended"]


async def _half_recovered(client: PrefectClient, pool: str) -> list[FlowRun]:
    """Find what this host has marked as crashed, and whose retry the server never got."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterEndTime,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType

    crashed = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
        end_time=FlowRunFilterEndTime.model_validate({"after_": datetime.now(UTC) - _RECENT}),
    )
    return [
        flow_run
        for flow_run in await _flow_runs(client, pool, crashed)
        if flow_run.state is not None
        and (due := _RETRY_DUE.match(flow_run.state.message or ""))
        and due["host"] == platform.node()
    ]


async def _flow_runs(client: PrefectClient, pool: str, which: FlowRunFilter) -> list[FlowRun]:
    from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName

    flow_runs: list[FlowRun] = []
    while True:
        page = await client.read_flow_runs(
            flow_run_filter=which,
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
            limit=_PAGE,
            offset=len(flow_runs),
        )
        flow_runs += page
        if len(page) < _PAGE:
            return flow_runs


async def _history(client: PrefectClient, flow_run: FlowRun) -> list[State[Any]]:
    states: list[State[Any]] = await client.read_flow_run_states(flow_run.id)
    return sorted(states, key=lambda state: state.timestamp)


async def _recover(
    client: PrefectClient,
    flow_run: FlowRun,
    holder: Holder,
    retries: Callable[[FlowRun], Awaitable[int]],
    say: Callable[[str], None],
) -> None:
    from prefect.states import Cancelled, Crashed

    await asyncio.to_thread(_close_in_stores, flow_run, say)
    gone = f"the worker process {holder.pid} on {holder.host} is gone: it was killed or crashed"
    if flow_run.state is not None and flow_run.state.is_cancelling():
        await client.set_flow_run_state(flow_run.id, Cancelled(message=gone), force=True)
        await _close_task_runs(client, flow_run, gone)
        say(f"{flow_run.name} was being cancelled when its worker was killed: cancelled")
        return
    earlier = sum(state.is_crashed() for state in await _history(client, flow_run))
    allowed = await retries(flow_run)
    await _close_task_runs(client, flow_run, gone)
    if earlier >= allowed:
        await client.set_flow_run_state(flow_run.id, Crashed(message=gone), force=True)
        say(f"{flow_run.name} crashed with its worker; its {allowed} retries are used up")
        return
    # Two calls, and the second may fail: the message keeps what is still to be done.
    due = f"{gone}; retry {earlier + 1} of {allowed} follows"
    await client.set_flow_run_state(flow_run.id, Crashed(message=due), force=True)
    flow_run.state = Crashed(message=due)
    await _retry(client, flow_run, say)


async def _retry(client: PrefectClient, flow_run: FlowRun, say: Callable[[str], None]) -> None:
    """Schedule the retry that the message of a run's state announces."""
    from prefect.states import AwaitingRetry

    due = _RETRY_DUE.match((flow_run.state and flow_run.state.message) or "")
    again = f"{due['retry'] if due else 'a retry'} after a crash"
    await client.set_flow_run_state(flow_run.id, AwaitingRetry(message=again), force=True)
    say(f"{flow_run.name} crashed with its worker, and goes on: {again}")


async def _close_task_runs(client: PrefectClient, flow_run: FlowRun, message: str) -> None:
    """Mark what the dead process was at; nobody else ever would."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterId,
        TaskRunFilter,
        TaskRunFilterState,
        TaskRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    running = await client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(
                type=TaskRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])
            )
        ),
    )
    for task_run in running:
        await client.set_task_run_state(task_run.id, Crashed(message=message), force=True)


def _close_in_stores(flow_run: FlowRun, say: Callable[[str], None]) -> None:
    """Close the run rows and claims of dead processes in the stores that a run may have used."""
    from weighbridge.db.errors import StoreError
    from weighbridge.db.housekeeping import close_abandoned
    from weighbridge.db.location import store_path
    from weighbridge.tasks.settings import as_database_url, load_settings

    request: Any = flow_run.parameters.get("request")
    fields = cast("dict[str, Any]", request) if isinstance(request, dict) else {}
    named = fields.get("database")
    urls = {load_settings().database_url}
    if isinstance(named, str) and named.strip():
        urls.add(as_database_url(named))
    for url in sorted(urls):
        try:
            path = store_path(url)
            if path is None or path.exists():  # opening would make an empty one
                close_abandoned(url)
        except StoreError as error:
            say(f"the runs of {flow_run.name} could not be closed in the store: {error}")
