"""Applies deployments to a Prefect server, again and again, to the same end.

What is typed is applied, and what is not typed stays as it is on the server: the parameters,
the schedule and whether it is switched on belong to whoever set them last. Description, entry
point, limits and the form of the parameters belong to `prefect.yaml` of this package.
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from weighbridge.deployments.deployments_file import FLOW, POOL, Entry

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.objects import DeploymentSchedule
    from prefect.client.schemas.responses import DeploymentResponse

_WORKER_TYPE = "weighbridge"
_SET = {
    *("parameters", "paused", "work_pool_name", "version", "description", "entrypoint"),
    *("parameter_openapi_schema", "enforce_parameter_schema", "concurrency_options"),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is typed about a deployment; None keeps what there is.

    Attributes:
        request: Fields of its `ScoreRequest`.
        cron: When it runs.
        timezone: Zone of the schedule.
        paused: False switches the schedule on.
        pool: Work pool of its runs.
        rejected_share: Beyond which share of rejected documents automations are told.
    """

    request: Mapping[str, Any]
    cron: str | None = None
    timezone: str | None = None
    paused: bool | None = None
    pool: str | None = None
    rejected_share: float | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A deployment as it is on the server now.

    Attributes:
        name: Its name, within the flow.
        id: Its id.
        made: Whether it was not there before.
        changed: Whether it is another one than before.
        pool: Work pool of its runs.
        schedules: When it runs, in words; those that are switched off only where all are.
        paused: Whether no schedule starts it.
        request: Fields of the `ScoreRequest` of its runs that are set.
    """

    name: str
    id: UUID
    made: bool
    changed: bool
    pool: str
    schedules: tuple[str, ...]
    paused: bool
    request: Mapping[str, Any]


def ensure_pool(client: "SyncPrefectClient", name: str) -> bool:
    """Make a work pool of our type if there is none of that name; say whether it was made."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type=_WORKER_TYPE))
        except ObjectAlreadyExists:
            return False  # a worker was a moment earlier
        return True
    return False


def find(client: "SyncPrefectClient", name: str) -> "DeploymentResponse | None":
    """Return a deployment of our flow, None when there is none of that name."""
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(f"{FLOW}/{name}")
    except ObjectNotFound:
        return None


def deployed_names(client: "SyncPrefectClient") -> list[str]:
    """Return the names of the deployments of our flow."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    found = client.read_deployments(flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])))
    return sorted(each.name for each in found)


def merged_request(wanted: Wanted, existing: "DeploymentResponse | None") -> dict[str, Any]:
    """Return what runs will be asked: what there is, and over it what is typed."""
    request = overlaid(request_of(existing), wanted.request)
    if wanted.rejected_share is not None:
        request["alert_rejected_share"] = wanted.rejected_share
    return request


def request_of(deployment: "DeploymentResponse | None") -> dict[str, Any]:
    """Return the fields of the `ScoreRequest` that a deployment sets."""
    found: Any = {} if deployment is None else deployment.parameters.get("request", {})
    return dict(found) if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownArgumentType]


def overlaid(before: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Put typed fields over others, without what is told of a schema or checkpoint before."""
    from weighbridge.tasks.scorers import OF_A_CHECKPOINT

    told = {"schema": ("schema_name",), "checkpoint": OF_A_CHECKPOINT}
    gone = {name for field, names in told.items() if field in typed for name in names}
    return {**{name: value for name, value in before.items() if name not in gone}, **typed}


def apply(
    client: "SyncPrefectClient",
    entry: Entry,
    wanted: Wanted,
    existing: "DeploymentResponse | None",
    request: Mapping[str, Any],
    zone: str,
) -> Applied:
    """Make a deployment, or bring the one that is there up to date.

    Args:
        client: Of the server.
        entry: What the file says of it.
        wanted: What is typed.
        existing: What is on the server.
        request: From `merged_request`.
        zone: Zone of this machine, for a first schedule without another.
    """
    if existing is None:
        made = _create(client, entry, wanted, request, zone)
    else:
        _update(client, entry, wanted, existing, request, zone)
        made = existing.id
    found = client.read_deployment(made)
    active = [each for each in found.schedules if each.active]
    return Applied(
        name=found.name,
        id=found.id,
        made=existing is None,
        changed=existing is None or _seen(existing) != _seen(found),
        pool=found.work_pool_name or "",
        schedules=tuple(map(in_words, active or found.schedules)),
        paused=found.paused or not active,
        request=request_of(found),
    )


def has_cron(entry: Entry, existing: "DeploymentResponse | None") -> bool:
    """Say whether there is, or will be made, a schedule that has a time zone to set."""
    from prefect.client.schemas.schedules import CronSchedule

    if existing is None:
        return entry.cron is not None
    own = _own_schedule(entry, existing)
    return own is not None and isinstance(own.schedule, CronSchedule)


