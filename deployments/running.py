"""What a worker does in its thread of flow runs: load the checkpoint, run a flow."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import logging
import queue
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class FlowThread(threading.Thread):
    """One thread that runs one call after the other: an executor that ends with the process.

    The threads of an executor are waited for when Python ends, however long the model
    still loads.
    """

    def __init__(self) -> None:
        super().__init__(name="weighbridge-flow-runs", daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._flow: Future[Any] | None = None

    @property
    def has_flow(self) -> bool:
        """Whether a flow run waits here or runs, whoever still awaits it."""
        return self._flow is not None and not self._flow.done()

    def call_flow(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Do as `call` with what runs a flow run, the only one at its time."""
        self._flow = self._put(function, *arguments)
        return asyncio.wrap_future(self._flow)

    def call(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Run a function in the thread after those before it; await its value."""
        return asyncio.wrap_future(self._put(function, *arguments))

    def _put(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        # The context of the caller holds the settings of Prefect, and with them the API.
        context = contextvars.copy_context()
        future: Future[Any] = Future()
        self._calls.put((partial(context.run, function, *arguments), future))
        return future

    def run(self) -> None:
        """Run calls for ever."""
        while True:
            function, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                future.set_exception(error)


def load_ahead(log: Log) -> None:
    """Load the checkpoint of the settings, and the flow, before there is a run.

    Args:
        log: Told in lines for people how, or why not.
    """
    from weighbridge.tasks.loading import load_scorer
    from weighbridge.tasks.scorers import ScorerSpec
    from weighbridge.tasks.stopping import Stopped, stop_asked

    if stop_asked():
        return
    try:
        loaded = load_scorer(ScorerSpec(), say=log.info)
    except Stopped:
        return
    except Exception as error:  # noqa: BLE001 - a worker without a model can still say so to runs
        log.warning("no model was loaded ahead of the runs: %s", error)
        if hint := getattr(error, "hint", None):
            log.warning("hint: %s", hint)
        log.warning("the worker goes on: a run loads the model that it names")
    else:
        log.info(
            "runs will find %s in memory: %.2f GiB, %s, ready after %.1f s",
            loaded.name,
            loaded.bytes / 2**30,
            loaded.backend,
            loaded.seconds,
        )
    importlib.import_module("weighbridge.flows")  # or the first run would wait for it


def give_way(log: Log) -> None:
    """Give the model up if another program of this machine waits for it.

    Call in the thread of flow runs, while there is none.
    """
    from weighbridge.tasks.loading import hand_over

    if hand_over():
        log.info("gave the model up, as another program waits for it; the next run loads it again")


def run_here(flow_run_id: UUID, begin: Callable[[], bool]) -> tuple[bool, str | None]:
    """Run a flow run in this process and thread, by its deployment's entry point.

    Args:
        flow_run_id: The flow run, `Pending`.
        begin: Asked right before it starts whether it still should.

    Returns:
        Whether it began, and why it did not end by itself: None if it did, or another
        state came from the server.
    """
    from prefect.exceptions import Abort, Pause
    from prefect.flow_engine import load_flow, load_flow_run, run_flow

    if not begin():
        return False, None
    try:
        flow_run = load_flow_run(flow_run_id)
        run_flow(load_flow(flow_run), flow_run=flow_run, return_type="state")
    except (Abort, Pause):
        return True, None  # the server has given it another state
    except BaseException as error:  # noqa: BLE001 - a KeyboardInterrupt must not end the worker
        return True, f"the flow could not be run: {type(error).__name__}: {error}"
    return True, None
