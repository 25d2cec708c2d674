"""Seconds of each mode on the sample tickets, medians and ratios in one run.

Process CPU seconds beside wall seconds, since machines are shared; modes take
turns, so that a slow minute hits all of them.

    python benchmarks/modes.py --documents 4 --repeats 3
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from machine import machine_lines

from weighbridge.scorer import ParallelScorer, Schema, ScoreResult
from weighbridge.tasks.scorers import ScorerSpec, open_scorer

EXAMPLES = Path(__file__).parent.parent / "examples"
MODES = ("independent", "cached_serial", "parallel", "auto")
BASELINE = "independent"


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds of each mode.")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    scorer = open_scorer(ScorerSpec())
    tickets = (EXAMPLES / "documents" / "tickets.jsonl").read_text(encoding="utf-8").split("\n")
    texts = [json.loads(line)["text"] for line in tickets[: arguments.documents]]
    for line in machine_lines():
        print(line)
    print(f"{'fields':>6}  {'mode':<14}{'CPU s':>8}{'wall s':>8}{'ratio':>8}  labels  max |dp|")
    agreed = True
    for name in ("sentiment", "triage", "incident"):
        schema = Schema.load(EXAMPLES / "schemas" / f"{name}.json")
        agreed &= compare(scorer, texts, schema, arguments.repeats)
    return 0 if agreed else 1


def compare(scorer: ParallelScorer, texts: list[str], schema: Schema, repeats: int) -> bool:
    """Measure all modes on one schema; return whether their labels agree."""
    seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    results: dict[str, list[ScoreResult]] = {}
    scorer.score_batch(texts[:1], schema)  # loads and warms up
    for _ in range(repeats):
        for mode in MODES:
            wall, cpu = time.perf_counter(), time.process_time()
            scored = scorer.score_batch(texts, schema, mode)
            seconds[mode].append((time.process_time() - cpu, time.perf_counter() - wall))
            results[mode] = [result for result in scored if isinstance(result, ScoreResult)]
    agreed = True
    reference = results[BASELINE]
    base = statistics.median(cpu for cpu, _ in seconds[BASELINE])
    for mode in MODES:
        cpu = statistics.median(each for each, _ in seconds[mode])
        wall = statistics.median(each for _, each in seconds[mode])
        same = [a.output for a in results[mode]] == [b.output for b in reference]
        agreed &= same
        apart = max(
            float(np.abs(np.subtract(list(x.scores.values()), list(y.scores.values()))).max())
            for a, b in zip(results[mode], reference, strict=True)
            for x, y in zip(a.fields.values(), b.fields.values(), strict=True)
        )
        print(
            f"{len(schema.fields):>6}  {mode:<14}{cpu:>8.3f}{wall:>8.3f}{base / cpu:>7.2f}x"
            f"  {'agree' if same else 'DIFFER':<6}  {apart:.1e}"
        )
    return agreed


if __name__ == "__main__":
    sys.exit(main())
