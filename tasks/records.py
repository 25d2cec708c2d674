"""The raw records of JSONL, CSV and TSV files: cut, decoded, and refused one by one.

A fault belongs to the one record that has it, never to the records around it.
A row of a table whose cells are all empty is a blank line, and a first line `sep=;`,
which Excel writes, names the separator: neither is a record.
Knows nothing of which columns hold a text or an id; `sources` decides that,
and describes the rules for users.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self

from weighbridge.tasks.compression import BrokenStream, open_text
from weighbridge.tasks.refusals import (
    MAX_RECORD_BYTES,
    Record,
    Refusal,
    bad_byte,
    kind_of,
    quoted,
    refuse,
    too_long,
)

_JSON_BLANKS = " \t\r\n"
# A sign that can stand between cells: no letter, digit, quote or blank but the tab.
_SEPARATOR_LINE = re.compile(rb'"?sep=([\t!#-/:-@[-`{-~])"?\r?\n?', re.IGNORECASE)


class _TooLong(Exception):  # noqa: N818
    """A line that is longer than a record may be; it has been read to its end."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class _Lines:
    """The lines of a file, none longer than a record may be; lines can be given back.

    Attributes:
        line: Number of the next line, from 1.
        offset: Its place in the file, in what was unpacked if it is packed.
    """

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._file = file
        self._given_back: list[bytes | _TooLong] = []
        self._broken: BrokenStream | None = None
        self.line = 1
        self.offset = offset

    def read(self) -> bytes:
        """Return the next line with its end, and nothing at the end of the file.

        Raises:
            BrokenStream: What follows cannot be unpacked; also each time after that.
            _TooLong: The next line is too long.
        """
        taken = self._given_back.pop() if self._given_back else self._next()
        if not taken:
            return b""
        self.line += 1
        self.offset += taken.size if isinstance(taken, _TooLong) else len(taken)
        if isinstance(taken, _TooLong):
            raise taken
        return taken

    def give_back(self, lines: list[bytes | _TooLong]) -> None:
        """Read these lines again."""
        self._given_back += reversed(lines)
        self.line -= len(lines)
        self.offset -= sum(line.size if isinstance(line, _TooLong) else len(line) for line in lines)

    def _next(self) -> bytes | _TooLong:
        if self._broken:
            raise self._broken
        try:
            raw = self._file.readline(MAX_RECORD_BYTES + 1)
            if len(raw) <= MAX_RECORD_BYTES or raw.endswith(b"\n"):
                return raw
            size = len(raw)
            while not raw.endswith(b"\n") and (raw := self._file.readline(1 << 20)):
                size += len(raw)
            return _TooLong(size)
        except BrokenStream as error:
            self._broken = error
            raise


def unreadable_rest(error: BrokenStream, line: int) -> Record:
    """Return the one record that stands for all that a broken stream does not give."""
    return Record(
        line,
        {},
        Refusal(
            "document.unreadable",
            f"the compressed file must be whole, and {error} in the record on line {line}; "
            "it and what follows cannot be read, and damage may show in records before it: "
            "copy or download the file again",
        ),
    )


# --- JSON lines -----------------------------------------------------------------


def jsonl_records(path: Path) -> Iterator[Record]:
    """Yield one record per line that is not blank."""
    file, start = open_text(path)
    lines = _Lines(file, start)
    with file:
        while True:
            line, offset = lines.line, lines.offset
            try:
                raw = lines.read()
            except _TooLong:
                yield Record(line, {}, too_long(f"on line {line}"))
                continue
            except BrokenStream as error:
                yield unreadable_rest(error, line)
                return
            if not raw:
                return
            if raw.strip(_JSON_BLANKS.encode()):
                yield json_record(raw, line, offset)


