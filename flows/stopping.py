"""Looks between two batches whether a flow run should go on.

Prefect tells a run nothing once it has started: a run that is cancelled in the UI must
read its own state. What runs in a process that is about to end hears it from
`weighbridge.tasks.stopping`.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
from prefect import get_client, get_run_logger
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectException
from prefect.runtime import deployment, flow_run
from prefect.states import AwaitingRetry, Cancelled, Running

from weighbridge.tasks.stopping import Stopped, ask_to_stop, clear_stop, stop_asked

__all__ = ["Stopped", "Watch", "ask_to_stop", "clear_stop", "ended_state", "stop_asked"]

T = TypeVar("T")

READ_SECONDS = 1.0
"""A run's state is read so often at most: it takes 10 to 20 ms."""

_CANCELLED = frozenset({StateType.CANCELLING, StateType.CANCELLED})
_NO_PAUSE = (
    "this run cannot be paused: it would keep the model and its place in the queue. "
    "Suspend it instead, or cancel it: what is recorded is kept"
)

_ALIVE = "this run was taken for crashed, and is alive: it goes on"


class CancelledByPrefect(Stopped):
    """The run was cancelled through Prefect."""


def put_back(error: httpx.TransportError) -> State[Any] | None:
    """Return the state of a run whose server has been away for too long, None to let it fail.

    A run of a deployment is put back into its queue, for the time when the server is back.
    """
    if deployment.id is None:
        return None
    why = str(error) or type(error).__name__
    return ended_state(Stopped(f"the Prefect API did not answer ({why})"))


def ended_state(stopped: Stopped) -> State[Any]:
    """Return the state in which a run that was stopped ends.

    A run of a deployment whose process ends is put back into its queue, and goes on
    with the next worker as the run it was.
    """
    message = f"{stopped.message}; what is recorded is kept"
    if deployment.id is None or isinstance(stopped, CancelledByPrefect):
        return Cancelled(message=message)
    return AwaitingRetry(scheduled_time=datetime.now(UTC), message=message)


class Watch:
    """Watches one flow run from inside."""

    def __init__(self) -> None:
        self._id = flow_run.id
        self._read = time.monotonic()

    def each(self, batches: Iterator[T]) -> Iterator[T]:
        """Give one batch after the other, as long as the run should go on.

        A run that is through when it is asked to stop is done.

        Raises:
            Stopped: As `look`.
        """
        for batch in batches:
            self.look()
            yield batch

    def check_end(self) -> None:
        """Return if a run that has done everything may end as completed.

        Raises:
            CancelledByPrefect: It was cancelled meanwhile, and Prefect lets it end in no
                other way.
        """
        if self._id is None:
            return
        with get_client(sync_client=True) as client:
            try:
                state = client.read_flow_run(self._id).state
            except PrefectException:
                return  # it was deleted, and there is nothing to end
        if state is not None and state.type is StateType.CANCELLING:
            raise CancelledByPrefect("cancelled through Prefect when all was recorded")

    def look(self) -> None:
        """Return if the run should go on; call where nothing is half done.

        Raises:
            CancelledByPrefect: It was cancelled through Prefect.
            Stopped: This process was asked to stop its runs.
        """
        if reason := stop_asked():
            raise Stopped(reason)
        now = time.monotonic()
        if self._id is None or now - self._read < READ_SECONDS:
            return
        self._read = now
        with get_client(sync_client=True) as client:
            try:
                state = client.read_flow_run(self._id).state
            except PrefectException:
                return  # such as a run that was deleted meanwhile: its answers are wanted still
            if state is None:
                return
            if state.type in _CANCELLED:
                raise CancelledByPrefect("cancelled through Prefect")
            if state.type is StateType.CRASHED:
                # Such as by an automation, while this machine slept.
                get_run_logger().warning(_ALIVE)
                client.set_flow_run_state(self._id, Running(message=_ALIVE), force=True)
            elif state.is_final():
                raise CancelledByPrefect(f"set to {state.name} through Prefect")
            # A suspended run ends and frees its place; Prefect sees to that by itself.
            if state.type is StateType.PAUSED and state.name != "Suspended":
                get_run_logger().warning(_NO_PAUSE)
                client.set_flow_run_state(self._id, Running(message=_NO_PAUSE), force=True)
