"""Two runs compared: what differs between them, which answers changed, and whether by chance.

The tests are McNemar's, exact (Q. McNemar, Psychometrika 12, 1947; binomial, not the
chi-squared approximation): of the documents that changed sides, as many should have gone
one way as the other if the runs do not differ. Several tests on one field are corrected by
Holm's method (Scand. J. Statist. 6, 1979).
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from weighbridge.db import FieldPairs, PairedField, Pairing, RunDetails


def compare(
    engine: "Engine",
    first: int,
    second: int,
    *,
    fields: Sequence[str] = (),
    expected: Sequence[str] = (),
    changed: bool = False,
    limit: int | None = None,
) -> dict[str, Any]:
    """Compare two runs; the value of `diff --json`.

    Args:
        engine: A store.
        first: A run.
        second: Another one.
        fields: Only these; all that can be compared if empty.
        expected: `FIELD=COLUMN`, the metadata column that holds the right answers.
        changed: List the changed answers too.
        limit: List at most so many documents and changed answers of each field.
    """
    from weighbridge.db import (
        count_pairs,
        pair_runs,
        reading_pairs,
        run_details,
        unpaired_documents,
    )

    pairing = pair_runs(engine, first, second, fields=fields)
    columns = _expected_columns(pairing, expected)
    found: dict[str, Any] = {
        "first": first,
        "second": second,
        "differences": _differences(run_details(engine, first), run_details(engine, second)),
        "documents": {
            "paired": pairing.paired,
            "only_first": pairing.only_first,
            "only_second": pairing.only_second,
        },
        "unpaired": {
            "first": unpaired_documents(engine, pairing, "first", limit),
            "second": unpaired_documents(engine, pairing, "second", limit),
        },
        "left_out": dict(pairing.left_out),
        "fields": [],
    }
    for pairs, field in zip(count_pairs(engine, pairing), pairing.fields, strict=True):
        values = _field_values(pairs)
        if field.name in columns:
            values["expected"] = _against(engine, pairing, field, columns[field.name])
        found["fields"].append(values)
    if changed:
        with reading_pairs(engine, pairing, limit=limit) as answers:
            found["changed"] = list(answers)
    return found


def mcnemar(first_only: int, second_only: int) -> float:
    """Give the exact two-sided p value of so uneven a split; 1 when nothing changed sides."""
    if first_only + second_only == 0:
        return 1.0
    # Imported here: most of a second, which only a comparison pays.
    stats: Any = import_module("scipy.stats")
    return float(stats.binomtest(first_only, first_only + second_only, 0.5).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values for there being several, by Holm's step-down method."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected = [1.0] * len(p_values)
    least = 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = least
    return corrected


def _differences(first: "RunDetails", second: "RunDetails") -> list[dict[str, Any]]:
    mine, theirs = _described(first), _described(second)
    return [
        {"name": name, "first": mine[name], "second": theirs[name]}
        for name in mine
        if mine[name] != theirs[name]
    ]


def _described(details: "RunDetails") -> dict[str, Any]:
    run = details.summary
    return {
        "schema": f"{run.schema} ({details.schema_sha256[:12]})",
        "checkpoint": f"{run.checkpoint} ({details.fingerprint[:12]})",
        "temperature": run.temperature,
        "temperature_kind": run.temperature_kind,
        **{name: getattr(run, name) for name in ("layout", "encoding", "contract", "dtype")},
        "prompt_version": details.prompt_version,
        "permutations": run.permutations,
        "mode": run.mode,
        "backend": run.backend,
        "max_input_tokens": details.max_input_tokens,
        "source": run.documents_source,
        **{f"version of {name}": version for name, version in details.versions.items()},
    }


def _field_values(pairs: "FieldPairs") -> dict[str, Any]:
    total, same = pairs.paired, pairs.same
    counted = sorted(pairs.counts.items(), key=lambda entry: (-entry[1], entry[0]))
    changes = [
        {"first": first, "second": second, "count": count}
        for (first, second), count in counted
        if first != second
    ]
    return {
        "field": pairs.field.name,
        "kind": pairs.field.kind,
        "paired": total,
        "same": same,
        "changed": total - same,
        "agreement": same / total if total else None,
        "mean_probability_change": pairs.probability_change,
        "changes": changes,
        "values": _value_tests(pairs),
    }


def _value_tests(pairs: "FieldPairs") -> list[dict[str, Any]]:
    """Test each value against the rest; two values are one question, asked once."""
    choices = pairs.field.choices
    tested = choices if len(choices) > 2 else choices[-1:]
    rows: list[dict[str, Any]] = []
    for value in tested:
        both = pairs.counts.get((value, value), 0)
        first = sum(count for (mine, _), count in pairs.counts.items() if mine == value)
        second = sum(count for (_, theirs), count in pairs.counts.items() if theirs == value)
        rows.append(
            {
                "value": value,
                "first": first,
                "second": second,
                "only_first": first - both,
                "only_second": second - both,
                "p": mcnemar(first - both, second - both),
            }
        )
    for row, corrected in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = corrected
    return rows


def _expected_columns(pairing: "Pairing", expected: Sequence[str]) -> dict[str, str]:
    from weighbridge.deployments.errors import CommandError

    names = {field.name for field in pairing.fields}
    found: dict[str, str] = {}
    for text in expected:
        # A name may hold an equals sign itself: the one is meant that leaves a field before it.
        cuts = [place for place, letter in enumerate(text) if letter == "="]
        field = next((text[:cut] for cut in cuts if text[:cut] in names), None)
        column = "" if field is None else text[len(field) + 1 :]
        if field is None or not column:
            raise CommandError(
                f"--expected must be FIELD=COLUMN with a field that is compared, got {text!r:.80}",
                hint=f"fields compared: {', '.join(sorted(names)) or 'none'}",
            )
        found[field] = column
    return found


def _against(
    engine: "Engine", pairing: "Pairing", field: "PairedField", column: str
) -> dict[str, Any]:
    """Count right and wrong in both runs, by what a metadata column says."""
    from weighbridge.db import reading_expected

    spelled = {choice.casefold(): choice for choice in field.first.choices}
    counts = {"both": 0, "only_first": 0, "only_second": 0, "neither": 0}
    without = unknown = 0
    with reading_expected(engine, pairing, field, column) as rows:
        for first, second, told in rows:
            if told is None or told == "":
                without += 1
                continue
            # JSON's true and a CSV file's True are both the choice `true`.
            right = str(told) if str(told) in spelled.values() else None
            right = right or spelled.get(str(told).strip().casefold())
            if right is None:
                unknown += 1
                continue
            key = ("both", "only_first", "only_second", "neither")
            counts[key[2 * (first != right) + (second != right)]] += 1
    total = sum(counts.values())
    return {
        "column": column,
        "compared": total,
        "without": without,
        "unknown": unknown,
        **counts,
        "first_right": (counts["both"] + counts["only_first"]) / total if total else None,
        "second_right": (counts["both"] + counts["only_second"]) / total if total else None,
        "p": mcnemar(counts["only_first"], counts["only_second"]),
    }
