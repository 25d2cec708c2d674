"""Answers on their way out of the store: into a file, or as text to stdout."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge.deployments.console import (
    SafeOutput,
    answer_console,
    print_hint,
    print_note,
)
from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from weighbridge.db import CsvStyle, Exported, ExportFormat

Rows = Iterable[Sequence[Any]]


def write_run(engine: "Engine", run_id: int, path: Path) -> None:
    """Write all answers of a run to a file, in the format that its name asks for."""
    from weighbridge.db.queries import RESULT_TYPES, reading_answers

    with reading_answers(engine, run_id) as rows:
        write_file(rows, path, columns=RESULT_TYPES, source=run_named(engine, run_id))


def run_named(engine: "Engine", run_id: int) -> str:
    """Say which run it is: `run 1 (tickets.csv)`."""
    from weighbridge.db.queries import run_summary

    return f"run {run_id} ({run_summary(engine, run_id).documents_source})"


def write_file(
    rows: Rows,
    path: Path,
    *,
    columns: Mapping[str, type],
    format: "ExportFormat | None" = None,
    style: "CsvStyle | None" = None,
    source: str | None = None,
) -> None:
    """Write rows to a file and say so: how many, and of what."""
    from weighbridge.db import CsvStyle, export_values

    style = style or CsvStyle()
    done = export_values(rows, path, columns=columns, format=format, style=style)
    counted = f"{done.rows:,} row{'' if done.rows == 1 else 's'}"
    print_note(f"{counted}{f' of {source}' if source else ''} written to {path}")
    _warn(done, style)


def write_stdout(
    rows: Rows,
    format: "ExportFormat",
    *,
    columns: Mapping[str, type],
    style: "CsvStyle | None" = None,
) -> None:
    """Write rows to stdout as they come.

    JSON is escaped where a terminal would act on it, which changes no value. CSV has no
    such escapes: it is exact in a pipe, and printable on a terminal.
    """
    from weighbridge.db import CsvStyle, write_text, write_values

    style = style or CsvStyle()
    terminal = answer_console().is_terminal
    if format == "parquet" and terminal:
        raise CommandError(
            "Parquet must go to a file, as it is no text for a terminal",
            hint="name one with --output answers.parquet, or redirect: > answers.parquet",
        )
    if format in {"json", "jsonl"} or terminal:
        output = SafeOutput(sys.stdout, as_json=format != "csv")
        # A byte order mark is for files: a terminal would show it.
        shown = replace(style, byte_order_mark=False)
        done = write_text(rows, output, format, columns=columns, style=shown)
    else:
        sys.stdout.flush()
        done = write_values(rows, sys.stdout.buffer, format, columns=columns, style=style)
        sys.stdout.buffer.flush()
    _warn(done, style)


def _warn(done: "Exported", style: "CsvStyle") -> None:
    if done.formulas and not style.escape_formulas:
        cells = "1 cell begins" if done.formulas == 1 else f"{done.formulas:,} cells begin"
        print_note(f"{cells} with = + - or @, which a spreadsheet runs as a formula")
        print_hint("--escape-formulas writes ' before such cells")
