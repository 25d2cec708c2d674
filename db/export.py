"""Writes answers to files, whole or not at all, and to a stream, row by row.

Texts go out exactly as they are. A spreadsheet runs a cell that begins with `=`, `+`, `-`
or `@` as a formula, and a document's id or a choice may begin so; changing them by itself
would break every join on ids. So a CSV file tells how many such cells it has, and marks
them with an apostrophe only when asked to (`CsvStyle.escape_formulas`).
"""

import csv
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol, cast, get_args

from weighbridge.db.errors import ExportRefused

ExportFormat = Literal["json", "jsonl", "csv", "parquet"]
_SQLITE: Final = b"SQLite format 3\0"
FORMATS: Final[tuple[ExportFormat, ...]] = get_args(ExportFormat)
Columns = Mapping[str, type] | Iterable[str]
# Rows of a Parquet row group: what a reader skips or takes at once, and all that is in memory.
ROW_GROUP: Final = 20_000
# The greatest number of a column of numbers, and the one up to which a float holds each.
_LONGEST_INT: Final = 2**63 - 1
_WHOLE_FLOAT: Final = 2**53
# A number is no formula, whatever its sign.
_FORMULA: Final = re.compile(r"[=@\t\r]|[+-](?![0-9.]+$)")


class Writing(Protocol):
    """What text can be written to."""

    def write(self, text: str, /) -> int:
        """Write a part of it."""
        ...


@dataclass(frozen=True)
class CsvStyle:
    """How a CSV file is written.

    Attributes:
        escape_formulas: Put an apostrophe before cells that a spreadsheet would run.
        byte_order_mark: Begin with one: without it Excel takes UTF-8 for something else.
        separator: What stands between cells.
        decimal: The decimal mark of numbers.
    """

    escape_formulas: bool = False
    byte_order_mark: bool = False
    separator: str = ","
    decimal: str = "."


