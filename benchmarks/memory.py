"""Whether memory stays flat: thousands of documents of every length, one process.

Three parts, each in a process of its own:

- `scorer`: a `ParallelScorer` with next to no weights, so that what surrounds the model shows.
- `flow`: the same documents through the flow of `weighbridge score`, with its store.
- `embedded`: the embedded checkpoint, on fewer and shorter documents.

Lengths are log-uniform, from 1 to 1,500 words (20 to 400 for the embedded checkpoint). The
first quarter of the documents is for warming up; behind it neither what MLX has in use may
grow nor the rest of the resident set. Freed buffers that MLX keeps for later arrays are held
against their own limit: with lengths of every kind they fill slowly. A flow warms up over some
1,000 documents, so it needs 4,000 or more.

    python benchmarks/memory.py --json
"""

# ruff: noqa: PLC0415 - Prefect reads its environment when it is imported

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from held import BOUNDS, MIB, Sample, judged, texts, watched, watching
from machine import machine_lines
from made_up import EXAMPLES, next_to_no_weights
from residency import prepared_environment, server

from weighbridge.scorer.backend import CACHE_LIMIT_BYTES

PARTS = ("scorer", "flow", "embedded")
SCHEMA = EXAMPLES / "schemas" / "triage.json"
LENGTHS = {"scorer": (1, 1_500), "flow": (1, 1_500), "embedded": (20, 400)}
# Beside large arrays allocators take and give back some 10 MiB at a time.
EMBEDDED_BOUNDS = {**BOUNDS, "rest": 16 * MIB}


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether memory stays flat.")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--documents", type=int, default=5_000, help="of the made-up model")
    parser.add_argument("--embedded", type=int, default=500, help="documents of the embedded one")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.add_argument("--measure", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(MEASURES[given.measure](given)))
        return 0
    result = measured(given)
    if given.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if all(flat(part) for part in result["parts"].values()) else 1


def flat(part: dict[str, Any]) -> bool:
    """Whether nothing grows, and MLX's own cache stays within its bound."""
    bounded = part["cached_most_mib"] <= part["cached_limit_mib"]
    return bounded and all(each["flat"] for each in part["held"].values())


def measured(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = prepared_environment(folder)
        real = environment["WEIGHBRIDGE_CHECKPOINT"]
        made = next_to_no_weights(Path(real), folder)
        parts: dict[str, Any] = {}
        for part in given.parts:
            environment |= {
                "WEIGHBRIDGE_CHECKPOINT": real if part == "embedded" else str(made),
                "WEIGHBRIDGE_DATABASE_URL": str(folder / f"{part}.db"),
            }
            if part == "flow":
                with server(environment, folder):
                    parts[part] = apart(part, environment, folder, given)
            else:
                parts[part] = apart(part, environment, folder, given)
    return {"machine": machine_lines(), "parts": parts}


def apart(
    part: str, environment: dict[str, str], folder: Path, given: argparse.Namespace
) -> dict[str, Any]:
    """Measure a part in a process of its own."""
    count = given.embedded if part == "embedded" else given.documents
    command = [sys.executable, __file__, "--measure", part, "--documents", str(count)]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{part} must end well, and did not:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- what is measured, in a process of its own ---------------------------------------


def measure_scorer(given: argparse.Namespace) -> dict[str, Any]:
    """Score documents with one scorer."""
    from weighbridge.scorer import ParallelScorer, Schema

    schema = Schema.load(SCHEMA)
    scorer = ParallelScorer(os.environ["WEIGHBRIDGE_CHECKPOINT"], allow_uncalibrated=True)
    wall, cpu = time.perf_counter(), time.process_time()
    documents = texts(given.documents, *LENGTHS[given.measure])
    samples = watched(lambda batch: scorer.score_batch(batch, schema), documents, given.documents)
    bounds = EMBEDDED_BOUNDS if given.measure == "embedded" else BOUNDS
    return told(samples, bounds, time.perf_counter() - wall, time.process_time() - cpu)


def measure_flow(given: argparse.Namespace) -> dict[str, Any]:
    """Score the same documents by the flow; look at the process whenever some are scored."""
    from weighbridge.flows import ScoreRequest, score_documents

    path = Path("documents.jsonl").absolute()
    with path.open("w", encoding="utf-8") as file:
        for text in texts(given.documents, *LENGTHS[given.measure]):
            file.write(json.dumps({"text": text}) + "\n")
    request = {"documents": str(path), "schema": str(SCHEMA), "allow_uncalibrated": True}
    wall, cpu = time.perf_counter(), time.process_time()
    with watching(given.documents) as samples:
        outcome = score_documents(ScoreRequest.model_validate(request))
    if outcome["scored"] != given.documents:
        raise SystemExit(f"every document must be scored, got {outcome}")
    return told(samples, BOUNDS, time.perf_counter() - wall, time.process_time() - cpu)


def told(samples: list[Sample], bounds: dict[str, int], wall: float, cpu: float) -> dict[str, Any]:
    return {
        "documents": samples[-1].documents,
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_mib": round(max(each.peak for each in samples) / MIB, 2),
        "held": judged(samples, bounds),
        "resident_most_mib": round(max(each.resident for each in samples) / MIB, 2),
        "cached_most_mib": round(max(each.cached for each in samples) / MIB, 2),
        "cached_limit_mib": CACHE_LIMIT_BYTES / MIB,
        "samples": [each._asdict() for each in samples],
    }


MEASURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "scorer": measure_scorer,
    "flow": measure_flow,
    "embedded": measure_scorer,
}


def show(result: dict[str, Any]) -> None:
    for line in result["machine"]:
        print(line)
    for part, found in result["parts"].items():
        print(
            f"{part}: {found['documents']:,} documents in {found['seconds']} s, "
            f"{found['cpu_seconds']} CPU s; MiB: MLX at most {found['peak_mib']}, its cache "
            f"{found['cached_most_mib']} of {found['cached_limit_mib']:.0f}, resident "
            f"{found['resident_most_mib']}"
        )
        print(f"  {'':<10}{'first':>9}{'last':>9}{'most':>9}{'trend':>9}{'step':>9}{'bound':>9}")
        for figure, row in found["held"].items():
            names = ("first", "last", "most", "trend", "step", "bound")
            figures = "".join(f"{row[f'{name}_mib']:>9.1f}" for name in names)
            print(f"  {figure:<10}{figures}{'' if row['flat'] else '  GROWS'}")


if __name__ == "__main__":
    sys.exit(main())
