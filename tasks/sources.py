r"""Read documents, record by record, from JSONL and CSV files.

A record that cannot be a document becomes a `BadRecord` with a code, and the
records around it are not touched. Only a file that cannot be read as records
at all raises `SourceError`. Memory is bounded by the longest record, never by
the file. Knows no store, no scorer and no Prefect; whether a document is too
long is decided later, by the scorer.

What is decided here:

- A line ends at `\n` and nowhere else: U+2028, U+0085 and the like stay inside.
  Blank lines are not records.
- A JSON record is one object on one line. Repeated keys, NaN, infinities,
  integers of more than 4,300 digits and nesting below 64 levels are refused:
  they would be lost or changed on the way to the store.
- A CSV file has a header, and each record as many cells as the header. The
  separator is the first of comma, semicolon and tab under which the header
  holds the text column. An unnamed column `i` (from 1) is called `column i`.
- A quote that does not close as it must refuses the line its record starts on,
  and reading goes on at the next line, so that it cannot swallow the rest. For
  the same reason a quoted cell spans at most 16 MiB of lines.
- An id is kept as text: a string as it is, null as no id, any other JSON value
  as its JSON. An empty cell is no id.
- An undecodable byte, NUL or lone surrogate in text, id or metadata refuses the record.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.records import (
    BOM,
    TOO_DEEP,
    Record,
    RecordCode,
    Refusal,
    csv_records,
    csv_rows,
    fault_of,
    jsonl_records,
    kind_of,
    quoted,
    refuse,
)

_HEAD_BYTES = 64 * 1024
_JSON_START = re.compile(rb"""^[ \t]*\{[ \t]*["}]""", re.MULTILINE)
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
_CONTAINERS = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet",
    b"PAR1": "Parquet",
    b"SQLite format 3\x00": "an SQLite database",
    b"%PDF-": "PDF",
}


