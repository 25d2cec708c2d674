"""What the reading commands share, and the plain ones among them: rejected, query."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.answers import write_file, write_stdout
from weighbridge.deployments.cli.options import DatabaseOption, JsonOption, RunArgument
from weighbridge.deployments.cli.result_options import (
    DecimalOption,
    EscapeOption,
    ExcelOption,
    FormatOption,
    OutputOption,
    SeparatorOption,
    spreadsheet_style,
    written_format,
)
from weighbridge.deployments.console import (
    Column,
    answer_console,
    print_json,
    print_note,
    print_table,
)
from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from sqlalchemy import Engine

FIRST_RUN = "weighbridge demo, or weighbridge score DOCUMENTS --schema FILE"
_REJECTED_COLUMNS = (
    Column("position", "right"),
    Column("line", "right"),
    Column("id"),
    Column("code"),
    Column("message"),
)
# A terminal shows so much of an id or a value; a pipe has all of it.
_SHOWN = 120
# A table is for reading: 16 digits of a float push out the other columns.
_DIGITS = 4


def rejected(
    run: RunArgument = None,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Show which documents of a run were rejected, and why.

    Example: weighbridge rejected
    """
    from weighbridge.db import queries

    with reading_store(database) as engine:
        run_id = chosen_run(engine, run)
        found = queries.rejected(engine, run_id)
    if as_json:
        print_json(found)
        return
    if found:
        rows = [{**row, "id": shown(row["external_id"])} for row in found]
        print_table(_REJECTED_COLUMNS, rows)
    documents = "document" if len(found) == 1 else "documents"
    print_note(f"run {run_id}: {len(found)} {documents} rejected")


def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One statement that only reads.")],
    format: FormatOption = None,
    output: OutputOption = None,
    excel: ExcelOption = False,
    escape_formulas: EscapeOption = False,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Run a SQL statement on the store, read-only.

    The views `results`, `choice_probabilities` and `stability` are made for it, and for
    each schema `answers_NAME` with a row for each document: weighbridge show names it.

    Example: weighbridge query "select field, value, count(*) from results group by 1, 2"

    Example: weighbridge query "select * from results" --output answers.parquet
    """
    style = spreadsheet_style(
        excel=excel, escape_formulas=escape_formulas, separator=separator, decimal=decimal
    )
    chosen = written_format(format, output, style, as_json=as_json, count=False)
    from weighbridge.db import common_type, queries

    with reading_store(database) as engine:
        found = queries.run_sql(engine, sql)
    names = _distinct(found.columns)
    # What JSON has no word for; the other files hold such numbers as they are.
    value = _no_bytes if chosen in {"csv", "parquet"} else _json_value
    values = [[value(each) for each in row] for row in found.rows]
    if as_json or chosen is None:
        rows = [dict(zip(names, row, strict=True)) for row in values]
        if as_json:
            print_json(rows)
            return
        print_table([_sql_column(name, rows) for name in names], rows)
        if not rows:
            print_note("0 rows")
        return
    columns = {
        name: common_type([row[place] for row in values]) for place, name in enumerate(names)
    }
    if output is None:
        write_stdout(values, chosen, columns=columns, style=style)
    else:
        write_file(values, output, columns=columns, format=chosen, style=style)


@contextmanager
def reading_store(database: str | None) -> Generator["Engine"]:
    """Open the store that an option or the settings name, for reading only."""
    from weighbridge.db.engine import open_engine
    from weighbridge.tasks.settings import load_settings

    engine = open_engine(load_settings(database_url=database).database_url, readonly=True)
    try:
        yield engine
    finally:
        engine.dispose()


def chosen_run(engine: "Engine", run: int | None) -> int:
    """Give the id of a run that is there; None asks for the newest."""
    from weighbridge.db import queries

    if run is None and queries.latest_run_id(engine) is None:
        raise CommandError(
            "there must be a run to show, and the store has none yet",
            hint=FIRST_RUN,
        )
    return queries.existing_run(engine, run)


def shown(text: str | None) -> str | None:
    """Cut a text that would fill a terminal; what goes into a pipe or a file is whole."""
    if text is None or len(text) <= _SHOWN or not answer_console().is_terminal:
        return text
    return f"{text[: _SHOWN - 1]}…"


def counted(count: int, thing: str) -> str:
    """Say how many: `1 answer`, `1,234 answers`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _distinct(names: Sequence[str]) -> list[str]:
    """Number what SQL calls the same (`select a.id, b.id`), so that no value is lost."""
    return [
        name if names.index(name) == index else f"{name}:{names[:index].count(name) + 1}"
        for index, name in enumerate(names)
    ]


def _no_bytes(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _json_value(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _no_bytes(value)


def _sql_column(name: str, rows: list[dict[str, Any]]) -> Column:
    numbers = all(isinstance(row[name], int | float | None) for row in rows)
    return Column(name, "right" if rows and numbers else "left", significant=_DIGITS)
