"""The command that compares two runs."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from weighbridge.deployments.cli.options import DatabaseOption, JsonOption
from weighbridge.deployments.cli.reading import counted, reading_store, shown
from weighbridge.deployments.comparison import compare
from weighbridge.deployments.console import (
    Column,
    print_answer,
    print_hint,
    print_json,
    print_note,
    print_table,
)

_SHOWN = 20
_NAMED = 5
_DIFFERENCES = (Column("differs"), Column("first"), Column("second"))
_FIELDS = (
    Column("field"),
    Column("documents", "right"),
    Column("same", "right"),
    Column("changed", "right"),
    Column("agreement", "right", digits=3),
    Column("mean |Δp|", "right", digits=3),
)
_CHANGES = (
    Column("field"),
    Column("first"),
    Column("second"),
    Column("documents", "right"),
)
_TESTS = (
    Column("field"),
    Column("value"),
    Column("first", "right"),
    Column("second", "right"),
    Column("left", "right"),
    Column("came", "right"),
    Column("p", "right"),
    Column("p (Holm)", "right"),
)
_RIGHT = (
    Column("field"),
    Column("documents", "right"),
    Column("first right", "right", digits=3),
    Column("second right", "right", digits=3),
    Column("only first", "right"),
    Column("only second", "right"),
    Column("p", "right"),
)
_CHANGED = (
    Column("id"),
    Column("field"),
    Column("first"),
    Column("p", "right", digits=2),
    Column("second"),
    Column("p ", "right", digits=2),
)


def diff(
    first: Annotated[int, typer.Argument(metavar="RUN", help="Number of a run.")],
    second: Annotated[int, typer.Argument(metavar="RUN", help="Number of another.")],
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only this field; may be given several times.", show_default=False
        ),
    ] = None,
    expected: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=COLUMN",
            help="The metadata column that holds the right answers of a field.",
            show_default=False,
        ),
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="List the answers that changed.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"List at most so many answers of a field; {_SHOWN} unless as JSON.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Compare the answers of two runs to the same documents.

    Documents are paired by their text. p says how likely so uneven a change is
    by chance, if documents were as likely to change one way as the other; it
    does not say which run is right: --expected does.

    Example: weighbridge diff 3 4 --changed

    Example: weighbridge diff 3 4 --expected topic=true_topic
    """
    most = limit if limit is not None or as_json else _SHOWN
    with reading_store(database) as engine:
        found = compare(
            engine,
            first,
            second,
            fields=field or (),
            expected=expected or (),
            changed=changed,
            limit=most,
        )
    if as_json:
        print_json(found)
    else:
        print_comparison(found)


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print what `compare` found: the runs' differences, the fields, the changes, the tests."""
    fields: Sequence[Mapping[str, Any]] = found["fields"]
    if found["differences"]:
        _table(_DIFFERENCES, [{**row, "differs": row["name"]} for row in found["differences"]])
    if fields and found["documents"]["paired"]:
        _table(
            _FIELDS,
            [
                {
                    **row,
                    "documents": row["paired"],
                    "mean |Δp|": row["mean_probability_change"],
                }
                for row in fields
            ],
        )
        _print_changes(fields)
        _print_right(fields)
    if found.get("changed"):
        _print_changed(found["changed"])
    _print_documents(found)
    if any(row["name"] == "temperature" for row in found["differences"]):
        print_hint("with one --temperature for both, probabilities compare; it needs no model")


def _print_changes(fields: Sequence[Mapping[str, Any]]) -> None:
    changes = [
        {**change, "field": row["field"], "documents": change["count"]}
        for row in fields
        for change in row["changes"]
    ]
    if not changes:
        return
    _table(_CHANGES, changes[:_SHOWN])
    if len(changes) > _SHOWN:
        print_note(f"{_SHOWN} of {len(changes):,} kinds of change; --field or --json has more")
    tests = [
        {
            **test,
            "field": row["field"],
            "left": test["only_first"],
            "came": test["only_second"],
            "p": _p(test["p"]),
            "p (Holm)": _p(test["p_holm"]),
        }
        for row in fields
        for test in row["values"]
        if test["only_first"] or test["only_second"]
    ]
    _table(_TESTS, tests[:_SHOWN])
    print_note("left, came: documents that lost or got the value; p: how likely so uneven")
    print_note("a split is by chance (exact McNemar; Holm corrects for the field's values).")
    print_note("A small p says that the change has a direction, not which run is right.")


def _print_right(fields: Sequence[Mapping[str, Any]]) -> None:
    told = [(row["field"], row["expected"]) for row in fields if "expected" in row]
    if not told:
        return
    rows = [
        {
            "field": name,
            "documents": each["compared"],
            "first right": each["first_right"],
            "second right": each["second_right"],
            "only first": each["only_first"],
            "only second": each["only_second"],
            "p": _p(each["p"]),
        }
        for name, each in told
    ]
    _table(_RIGHT, rows)
    print_note("a small p here says that one run is right more often, and not by chance")
    for name, each in told:
        if each["without"] or each["unknown"]:
            print_note(
                f"{name}: {each['without']:,} without a value in {each['column']}, "
                f"{each['unknown']:,} with one that is no choice"
            )


def _print_changed(answers: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        {
            "id": answer["external_id"] or f"position {answer['first_position']}",
            "field": answer["field"],
            "first": answer["first_value"],
            "p": answer["first_probability"],
            "second": answer["second_value"],
            "p ": answer["second_probability"],
        }
        for answer in answers
    ]
    _table(_CHANGED, rows)


def _print_documents(found: Mapping[str, Any]) -> None:
    first, second, documents = found["first"], found["second"], found["documents"]
    print_note(f"runs {first} and {second}: {counted(documents['paired'], 'document')} in both")
    for side, run in (("first", first), ("second", second)):
        count = documents[f"only_{side}"]
        if count:
            named = found["unpaired"][side][:_NAMED]
            ids = ", ".join(
                str(shown(each["external_id"]) or f"position {each['position']}") for each in named
            )
            more = ", …" if count > len(named) else ""
            print_note(f"only run {run} answered {counted(count, 'document')}: {ids}{more}")
    for name, reason in found["left_out"].items():
        print_note(f"{shown(name)} is not compared: {reason}")
    if not documents["paired"]:
        print_hint("documents are paired by their whole text; score the same ones in both runs")


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        columns,
        [
            {name: shown(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
            for row in rows
        ],
    )
    print_answer()


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
