"""Text files as records: a folder, a glob, or a single file; each file is one document.

- A folder is read with its subfolders: `.txt`, `.text`, `.md`, `.markdown` and `.rst`,
  also packed (`.txt.gz`, `.md.zst`). Hidden files and folders are left out, links to
  folders not followed. A glob takes every file it matches, whatever its name ends with.
- The id is the path below the folder, or below the part of the glob without wildcards,
  with `/` between names; the order is that of the ids. A single file's id is its name.
- There is no metadata: size and time change with a copy, and the path says the rest.
- A file that is not UTF-8, longer than 16 MiB or unreadable is one bad record.
"""

import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from weighbridge.tasks.compression import BOM, BrokenStream, open_stream
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.refusals import MAX_RECORD_BYTES, Record, Refusal, bad_byte, too_long

SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
COLUMNS = ["id", "text"]

_PACKED = ("", ".gz", ".zst")
_ENDS = tuple(suffix + packed for suffix in SUFFIXES for packed in _PACKED)
_RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_RECORD_ENDS = (*(suffix + packed for suffix in _RECORDS for packed in _PACKED), ".db", ".sqlite")


def is_glob(source: str) -> bool:
    """Tell whether a name that no file has is a pattern."""
    return glob.has_magic(source)


def find_text_files(source: str, *, named: bool) -> list[tuple[str, Path]]:
    """Return id and path of the text files that a folder, a glob or a file name stands for.

    Args:
        source: The folder, glob or file.
        named: Whether the format was named, so that a glob may match any file.

    Raises:
        SourceError: There is none, or a glob matches files of records.
    """
    path = Path(source)
    if path.is_dir():
        found = [(each.relative_to(path).as_posix(), each) for each in _below(path)]
        if not found:
            raise SourceError(
                f"a folder must hold text files ({', '.join(SUFFIXES)}), and {path} holds none",
                hint="name one file of records, or other text files with a quoted glob: "
                f"'{path}/**/*.html'",
            )
    elif path.exists() or not is_glob(source):
        found = [(path.name, path)]
    else:
        base = _base(source)
        if "**" in source and base.is_dir():
            list(_below(base))  # refuses a folder that cannot be listed; glob leaves it out
        # Two ** find a file more than once.
        matched = set(glob.iglob(source, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute one
        files = [Path(each) for each in matched if not Path(each).is_dir()]
        found = [(each.relative_to(base).as_posix(), each) for each in files]
        records = [each.name for each in files if each.name.lower().endswith(_RECORD_ENDS)]
        if records and not named:
            raise SourceError(
                f"a glob must match text files, each one document, and {source} matches "
                f"{records[0]}, a file of records",
                hint="name one such file at a time, or pipe them: cat *.jsonl | … -; "
                "--format text reads each as one text",
            )
        if not found:
            raise SourceError(
                f"a glob must match at least one file, and {source} matches none",
                hint=f"a relative one starts at {Path.cwd()}; ** matches any number of folders",
            )
    return sorted(found)


def text_records(files: list[tuple[str, Path]]) -> Iterator[Record]:
    """Yield one record per file."""
    for number, (name, path) in enumerate(files, 1):
        where = f"in file {number}"
        text, refusal = _read(path, where)
        values = {"id": name} if text is None else {"id": name, "text": text}
        yield Record(None, values, refusal, where)


def _read(path: Path, where: str) -> tuple[str | None, Refusal | None]:
    try:
        # A pipe would wait for its writer for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            return None, _unreadable(where, "it is a pipe or a device")
        with open_stream(path) as file:
            data = file.read(MAX_RECORD_BYTES + 1)
    except OSError as error:
        return None, _unreadable(where, error.strerror or type(error).__name__)
    except BrokenStream as error:
        return None, _unreadable(where, f"its compressed stream {error}")
    if len(data) > MAX_RECORD_BYTES:
        return None, too_long(where)
    raw = data.removeprefix(BOM)
    refusal = bad_byte(raw, where, len(data) - len(raw))
    return raw.decode("utf-8", "replace") if refusal is None else None, refusal


def _unreadable(where: str, reason: str) -> Refusal:
    return Refusal("document.unreadable", f"the text {where} must be readable: {reason}")


def _below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> NoReturn:
        # os.walk would leave out what it cannot list.
        raise SourceError(
            f"every folder of text files must be readable, got {error.filename}: {error.strerror}",
            hint="change its permissions, or name other folders or files",
        ) from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(_ENDS) and not name.startswith("."):
                yield Path(place) / name


def _base(pattern: str) -> Path:
    """Return the folders of a glob before its first wildcard."""
    parts = Path(pattern).parts
    plain = next(at for at, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:plain])
