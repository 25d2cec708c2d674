"""Right answers on the sample tickets, by field, beside the most frequent label.

The labels are hand-given (`examples/documents/labels.csv`). A field whose share is
below the most frequent label is one the checkpoint cannot answer.

    python benchmarks/tickets.py
"""

import csv
import json
import sys
from collections import Counter
from pathlib import Path

from machine import machine_lines

from weighbridge.scorer import Schema, ScoreResult
from weighbridge.tasks.scorers import ScorerSpec, open_scorer

EXAMPLES = Path(__file__).parent.parent / "examples"


def main() -> int:
    scorer = open_scorer(ScorerSpec())
    lines = (EXAMPLES / "documents" / "tickets.jsonl").read_text(encoding="utf-8").split("\n")
    tickets = [json.loads(line) for line in lines if line]
    with (EXAMPLES / "documents" / "labels.csv").open(encoding="utf-8", newline="") as file:
        labels = {row["id"]: row for row in csv.DictReader(file)}
    for line in machine_lines():
        print(line)
    print(f"{'schema':<10} {'field':<10} {'choices':>7} {'right':>6} {'most frequent':>14}")
    for name in ("sentiment", "triage", "incident"):
        schema = Schema.load(EXAMPLES / "schemas" / f"{name}.json")
        results = scorer.score_batch([ticket["text"] for ticket in tickets], schema)
        for field in schema.fields:
            given = [labels[ticket["id"]][field.name] for ticket in tickets]
            answers = [answer(result, field.name) for result in results]
            right = sum(map(str.__eq__, answers, given)) / len(given)
            frequent = Counter(given).most_common(1)[0][1] / len(given)
            print(
                f"{name:<10} {field.name:<10} {len(field.choices):>7} {right:>6.2f} "
                f"{frequent:>14.2f}"
            )
    return 0


def answer(result: object, field: str) -> str:
    """Return an answer as the labels spell it, nothing for a rejected document."""
    if not isinstance(result, ScoreResult):
        return ""
    value = result.output[field]
    return str(value).lower() if isinstance(value, bool) else value


if __name__ == "__main__":
    sys.exit(main())
