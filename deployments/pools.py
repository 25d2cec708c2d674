"""Who takes the runs of a work pool, and whether they have time for another."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_AT_WORK = ["PENDING", "RUNNING", "CANCELLING"]


def online_workers(client: "SyncPrefectClient", pool: str) -> int:
    """Return how many workers of a pool have been heard of lately; 0 if there is no such pool."""
    from prefect.client.schemas.filters import WorkerFilter, WorkerFilterStatus
    from prefect.exceptions import ObjectNotFound

    online = WorkerFilter(status=WorkerFilterStatus(any_=["ONLINE"]))
    try:
        return len(client.read_workers_for_work_pool(pool, worker_filter=online))
    except ObjectNotFound:
        return 0


def others_at_work(client: "SyncPrefectClient", run: "FlowRun") -> bool:
    """Return whether each worker that could take a run has another one.

    Our worker does one at a time.
    """
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType

    if not run.work_pool_name:
        return False
    workers = online_workers(client, run.work_pool_name)
    if not workers:
        return False
    at_work = FlowRunFilterStateType(any_=[StateType(each) for each in _AT_WORK])
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=at_work)),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[run.work_pool_name])),
        limit=workers + 1,
    )
    return len([each for each in found if each.id != run.id]) >= workers
