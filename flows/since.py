"""`:since` in a query: when this deployment last began to read what it then completed.

The start and not the end: what was added while that run read would otherwise be read by no
run. What is read twice costs nothing, as its answers are reused.

Only runs that asked the same count (see `FREE`): a run of the deployment that somebody
triggered for other documents, another schema or another `since` read something else, and one
with a limit left something out.

The value is the same in each retry, as positions of a source must not move: only runs that
had ended when this one first started are looked at.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import deployment, flow_run
from pydantic import ValidationError

from weighbridge.flows.request import ScoreRequest
from weighbridge.tasks.errors import SourceError

BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)

FREE: Final = frozenset(
    {"output", "timezone", "alert_rejected_share", "source", "mode", "batch_size"}
    | {"field_batch_size", "rescore", "store_text"}
)
"""Fields of a request that change neither what is read nor what is asked of it."""

_PAGE = 200


def last_start(request: ScoreRequest) -> datetime:
    """Return when the last run of this deployment that asked the same was started, in UTC.

    Args:
        request: As it came, with its dates not yet filled in.

    Returns:
        The start of the first attempt of that run, in whole seconds; 1970 if there is none.

    Raises:
        SourceError: This flow run belongs to no deployment.
    """
    if deployment.id is None or flow_run.id is None:
        raise SourceError(
            "a query with :since must be run by a deployment, which knows its last completed run, "
            "or be told since when, and this run is neither",
            hint="give since (--since 2026-11-01), or trigger a deployment",
        )
    asked = _asked(request)
    with get_client(sync_client=True) as client:
        began = client.read_flow_run(UUID(flow_run.id)).start_time or datetime.now(UTC)
        for run in _completed(client, UUID(deployment.id), began):
            if run.start_time and run.end_time and run.end_time <= began:
                other = _request_of(run)
                if other is not None and other.limit is None and _asked(other) == asked:
                    start = datetime.fromtimestamp(run.start_time.timestamp(), UTC)
                    # Databases keep times in whole seconds, cut off.
                    return start.replace(microsecond=0)
    return BEGINNING


def _completed(
    client: SyncPrefectClient, deployment_id: UUID, before: datetime
) -> Iterator[FlowRun]:
    """Yield the completed runs of a deployment, the latest start first."""
    wanted = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.COMPLETED])),
        start_time=FlowRunFilterStartTime.model_validate({"before_": before}),
    )
    offset = 0
    while page := client.read_flow_runs(
        flow_run_filter=wanted, sort=FlowRunSort.START_TIME_DESC, limit=_PAGE, offset=offset
    ):
        yield from page
        offset += len(page)


def _request_of(run: FlowRun) -> ScoreRequest | None:
    try:
        return ScoreRequest.model_validate(run.parameters.get("request"))
    except ValidationError:
        return None  # of another version, or refused


def _asked(request: ScoreRequest) -> dict[str, Any]:
    return request.model_dump(exclude=set(FREE) | {"limit"})
