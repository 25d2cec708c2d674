"""The answers that `results` was asked for, as tables, files and streams."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len

from weighbridge.deployments.answers import run_named, write_file, write_stdout
from weighbridge.deployments.cli.reading import counted, shown
from weighbridge.deployments.console import (
    Column,
    answer_console,
    print_hint,
    print_note,
    print_table,
    printable,
)

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from weighbridge.db import AnswerFilter, AnswerPage, CsvStyle, ExportFormat

_COLUMNS = (
    Column("position", "right"),
    Column("id"),
    Column("field"),
    Column("value"),
    Column("probability", "right", digits=3),
    Column("margin", "right", digits=2),
)
SHOWN = 50
# More rows than this are for a file.
_PRINTABLE = 2000
# The widest a column of `--wide` is shown on a terminal; a longer value is folded.
_WIDEST = 24
# Significant digits of numbers in metadata.
_DIGITS = 4


class ChosenAnswers:
    """The answers that were asked for, in each form that they can be given in."""

    def __init__(
        self,
        engine: "Engine",
        run_id: int,
        only: "AnswerFilter",
        *,
        wide: bool,
        temperature: float | None,
        columns: Sequence[str] = (),
    ) -> None:
        if temperature is not None and wide:
            raise typer.BadParameter("--temperature gives an answer a row: leave out --wide")
        self._engine = engine
        self._run_id = run_id
        self._only = only
        self._wide = wide
        self._temperature = temperature
        self._columns = tuple(dict.fromkeys(columns))

    def count(self) -> int:
        """Count them, whatever the page."""
        from weighbridge.db import count_answers, count_wide

        count = count_wide if self._wide else count_answers
        return count(self._engine, self._run_id, self._only)

    def print_page(self, page: "AnswerPage") -> None:
        """Print a page as a table, and where the rest is."""
        from dataclasses import replace

        total = self.count()
        page = replace(page, limit=page.limit or SHOWN)
        number = self._print_wide(page) if self._wide else self._print_answers(page)
        things = counted(total, "document" if self._wide else "answer")
        if number == total:
            print_note(f"run {self._run_id}: {things}")
            return
        print_note(f"run {self._run_id}: {number:,} of {things}")
        after = page.offset + number
        if number and after < total:
            everything = f"--limit {total} all; " if total <= _PRINTABLE else ""
            print_hint(f"--offset {after} shows the next; {everything}--output FILE.csv writes all")

    def write(
        self, page: "AnswerPage", format: "ExportFormat", output: Path | None, style: "CsvStyle"
    ) -> None:
        """Write them to a file or to stdout, one by one."""
        from weighbridge.db.queries import RESULT_TYPES, column_types

        types: Mapping[str, type] = dict.fromkeys(self._columns, str)
        if format == "parquet":
            # Only Parquet asks for types, which takes a look at every document.
            types = column_types(self._engine, self._run_id, self._columns)

        def written(rows: Iterable[Sequence[Any]], columns: Mapping[str, type]) -> None:
            if output is None:
                write_stdout(rows, format, columns=columns, style=style)
            else:
                source = run_named(self._engine, self._run_id)
                write_file(rows, output, columns=columns, format=format, style=style, source=source)

        if not self._wide:
            with self._reading(page) as rows:
                added = zip(_beside(types, RESULT_TYPES), types.values(), strict=True)
                # At the end: what reads the other columns by place finds them where they were.
                written(rows, {**RESULT_TYPES, **dict(added)})
            return
        with self._reading_wide(page) as (columns, rows):
            named = iter(types.values())
            written(rows, {name: kind or next(named) for name, kind in columns.items()})

    def _reading(self, page: "AnswerPage") -> Any:
        from weighbridge.db import reading_answers, reading_rescaled

        run = (self._engine, self._run_id, self._only, page)
        if self._temperature is None:
            return reading_answers(*run, columns=self._columns)
        return reading_rescaled(*run, temperature=self._temperature, columns=self._columns)

    @contextmanager
    def _reading_wide(
        self, page: "AnswerPage"
    ) -> Generator[tuple[dict[str, type | None], Iterator[Sequence[Any]]]]:
        """Read documents with their metadata before the fields; None is a type to be found."""
        from weighbridge.db.queries import ITEM_TYPES, reading_wide

        run = (self._engine, self._run_id, self._only, page)
        with reading_wide(*run, columns=self._columns) as (fields, rows):
            answers: dict[str, type] = {}
            for each in fields:
                answers |= {each.value: str, each.probability: float}
            added = dict.fromkeys(_beside(self._columns, {**ITEM_TYPES, **answers}))
            first, last = len(ITEM_TYPES), len(ITEM_TYPES) + len(answers)
            moved = ([*row[:first], *row[last:], *row[first:last]] for row in rows)
            yield {**ITEM_TYPES, **added, **answers}, moved

    def _print_answers(self, page: "AnswerPage") -> int:
        from weighbridge.db.queries import RESULT_TYPES

        added = _beside(self._columns, [*RESULT_TYPES, "id"])
        with self._reading(page) as rows:
            found = [dict(zip([*RESULT_TYPES, *added], row, strict=True)) for row in rows]
        for row in found:
            row |= {"id": shown(row["external_id"])}
            row |= {name: _shown(row[name]) for name in ("field", "value", *added)}
        if found:
            beside = [_added_column(name, [row[name] for row in found]) for name in added]
            print_table([*_COLUMNS[:2], *beside, *_COLUMNS[2:]], found)
        return len(found)

    def _print_wide(self, page: "AnswerPage") -> int:
        from weighbridge.db.queries import ITEM_TYPES

        with self._reading_wide(page) as (names, rows):
            first = len(ITEM_TYPES) + len(self._columns)
            # Every second cell is a probability, for which a table has no room.
            found = [[*row[1:first], *row[first::2]] for row in rows]
        told = list(names)
        columns = [Column("position", "right"), Column("id")]
        columns += [
            _added_column(name, [row[place] for row in found])
            for place, name in enumerate(told[len(ITEM_TYPES) : first], 2)
        ]
        columns += [Column(str(shown(name))) for name in told[first::2]]
        fitting = _fitting(columns, found)
        if found:
            headers = [column.name for column in columns]
            cells = (map(_shown, row) for row in found)
            print_table(columns[:fitting], [dict(zip(headers, row, strict=True)) for row in cells])
        if fitting < len(columns):
            left = counted(len(columns) - fitting, "column")
            print_note(f"no room in this terminal for {left} more")
            print_hint("--field NAME chooses columns; --format csv has all of them")
        return len(found)


def _beside(columns: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Name columns of metadata, however like ours their names are: `metadata_topic`."""
    used = {name.casefold() for name in taken}
    found: list[str] = []
    for column in columns:
        name = column
        while name.casefold() in used:
            name = f"metadata_{name}"
        used.add(name.casefold())
        found.append(name)
    return found


def _added_column(name: str, values: Sequence[Any]) -> Column:
    numbers = all(type(value) in {int, float, type(None)} for value in values)
    return Column(name, "right" if numbers else "left", significant=_DIGITS)


def _shown(value: Any) -> Any:
    return shown(value) if isinstance(value, str) else value


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> int:
    """Count the columns that a terminal has room for; a pipe has room for all."""
    console = answer_console()
    if not console.is_terminal:
        return len(columns)
    room, fitting = console.width, 0
    for place, column in enumerate(columns):
        cells = [str(row[place] or "") for row in rows]
        texts = [column.name, *(printable(cell[:_WIDEST]) for cell in cells)]
        room -= min(max(map(cell_len, texts)), _WIDEST) + 2
        if room < -2:
            break
        fitting += 1
    # One field at least, folded if it must be.
    return max(fitting, min(3, len(columns)))
