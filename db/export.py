"""Writes answers to files, whole or not at all."""

import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from weighbridge.db.errors import ExportRefused

Rows = Iterable[Mapping[str, Any]]


def export_rows(rows: Rows, path: Path) -> None:
    """Write rows to a file, in the format its suffix names.

    The file appears when it is whole: it is written beside its place and moved.

    Args:
        rows: Values by column name, the same names in each row.
        path: Ends in `.json` (an array), `.jsonl` or `.csv`.

    Raises:
        ExportRefused: The suffix names no format, or the file cannot be written.
    """
    write = export_format(path)
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=path.parent, prefix=path.name, delete=False
        ) as file:
            try:
                write(rows, file)
            except BaseException:
                Path(file.name).unlink()
                raise
        Path(file.name).replace(path)
    except OSError as error:
        raise ExportRefused(
            f"the output must be a file that can be written, got {path}: {error.strerror}",
            hint="name a file in an existing folder",
        ) from error


def export_format(path: Path) -> Callable[[Rows, IO[str]], None]:
    """Return what writes the format that a file name asks for.

    Raises:
        ExportRefused: The suffix names no format.
    """
    write = _FORMATS.get(path.suffix.lower())
    if write is None:
        raise ExportRefused(
            f"the output must end in {', '.join(_FORMATS)}, got {path.name}",
            hint=f"for example {path.stem}.csv",
        )
    return write


def _json(rows: Rows, file: IO[str]) -> None:
    json.dump([dict(row) for row in rows], file, ensure_ascii=False, allow_nan=False, indent=1)
    file.write("\n")


def _jsonl(rows: Rows, file: IO[str]) -> None:
    for row in rows:
        file.write(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")


def _csv(rows: Rows, file: IO[str]) -> None:
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow(row)


_FORMATS: dict[str, Callable[[Rows, IO[str]], None]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
}
