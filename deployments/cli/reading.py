"""Commands that only read the store: runs, results, rejected, query."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.options import DatabaseOption, JsonOption, RunArgument
from weighbridge.deployments.console import Column, print_hint, print_json, print_note, print_table
from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from weighbridge.db.records import RunSummary

_FIRST_RUN = "weighbridge demo, or weighbridge score DOCUMENTS --schema FILE"
_RUN_COLUMNS = (
    Column("run", "right"),
    Column("started"),
    Column("status"),
    Column("documents", "right"),
    Column("scored", "right"),
    Column("reused", "right"),
    Column("rejected", "right"),
    Column("schema"),
)
_RESULT_COLUMNS = (
    Column("position", "right"),
    Column("id"),
    Column("field"),
    Column("value"),
    Column("probability", "right", digits=3),
    Column("margin", "right", digits=2),
)
_REJECTED_COLUMNS = (
    Column("position", "right"),
    Column("line", "right"),
    Column("id"),
    Column("code"),
    Column("message"),
)


def runs(
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option(min=1, help="How many of the latest runs to show.")] = 20,
    database: DatabaseOption = None,
) -> None:
    """List the runs, the latest first.

    Example: weighbridge runs --limit 5
    """
    from weighbridge.db import queries

    with _reading(database) as engine:
        found = queries.runs(engine, limit=limit)
    if as_json:
        print_json([_run_values(run) for run in found])
    elif found:
        print_table(_RUN_COLUMNS, [_run_row(run) for run in found])
    else:
        print_note("no runs yet")
        print_hint(_FIRST_RUN)


def results(
    run: RunArgument = None,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Show the answers of a run.

    The probability is at the run's temperature. The margin is the distance of
    the two best choices in logits: near 0 the answer is a coin toss.

    Example: weighbridge results 3 --json
    """
    from weighbridge.db import queries

    with _reading(database) as engine:
        run_id = _existing_run(engine, run)
        found = queries.results(engine, run_id)
    if as_json:
        print_json(found)
        return
    print_table(_RESULT_COLUMNS, [{**row, "id": row["external_id"]} for row in found])
    print_note(f"run {run_id}: {len(found)} answers")


def rejected(
    run: RunArgument = None,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Show which documents of a run were rejected, and why.

    Example: weighbridge rejected
    """
    from weighbridge.db import queries

    with _reading(database) as engine:
        run_id = _existing_run(engine, run)
        found = queries.rejected(engine, run_id)
    if as_json:
        print_json(found)
        return
    if found:
        print_table(_REJECTED_COLUMNS, [{**row, "id": row["external_id"]} for row in found])
    documents = "document" if len(found) == 1 else "documents"
    print_note(f"run {run_id}: {len(found)} {documents} rejected")


def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One statement that only reads.")],
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Run a SQL statement on the store, read-only.

    The views `results`, `choice_probabilities` and `stability` are made for it.

    Example: weighbridge query "select field, value, count(*) from results group by 1, 2"
    """
    from weighbridge.db import queries

    with _reading(database) as engine:
        found = queries.run_sql(engine, sql)
    names = _distinct(found.columns)
    rows = [dict(zip(names, map(_json_value, row), strict=True)) for row in found.rows]
    if as_json:
        print_json(rows)
    else:
        print_table([_sql_column(name, rows) for name in names], rows)


@contextmanager
def _reading(database: str | None) -> Generator["Engine"]:
    from weighbridge.db.engine import open_engine
    from weighbridge.tasks.settings import load_settings

    engine = open_engine(load_settings(database_url=database).database_url, readonly=True)
    try:
        yield engine
    finally:
        engine.dispose()


def _existing_run(engine: "Engine", run: int | None) -> int:
    from weighbridge.db import queries

    if run is None and queries.latest_run_id(engine) is None:
        raise CommandError(
            "there must be a run to show, and the store has none yet",
            hint=_FIRST_RUN,
        )
    return queries.existing_run(engine, run)


def _run_values(run: "RunSummary") -> dict[str, Any]:
    finished = run.finished_at and run.finished_at.isoformat()
    return {**asdict(run), "started_at": run.started_at.isoformat(), "finished_at": finished}


def _run_row(run: "RunSummary") -> dict[str, Any]:
    started = run.started_at.astimezone().strftime("%Y-%m-%d %H:%M")
    return {**asdict(run), "run": run.run_id, "started": started}


def _distinct(names: Sequence[str]) -> list[str]:
    """Number what SQL calls the same (`select a.id, b.id`), so that no value is lost."""
    return [
        name if names.index(name) == index else f"{name}:{names[:index].count(name) + 1}"
        for index, name in enumerate(names)
    ]


def _json_value(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _sql_column(name: str, rows: list[dict[str, Any]]) -> Column:
    numbers = all(isinstance(row[name], int | float | None) for row in rows)
    return Column(name, "right" if rows and numbers else "left")