class SourceFormat(StrEnum):
    """How a file holds its records."""

    JSONL = "jsonl"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class Document:
    """A record that can be scored.

    Attributes:
        position: Number of the record in the file, from 0; bad records count.
        line: Line on which the record starts, from 1.
        external_id: The caller's id; ids may repeat or be None.
        text: At least one character that is not white space; no NUL, no lone surrogate.
        metadata: All other columns; JSON types from JSONL, text from CSV.
    """

    position: int
    line: int
    external_id: str | None
    text: str = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be scored, and why; the message holds none of its values."""

    position: int
    line: int
    external_id: str | None
    code: RecordCode
    message: str


def read_documents(
    path: Path | str,
    *,
    text_field: str = "text",
    id_field: str = "id",
    format: SourceFormat | str | None = None,
) -> Iterator[Document | BadRecord]:
    """Stream the records of a file.

    The file and, for CSV, its header are checked before this returns; the
    records are read while the iterator is used.

    Args:
        path: A regular file in UTF-8, with or without byte order mark.
        text_field: Column that holds the document's text.
        id_field: Column that holds the caller's id; may be absent.
        format: `jsonl` or `csv`; by default the suffix decides (`.jsonl`, `.ndjson`,
            `.csv`, `.tsv`), and for another suffix the first character.

    Returns:
        One `Document` or `BadRecord` per record, in the order of the file.

    Raises:
        SourceError: Not a readable file, empty, not UTF-8 text, an unknown
            format, or a CSV header without the text column.
    """
    path = Path(path)
    if text_field == id_field:
        raise SourceError(f"text and id must be two columns, got {quoted(text_field)} for both")
    head = _head(path, text_field)
    if _format(path, head, format) is SourceFormat.JSONL:
        records = jsonl_records(path)
    else:
        separator, columns = _header(path, text_field, id_field)
        records = csv_records(path, separator, columns, id_field)
    return (
        _document(position, record, text_field, id_field) for position, record in enumerate(records)
    )


# --- the file -----------------------------------------------------------------


def _head(path: Path, text_field: str) -> bytes:
    """Return the first bytes of a file that can hold records."""
    try:
        if path.is_dir():
            raise SourceError(
                f"documents must be a file, and {path} is a folder",
                hint="name one JSONL or CSV file in it",
            )
        if path.exists() and not path.is_file():
            raise SourceError(
                f"documents must be a regular file, and {path} is a pipe or a device",
                hint="read a pipe with - instead of a file name",
            )
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError as error:
        raise SourceError(
            f"documents must be an existing file, and {path} does not exist",
            hint=f"a relative path starts at {Path.cwd()}",
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"documents must be a readable file, got {path}: {reason}") from error
    if not head.removeprefix(BOM).strip() and len(head) < _HEAD_BYTES:
        raise SourceError(f"documents must hold at least one record, and {path} is empty")
    _check_text(path, head, text_field)
    return head.removeprefix(BOM)


def _check_text(path: Path, head: bytes, text_field: str) -> None:
    """Refuse what is another kind of file as a whole, not record by record."""
    # One broken record must not refuse the file: what shows records is read as records.
    if _JSON_START.search(head) or text_field.encode() in head.partition(b"\n")[0]:
        return
    even, odd = head[0::2], head[1::2]
    marked = head.startswith((b"\xff\xfe", b"\xfe\xff")) and 0 in head
    if marked or (len(head) >= 4 and not (any(even) and any(odd))):
        raise SourceError(
            f"documents must be UTF-8 text, and {path} is UTF-16 or UTF-32",
            hint=f"convert it: iconv -f UTF-16 -t UTF-8 {path} > documents{path.suffix}",
        )
    for magic, name in _CONTAINERS.items():
        if head.startswith(magic):
            raise SourceError(
                f"documents must be JSONL or CSV, and {path} is {name}",
                hint="export it as CSV or JSONL in UTF-8",
            )
    controls = sum(byte < 0x20 and byte not in b"\t\n\r\f\x1b" for byte in head)
    if controls >= 16 and controls * 20 > len(head):
        raise SourceError(f"documents must be JSONL or CSV text, and {path} is a binary file")


def _format(path: Path, head: bytes, named: SourceFormat | str | None) -> SourceFormat:
    name = named or _SUFFIXES.get(path.suffix.lower())
    if name is None:
        start = head.lstrip()[:1]
        if start == b"[":
            raise SourceError(
                f"documents must be JSONL or CSV, and {path} begins with a JSON array",
                hint=f"one object a line: jq -c '.[]' {path} > {path.stem}.jsonl",
            )
        return SourceFormat.JSONL if start == b"{" else SourceFormat.CSV
    try:
        return SourceFormat(name)
    except ValueError as error:
        raise SourceError(f"format must be jsonl or csv, got {quoted(name)}") from error


# --- CSV ------------------------------------------------------------------------


def _header(path: Path, text_field: str, id_field: str) -> tuple[str, list[str]]:
    """Return the separator and the column names of a CSV file."""
    found: list[tuple[str, list[str]]] = []
    for separator in ",;\t":
        try:
            found.append((separator, _columns(path, separator)))
        except SourceError:
            # A quoted header is malformed under every separator but its own.
            if separator == "\t" and not found:
                raise
    separator, columns = next(
        (each for each in found if text_field in each[1]), max(found, key=lambda each: len(each[1]))
    )
    # In a file without a header these are a document. Prefect keeps an error's message, so
    # they stand in the hint, which only the terminal shows.
    names = ", ".join(map(quoted, columns))
    if text_field not in columns:
        raise SourceError(
            f"the header of {path} must have a column {quoted(text_field)}, and has none",
            hint=f"it has {names}\nname the column of the texts with --text-field",
        )
    if id_field != "id" and id_field not in columns:
        raise SourceError(
            f"the header of {path} must have a column {quoted(id_field)}, and has none",
            hint=f"it has {names}\nname the column of the ids with --id-field",
        )
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise SourceError(
            f"the columns of {path} must have different names, and two have the same",
            hint=f"{quoted(twice[0])} comes twice",
        )
    if fault := fault_of(columns):
        raise SourceError(f"the header of {path} must be UTF-8 text, got {fault}")
    return separator, columns


def _columns(path: Path, separator: str) -> list[str]:
    for _, cells, refusal in csv_rows(path, separator):
        if refusal:
            raise SourceError(
                f"{path} must be a CSV file with a header: {refusal.message}",
                hint="the first line names the columns, for example: id,text",
            )
        return [name or f"column {number}" for number, name in enumerate(cells, 1)]
    return []


# --- one record -----------------------------------------------------------------


def _document(
    position: int, record: Record, text_field: str, id_field: str
) -> Document | BadRecord:
    line, values, refusal = record
    external_id = _external_id(values.get(id_field))
    try:
        if refusal:
            raise refusal
        text = _text(values, line, text_field)
    except Refusal as error:
        return BadRecord(position, line, external_id, error.code, error.message)
    metadata = {name: value for name, value in values.items() if name not in {text_field, id_field}}
    return Document(position, line, external_id, text, metadata)


def _text(values: dict[str, Any], line: int, text_field: str) -> str:
    for name, value in values.items():
        if fault := fault_of([name, value]):
            code = "document.bad_json" if fault == TOO_DEEP else "document.encoding"
            refuse(code, f"{quoted(name)} on line {line} must be plain text, got {fault}")
    column = quoted(text_field)
    text = values.get(text_field)
    if text is None:
        came = f"{column} is null" if text_field in values else _listed(values)
        refuse("document.missing_text", f"the record on line {line} must have {column}, and {came}")
    if not isinstance(text, str):
        refuse("document.not_text", f"{column} on line {line} must be text, got {kind_of(text)}")
    if not text.strip():
        came = "only white space" if text else "no characters"
        refuse("document.empty", f"{column} on line {line} must not be blank, got {came}")
    return text


def _external_id(value: Any) -> str | None:
    """Return an id that can be kept and shown, or None."""
    if value is None or fault_of([value]):
        return None
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _listed(values: dict[str, Any]) -> str:
    names = [quoted(name) for name in list(values)[:8]]
    return f"has {', '.join(names) or 'no columns'}{', …' if len(values) > 8 else ''}"
