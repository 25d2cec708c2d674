"""The Prefect worker that keeps the model: it runs flow runs in its own process.

Prefect's own workers start a process for each flow run, which would load the model each
time. This one runs them one after the other in one thread, so the checkpoint stays
resident between them. Prefect finds it by the entry point `prefect.collections`; its
server imports this module too, which therefore loads neither a model nor tables nor flows.
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import anyio
import httpx
from prefect.exceptions import InfrastructureNotAvailable, ObjectNotFound, PrefectSignal
from prefect.settings import PREFECT_WORKER_QUERY_SECONDS, get_current_settings, temporary_settings
from prefect.states import Pending
from prefect.utilities.engine import propose_state
from prefect.utilities.urls import url_for
from prefect.workers.base import BaseJobConfiguration, BaseWorker, BaseWorkerResult
from pydantic import Field

from weighbridge.deployments.deployments_file import POOL
from weighbridge.deployments.installed import Upgrades
from weighbridge.deployments.orphans import (
    cancelled_waiting,
    recover_orphans,
    taken_message,
    this_process,
)
from weighbridge.deployments.running import FlowThread, give_way, load_ahead, run_here
from weighbridge.deployments.server_errors import leaves, reason_of
from weighbridge.deployments.settling import Left, Settler
from weighbridge.deployments.signals import drain_on_signals
from weighbridge.deployments.waiting import Waits
from weighbridge.tasks.stopping import ask_to_stop, clear_stop, stop_asked

if TYPE_CHECKING:
    from collections.abc import Callable

    import anyio.abc
    from prefect.client.schemas.objects import FlowRun

RETRIES_AFTER_CRASH = 2
_POLL_SECONDS = 1.0
_LOOK_SECONDS = 3.0  # Prefect tells a worker of cancelled runs only while it takes them


class _Ended(Exception):  # noqa: N818 - not an error
    """The worker has nothing more to do in this process."""


class WeighbridgeJob(BaseJobConfiguration):
    """What a deployment may set as job variables."""

    retries_after_crash: int = Field(
        default=RETRIES_AFTER_CRASH,
        ge=0,
        le=100,
        description="How often a run whose worker process was killed or crashed is continued by "
        "itself. A document that kills the process would otherwise be tried for ever.",
    )


class WeighbridgeResult(BaseWorkerResult):
    """What Prefect is told when a run has ended."""


class WeighbridgeWorker(BaseWorker[WeighbridgeJob, Any, WeighbridgeResult]):
    """Runs one flow run at a time in this process, with the checkpoint resident.

    Args:
        work_pool_name: The pool; made when there is none.
        work_queues: As for any worker, likewise `name`, `create_pool_if_not_found`,
            `heartbeat_interval_seconds` and `base_job_template`.
        prefetch_seconds: Ignored: a run that is not due must not hold the only place.
        limit: Ignored: one process runs one flow run at a time.
        warm_up: Whether the checkpoint of the settings is loaded before there is a run.
    """

    type = "weighbridge"
    job_configuration = WeighbridgeJob

    _description = (
        "Runs flow runs one after the other in the worker's own process, so that the decision "
        "model stays loaded between them. Needs weighbridge installed where the worker runs."
    )

    def __init__(
        self,
        work_pool_name: str = POOL,
        work_queues: list[str] | None = None,
        name: str | None = None,
        prefetch_seconds: float | None = None,
        create_pool_if_not_found: bool = True,
        limit: int | None = None,
        heartbeat_interval_seconds: int | None = None,
        *,
        base_job_template: dict[str, Any] | None = None,
        warm_up: bool = True,
    ) -> None:
        del prefetch_seconds, limit
        super().__init__(
            work_pool_name=work_pool_name,
            work_queues=work_queues,
            name=name or this_process().replace(":", "-"),
            prefetch_seconds=0,
            create_pool_if_not_found=create_pool_if_not_found,
            limit=1,
            heartbeat_interval_seconds=heartbeat_interval_seconds,
            base_job_template=base_job_template,
        )
        self._warm_up = warm_up
        # Flow runs and the loading of the checkpoint, one after the other.
        self._thread = FlowThread()
        self._loading: asyncio.Future[None] | None = None
        self._running: UUID | None = None
        self._taken: set[UUID] = set()  # waiting for the thread, in it or just out of it
        self._settler = Settler()
        self._uncancelled: set[UUID] = set()  # seen to at the next poll that is answered
        self._looked = 0.0
        self._waits = Waits()
        self._recovered = False
        self._upgrades = Upgrades()
        self._unreachable = False

    @classmethod
    def get_default_base_job_template(cls) -> dict[str, Any]:
        """Return the template of a new pool: only what has a meaning in this process."""
        properties = WeighbridgeJob.model_json_schema()["properties"]
        return {
            "job_configuration": {"retries_after_crash": "{{ retries_after_crash }}"},
            "variables": {
                "type": "object",
                "properties": {"retries_after_crash": properties["retries_after_crash"]},
            },
        }

    async def start(
        self,
        run_once: bool = False,
        with_healthcheck: bool = False,
        printer: Callable[..., None] = print,
    ) -> None:
        """Run until a signal, an upgrade or a failure ends it. Polls each second by default."""
        seconds = PREFECT_WORKER_QUERY_SECONDS.value()
        if "query_seconds" not in get_current_settings().worker.model_fields_set:
            seconds = _POLL_SECONDS
        with temporary_settings({PREFECT_WORKER_QUERY_SECONDS: seconds}):
            try:
                await super().start(run_once, with_healthcheck, printer)
            except BaseException as error:
                # The loops run side by side, so what ends them arrives in groups.
                causes = list(leaves(error))
                others = [each for each in causes if not isinstance(each, _Ended)]
                if not others:
                    self._say(f"ended: {causes[0]}")
                elif others[0] is error:
                    raise
                else:
                    raise others[0] from None

    async def setup(self) -> None:
        """Connect, make the pool, handle signals, and begin to load the checkpoint."""
        clear_stop()
        drain_on_signals(self._asked, lambda name: self._say(f"{name} again: stopping at once"))
        try:
            await super().setup()
        except BaseException:
            # The base class leaves its connections and tasks open, and they complain at exit.
            await super().teardown(None, None, None)
            raise
        self._thread.start()
        if self._warm_up:
            self._loading = self._thread.call(load_ahead, self._logger)

    async def teardown(self, *exc_info: Any) -> None:
        """Let the run in flight reach the end of its batch, then disconnect."""
        ask_to_stop("its worker stops")
        with anyio.CancelScope(shield=True):
            await self._drained()
        await super().teardown(*exc_info)

    async def sync_with_backend(self) -> None:
        """Send a heartbeat; a server that is away for a while does not end the worker."""
        try:
            await self._waits.until_told(super().sync_with_backend())
        except httpx.HTTPError as error:
            self._lost(error)

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Start the next run, unless this process should end."""
        await self._end_if_due()
        if self._upgrades.replacing:
            return []
        try:
            found = await self._waits.until_told(self._poll())
        except httpx.HTTPError as error:
            self._lost(error)
            found = None
        if found is None:
            await self._end_if_due()
        return found or []

    async def _poll(self) -> list[FlowRun]:
        if not self._recovered and self._work_pool is not None:
            await recover_orphans(
                self.client, self._work_pool_name, retries=self._retries, say=self._say
            )
            self._recovered = True
        await self._give_way()
        # Before a run is taken, or one that is taken again could be meant.
        await self._settler.settle_rest(self.client, self._logger)
        cancelling, self._uncancelled = self._uncancelled, set()
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            cancelling |= await cancelled_waiting(self.client, self._work_pool_name)
        for flow_run_id in cancelling:
            await self._cancel_run(flow_run_id)
        found = await super().get_and_submit_flow_runs()
        if self._unreachable:
            self._unreachable = False
            self._say("the Prefect API answers again")
        return found

    async def run(
        self,
        flow_run: FlowRun,
        configuration: WeighbridgeJob,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> WeighbridgeResult:
        """Run a flow run in the thread of flow runs, and say how it ended."""
        del configuration
        place = this_process()
        self._taken.add(flow_run.id)
        if task_status is not None:
            task_status.started(place)  # pyright: ignore[reportArgumentType]
        started = time.monotonic()
        try:
            began, why = await self._thread.call_flow(
                run_here, flow_run.id, partial(self._begin, flow_run.id, flow_run.name)
            )
            self._running = None
            left = Left(flow_run, began, why, time.monotonic() - started)
            await self._settler.settle(self.client, left, self._logger)
        finally:
            self._taken.discard(flow_run.id)
        return WeighbridgeResult(identifier=place, status_code=0)

    async def kill_infrastructure(
        self,
        infrastructure_pid: str,
        configuration: WeighbridgeJob,
        grace_seconds: int = 30,
    ) -> None:
        """Drop a cancelled run that waits for the thread; what runs stops by itself.

        Raises:
            InfrastructureNotAvailable: It runs, or another worker has it.
        """
        del grace_seconds
        flow_run_id = UUID(configuration.env["PREFECT__FLOW_RUN_ID"])
        if infrastructure_pid != this_process():
            raise InfrastructureNotAvailable("another worker has this run")
        self._settler.dropped.add(flow_run_id)
        if self._running == flow_run_id:
            raise InfrastructureNotAvailable("it runs, and stops at the end of its batch")

    async def _submit_run(self, flow_run: FlowRun) -> None:
        # What escaped from here would end the worker, and with it the run in flight.
        try:
            await self._waits.until_told(super()._submit_run(flow_run))
        except (Exception, PrefectSignal) as error:  # noqa: BLE001 - the next poll meets it again
            self._logger.warning("%s was not taken: %s", flow_run.name, reason_of(error))
        self._submitting_flow_run_ids.discard(flow_run.id)
        if self._cancelling_observer is not None:
            self._cancelling_observer.remove_in_flight_flow_run_id(flow_run.id)
        if flow_run.id not in self._taken:
            self._release_limit_slot(flow_run.id)

    async def _submit_run_and_capture_errors(
        self, flow_run: FlowRun, task_status: Any = None
    ) -> BaseWorkerResult | Exception:
        try:
            return await super()._submit_run_and_capture_errors(flow_run, task_status)
        except (Exception, PrefectSignal) as error:  # noqa: BLE001 - as in `_submit_run`
            self._logger.warning("%s was left: %s", flow_run.name, reason_of(error))
            return RuntimeError(reason_of(error))

    async def _propose_pending_state(self, flow_run: FlowRun) -> bool:
        # As the base class does, with a message: see `taken_message`.
        if stop_asked():
            return False
        self._settler.taken(flow_run.id)
        taken = Pending(message=taken_message())
        try:
            state = await propose_state(self.client, taken, flow_run_id=flow_run.id)
        except (Exception, PrefectSignal) as error:  # noqa: BLE001 - as in `_submit_run`
            # Such as Abort: another worker was faster, or it was cancelled meanwhile. Or our
            # own proposal came through, and the answer got lost.
            self._logger.info("%s was not taken: %s", flow_run.name, reason_of(error))
            self._settler.unheard(flow_run)
            return False
        return state.is_pending()

    async def _cancel_run(self, flow_run_id: UUID) -> None:
        try:
            await self._waits.until_told(self._cancel(flow_run_id))
        except httpx.HTTPError as error:
            self._uncancelled.add(flow_run_id)
            self._logger.warning("a run could not be cancelled yet: %s", reason_of(error))
        except Exception as error:  # noqa: BLE001 - as in `_submit_run`
            self._logger.warning("a run could not be cancelled: %s", reason_of(error))

    async def _cancel(self, flow_run_id: UUID) -> None:
        # The base class leaves alone what has run before. A run that waits for its retry has,
        # and no process would ever end it.
        try:
            flow_run = await self.client.read_flow_run(flow_run_id)
        except ObjectNotFound:
            return
        if flow_run.start_time is None:
            await super()._cancel_run(flow_run_id)
            return
        if self._running != flow_run_id:
            await self._settler.cancel_waiting(
                self.client, flow_run, taken=flow_run_id in self._taken
            )

    async def _retries(self, flow_run: FlowRun) -> int:
        try:
            configuration = await self.job_configuration.resolve_for_flow_run(
                flow_run, client=self.client, work_pool=self.work_pool, worker_name=self.name
            )
        except ObjectNotFound:  # its deployment was deleted
            return 0
        return configuration.retries_after_crash

    def _begin(self, flow_run_id: UUID, name: str) -> bool:
        """Say in the thread of flow runs whether a run may start now."""
        if flow_run_id in self._settler.dropped or stop_asked():
            return False
        self._running = flow_run_id
        self._say(f"{name} starts: {url_for('flow-run', obj_id=flow_run_id)}")
        return True

    async def _end_if_due(self) -> None:
        """End the loops when a signal or an upgrade asks for it, once nothing runs."""
        reason = stop_asked()
        if reason is None and not self._busy:
            reason = self._upgrades.look(self._say)
        if reason is None:
            return
        ask_to_stop(reason)
        await self._drained()
        raise _Ended(reason)

    async def _give_way(self) -> None:
        loading = self._loading is not None and not self._loading.done()
        # Before the first run there may be no model, and its modules take seconds to import.
        if not self._busy and not loading and "weighbridge.tasks.loading" in sys.modules:
            await self._thread.call(give_way, self._logger)

    @property
    def _busy(self) -> bool:
        # Whoever awaits the thread may have been cancelled, which does not stop the thread.
        taken = self._limiter is not None and self._limiter.borrowed_tokens
        return bool(taken) or self._thread.has_flow

    async def _drained(self) -> None:
        while self._busy:
            await anyio.sleep(0.05)

    def _asked(self, signal_name: str) -> None:
        reason = f"the worker received {signal_name}"
        ask_to_stop(reason)
        self._waits.hurry()
        rest = "a second signal stops at once"
        self._say(f"{reason}: ending after the batch in flight; {rest}")

    def _lost(self, error: httpx.HTTPError) -> None:
        transient = not isinstance(error, httpx.HTTPStatusError)
        if not transient and error.response.status_code < 500:
            raise error
        if not self._unreachable:
            self._unreachable = True
            text = "the Prefect API does not answer (%s): trying again"
            self._logger.warning(text, reason_of(error))

    def _say(self, text: str) -> None:
        self._logger.info(text)
