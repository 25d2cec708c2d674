"""What kind of file it is, by its name and its first bytes; refuses what cannot hold records."""

import glob
from enum import StrEnum
from pathlib import Path

from weighbridge.tasks.compression import (
    BOM,
    HEAD_BYTES,
    Compression,
    shows_json_lines,
    sniff,
)
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.template import TextField

_CONTAINERS = {
    b"PK\x03\x04": "a ZIP archive or a spreadsheet",
    b"%PDF-1.": "PDF",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"ARROW1\x00\x00": "an Arrow file",
    b"\xd0\xcf\x11\xe0": "an old Office file",
}
_SQLITE = b"SQLite format 3\x00"
_PARQUET = b"PAR1"


class SourceFormat(StrEnum):
    """How a source holds its records."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    TEXT = "text"
    SQL = "sql"


_SUFFIXES = {
    ".jsonl": SourceFormat.JSONL,
    ".ndjson": SourceFormat.JSONL,
    ".json": SourceFormat.JSON,
    ".csv": SourceFormat.CSV,
    ".tsv": SourceFormat.TSV,
    ".parquet": SourceFormat.PARQUET,
    ".pq": SourceFormat.PARQUET,
    ".md": SourceFormat.TEXT,
    ".markdown": SourceFormat.TEXT,
    ".rst": SourceFormat.TEXT,
}


def is_many(path: Path) -> bool:
    """Tell a folder or a glob from a file."""
    try:
        return path.is_dir() or (glob.has_magic(str(path)) and not path.exists())
    except (OSError, ValueError):
        return False


def does_not_exist(path: Path) -> SourceError:
    """Return the error of a name that nothing has."""
    return SourceError(
        f"documents must be an existing file, and {path} does not exist",
        hint=f"a relative path starts at {Path.cwd()}",
    )


def read_head(
    path: Path, text: TextField, kind: SourceFormat | None
) -> tuple[bytes, Compression | None]:
    """Return the first bytes of a file that can hold records, unpacked, and its packing."""
    try:
        if path.exists() and not path.is_file():
            raise SourceError(
                f"documents must be a regular file, and {path} is a pipe or a device",
                hint="read a pipe with - instead of a file name",
            )
        head, packing = sniff(path)
    except FileNotFoundError as error:
        raise does_not_exist(path) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"documents must be a readable file, got {path}: {reason}") from error
    if not head.removeprefix(BOM).strip() and len(head) < HEAD_BYTES:
        raise SourceError(f"documents must hold at least one record, and {path} is empty")
    if kind is not SourceFormat.PARQUET and not head.startswith(_PARQUET):
        _check_text(path, head, text)
    return head.removeprefix(BOM), packing


def _check_text(path: Path, head: bytes, text: TextField) -> None:
    """Refuse what is another kind of file as a whole, not record by record."""
    # The payload fractions behind the magic are the same in every SQLite file.
    if head.startswith(_SQLITE) and head[21:24] == b"\x40\x20\x20":
        raise SourceError(
            f"{path} is an SQLite database, and its documents need a query",
            hint="""name one: --query "SELECT id, text FROM tickets ORDER BY id" """.strip(),
        )
    # One broken record must not refuse the file: what shows records is read as records.
    if shows_json_lines(head):
        return
    for magic, name in _CONTAINERS.items():
        if head.startswith(magic):
            raise SourceError(
                f"documents must be records in text or Parquet, and {path} is {name}",
                hint="export it as CSV or JSONL in UTF-8; gzip and zstd are read as they are",
            )
    first = head.partition(b"\n")[0]
    if any(name.encode() in first for name in text.columns):
        return
    even, odd = head[0::2], head[1::2]
    marked = head.startswith((b"\xff\xfe", b"\xfe\xff")) and 0 in head
    if marked or (len(head) >= 4 and not (any(even) and any(odd))):
        raise SourceError(
            f"documents must be UTF-8 text, and {path} is UTF-16 or UTF-32",
            hint=f"convert it: iconv -f UTF-16 -t UTF-8 {path} > documents{path.suffix}",
        )
    controls = sum(byte < 0x20 and byte not in b"\t\n\r\f\x1b" for byte in head)
    if controls >= 16 and controls * 20 > len(head):
        raise SourceError(
            f"documents must be records in text or Parquet, and {path} is a binary file"
        )


def format_of(path: Path, head: bytes) -> SourceFormat:
    """Go by the name, except where the first bytes leave no doubt."""
    if head.startswith(_PARQUET):
        return SourceFormat.PARQUET
    inner = path.with_suffix("") if path.suffix.lower() in {".gz", ".zst", ".zstd"} else path
    named = _SUFFIXES.get(inner.suffix.lower())
    start = head.lstrip()[:1]
    if named is SourceFormat.JSON and start == b"{":
        return SourceFormat.JSONL  # many a file of JSON lines is called .json
    if named is not None:
        return named
    if start == b"[":
        return SourceFormat.JSON
    return SourceFormat.JSONL if start == b"{" else SourceFormat.CSV
