"""Writes answers to files, whole or not at all."""

import csv
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from weighbridge.db.errors import ExportRefused

Rows = Iterable[Mapping[str, Any]]


def export_rows(rows: Rows, path: Path, *, columns: Iterable[str]) -> None:
    """Write rows to a file that only the user can read, in the format its suffix names.

    The file appears when it is whole: it is written beside its place and moved.

    Args:
        rows: Values by column name.
        path: Ends in `.json` (an array), `.jsonl` or `.csv`.
        columns: The names of all columns, in order; a CSV file without rows has them too.

    Raises:
        ExportRefused: The suffix names no format, or the file cannot be written.
    """
    write = export_format(path)
    names = list(columns)
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=path.parent, prefix=".export-", delete=False
        ) as file:
            try:
                write(({name: row[name] for name in names} for row in rows), names, file)
            except BaseException:
                Path(file.name).unlink()
                raise
        Path(file.name).replace(path)
    except OSError as error:
        raise ExportRefused(
            f"the output must be a file that can be written, got {path}: {error.strerror}",
            hint="name a file in an existing folder",
        ) from error


def export_format(path: Path) -> Callable[[Rows, list[str], IO[str]], None]:
    """Return what writes the format that a file name asks for.

    Raises:
        ExportRefused: The suffix names no format, or no file can be put there.
    """
    write = _FORMATS.get(path.suffix.lower())
    if write is None:
        raise ExportRefused(
            f"the output must end in {', '.join(_FORMATS)}, got {path.name}",
            hint=f"for example {path.stem or 'answers'}.csv",
        )
    if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
        fault = "it is a folder" if path.is_dir() else f"{path.parent} cannot be written"
        raise ExportRefused(
            f"the output must be a file that can be written, got {path}: {fault}",
            hint="name a file in an existing folder",
        )
    return write


def _json(rows: Rows, names: list[str], file: IO[str]) -> None:
    del names
    json.dump(list(rows), file, ensure_ascii=False, allow_nan=False, indent=1)
    file.write("\n")


def _jsonl(rows: Rows, names: list[str], file: IO[str]) -> None:
    del names
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _csv(rows: Rows, names: list[str], file: IO[str]) -> None:
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


_FORMATS: dict[str, Callable[[Rows, list[str], IO[str]], None]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
}
