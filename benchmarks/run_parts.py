"""What `runs.py` measures, each in a process of its own."""

# ruff: noqa: PLC0415 - Prefect reads its environment when it is imported

import cProfile
import importlib
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_up import EXAMPLES, tickets
from run_switches import SWITCHES
from store import FIELDS, fill

TIME_WENT = "where the time went:"


def measure_short(given: dict[str, Any]) -> dict[str, Any]:
    found = measure_cost(given, documents=given["documents"] // 10, profile=None)
    return {"short_documents": found["documents"], "short_cpu_seconds": found["cpu_seconds"]}


def measure_cost(
    given: dict[str, Any], documents: int | None = None, profile: str | None = "given"
) -> dict[str, Any]:
    """Score distinct tickets; count what the process took, and what the model took of it."""
    count = documents or given["documents"]
    folder = Path(given["folder"])
    path = tickets(folder / f"tickets-{count}.jsonl", count)
    model = ModelTime()
    outcome, timed = scored(
        path, folder / f"cost-{count}.db", given["profile"] if profile else None, model
    )
    assert outcome["scored"] == count, outcome
    return {
        "documents": count,
        "wall_seconds": timed["wall"],
        "cpu_seconds": timed["cpu"] - model.cpu,
        "model_cpu_seconds": model.cpu,
        "model_wall_seconds": model.wall,
        "flow_thread_cpu_seconds": timed["thread"],
        **timed["stages"],
    }


def measure_switched(given: dict[str, Any]) -> dict[str, Any]:
    """Score as `measure_cost` does, with one optimization off, or with all of them on."""
    name = given["switch"]
    if name is not None:
        switch = SWITCHES[name]
        module = importlib.import_module(switch.module)
        assert getattr(module, switch.name) != switch.off, name
        setattr(module, switch.name, switch.off)
    found = measure_cost(given, profile=None)
    return {
        "documents": found["documents"],
        "cpu_seconds": found["cpu_seconds"],
        "wall_seconds": found["wall_seconds"],
        "run_seconds": found["run_seconds"],
    }


def measure_decide(given: dict[str, Any]) -> dict[str, Any]:
    folder = Path(given["folder"])
    path = tickets(folder / "tickets.jsonl", given["documents"])
    outcome, _ = scored(path, folder / "store.db", None, ModelTime())
    return {"documents": outcome["scored"]}


def measure_rerun(given: dict[str, Any]) -> dict[str, Any]:
    folder = Path(given["folder"])
    outcome, timed = scored(
        folder / "tickets.jsonl", folder / "store.db", given["profile"], ModelTime()
    )
    assert outcome["reused"] == given["documents"], outcome
    seconds = flow_seconds()
    return {
        "documents": outcome["documents"],
        "wall_seconds": timed["wall"],
        "cpu_seconds": timed["cpu"],
        "flow_seconds": seconds,
        "documents_per_second": outcome["documents"] / seconds,
        "model_loaded": outcome["model_loaded"],
        **timed["stages"],
    }


def measure_store(given: dict[str, Any]) -> dict[str, Any]:
    from weighbridge.db import open_engine, sqlite_url

    engine = open_engine(sqlite_url(Path(given["folder"]) / "store.db"))
    count, cpu = given["documents"], time.process_time()
    seconds = fill(engine, count)
    return {
        "answers": count * len(FIELDS),
        "answers_per_second": count * len(FIELDS) / seconds,
        "seconds": seconds,
        "cpu_seconds_with_making_them_up": time.process_time() - cpu,
    }


MEASURES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "short": measure_short,
    "long": measure_cost,
    "switched": measure_switched,
    "decide": measure_decide,
    "rerun": measure_rerun,
    "store": measure_store,
}


class ModelTime:
    """Counts the processor time of loading and scoring, of all threads but the flow's own.

    While the model works, the flow's thread waits or records and another makes the next batch
    ready: what they do meanwhile is no part of the model.
    """

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self._depth = 0

    def __enter__(self) -> "ModelTime":
        from weighbridge.scorer.resident import ResidentCheckpoint

        for name in ("score", "load"):
            setattr(ResidentCheckpoint, name, self._timed(getattr(ResidentCheckpoint, name)))
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it: the process ends with what was measured."""

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._depth:
                return function(*arguments, **options)
            self._depth = 1
            cpu, wall = self._others(), time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._depth = 0
                self.cpu += self._others() - cpu
                self.wall += time.perf_counter() - wall

        return call

    def _others(self) -> float:
        flow = (
            each.ident
            for each in threading.enumerate()
            if each is threading.main_thread() or each.name.startswith("weighbridge-preparing")
        )
        clocks = [time.pthread_getcpuclockid(ident) for ident in flow if ident]
        return time.process_time() - sum(map(time.clock_gettime, clocks))


def scored(
    documents: Path, database: Path, profile: str | None, model: ModelTime
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the flow once, as a process that has just started."""
    from weighbridge.flows import ScoreRequest, score_documents

    told = StagesTold()
    logging.getLogger("prefect").handlers[:] = []  # the terminal is none of a run's
    logging.getLogger("prefect.flow_runs").addHandler(told)
    request = ScoreRequest.model_validate(
        {
            "documents": str(documents),
            "schema": str(EXAMPLES / "schemas" / "triage.json"),
            "database": str(database),
            "allow_uncalibrated": True,
        }
    )
    profiler = cProfile.Profile() if profile else None
    with model:
        cpu, wall, thread = time.process_time(), time.perf_counter(), time.thread_time()
        outcome = (
            profiler.runcall(score_documents, request) if profiler else score_documents(request)
        )
        timed: dict[str, Any] = {
            "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall,
            "thread": time.thread_time() - thread,
            "stages": {},
        }
    if told.found:
        timed["stages"] = {
            "stages": told.found,
            # A run's seconds go by the flow; Prefect's own, before and after it, come on top.
            "stages_over_run": sum(told.found.values()) / outcome["seconds"],
            "run_seconds": outcome["seconds"],
            "seconds_hidden_behind_scoring": told.hidden,
        }
    if profiler and profile:
        profiler.dump_stats(profile)
    return outcome, timed


class StagesTold(logging.Handler):
    """Reads the line in which a run tells where its time went."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}
        self.hidden = 0.0

    def emit(self, record: logging.LogRecord) -> None:  # noqa: D102
        line = record.getMessage()
        if line.startswith(TIME_WENT):
            self.hidden = sum(map(float, re.findall(r"and ([\d.]+) s while scoring", line)))
            parts = re.findall(
                r"([a-z ]+) ([\d.,]+) s(?: \([^)]*\))?(?:, |$)", line[len(TIME_WENT) :]
            )
            self.found = {stage.strip(): float(text.replace(",", "")) for stage, text in parts}


def flow_seconds() -> float:
    """Seconds from start to end of the last flow run, by the server's record of it."""
    from prefect import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as api:
        (run,) = api.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
    assert run.start_time
    assert run.end_time
    return (run.end_time - run.start_time).total_seconds()
