r"""Read documents, record by record, from files, folders, pipes and databases.

A record that cannot be a document becomes a `BadRecord` with a code, and the
records around it are not touched. Only a source that cannot be read as records
at all raises `SourceError`. Memory is bounded by the longest record, 16 MiB, never
by the source. Knows no store, no scorer and no Prefect; whether a document is too
long for a model is decided later, by the scorer.

What is decided here and in the readers:

- The format is the named one, else what the name says (`.jsonl`, `.ndjson`, `.json`,
  `.csv`, `.tsv`, `.parquet`, `.md`; also before `.gz` and `.zst`), else what the first
  bytes say. Whether a file is packed with gzip or zstd its first bytes say.
- A line ends at `\n` and nowhere else: U+2028, U+0085 and the like stay inside.
  Blank lines are not records, nor are rows of CSV and TSV whose cells are all empty.
- A JSON record is one object: on one line (JSONL), or an element of an array (see
  `json_array`). Repeated keys, NaN, infinities, integers of more than 4,300 digits and
  nesting below 64 levels are refused: they would be lost or changed on the way to the
  store.
- A CSV file has a header, and each record as many cells as the header. The
  separator is the first of comma, semicolon and tab under which the header
  holds the text columns; of a TSV file it is the tab. A first line `sep=;`, as Excel
  writes it, names another. An unnamed column `i` (from 1) is called `column i`.
- A quote that does not close as it must refuses the line its record starts on,
  and reading goes on at the next line, so that it cannot swallow the rest. For
  the same reason a quoted cell spans at most 16 MiB of lines.
- A packed file that is cut or damaged gives all whole records before the damage, and
  one bad record for the rest.
- The text is a column or a template of several (see `template`); the columns of a
  template stay in the metadata, a single text column does not.
- An id is kept as text: a string as it is, null as no id, any other JSON value
  as its JSON. An empty cell of CSV is no id.
- Text is UTF-8, with or without byte order mark. An undecodable byte, NUL or lone
  surrogate in text, id or metadata refuses the record, and the message names its offset.

Parquet, SQL and text files: see `parquet`, `sql_source` and `text_files`.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from weighbridge.tasks.columns import csv_header, require_columns
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.file_kinds import (
    SourceFormat,
    does_not_exist,
    format_of,
    is_many,
    read_head,
)
from weighbridge.tasks.json_array import json_records
from weighbridge.tasks.parquet import parquet_columns, parquet_records
from weighbridge.tasks.records import csv_records, jsonl_records
from weighbridge.tasks.refusals import (
    TOO_DEEP,
    Record,
    RecordCode,
    Refusal,
    fault_of,
    quoted,
    refuse,
)
from weighbridge.tasks.sql_source import is_url, require_no_password, sql_columns, sql_records
from weighbridge.tasks.template import TextField, parse_text_field
from weighbridge.tasks.text_files import COLUMNS, find_text_files, is_glob, text_records


@dataclass(frozen=True, slots=True)
class Document:
    """A record that can be scored.

    Attributes:
        position: Number of the record in the source, from 0; bad records count.
        line: Line on which the record starts, from 1; None where there are no lines.
        external_id: The caller's id; ids may repeat or be None.
        text: At least one character that is not white space; no NUL, no lone surrogate.
        metadata: All other columns, as JSON values; text from CSV and TSV.
    """

    position: int
    line: int | None
    external_id: str | None
    text: str = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be scored, and why; the message holds none of its values."""

    position: int
    line: int | None
    external_id: str | None
    code: RecordCode
    message: str


