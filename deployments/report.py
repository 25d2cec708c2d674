"""What the scoring commands print when a run is done."""

from typing import Any

from weighbridge.deployments.console import Column, print_hint, print_note, print_table

ANSWER_COLUMNS = (
    Column("id"),
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
    Column("probability", "right", digits=2),
)
_BAR_WIDTH = 20


def print_outcome(database_url: str, outcome: dict[str, Any]) -> None:
    """Print how often each answer was given, then what became of the documents.

    Args:
        database_url: The store.
        outcome: What the flow returned.
    """
    from weighbridge.db.engine import open_engine
    from weighbridge.db.queries import answer_distribution

    engine = open_engine(database_url, readonly=True)
    answers = answer_distribution(engine, outcome["run_id"])
    engine.dispose()
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
                    "share": "█" * max(round(_BAR_WIDTH * answer.count / totals[answer.field]), 1),
                    "probability": answer.mean_probability,
                }
                for answer in answers
            ],
        )
    _print_closing(outcome)


def print_answers(
    database_url: str, outcome: dict[str, Any], *, documents: int | None = None
) -> None:
    """Print the answers of a run, then what became of the documents.

    Args:
        database_url: The store.
        outcome: What the flow returned.
        documents: Only those of the first so many documents.
    """
    from weighbridge.db.engine import open_engine
    from weighbridge.db.queries import results

    engine = open_engine(database_url, readonly=True)
    rows = results(engine, outcome["run_id"])
    engine.dispose()
    if documents is not None:
        rows = [row for row in rows if row["position"] < documents]
    print_table(ANSWER_COLUMNS, [{**row, "id": row["external_id"]} for row in rows])
    _print_closing(outcome)


def _print_closing(outcome: dict[str, Any]) -> None:
    run = outcome["run_id"]
    print_note(
        f"run {run}: {outcome['documents']} documents, {outcome['scored']} scored, "
        f"{outcome['reused']} reused, {outcome['rejected']} rejected "
        f"in {outcome['seconds']:.1f} s ({outcome['documents_per_second']:.1f} documents/s)"
    )
    print_note(f"temperature {outcome['temperature']:g} ({outcome['temperature_kind']})")
    print_note(f"kept in {outcome['database']}")
    if outcome["rejected"]:
        print_hint(f"weighbridge rejected {run} says what was rejected and why")
    print_hint(f"weighbridge results {run} shows the answers; see also runs, query --help")
