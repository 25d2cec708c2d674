"""What one record of a source is, and why it may not be a document. A leaf.

Every reader yields `Record` values: a fault belongs to the one record that has it,
never to the records around it.
"""

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from math import isfinite
from typing import Any, Literal, NamedTuple, NoReturn, cast
from uuid import UUID

RecordCode = Literal[
    "document.encoding",
    "document.empty",
    "document.missing_text",
    "document.not_text",
    "document.bad_json",
    "document.bad_csv",
    "document.bad_value",
    "document.too_long",
    "document.unreadable",
]

MAX_RECORD_BYTES = 16 * 2**20
MAX_DEPTH = 64
TOO_DEEP = f"more than {MAX_DEPTH} levels"


class Refusal(Exception):  # noqa: N818
    """Why one record is not a document."""

    def __init__(self, code: RecordCode, message: str) -> None:
        super().__init__(message)
        self.code: RecordCode = code
        self.message = message


class Record(NamedTuple):
    """What one record holds, and the fault that its values cannot show.

    Attributes:
        line: Line on which it starts, from 1; None where a source has no lines.
        values: Its columns, as JSON values.
        refusal: Why it is refused whatever its values are, or None.
        where: Where it is if it has no line, such as `in row 3`.
    """

    line: int | None
    values: dict[str, Any]
    refusal: Refusal | None
    where: str = ""


def refuse(code: RecordCode, message: str) -> NoReturn:
    """Refuse the record at hand."""
    raise Refusal(code, message)


def too_long(where: str) -> Refusal:
    """Return the refusal of a record that is longer than memory should hold."""
    limit = f"{MAX_RECORD_BYTES // 2**20} MiB"
    return Refusal("document.too_long", f"the record {where} must be at most {limit} long")


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


def byte_fault(raw: bytes) -> int | None:
    """Return the offset of the first byte that is not UTF-8, or is NUL, which no text may hold."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start
    at = raw.find(0)
    return None if at < 0 else at


def bad_byte(raw: bytes, where: str, offset: int) -> Refusal | None:
    """Refuse a record of text for the bytes it holds.

    Args:
        raw: The record, without a byte order mark.
        where: Where it is, such as `on line 3`.
        offset: Its place in the file; in an unpacked stream, in what was unpacked.
    """
    at = byte_fault(raw)
    if at is None:
        return None
    return Refusal(
        "document.encoding",
        f"the record {where} must be UTF-8 text without NUL, got the byte "
        f"0x{raw[at]:02x} at offset {at} of the record ({offset + at} of the file); "
        "save the file as UTF-8",
    )


def bad_cell(column: str, raw: bytes, where: str) -> Refusal:
    """Refuse a record for a cell of a table that cannot be decoded."""
    at = byte_fault(raw) or 0
    return Refusal(
        "document.encoding",
        f"{quoted(column)} {where} must be UTF-8 text without NUL, got the byte "
        f"0x{raw[at]:02x} at offset {at} of the cell",
    )


def json_value(value: Any) -> Any:  # noqa: PLR0911 - one per kind of type
    """Turn a value of a table into the JSON value that is kept.

    Dates, times, timestamps and durations become ISO text, decimals and UUIDs their text.

    Raises:
        Refusal: `document.bad_value` for what JSON cannot hold: bytes, NaN, infinities,
            or any other type.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not isfinite(value):
            refuse("document.bad_value", f"a number must be finite, got {value}")
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return duration(value // timedelta(microseconds=1) * 1000)
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, dict):
        members = cast("dict[Any, Any]", value)
        return {str(name): json_value(member) for name, member in members.items()}
    if isinstance(value, list | tuple):
        return [json_value(member) for member in cast("list[Any]", value)]
    refuse("document.bad_value", f"a value must be one that JSON can hold, got {kind_of(value)}")


def duration(nanoseconds: int) -> str:
    """Write a span of time as ISO 8601 does, in seconds alone."""
    seconds, rest = divmod(abs(nanoseconds), 10**9)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return f"PT{'-' if nanoseconds < 0 else ''}{seconds}{fraction}S"


def kind_of(value: object) -> str:
    """Name the JSON type of a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    for kind, name in ((str, "a string"), (list, "an array"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    return "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"


def quoted(name: str) -> str:
    """Quote the name of a column, safe to print and not longer than 60 characters."""
    return json.dumps(name if len(name) <= 60 else name[:59] + "…")