PLAIN_CSV: Final = CsvStyle()


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        rows: How many.
        formulas: Cells of a CSV file that a spreadsheet takes for a formula, as they came.
    """

    rows: int
    formulas: int = 0


def export_rows(
    rows: Iterable[Mapping[str, Any]],
    path: Path,
    *,
    columns: Columns,
    format: ExportFormat | None = None,
    style: CsvStyle = PLAIN_CSV,
) -> Exported:
    """Write rows to a file as `export_values` does.

    Args:
        rows: Values by column name.
        path: The file.
        columns: The names of all columns, in order; see `export_values`.
        format: See `export_values`.
        style: See `export_values`.

    Raises:
        ExportRefused: The suffix names no format, or the file cannot be written.
    """
    types = _typed(columns)
    values = (tuple(row[name] for name in types) for row in rows)
    return export_values(values, path, columns=types, format=format, style=style)


def export_values(
    rows: Iterable[Sequence[Any]],
    path: Path,
    *,
    columns: Columns,
    format: ExportFormat | None = None,
    style: CsvStyle = PLAIN_CSV,
) -> Exported:
    """Write rows to a file that only the user can read, row by row.

    The file appears when it is whole: it is written beside its place and moved.

    Args:
        rows: Values in the order of the columns.
        path: Ends in `.json` (an array), `.jsonl`, `.csv` or `.parquet`, unless the format
            is given.
        columns: The names of all columns, in order; a file without rows has them too. Given
            with types (`int`, `float`, `bool`, `str`), they are those of Parquet; text
            without. What is no text is written as JSON into a column of text.
        format: In place of the one that the suffix names.
        style: How a CSV file is written.

    Raises:
        ExportRefused: The suffix names no format, or the file cannot be written.
    """
    chosen = export_format(path, format)
    try:
        with tempfile.NamedTemporaryFile(
            "wb", dir=path.parent, prefix=".export-", delete=False
        ) as file:
            partial = Path(file.name)
            try:
                done = write_values(rows, file, chosen, columns=columns, style=style)
                file.close()
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ExportRefused(
            f"the output must be a file that can be written, got {path}: {error.strerror}",
            hint="name a file in an existing folder",
        ) from error
    return done


def export_format(path: Path, format: ExportFormat | None = None) -> ExportFormat:
    """Return the format that a file name asks for, or the one that was asked for by name.

    Raises:
        ExportRefused: The suffix names no format, or another one than was asked for, or no
            file can be put there.
    """
    named: ExportFormat | None = next(
        (each for each in FORMATS if path.suffix.lower() == f".{each}"), None
    )
    chosen = format or named
    if chosen is None:
        raise ExportRefused(
            f"the output must end in {', '.join(f'.{each}' for each in FORMATS)}, got {path.name}",
            hint=f"for example {path.stem or 'answers'}.csv",
        )
    if named not in (None, chosen):
        raise ExportRefused(
            f"the output must end as its format does, got {path.name} for the format {chosen}",
            hint=f"for example {path.with_suffix(f'.{chosen}').name}",
        )
    if fault := _fault(path):
        raise ExportRefused(
            f"the output must be a file that can be written, got {path}: {fault}",
            hint="name another file in an existing folder; without --output it goes to stdout",
        )
    return chosen


def _fault(path: Path) -> str | None:
    """Say why no output can have this name; a former output of ours may be replaced."""
    if path.is_dir():
        return "it is a folder"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"{path.parent} cannot be written"
    if not path.exists():
        return None
    if not path.is_file():
        return "it is a pipe or a device"
    with path.open("rb") as file:
        # The store above all, and the log that SQLite keeps beside it.
        database = file.read(len(_SQLITE)) == _SQLITE
    beside = path.name.endswith(("-wal", "-shm", "-journal"))
    return "it is a SQLite database" if database or beside else None


def write_values(
    rows: Iterable[Sequence[Any]],
    file: IO[bytes],
    format: ExportFormat,
    *,
    columns: Columns,
    style: CsvStyle = PLAIN_CSV,
) -> Exported:
    """Write rows to an open file, which stays open.

    Args:
        rows: Values in the order of the columns.
        file: Open for writing; it need not be one that can seek.
        format: As which format.
        columns: See `export_values`.
        style: See `export_values`.
    """
    if format == "parquet":
        return Exported(_parquet(rows, _typed(columns), file))
    text = TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        return write_text(rows, text, format, columns=columns, style=style)
    finally:
        text.detach()  # flushes too


def write_text(
    rows: Iterable[Sequence[Any]],
    file: Writing,
    format: ExportFormat,
    *,
    columns: Columns,
    style: CsvStyle = PLAIN_CSV,
) -> Exported:
    """Write rows as `write_values` does to what takes text; Parquet is none."""
    names = list(_typed(columns))
    if format == "csv":
        return _csv(rows, names, file, style=style)
    lines = _lines(rows, names)
    return Exported(_jsonl(lines, file) if format == "jsonl" else _json(lines, file))


def _typed(columns: Columns) -> dict[str, type]:
    if isinstance(columns, Mapping):
        return dict(cast("Mapping[str, type]", columns))
    return dict.fromkeys(columns, str)


def _lines(rows: Iterable[Sequence[Any]], names: list[str]) -> Iterator[str]:
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    for row in rows:
        yield encode(dict(zip(names, row, strict=True)))


def _json(lines: Iterator[str], file: Writing) -> int:
    count = 0
    for line in lines:
        file.write(("," if count else "[") + "\n " + line)
        count += 1
    file.write("\n]\n" if count else "[]\n")
    return count


def _jsonl(lines: Iterator[str], file: Writing) -> int:
    count = 0
    for line in lines:
        file.write(line + "\n")
        count += 1
    return count


def common_type(values: Sequence[Any]) -> type:
    """Give the type of a column that holds such values: text where they are mixed."""
    kinds: set[type] = {type(value) for value in values if value is not None}
    whole = [abs(value) for value in values if isinstance(value, int)]
    if kinds == {int, float} and max(whole) <= _WHOLE_FLOAT:
        return float
    # A number of Python may be longer than one of a file.
    if kinds == {int} and max(whole) > _LONGEST_INT:
        return str
    return next((kind for kind in (int, float, bool) if kinds == {kind}), str)


def as_text(value: Any) -> str | None:
    """Give a value as a cell of text: what is no text as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _csv(
    rows: Iterable[Sequence[Any]], names: list[str], file: Writing, *, style: CsvStyle
) -> Exported:
    writer = csv.writer(file, lineterminator="\n", delimiter=style.separator)
    # Readers end a line at a bare carriage return too, and Python quotes it in no other way.
    quoting = csv.writer(
        file, lineterminator="\n", delimiter=style.separator, quoting=csv.QUOTE_ALL
    )
    count = formulas = 0
    if style.byte_order_mark:
        file.write("\ufeff")

    def plain(value: Any) -> Any:
        if isinstance(value, float) and style.decimal != ".":
            return repr(value).replace(".", style.decimal)
        return as_text(value) if isinstance(value, bool | list | dict) else value

    def cells(values: Sequence[Any]) -> Sequence[Any]:
        nonlocal formulas
        found = [isinstance(each, str) and _FORMULA.match(each) is not None for each in values]
        values = [plain(each) for each in values]
        if not any(found):
            return values
        formulas += sum(found)
        if not style.escape_formulas:
            return values
        return [f"'{each}" if one else each for each, one in zip(values, found, strict=True)]

    for row in chain([names], rows):
        broken = any(isinstance(each, str) and "\r" in each for each in row)
        (quoting if broken else writer).writerow(cells(row))
        count += 1
    return Exported(count - 1, formulas)


def _parquet(rows: Iterable[Sequence[Any]], types: Mapping[str, type], file: IO[bytes]) -> int:
    # Imported here: a fifth of a second that no other format pays. It has no types.
    arrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    kinds = {
        **{int: arrow.int64(), float: arrow.float64()},
        **{bool: arrow.bool_(), str: arrow.string()},
    }
    schema = arrow.schema([(name, kinds[kind]) for name, kind in types.items()])
    texts = [kind is str for kind in types.values()]
    source, count = iter(rows), 0
    writer = parquet.ParquetWriter(_Sink(file), schema, compression="zstd")
    with writer:
        while part := list(islice(source, ROW_GROUP)):
            arrays = [
                arrow.array(list(map(as_text, values)) if text else values, type=field.type)
                for values, text, field in zip(zip(*part, strict=True), texts, schema, strict=True)
            ]
            writer.write_batch(arrow.record_batch(arrays, schema=schema))
            count += len(part)
    return count


class _Sink:
    """A file as Arrow writes it: it asks where it stands, which a pipe cannot say."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._written = 0

    def write(self, data: Any) -> int:
        """Write, and count."""
        self._file.write(data)
        self._written += len(data)
        return len(data)

    def tell(self) -> int:
        """Give how much has been written."""
        return self._written

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def close(self) -> None:
        """Leave the file open: it is the caller's."""
