"""A run without its model: processor time for each document, a re-run, and the store.

Four parts, each in processes of its own, against one real Prefect server:

- `cost`: everything but the model over made-up tickets. The checkpoint has the embedded
  one's tokenizer and next to no weights; what its calls take is measured and left out.
  Processor seconds, by two lengths of the run told apart: for each run, for each document.
- `rerun`: a second run over documents that are decided, by a process that starts anew.
- `store`: answers recorded a second, by what a run records with.
- `switches`: what each optimization around the model brings, by leaving it out.

    python benchmarks/runs.py --json
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from machine import machine_lines
from made_up import next_to_no_weights
from residency import prepared_environment, server
from run_parts import MEASURES
from run_switches import switch_lines, switched

PARTS = ("cost", "rerun", "store", "switches")
BUDGET_PER_DOCUMENT, BUDGET_PER_RUN = 0.0015, 2.0
RERUN_TARGET, STORE_TARGET = 3_000, 10_000


def main() -> int:
    parser = argparse.ArgumentParser(description="A run without its model.")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--documents", type=int, default=2_000, help="of the part cost")
    parser.add_argument("--decided", type=int, default=10_000, help="documents of the part rerun")
    parser.add_argument("--switched", type=int, default=1_000, help="documents of switches")
    parser.add_argument("--embedded", type=int, default=96, help="the same, for a real model")
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
        embedded = Path(environment["WEIGHBRIDGE_CHECKPOINT"])
        checkpoint = next_to_no_weights(embedded, folder)
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
            runs: dict[str, list[dict[str, Any]]] = {
                part: [] for part in given.parts if part != "switches"
            }
            for number in range(given.times):
                for part, measured_runs in runs.items():
                    own = folder / f"{part}-{number}"
                    own.mkdir()
                    measured_runs.append(apart(part, own, environment, given))
            found["parts"] = {part: together(each) for part, each in runs.items()}
            if "switches" in given.parts:
                found["switches"] = switched(
                    partial(measure_switched, folder, environment, embedded, given), given.times
                )
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
        found |= in_own_process(step, told, own, folder)
    if part == "cost":
        documents = found["documents"] - found.pop("short_documents")
        more = found["cpu_seconds"] - found.pop("short_cpu_seconds")
        found["cpu_seconds_per_document"] = more / documents
        found["cpu_seconds_per_run"] = (
            found["cpu_seconds"] - found["documents"] * found["cpu_seconds_per_document"]
        )
    return found


def measure_switched(
    folder: Path,
    environment: dict[str, str],
    embedded: Path,
    given: argparse.Namespace,
    switch: str | None,
    real: bool,
    number: int,
) -> dict[str, Any]:
    """Run once with a switch off, or with all on."""
    own = folder / f"switched-{number}-{'embedded' if real else 'none'}-{switch or 'all on'}"
    own.mkdir()
    told = {
        "folder": str(own),
        "documents": given.embedded if real else given.switched,
        "profile": None,
        "switch": switch,
    }
    used = {**environment, "WEIGHBRIDGE_DATABASE_URL": str(own / "store.db")}
    if real:
        used["WEIGHBRIDGE_CHECKPOINT"] = str(embedded)
    return in_own_process("switched", told, used, own)


def in_own_process(
    step: str, told: dict[str, Any], environment: dict[str, str], folder: Path
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", step, json.dumps(told)]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{step} must end well, and did not:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


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
    if "switches" in result:
        print("\nswitches")
        print("\n".join(switch_lines(result["switches"])))


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