def read_documents(
    source: Path | str,
    *,
    text_field: str = "text",
    id_field: str = "id",
    format: SourceFormat | str | None = None,
    query: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Iterator[Document | BadRecord]:
    """Stream the records of a source.

    The source and, where there are some, the names of its columns are checked before this
    returns; the records are read while the iterator is used.

    Args:
        source: A file, a folder or glob of text files, or, with a query, a SQLite file or
            a database URL without a password.
        text_field: Column that holds the document's text, or a template of several.
        id_field: Column that holds the caller's id; may be absent.
        format: A `SourceFormat`; by default name and content decide.
        query: A SQL statement that reads; its rows are the records.
        parameters: The values of the query's parameters, by name.

    Returns:
        One `Document` or `BadRecord` per record, in the order of the source.

    Raises:
        SourceError: Not a readable source, empty, not UTF-8 text, an unknown format, a
            query that is refused, or no text column. While records are read: the disk or
            the database fails.
    """
    text, records = _opened(source, text_field, id_field, format, query, parameters)
    return _documents(str(source), records, text, id_field)


def count_records(
    source: Path | str,
    *,
    text_field: str = "text",
    id_field: str = "id",
    format: SourceFormat | str | None = None,
    query: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> int:
    """Count what `read_documents` gives, without making documents of it.

    Args:
        source: As for `read_documents`, and so all others.
        text_field: The same.
        id_field: The same.
        format: The same.
        query: The same.
        parameters: The same.
        limit: Where to stop counting; None goes to the end.

    Raises:
        SourceError: As `read_documents`.
    """
    _, records = _opened(source, text_field, id_field, format, query, parameters)
    with _readable(str(source)):
        return sum(1 for _ in islice(records, limit))


def _opened(
    source: Path | str,
    text_field: str,
    id_field: str,
    format: SourceFormat | str | None,
    query: str | None,
    parameters: Mapping[str, Any] | None,
) -> tuple[TextField, Iterator[Record]]:
    text = parse_text_field(text_field)
    if text.columns == (id_field,):
        raise SourceError(f"text and id must be two columns, got {quoted(id_field)} for both")
    kind = _named(format)
    if query is not None or kind is SourceFormat.SQL or is_url(str(source)):
        return text, _from_sql(str(source), query, parameters, kind, text, id_field)
    return text, _from_files(str(source), kind, text, id_field)


def _named(format: SourceFormat | str | None) -> SourceFormat | None:
    try:
        return None if format is None else SourceFormat(format)
    except ValueError as error:
        names = ", ".join(SourceFormat)
        raise SourceError(f"format must be one of {names}, got {quoted(str(format))}") from error


def _from_sql(
    source: str,
    query: str | None,
    parameters: Mapping[str, Any] | None,
    kind: SourceFormat | None,
    text: TextField,
    id_field: str,
) -> Iterator[Record]:
    if is_url(source):
        require_no_password(source)
    if query is None:
        raise SourceError(
            "documents in a database need a query, and there is none",
            hint="""name one: --query "SELECT id, text FROM tickets ORDER BY id" """.strip(),
        )
    if kind not in {None, SourceFormat.SQL}:
        raise SourceError(f"a query must come with no format or with sql, got {kind}")
    require_columns("the query", sql_columns(source, query, parameters), text, id_field)
    return sql_records(source, query, parameters)


def _from_files(
    source: str, kind: SourceFormat | None, text: TextField, id_field: str
) -> Iterator[Record]:
    path = Path(source)
    if kind is SourceFormat.TEXT or is_many(path):
        if kind not in {None, SourceFormat.TEXT}:
            raise SourceError(
                f"a folder or glob must hold text files, and the format named is {kind}",
                hint="name one file of records at a time",
            )
        return _from_texts(source, kind, text, id_field)
    head, packing = read_head(path, text, kind)
    kind = kind or format_of(path, head)
    if kind is SourceFormat.TEXT:
        return _from_texts(source, kind, text, id_field)
    if kind is SourceFormat.PARQUET:
        if packing:
            raise SourceError(
                f"a Parquet file must not be packed again, and {path} is in {packing}",
                hint="unpack it first: Parquet compresses its own pages",
            )
        require_columns(str(path), parquet_columns(path), text, id_field)
        return parquet_records(path)
    if kind is SourceFormat.JSON:
        if not head.lstrip().startswith(b"["):
            raise SourceError(
                f"a JSON file must hold an array of objects, and {path} begins otherwise",
                hint=f"take the array out: jq '.name_of_the_array' {path} > array.json; "
                "one object a line is --format jsonl",
            )
        return json_records(path)
    if kind is SourceFormat.JSONL:
        return jsonl_records(path)
    separators = "\t" if kind is SourceFormat.TSV else ",;\t"
    separator, columns = csv_header(path, separators, text, id_field)
    return csv_records(path, separator, columns, id_field)


def _from_texts(
    source: str, kind: SourceFormat | None, text: TextField, id_field: str
) -> Iterator[Record]:
    require_columns("a text file", COLUMNS, text, id_field)
    path = Path(source)
    if not is_glob(source) and not path.exists():
        raise does_not_exist(path)
    return text_records(find_text_files(source, named=kind is SourceFormat.TEXT))


def _documents(
    source: str, records: Iterator[Record], text: TextField, id_field: str
) -> Iterator[Document | BadRecord]:
    with _readable(source):
        for position, record in enumerate(records):
            yield _document(position, record, text, id_field)


@contextmanager
def _readable(source: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise SourceError(
            f"documents must be readable to the end, got {source}: {reason}"
        ) from error


# --- one record -----------------------------------------------------------------


def _document(
    position: int, record: Record, text_field: TextField, id_field: str
) -> Document | BadRecord:
    line, values, refusal, where = record
    where = where or f"on line {line}"
    external_id = _external_id(values.get(id_field))
    try:
        if refusal:
            raise refusal
        _require_plain(values, where)
        text = text_field.text_of(values, where)
    except Refusal as error:
        return BadRecord(position, line, external_id, error.code, error.message)
    # The columns of a template stay: people filter and export by them.
    left_out = {id_field} if text_field.parts else {id_field, *text_field.columns}
    metadata = {name: value for name, value in values.items() if name not in left_out}
    return Document(position, line, external_id, text, metadata)


def _require_plain(values: dict[str, Any], where: str) -> None:
    for name, value in values.items():
        if fault := fault_of([name, value]):
            code = "document.bad_json" if fault == TOO_DEEP else "document.encoding"
            refuse(code, f"{quoted(name)} {where} must be plain text, got {fault}")


def _external_id(value: Any) -> str | None:
    """Return an id that can be kept and shown, or None."""
    if value is None or fault_of([value]):
        return None
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
