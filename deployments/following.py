"""Follows a flow run that another process executes, from its server alone."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx

from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact, FlowRun

    from weighbridge.flows.progress import Listener

POLL_SECONDS = 1.0
# A server that is started again takes some 20 s; beyond this it is gone.
PATIENCE_SECONDS = 60.0

CRASH_SECONDS = 3.0

# What the progress artifact says of itself: run 7: 1,000 of 2,000 documents.
_COUNTED = re.compile(r"([\d,]+) of ([\d,]+) document", re.ASCII)

_SAYS = {
    "Scheduled": "waiting for a worker",
    "Late": "waiting for a worker",
    "Pending": "a worker has taken it",
    "Submitting": "a worker has taken it",
    "AwaitingRetry": "put back, waiting for a worker to go on with it",
    "AwaitingConcurrencySlot": "waiting for another run of this deployment to end",
    "Cancelling": "being cancelled",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a flow run ended.

    Attributes:
        state: Type of its last state: `COMPLETED`, `FAILED`, `CRASHED` or `CANCELLED`.
        message: What the state says.
        outcome: Counts of the run as it published them; None when it published none.
    """

    state: str
    message: str
    outcome: Mapping[str, Any] | None


def follow(
    client: "SyncPrefectClient",
    flow_run: UUID,
    *,
    say: Callable[[str], None],
    listener: "Listener",
    poll_seconds: float = POLL_SECONDS,
) -> Ended:
    """Wait for the end of a flow run, and tell how far it is meanwhile.

    Args:
        client: Of the server.
        flow_run: The flow run's id.
        say: Told in a sentence what state the run has come to.
        listener: Told how far it is.
        poll_seconds: Between two questions.

    Raises:
        CommandError: The server is gone, or the flow run was deleted.
    """
    before = None
    crashed_at: float | None = None
    for run in _states(client, flow_run, poll_seconds):
        if (state := _in_words(run)) != before:
            before = state
            say(state)
        if run.state is None or not run.state.is_final():
            _tell_progress(client, run, listener)
            crashed_at = None
            continue
        if run.state.is_crashed():
            # A worker that starts again puts it back a moment later.
            crashed_at = crashed_at or time.monotonic()
            if time.monotonic() - crashed_at < CRASH_SECONDS:
                continue
        return Ended(
            state=run.state.type.value,
            message=run.state.message or "",
            outcome=_outcome(client, flow_run),
        )
    raise AssertionError("a flow run is followed to its end")


def artifacts_of(client: "SyncPrefectClient", flow_run: UUID) -> "list[Artifact]":
    """Return what a flow run has published so far, the latest first."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.client.schemas.sorting import ArtifactSort

    only = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
    return client.read_artifacts(artifact_filter=only, sort=ArtifactSort.CREATED_DESC)


def _states(
    client: "SyncPrefectClient", flow_run: UUID, poll_seconds: float
) -> "Iterator[FlowRun]":
    from prefect.exceptions import ObjectNotFound

    silent_since: float | None = None
    while True:
        try:
            run = client.read_flow_run(flow_run)
        except ObjectNotFound as error:
            raise CommandError("the flow run must exist, and it was deleted") from error
        except httpx.RequestError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_SECONDS:
                raise
        else:
            silent_since = None
            yield run
        time.sleep(poll_seconds)


def _in_words(run: "FlowRun") -> str:
    name = run.state_name or "Scheduled"
    return _SAYS.get(name, name.lower())


def _tell_progress(client: "SyncPrefectClient", run: "FlowRun", listener: "Listener") -> None:
    from weighbridge.flows.progress import Progress

    if run.state_name != "Running":
        listener(Progress(_in_words(run)))
        return
    found = next((each for each in _artifacts(client, run.id) if each.type == "progress"), None)
    if found is None or found.data is None:
        listener(Progress("starting"))
        return
    counted = _COUNTED.search(found.description or "")
    if counted:
        done, total = (int(each.replace(",", "")) for each in counted.groups())
        listener(Progress("scoring", done, total))
    else:
        listener(Progress(f"{float(str(found.data)):.0f} % scored"))


def _artifacts(client: "SyncPrefectClient", flow_run: UUID) -> "list[Artifact]":
    try:
        return artifacts_of(client, flow_run)
    except httpx.HTTPError:
        return []  # how far it is matters less than how it ends


def _outcome(client: "SyncPrefectClient", flow_run: UUID) -> Mapping[str, Any] | None:
    for each in artifacts_of(client, flow_run):
        if each.type == "table" and (each.key or "").endswith("-outcome"):
            rows: Any = json.loads(each.data) if isinstance(each.data, str) else each.data
            return rows[0] if rows else None
    return None
