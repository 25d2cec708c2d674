"""The rows of a Parquet file as records, a few at a time.

A column chunk is read through a buffer, page by page, so a row group may be as large as
the file. Types are kept where JSON has them; timestamps, dates and times become ISO
text (in UTC with a zone), durations ISO text in seconds, decimals and UUIDs their text,
maps objects. A value that JSON cannot hold (bytes, NaN) refuses its row. A part of a row
group that cannot be read gives one bad record for each of its rows: the file says how
many there are, so positions and counts stay right.

pyarrow has no types of its own; they are `Any` here.
"""

import importlib
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, cast

from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.refusals import (
    MAX_RECORD_BYTES,
    Record,
    Refusal,
    bad_cell,
    duration,
    json_value,
    quoted,
    refuse,
    too_long,
)

_ROWS = 256
_BATCH_BYTES = 4 * 2**20
_BUFFER_BYTES = 2**20
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_SECOND = 10**9


def parquet_columns(path: Path) -> list[str]:
    """Return the names of the columns.

    Raises:
        SourceError: It is not a Parquet file, or a damaged one.
    """
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def parquet_records(path: Path) -> Iterator[Record]:
    """Yield one record per row."""
    with _opened(path) as file:
        row = 0
        for group in range(file.num_row_groups):
            end = row + file.metadata.row_group(group).num_rows
            for values, refusal in _group(file, group, row):
                yield Record(None, values, refusal, f"in row {row + 1}")
                row += 1
            # What a damaged group does not give is refused row by row.
            for lost in range(row, end):
                yield Record(None, {}, _unreadable(lost, "its part of the file is damaged"))
            row = end


def _pyarrow(module: str = "pyarrow") -> Any:
    return importlib.import_module(module)


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    pa, pq = _pyarrow(), _pyarrow("pyarrow.parquet")
    try:
        file: Any = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, ValueError) as error:
        raise SourceError(
            f"documents must be a whole Parquet file, and {path} is damaged: {_first_line(error)}",
            hint="copy or export it again",
        ) from error
    try:
        yield file
    finally:
        file.close(force=True)


def _group(file: Any, group: int, first: int) -> Iterator[tuple[dict[str, Any], Refusal | None]]:
    """Yield the rows of a row group, up to where it cannot be read."""
    pa = _pyarrow()
    about = file.metadata.row_group(group)
    each = max(1, about.total_byte_size // max(1, about.num_rows))
    rows = max(1, min(_ROWS, _BATCH_BYTES // each))
    row = count(first)
    batches = file.iter_batches(batch_size=rows, row_groups=[group], use_threads=False)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError, ValueError):
            return
        if batch is None:
            return
        names: list[str] = batch.schema.names
        columns = [_cells(column) for column in batch.columns]
        for cells in zip(*columns, strict=True):
            yield _row(names, cells, next(row))


def _row(
    names: list[str], cells: tuple[Any, ...], row: int
) -> tuple[dict[str, Any], Refusal | None]:
    where = f"in row {row + 1}"
    values: dict[str, Any] = {}
    refusal: Refusal | None = None
    size = 0
    for name, cell in zip(names, cells, strict=True):
        value = cell
        if isinstance(cell, _Slow):
            try:
                value = cell.value()
            except UnicodeDecodeError as error:
                refusal = refusal or bad_cell(name, error.object, where)
                continue
            except Refusal as error:
                reason = f"{quoted(name)} {where}: {error.message}"
                refusal = refusal or Refusal(error.code, reason)
                continue
            except (ValueError, OverflowError, ArithmeticError, NotImplementedError) as error:
                reason = f"{quoted(name)} {where} must be a value that text can show"
                refusal = refusal or Refusal(
                    "document.bad_value", f"{reason}, got a {type(error).__name__}"
                )
                continue
        size += len(value) if isinstance(value, str) else 0
        values[name] = value
    if size > MAX_RECORD_BYTES:
        return {}, too_long(where)
    return values, refusal


def _unreadable(row: int, reason: str) -> Refusal:
    return Refusal("document.unreadable", f"row {row + 1} must be readable, and is not: {reason}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


# --- cells --------------------------------------------------------------------------


class _Slow:
    """A cell that is turned into a value by itself, as it may have to be refused."""

    def __init__(self, scalar: Any, convert: Callable[[Any], Any]) -> None:
        self._scalar = scalar
        self._convert = convert

    def value(self) -> Any:
        return self._convert(self._scalar)


def _cells(column: Any) -> list[Any]:
    """Return a column's values, `_Slow` where one may fail on its own."""
    pa = _pyarrow()
    kind = column.type
    quick: bool = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or _is_text(kind)
    if quick or pa.types.is_null(kind):
        try:
            return cast("list[Any]", column.to_pylist())
        except UnicodeDecodeError:
            pass
    if pa.types.is_floating(kind):
        numbers = cast("list[Any]", column.to_pylist())
        if all(number is None or isfinite(number) for number in numbers):
            return numbers
    return [_Slow(scalar, _value) for scalar in column]


def _is_text(kind: Any) -> bool:
    types = _pyarrow().types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _value(scalar: Any) -> Any:  # noqa: PLR0911 - one per kind of type
    """Turn a value of any Arrow type into a JSON value.

    Raises:
        Refusal: JSON cannot hold it.
        ValueError: Arrow cannot give it; also `UnicodeDecodeError`.
    """
    pa = _pyarrow()
    kind, types = scalar.type, pa.types
    if not scalar.is_valid:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        kept = scalar.as_py()
        return kept if isinstance(kept, str) else json_value(kept)
    if types.is_dictionary(kind):
        return _value(scalar.value)
    if types.is_timestamp(kind):
        return _timestamp(scalar.value * _NANOSECONDS[kind.unit], zoned=kind.tz is not None)
    if types.is_time(kind):
        return _timestamp(scalar.value * _NANOSECONDS[kind.unit]).partition("T")[2]
    if types.is_duration(kind):
        return duration(scalar.value * _NANOSECONDS[kind.unit])
    if types.is_date64(kind):
        return _day(scalar.value // 86_400_000)
    if types.is_date32(kind):
        return _day(scalar.value)
    if types.is_map(kind):
        return _object([(_key(_value(pair[0])), _value(pair[1])) for pair in _pairs(scalar)])
    if types.is_nested(kind) and not types.is_struct(kind) and not types.is_union(kind):
        return [_value(item) for item in scalar.values]
    if types.is_struct(kind):
        # By number: a struct may hold two fields of one name.
        return _object([(kind.field(at).name, _value(scalar[at])) for at in range(len(kind))])
    if types.is_union(kind):
        return _value(scalar.value)
    return json_value(scalar.as_py())


def _pairs(scalar: Any) -> list[tuple[Any, Any]]:
    keys, values = scalar.values.field(0), scalar.values.field(1)
    return list(zip(keys, values, strict=True))


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        refuse("document.bad_value", "a key must appear once in an object, and one comes twice")
    return values


def _timestamp(nanoseconds: int, *, zoned: bool = False) -> str:
    """Write a point in time as `datetime.isoformat` does, and nanoseconds where there are any."""
    seconds, rest = divmod(nanoseconds, _SECOND)
    text = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat()[:19]
    if rest:
        text += f".{rest:09d}" if rest % 1000 else f".{rest // 1000:06d}"
    return text + ("+00:00" if zoned else "")


def _day(days: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=days)).isoformat()
