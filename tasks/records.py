r"""The raw records of JSONL and CSV files: cut, decoded, and refused one by one.

A fault belongs to the one record that has it, never to the records around it.
Knows nothing of which columns hold a text or an id; `sources` decides that,
and describes the rules for users.
"""

import csv
import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn, Self, cast

RecordCode = Literal[
    "document.encoding",
    "document.empty",
    "document.missing_text",
    "document.not_text",
    "document.bad_json",
    "document.bad_csv",
]

BOM = b"\xef\xbb\xbf"
MAX_DEPTH = 64
MAX_QUOTED_BYTES = 16 * 2**20
TOO_DEEP = f"more than {MAX_DEPTH} levels"

_JSON_BLANKS = " \t\r\n"


class Refusal(Exception):  # noqa: N818
    """Why one record is not a document."""

    def __init__(self, code: RecordCode, message: str) -> None:
        super().__init__(message)
        self.code: RecordCode = code
        self.message = message


class Record(NamedTuple):
    """What one record holds, and the fault that its values cannot show."""

    line: int
    values: dict[str, Any]
    refusal: Refusal | None


def _open(path: Path) -> tuple[BinaryIO, int]:
    """Open a file after its byte order mark; return it with its position."""
    file = path.open("rb")
    start = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(start)
    return file, start


# --- JSON lines -----------------------------------------------------------------


def jsonl_records(path: Path) -> Iterator[Record]:
    """Yield one record per line that is not blank."""
    file, offset = _open(path)
    with file:
        for line in count(1):
            raw = file.readline()
            if not raw:
                return
            if raw.strip(_JSON_BLANKS.encode()):
                yield _json_record(raw, line, offset)
            offset += len(raw)


def _json_record(raw: bytes, line: int, offset: int) -> Record:
    refusal = _bad_byte(raw, line, offset)
    try:
        # A bad byte survives as a lone surrogate, so that the record's id can still be read.
        value = _DECODER.decode(raw.decode("utf-8", "surrogateescape").strip(_JSON_BLANKS))
        if not isinstance(value, dict):
            refuse("document.bad_json", f"line {line} must be a JSON object, got {kind_of(value)}")
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
    message = f"line {line} must be one JSON object: {reason}"
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

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.raw: list[bytes] = []
        self.size = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if self.raw and self.size > MAX_QUOTED_BYTES:
            raise csv.Error(f"a quote is not closed within {MAX_QUOTED_BYTES // 2**20} MiB")
        raw = self._file.readline()
        if not raw:
            raise StopIteration
        self.raw.append(raw)
        self.size += len(raw)
        return raw.decode("utf-8", "surrogateescape")


def csv_rows(path: Path, separator: str) -> Iterator[tuple[int, list[str], Refusal | None]]:
    """Yield line, cells and fault of each record, blank lines left out."""
    csv.field_size_limit(sys.maxsize)  # of the whole process; its default refuses 128 KiB
    file, offset = _open(path)
    line = 1
    with file:
        while True:
            lines = _RecordLines(file)
            try:
                cells = next(csv.reader(lines, delimiter=separator, strict=True))
            except StopIteration:
                return
            except csv.Error as error:
                refusal = Refusal(
                    "document.bad_csv", f"line {line} must be a well quoted CSV record: {error}"
                )
                yield line, [], refusal
                offset += len(lines.raw[0])
                line += 1
                file.seek(offset)
                continue
            if cells:
                yield line, cells, _bad_byte(b"".join(lines.raw), line, offset)
            offset += lines.size
            line += len(lines.raw)


def csv_records(path: Path, separator: str, columns: list[str], id_field: str) -> Iterator[Record]:
    """Yield one record per row after the header; an empty id cell is left out."""
    rows = csv_rows(path, separator)
    next(rows)
    for line, cells, fault in rows:
        refusal = fault
        if not refusal and len(cells) != len(columns):
            refusal = Refusal(
                "document.bad_csv",
                f"the record on line {line} must have {len(columns)} cells, got {len(cells)}; "
                "a separator or line break inside a cell needs quotes around the cell",
            )
        values: dict[str, Any] = dict(zip(columns, cells, strict=True)) if not refusal else {}
        if not values.get(id_field):
            values.pop(id_field, None)
        yield Record(line, values, refusal)


# --- what no record may hold ----------------------------------------------------


def fault_of(value: Any) -> str | None:
    """Say what cannot be stored in a JSON value: NUL, a lone surrogate, deep nesting."""
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            if fault := _text_fault(item):
                return fault
            continue
        if isinstance(item, dict):
            members = cast("dict[str, Any]", item)
            children = [*members, *members.values()]
        elif isinstance(item, list):
            children = cast("list[Any]", item)
        else:
            continue
        if depth > MAX_DEPTH:
            return TOO_DEEP
        pending += [(child, depth + 1) for child in children]
    return None


def _text_fault(text: str) -> str | None:
    if "\x00" in text:
        return f"NUL at character {text.index(chr(0)) + 1}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code_point = ord(text[error.start])
        return f"the lone surrogate U+{code_point:04X} at character {error.start + 1}"
    return None


def _bad_byte(raw: bytes, line: int, offset: int) -> Refusal | None:
    """Refuse bytes that are not UTF-8, or NUL, which no text may hold."""
    try:
        raw.decode()
        at = raw.find(0)
        if at < 0:
            return None
    except UnicodeDecodeError as error:
        at = error.start
    return Refusal(
        "document.encoding",
        f"the record on line {line} must be UTF-8 text without NUL, got the byte "
        f"0x{raw[at]:02x} at offset {at} of the record ({offset + at} of the file); "
        "save the file as UTF-8",
    )


def kind_of(value: object) -> str:
    """Name the JSON type of a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    for kind, name in ((str, "a string"), (list, "an array"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return "a number"


def quoted(name: str) -> str:
    """Quote the name of a column, safe to print and not longer than 60 characters."""
    return json.dumps(name if len(name) <= 60 else name[:59] + "…")


def refuse(code: RecordCode, message: str) -> NoReturn:
    """Refuse the record at hand."""
    raise Refusal(code, message)
