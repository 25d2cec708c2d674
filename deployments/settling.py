"""How a run that has left the thread of flow runs ends, where it did not end by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weighbridge.deployments.orphans import holder_of, this_process
from weighbridge.deployments.server_errors import reason_of
from weighbridge.tasks.stopping import stop_asked

if TYPE_CHECKING:
    import logging
    from uuid import UUID

    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State

    Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

# Prefect asks a server that is away for up to a minute, and the next run waits.
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Left:
    """A run that has left the thread of flow runs.

    Attributes:
        flow_run: The run, as it was when it was taken.
        began: Whether its flow was called at all.
        why: Why it did not end by itself, None if nothing speaks against it.
        seconds: How long it was with this process.
        heard: Whether the server has confirmed that this process has it.
    """

    flow_run: FlowRun
    began: bool
    why: str | None
    seconds: float
    heard: bool = True


class Settler:
    """Sees to the ends of a worker's runs, later if the server is away.

    Attributes:
        dropped: Runs that were cancelled before they began, while the worker had them.
    """

    def __init__(self) -> None:
        self.dropped: set[UUID] = set()
        self._unsettled: dict[UUID, Left] = {}

    def taken(self, flow_run_id: UUID) -> None:
        """Forget what an earlier time with this worker has left of a run."""
        self.dropped.discard(flow_run_id)
        self._unsettled.pop(flow_run_id, None)

    def unheard(self, flow_run: FlowRun) -> None:
        """Remember a run that this process may have taken without hearing of it."""
        self._unsettled[flow_run.id] = Left(flow_run, False, None, 0.0, heard=False)

    async def settle(self, client: PrefectClient, left: Left, log: Log) -> None:
        """See to the end of a run, and remember it if the server does not answer."""
        import anyio
        import httpx

        flow_run = left.flow_run
        again = flow_run.id in self._unsettled
        why = "the server does not answer"
        try:
            with anyio.move_on_after(_PATIENCE_SECONDS):
                if told := await _settle(client, left, dropped=flow_run.id in self.dropped):
                    log.info(told)
                self.taken(flow_run.id)
                return
        except httpx.HTTPError as error:
            why = reason_of(error)
        except Exception as error:  # noqa: BLE001 - such as a run that was deleted meanwhile
            log.warning("the end of %s is not known: %s", flow_run.name, reason_of(error))
            self.taken(flow_run.id)
            return
        self._unsettled[flow_run.id] = left
        if not again:
            log.warning("the end of %s could not be read yet: %s", flow_run.name, why)

    async def settle_rest(self, client: PrefectClient, log: Log) -> None:
        """See to the ends that the server was away at; call once it answers again."""
        for left in list(self._unsettled.values()):
            await self.settle(client, left, log)

    async def cancel_waiting(
        self, client: PrefectClient, flow_run: FlowRun, *, taken: bool
    ) -> None:
        """Cancel a run that has begun once and waits: for its retry, or for its place here.

        Args:
            client: The Prefect API.
            flow_run: The run.
            taken: Whether this worker has it.
        """
        from prefect.states import Cancelled

        states = await client.read_flow_run_states(flow_run.id)
        states.sort(key=lambda state: state.timestamp)
        if len(states) < 2 or not states[-1].is_cancelling():
            return
        mine = flow_run.infrastructure_pid == this_process()
        if states[-2].is_scheduled() or (states[-2].is_pending() and mine):
            if taken:
                self.dropped.add(flow_run.id)
            waited = Cancelled(message="cancelled while it waited for its retry")
            await client.set_flow_run_state(flow_run.id, waited, force=True)


async def _settle(client: PrefectClient, left: Left, *, dropped: bool) -> str:
    """Look how a run ended, and end what did not end by itself; say how, if it says anything.

    What waits for its retry or is suspended is left alone, and so is a run that another
    worker has taken since.
    """
    flow_run = await client.read_flow_run(left.flow_run.id)  # its flow has named it
    state = flow_run.state
    over = state is None or state.is_final() or state.is_scheduled() or state.is_paused()
    if not left.heard and (state is None or not state.is_pending()):
        return ""
    if state is not None and not over:
        holder = await holder_of(client, flow_run)
        if holder is None or f"{holder.host}:{holder.pid}" != this_process():
            return f"{flow_run.name}: another worker has taken it" if left.heard else ""
        state = _next_state(state, left, dropped=dropped)
        await client.set_flow_run_state(flow_run.id, state, force=True)
    name = "without a state" if state is None else state.name
    why = f" ({state.message})" if state is not None and state.message else ""
    return f"{flow_run.name}: {name} after {left.seconds:.1f} s{why}"


def _next_state(state: State[Any], left: Left, *, dropped: bool) -> State[Any]:
    """Choose the next state of a run that has not ended and runs no more."""
    from prefect.states import Cancelled, Crashed, Scheduled

    if state.is_cancelling() or dropped:
        if not left.began:
            return Cancelled(message="cancelled before it could start")
        how = left.why or "it was in its last batch"
        return Cancelled(message=f"cancelled; {how}; what is recorded is kept")
    if not left.heard:
        return Scheduled(message="its worker did not hear that it had taken it")
    if not left.began and stop_asked():
        return Scheduled(message="its worker stopped before it could start")
    return Crashed(message=left.why or "the flow ended without a state")
