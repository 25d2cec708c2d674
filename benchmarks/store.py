"""The store at a million answers: how fast it is asked, exported and recorded to.

The documents are made up and so are their logits; every row is written by the code that a
run writes with. Queries are timed warm (after one that is not counted), and memory is what
the process grew by over what it had before the export, at its greatest (Linux and macOS
count it over the whole life of a process, so the export runs in one of its own).
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import machine_lines
from sqlalchemy import Engine

from weighbridge.db import (
    AnswerFilter,
    AnswerPage,
    AnswerRecord,
    BatchRecord,
    CheckpointRow,
    ChoiceRecord,
    DocumentRecord,
    ItemRecord,
    RunStart,
    SchemaRow,
    Store,
    count_answers,
    open_engine,
    results,
    sqlite_url,
)

FIELDS = {
    "topic": ("enum", ("billing", "login", "bug", "praise", "other")),
    "product": ("enum", ("app", "site", "shop")),
    "language": ("enum", ("english", "german", "french", "other")),
    "urgent": ("boolean", ("false", "true")),
    "refund": ("boolean", ("false", "true")),
    "churn": ("boolean", ("false", "true")),
    "anger": ("score", ("calm", "annoyed", "furious")),
    "effort": ("score", ("low", "middle", "high")),
}
BATCH = 500
EXPORT = """
import resource, sys, time
from pathlib import Path
from weighbridge.db import export_values, open_engine, reading_answers, sqlite_url
from weighbridge.db.queries import RESULT_TYPES
import pyarrow.parquet

def peak():
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024

engine = open_engine(sqlite_url(Path(sys.argv[1])), readonly=True)
before, started = peak(), time.perf_counter()
with reading_answers(engine) as rows:
    done = export_values(rows, Path(sys.argv[2]), columns=RESULT_TYPES)
print(done.rows, time.perf_counter() - started, peak() - before)
"""


def answers(chance: random.Random) -> tuple[AnswerRecord, ...]:
    """Make up the answers to one document."""
    found: list[AnswerRecord] = []
    for field, (kind, choices) in FIELDS.items():
        logits = [chance.gauss(0, 2) for _ in choices]
        best = max(range(len(logits)), key=logits.__getitem__)
        order = sorted(logits, reverse=True)
        records = tuple(map(ChoiceRecord, choices, logits))
        found.append(AnswerRecord(field, kind, records, best, order[0] - order[1]))
    return tuple(found)


def item(position: int, chance: random.Random) -> ItemRecord:
    """Make up a document and its answers."""
    text = f"ticket {position}: " + " ".join(chance.choices(("page", "bill", "crash"), k=12))
    return ItemRecord(
        position=position,
        line=position + 1,
        external_id=f"T-{position:06}",
        document=DocumentRecord(hashlib.sha256(text.encode()).hexdigest(), text, len(text)),
        status="scored",
        metadata={"customer": position % 977},
        answers=answers(chance),
    )


def start() -> RunStart:
    """Begin a run as the flow does."""
    return RunStart(
        flow_run_id=None,
        name="bench",
        host="bench",
        pid=os.getpid(),
        schema=SchemaRow("5c" * 32, "bench", "{}"),
        checkpoint=CheckpointRow("c0" * 32, "none"),
        temperature=1.0,
        temperature_kind="default",
        temperature_source="nothing is known",
        documents_source="made up",
        mode="auto",
        layout="schema-first",
        encoding="labels",
        contract=None,
        dtype="float32",
        prompt_version="1",
        max_input_tokens=4096,
        backend="none",
    )


def fill(engine: Engine, documents: int) -> float:
    """Record one run; return the seconds that recording took, without making rows up."""
    store, chance, seconds = Store(engine), random.Random(4), 0.0
    run_id = store.begin_run(start()).run_id
    for first in range(0, documents, BATCH):
        items = tuple(item(n, chance) for n in range(first, min(first + BATCH, documents)))
        batch = BatchRecord(datetime.now(UTC), None, "auto", "none", items)
        began = time.perf_counter()
        store.record_batch(run_id, batch)
        seconds += time.perf_counter() - began
    store.finish_run(run_id, "completed", documents=documents)
    return seconds


def median_seconds(ask: Callable[[], object], times: int) -> float:
    """Time a query, after one that warms the caches up."""
    ask()
    taken: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure(path: Path, documents: int, times: int) -> dict[str, Any]:
    """Build a store, ask it, export it."""
    writer = open_engine(sqlite_url(path))
    recording = fill(writer, documents)
    writer.dispose()
    engine = open_engine(sqlite_url(path), readonly=True)
    topic = AnswerFilter(fields=("topic",))
    least, most = AnswerPage("probability", limit=50), AnswerPage("probability", True, limit=50)
    high = AnswerFilter(fields=("topic",), min_probability=0.9)
    found: dict[str, Any] = {
        "documents": documents,
        "answers": documents * len(FIELDS),
        "store_bytes": path.stat().st_size,
        "recorded_documents_per_second": documents / recording,
        "first_50_seconds": median_seconds(lambda: results(engine, only=topic, page=least), times),
        "last_50_seconds": median_seconds(lambda: results(engine, only=topic, page=most), times),
        "first_page_seconds": median_seconds(lambda: results(engine, limit=50), times),
        "count_above_0.9_seconds": median_seconds(lambda: count_answers(engine, only=high), times),
        "count_above_0.9": count_answers(engine, only=high),
        "count_seconds": median_seconds(lambda: count_answers(engine), 3),
    }
    engine.dispose()
    target = path.with_name("answers.parquet")
    told = subprocess.run(
        [sys.executable, "-c", EXPORT, str(path), str(target)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    found["exported_rows"] = int(told[0])
    found["export_seconds"] = float(told[1])
    found["export_peak_growth_bytes"] = int(told[2])
    found["export_bytes"] = target.stat().st_size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=125_000, help="eight answers each")
    parser.add_argument("--times", type=int, default=9, help="how often each query is timed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder) / "store.db", options.documents, options.times)
    lines = machine_lines()
    if options.json:
        print(json.dumps({"machine": lines, **found}, indent=2))
        return
    print("\n".join(lines))
    for name, value in found.items():
        print(
            f"{name:32} {value:>14,.4f}" if isinstance(value, float) else f"{name:32} {value:>14,}"
        )


if __name__ == "__main__":
    main()
