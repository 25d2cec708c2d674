"""What the scoring commands print when a run is done."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weighbridge.deployments.console import Column, print_note, print_table

if TYPE_CHECKING:
    from weighbridge.db import FieldValue, ResultRow

_ANSWER_COLUMNS = (
    Column("field"),
    Column("value"),
    Column("probability", "right", digits=3),
    Column("margin", "right", digits=2),
)
_DISTRIBUTION_COLUMNS = (
    Column("field"),
    Column("value"),
    Column("documents", "right"),
    Column("share"),
    Column("mean probability", "right", digits=2),
)
_BAR_WIDTH = 20
_TEXT_WIDTH = 20


def print_answers(answers: "Sequence[ResultRow]") -> None:
    """Print the answers to one document, a field a line."""
    if answers:
        print_table(_ANSWER_COLUMNS, answers)


def print_answers_side_by_side(
    answers: "Sequence[ResultRow]", texts: Mapping[int, str], *, documents: int
) -> None:
    """Print the answers to the first documents, a document a line.

    Args:
        answers: Of a run, in the order of documents and fields.
        texts: The documents, by position.
        documents: How many to show.
    """
    rows: dict[int, dict[str, str | None]] = {}
    for answer in answers:
        position = answer["position"]
        if position not in rows:
            if len(rows) == documents:
                break
            rows[position] = {
                "id": answer["external_id"],
                "text": beginning(texts[position], _TEXT_WIDTH),
            }
        rows[position][answer["field"]] = f"{answer['value']} {answer['probability']:.2f}"
    fields = dict.fromkeys(answer["field"] for answer in answers)
    print_table([Column(name) for name in ("id", "text", *fields)], rows.values())


def print_distribution(answers: "Sequence[FieldValue]") -> None:
    """Print how often each answer was given."""
    totals: dict[str, int] = {}
    for answer in answers:
        totals[answer.field] = totals.get(answer.field, 0) + answer.count
    if answers:
        print_table(
            _DISTRIBUTION_COLUMNS,
            [
                {
                    "field": answer.field,
                    "value": answer.value,
                    "documents": answer.count,
                    "share": _share(answer.count / totals[answer.field]),
                    "mean probability": answer.mean_probability,
                }
                for answer in answers
            ],
        )


def print_closing(outcome: Mapping[str, Any]) -> None:
    """Print what became of the documents, at which temperature, how stable, and where it is kept.

    Args:
        outcome: What the flow returned.
    """
    run, documents = outcome["run_id"], outcome["documents"]
    print_note(
        f"run {run}: {documents} document{'' if documents == 1 else 's'}, "
        f"{outcome['scored']} scored, {outcome['reused']} reused, {outcome['rejected']} rejected "
        f"in {outcome['seconds']:.1f} s ({outcome['documents_per_second']:.1f} documents/s)"
    )
    print_note(f"temperature {outcome['temperature']:g} ({outcome['temperature_kind']})")
    if outcome["flip_rate"] is not None:
        print_note(
            f"flip rate {outcome['flip_rate']:.2f}: of {outcome['permutations']} orders of "
            "choices, this share disagreed with the answer"
        )
    print_note(f"kept in {outcome['database']}")


def beginning(text: str, width: int) -> str:
    """Give the beginning of a text as one line, with `…` where something is left out."""
    # Cut before it is split: a text may be large.
    line = " ".join(text[: width * 8].split())
    return line if len(line) <= width and len(text) <= width * 8 else f"{line[: width - 1]}…"


def _share(share: float) -> str:
    return f"{'█' * max(round(_BAR_WIDTH * share), 1):<{_BAR_WIDTH}} {share:4.0%}"
