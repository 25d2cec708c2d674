"""Follows a flow run that another process executes, from its server alone."""

import builtins
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import httpx

from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.pools import others_at_work
from weighbridge.deployments.published import Published, artifacts_of, counted, read_published

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact, FlowRun, State

    from weighbridge.flows.progress import Listener

POLL_SECONDS = 1.0
# A server that is started again takes some 20 s; beyond this it is gone.
PATIENCE_SECONDS = 60.0

CRASH_SECONDS = 3.0

SILENT = "the Prefect API does not answer; trying again"
_BUSY = "waiting: the worker is busy with another run"
_SAYS = {
    "Scheduled": "waiting for a worker",
    "Late": "waiting for a worker",
    "Pending": "a worker has taken it, and is starting",
    "Submitting": "a worker has taken it, and is starting",
    "AwaitingRetry": "put back, waiting for a worker to go on with it",
    "AwaitingConcurrencySlot": "waiting for another run of this deployment to end",
    "Cancelling": "being cancelled",
}
# What stands before a server answers with these while the server starts, or has too much to do.
_STARTING = {429, 502, 503, 504}
_WAITING = {"Scheduled", "Late"}

# Of Prefect, before what the flow has raised.
_RAISED = re.compile(r"Flow run encountered an exception: (?:([^\W\d]\w*): )?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a flow run ended.

    Attributes:
        state: Type of its last state: `COMPLETED`, `FAILED`, `CRASHED` or `CANCELLED`.
        message: What the state says.
        published: What the run has published.
    """

    state: str
    message: str
    published: Published


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
        say: Told in a sentence what state the run has come to, or that the server is silent.
        listener: Told how far it is; what was said comes as a stage too.
        poll_seconds: Between two questions.

    Raises:
        CommandError: The server is gone, or the flow run was deleted.
    """
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    # By itself Prefect's client would ask a server that is away for a minute, without a word.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        state = _last(client, flow_run, say, listener, poll_seconds)
    return Ended(
        state=state.type.value,
        message=plain_message(state.message or ""),
        published=read_published(artifacts_of(client, flow_run)),
    )


def _last(
    client: "SyncPrefectClient",
    flow_run: UUID,
    say: Callable[[str], None],
    listener: "Listener",
    poll_seconds: float,
) -> "State":
    from weighbridge.flows.progress import Progress

    before = None
    crashed_at: float | None = None
    for run in _states(client, flow_run, poll_seconds):
        state = SILENT if run is None else _in_words(client, run)
        if state != before:
            before = state
            say(state)
            listener(Progress(state))
        if run is None:
            continue
        if run.state is None or not run.state.is_final():
            if run.state_name == "Running":
                _tell_progress(client, run, listener)
            crashed_at = None
            continue
        if run.state.is_crashed():
            # A worker that starts again puts it back a moment later.
            crashed_at = crashed_at or time.monotonic()
            if time.monotonic() - crashed_at < CRASH_SECONDS:
                continue
        return run.state
    raise AssertionError("a flow run is followed to its end")


def plain_message(message: str) -> str:
    """Return what a state says without what Prefect puts before it.

    The name of an error goes as well, where the message alone tells: not that of Python's own.
    """
    found = _RAISED.match(message)
    if found is None:
        return message
    name, rest = found[1] or "", message[found.end() :]
    return f"{name}: {rest}".strip(": ") if hasattr(builtins, name) or not rest else rest


def _states(
    client: "SyncPrefectClient", flow_run: UUID, poll_seconds: float
) -> "Iterator[FlowRun | None]":
    """Give the run again and again, None while the server does not answer."""
    from prefect.exceptions import ObjectNotFound

    silent_since: float | None = None
    while True:
        try:
            run = client.read_flow_run(flow_run)
        except ObjectNotFound as error:
            raise CommandError("the flow run must exist, and it was deleted") from error
        except (httpx.RequestError, httpx.HTTPStatusError) as error:
            if isinstance(error, httpx.HTTPStatusError) and (
                error.response.status_code not in _STARTING
            ):
                raise
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_SECONDS:
                raise
            yield None
        else:
            silent_since = None
            yield run
        time.sleep(poll_seconds)


def _in_words(client: "SyncPrefectClient", run: "FlowRun") -> str:
    name = run.state_name or "Scheduled"
    if name in _WAITING and _busy(client, run):
        return _BUSY
    return _SAYS.get(name, name.lower())


def _busy(client: "SyncPrefectClient", run: "FlowRun") -> bool:
    try:
        return others_at_work(client, run)
    except httpx.HTTPError:
        return False  # what it waits for matters less than how it ends


def _tell_progress(client: "SyncPrefectClient", run: "FlowRun", listener: "Listener") -> None:
    from weighbridge.flows.progress import Progress

    found = next((each for each in _artifacts(client, run.id) if each.type == "progress"), None)
    if found is None or found.data is None:
        listener(Progress("starting"))
    elif counts := counted(found):
        listener(Progress("scoring", *counts))
    else:
        listener(Progress(f"{float(str(found.data)):.0f} % scored"))


def _artifacts(client: "SyncPrefectClient", flow_run: UUID) -> "list[Artifact]":
    try:
        return artifacts_of(client, flow_run)
    except httpx.HTTPError:
        return []  # how far it is matters less than how it ends
