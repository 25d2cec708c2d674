"""A run without its model: processor time for each document, a re-run, and the store.

Three parts, each in processes of its own, against one real Prefect server:

- `cost`: everything but the model over made-up tickets. The checkpoint has the embedded
  one's tokenizer and next to no weights; what its calls take is measured and left out.
  Processor seconds, by two lengths of the run told apart: for each run, for each document.
- `rerun`: a second run over documents that are decided, by a process that starts anew.
- `store`: answers recorded a second, by what a run records with.

    python benchmarks/runs.py --json
"""

# ruff: noqa: PLC0415 - Prefect reads its environment when it is imported

import argparse
import cProfile
import json
import logging
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine_lines
from made_up import EXAMPLES, next_to_no_weights, tickets
from residency import prepared_environment, server
from store import FIELDS, fill

PARTS = ("cost", "rerun", "store")
BUDGET_PER_DOCUMENT, BUDGET_PER_RUN = 0.0015, 2.0
RERUN_TARGET, STORE_TARGET = 3_000, 10_000
TIME_WENT = "where the time went:"


def main() -> int:
    parser = argparse.ArgumentParser(description="A run without its model.")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--documents", type=int, default=2_000, help="of the part cost")
    parser.add_argument("--decided", type=int, default=10_000, help="documents of the part rerun")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.add_argument("--profile", type=Path, help="a folder for profiles of the flow's thread")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(MEASURES[given.measure[0]](json.loads(given.measure[1]))))
        return 0
    if given.profile:
        given.profile = given.profile.absolute()
        given.profile.mkdir(parents=True, exist_ok=True)
    result = measured(given)
    if given.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0  # a target that is missed is shown; a busy machine misses it for its own reasons


def measured(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = prepared_environment(folder)
        checkpoint = next_to_no_weights(Path(environment["WEIGHBRIDGE_CHECKPOINT"]), folder)
        # Lists of all processes are no part of a run; nor is what the terminal shows of it.
        environment |= {
            "WEIGHBRIDGE_CHECKPOINT": str(checkpoint),
            "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS", "1"),
            "PREFECT_LOGGING_LEVEL": "INFO",
        }
        found: dict[str, Any] = {
            "machine": machine_lines(),
            "prefect": __import__("prefect").__version__,
            "mkl_threads": environment["MKL_NUM_THREADS"],
            "times": given.times,
        }
        with server(environment, folder):
            runs: dict[str, list[dict[str, Any]]] = {part: [] for part in given.parts}
            for number in range(given.times):
                for part, measured_runs in runs.items():
                    own = folder / f"{part}-{number}"
                    own.mkdir()
                    measured_runs.append(apart(part, own, environment, given))
        found["parts"] = {part: together(measured_runs) for part, measured_runs in runs.items()}
    return found


def apart(
    part: str, folder: Path, environment: dict[str, str], given: argparse.Namespace
) -> dict[str, Any]:
    """Measure a part in processes of its own."""
    told = {
        "folder": str(folder),
        "documents": given.decided if part == "rerun" else given.documents,
        "profile": str(given.profile / f"{folder.name}.prof") if given.profile else None,
    }
    steps = {"cost": ["short", "long"], "rerun": ["decide", "rerun"], "store": ["store"]}[part]
    own = {**environment, "WEIGHBRIDGE_DATABASE_URL": str(folder / "store.db")}
    found: dict[str, Any] = {}
    for step in steps:
        command = [sys.executable, __file__, "--measure", step, json.dumps(told)]
        done = subprocess.run(
            command, env=own, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{step} must end well, and did not:\n{done.stderr[-4000:]}")
        found |= json.loads(done.stdout.splitlines()[-1])
    if part == "cost":
        documents = found["documents"] - found.pop("short_documents")
        more = found["cpu_seconds"] - found.pop("short_cpu_seconds")
        found["cpu_seconds_per_document"] = more / documents
        found["cpu_seconds_per_run"] = (
            found["cpu_seconds"] - found["documents"] * found["cpu_seconds_per_document"]
        )
    return found


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the median of each figure; what is no number must not differ."""
    found: dict[str, Any] = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, dict):  # such as the stages of a run: those of the first
            found[name] = value
        else:
            found[name] = round(statistics.median(values), 6) if number else value
    return found


# --- what is measured, in a process of its own ---------------------------------------


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
    "decide": measure_decide,
    "rerun": measure_rerun,
    "store": measure_store,
}


class ModelTime:
    """Counts the processor time of loading and scoring, of all threads but the flow's.

    While the model works, the flow's thread waits or records: what it does meanwhile is
    no part of the model.
    """

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
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
        return time.process_time() - time.clock_gettime(self._clock)


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


def show(result: dict[str, Any]) -> None:
    print("\n".join(result["machine"]))
    print(
        f"Prefect {result['prefect']}, Python {platform.python_version()}, "
        f"MKL_NUM_THREADS={result['mkl_threads']}, medians of {result['times']}"
    )
    for part, figures in result["parts"].items():
        print(f"\n{part}")
        for name, value in figures.items():
            print(f"  {name:34} " + (f"{value:,.4f}" if isinstance(value, float) else str(value)))
        print(f"  target: {verdict(part, figures)}")


def verdict(part: str, figures: dict[str, Any]) -> str:
    if part == "cost":
        budget = BUDGET_PER_RUN + figures["documents"] * BUDGET_PER_DOCUMENT
        right = figures["cpu_seconds"] <= budget
        what = f"at most {budget:.1f} s of processor time"
    elif part == "rerun":
        right = figures["documents_per_second"] >= RERUN_TARGET and not figures["model_loaded"]
        what = f"at least {RERUN_TARGET:,} documents/s, no model loaded"
    else:
        right = figures["answers_per_second"] >= STORE_TARGET
        what = f"at least {STORE_TARGET:,} answers/s"
    return f"{what}: {'met' if right else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main())
