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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from weighbridge.deployments.host_locks import locked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State

_TAKEN = re.compile(r"^taken by the worker process (?P<host>.+):(?P<pid>\d+)$")
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
    from prefect.exceptions import ObjectNotFound

    from weighbridge.tasks.settings import load_settings

    lock = locked(load_settings().cache / "workers" / "recovery.lock")
    # Two workers that start together would each schedule the retry.
    await asyncio.to_thread(lock.__enter__)
    try:
        found = 0
        for flow_run in await _unfinished(client, pool):
            try:
                holder = await holder_of(client, flow_run)
                if holder is None or holder.host != platform.node() or holder.lives:
                    continue
                await _recover(client, flow_run, holder, retries, say)
            except ObjectNotFound:
                continue  # deleted meanwhile
            found += 1
        return found
    finally:
        lock.__exit__(None, None, None)


async def _unfinished(client: PrefectClient, pool: str) -> list[FlowRun]:
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType

    states = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
    flow_runs: list[FlowRun] = []
    while True:
        page = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=states))
            ),
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
    from prefect.states import AwaitingRetry, Cancelled, Crashed

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
    # Right before its retry: whoever waits for the run's end may look in between.
    await client.set_flow_run_state(flow_run.id, Crashed(message=gone), force=True)
    if earlier >= allowed:
        say(f"{flow_run.name} crashed with its worker; its {allowed} retries are used up")
        return
    again = f"retry {earlier + 1} of {allowed} after a crash"
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