def in_words(schedule: "DeploymentSchedule") -> str:
    """Say when a schedule runs."""
    from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

    found = schedule.schedule
    if isinstance(found, CronSchedule):
        return f"{found.cron} ({found.timezone or 'UTC'})"
    if isinstance(found, IntervalSchedule):
        return f"every {found.interval}"
    return f"{getattr(found, 'rrule', found)}"


def _create(
    client: "SyncPrefectClient",
    entry: Entry,
    wanted: Wanted,
    request: Mapping[str, Any],
    zone: str,
) -> UUID:
    cron = wanted.cron or entry.cron
    # That of the file waits for its deployment, which is paused; one that is added to a
    # deployment that is not must wait by itself.
    on = entry.paused or wanted.paused is False
    return client.create_deployment(
        flow_id=client.create_flow_from_name(FLOW),
        name=entry.name,
        tags=list(entry.tags),
        work_pool_name=wanted.pool or POOL,
        parameters={"request": dict(request)},
        paused=entry.paused if wanted.paused is None else wanted.paused,
        schedules=[_schedule(entry, cron, wanted.timezone or zone, active=on)] if cron else [],
        pull_steps=[],
        **_owned_by_the_file(entry),
    )


def _update(
    client: "SyncPrefectClient",
    entry: Entry,
    wanted: Wanted,
    existing: "DeploymentResponse",
    request: Mapping[str, Any],
    zone: str,
) -> None:
    from prefect.client.schemas.actions import DeploymentUpdate

    changes: dict[str, Any] = {"parameters": {"request": dict(request)}}
    if wanted.paused is not None:
        changes["paused"] = wanted.paused
    if wanted.pool:
        changes["work_pool_name"] = wanted.pool
    # Schedules are left out: a list here would replace those that were added in the UI.
    client.update_deployment(existing.id, DeploymentUpdate(**changes, **_owned_by_the_file(entry)))
    own = _own_schedule(entry, existing)
    if own is None and wanted.cron:
        on = wanted.paused is False
        added = _schedule(entry, wanted.cron, wanted.timezone or zone, active=on)
        client.create_deployment_schedules(existing.id, [added])
    elif own is not None:
        _update_schedule(client, existing.id, own, wanted)


def _update_schedule(
    client: "SyncPrefectClient", deployment: UUID, own: "DeploymentSchedule", wanted: Wanted
) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    before = own.schedule
    changed = None
    if wanted.cron or (wanted.timezone and isinstance(before, CronSchedule)):
        changed = CronSchedule(
            cron=wanted.cron or getattr(before, "cron", ""),
            timezone=wanted.timezone or getattr(before, "timezone", None),
        )
    # A schedule has a switch of its own in the UI, beside that of the deployment.
    active = True if wanted.paused is False else None
    if changed is not None or (active and not own.active):
        client.update_deployment_schedule(
            deployment, own.id, active=active, schedule=changed, slug=own.slug
        )


def _own_schedule(entry: Entry, existing: "DeploymentResponse") -> "DeploymentSchedule | None":
    """Return the schedule that --cron is about: ours, or the only one."""
    found = list(existing.schedules)
    ours = [each for each in found if each.slug == _slug(entry)]
    if ours:
        return ours[0]
    return found[0] if len(found) == 1 else None


def _schedule(
    entry: Entry, cron: str, timezone: str, *, active: bool
) -> "DeploymentScheduleCreate":
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    # A schedule is found again by its slug.
    return DeploymentScheduleCreate(
        schedule=CronSchedule(cron=cron, timezone=timezone), active=active, slug=_slug(entry)
    )


def _seen(deployment: "DeploymentResponse") -> dict[str, Any]:
    """Return all that we set of a deployment, and none of what the server counts on."""
    limit = deployment.global_concurrency_limit
    return {
        **deployment.model_dump(mode="json", include=_SET),
        "limit": limit and limit.limit,
        "schedules": [
            each.model_dump(mode="json", include={"active", "slug", "schedule"})
            for each in deployment.schedules
        ],
    }


def _slug(entry: Entry) -> str:
    return entry.slug or "cron"


def _owned_by_the_file(entry: Entry) -> dict[str, Any]:
    from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    flow: Any = load_flow_from_entrypoint(entry.entrypoint)
    return {
        "version": importlib.metadata.version("weighbridge"),
        "description": entry.description,
        "entrypoint": entry.entrypoint,
        "parameter_openapi_schema": parameter_schema(flow).model_dump(exclude_unset=True),
        "enforce_parameter_schema": True,
        "concurrency_limit": entry.limit,
        "concurrency_options": ConcurrencyOptions(
            collision_strategy=ConcurrencyLimitStrategy(entry.collision_strategy),
            grace_period_seconds=entry.grace_period_seconds,
        ),
    }