def json_record(raw: bytes, line: int, offset: int) -> Record:
    """Parse the bytes of one record, which must be a JSON object."""
    where = f"on line {line}"
    refusal = bad_byte(raw, where, offset)
    try:
        # A bad byte survives as a lone surrogate, so that the record's id can still be read.
        value = _DECODER.decode(raw.decode("utf-8", "surrogateescape").strip(_JSON_BLANKS))
        if not isinstance(value, dict):
            refuse(
                "document.bad_json", f"the record {where} must be an object, got {kind_of(value)}"
            )
    except Refusal as error:
        return Record(line, {}, refusal or error)
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    except ValueError:
        reason = "an integer has more than 4,300 digits"
    except RecursionError:
        reason = "it is nested too deeply"
    else:
        return Record(line, value, refusal)
    message = f"the record {where} must be one JSON object: {reason}"
    return Record(line, {}, refusal or Refusal("document.bad_json", message))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        refuse("document.bad_json", f"a key must appear once, got {quoted(twice)} again")
    return values


def _finite(literal: str) -> float:
    value = float(literal)
    if value in {float("inf"), float("-inf")}:
        refuse("document.bad_json", "a number must fit a 64-bit float, and one does not")
    return value


def _no_constant(literal: str) -> NoReturn:
    refuse("document.bad_json", f"a number must be finite, got {literal}")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant
)


# --- CSV ------------------------------------------------------------------------


class _RecordLines:
    """Give csv.reader the lines of one record, and remember what it took."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self.taken: list[bytes | _TooLong] = []
        self.size = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if self.taken and self.size > MAX_RECORD_BYTES:
            raise csv.Error(f"a quote is not closed within {MAX_RECORD_BYTES // 2**20} MiB")
        try:
            raw = self._lines.read()
        except _TooLong as error:
            self.taken.append(error)
            raise
        if not raw:
            raise StopIteration
        self.taken.append(raw)
        self.size += len(raw)
        return raw.decode("utf-8", "surrogateescape")


def named_separator(path: Path) -> str | None:
    """Return the separator that the first line names, as Excel's `sep=;` does."""
    file, _ = open_text(path)
    with file:
        try:
            found = _SEPARATOR_LINE.fullmatch(file.readline(16))
        except BrokenStream:
            return None
    return found[1].decode() if found else None


def csv_rows(path: Path, separator: str) -> Iterator[tuple[int, list[str], Refusal | None]]:
    """Yield line, cells and fault of each record, without blank lines and `sep=;`."""
    separated = named_separator(path) is not None
    csv.field_size_limit(sys.maxsize)  # of the whole process; its default refuses 128 KiB
    file, start = open_text(path)
    lines = _Lines(file, start)
    with file:
        if separated:
            lines.read()
        while True:
            line, offset = lines.line, lines.offset
            record = _RecordLines(lines)
            try:
                cells = next(csv.reader(record, delimiter=separator, strict=True))
            except StopIteration:
                return
            except (csv.Error, _TooLong, BrokenStream) as error:
                if not record.taken and isinstance(error, BrokenStream):
                    yield line, [], unreadable_rest(error, line).refusal
                    return
                lines.give_back(record.taken[1:])
                yield line, [], _bad_row(error, line, alone=len(record.taken) == 1)
                continue
            if any(cells):
                raw = b"".join(each for each in record.taken if isinstance(each, bytes))
                yield line, cells, bad_byte(raw, f"on line {line}", offset)


def _bad_row(error: Exception, line: int, *, alone: bool) -> Refusal:
    if alone and isinstance(error, _TooLong):
        return too_long(f"on line {line}")
    reason = error if isinstance(error, csv.Error) else "a quote is not closed"
    return Refusal("document.bad_csv", f"line {line} must be a well quoted CSV record: {reason}")


def csv_records(path: Path, separator: str, columns: list[str], id_field: str) -> Iterator[Record]:
    """Yield one record per row after the header; an empty id cell is left out."""
    rows = csv_rows(path, separator)
    next(rows)
    for line, cells, fault in rows:
        refusal = fault
        whole = len(cells) == len(columns)
        if not refusal and not whole:
            refusal = Refusal(
                "document.bad_csv",
                f"the record on line {line} must have {len(columns)} cells, got {len(cells)}; "
                "a separator or line break inside a cell needs quotes around the cell",
            )
        values: dict[str, Any] = dict(zip(columns, cells, strict=True)) if whole else {}
        if not values.get(id_field):
            values.pop(id_field, None)
        yield Record(line, values, refusal)
