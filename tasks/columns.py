"""The columns of a table: the header of a CSV file, and what names must be among them."""

import shlex
from difflib import get_close_matches
from pathlib import Path

from weighbridge.tasks.encodings import convert_hint
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.records import csv_rows, named_separator
from weighbridge.tasks.refusals import fault_of, quoted
from weighbridge.tasks.template import TextField


def require_columns(
    what: str, columns: list[str], text: TextField, id_field: str, *, else_do: str = ""
) -> None:
    """Refuse a table without the columns that are named, or whose names cannot be kept."""
    # In a file without a header these are a document. Prefect keeps an error's message, so
    # they stand in the hint, which only the terminal shows.
    names = ", ".join(map(quoted, columns))
    for name in text.columns:
        if name not in columns:
            raise SourceError(
                f"{what} must have a column {quoted(name)}, and has none",
                hint=f"it has {names}\n{_meant(name, columns, text)}"
                f"name the column of the texts with --text-field{else_do}",
            )
    if id_field != "id" and id_field not in columns:
        raise SourceError(
            f"{what} must have a column {quoted(id_field)}, and has none",
            hint=f"it has {names}\nname the column of the ids with --id-field",
        )
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise SourceError(
            f"the columns of {what} must have different names, and two have the same",
            hint=f"{quoted(twice[0])} comes twice",
        )
    if fault := fault_of(columns):
        raise SourceError(f"the names of the columns of {what} must be UTF-8 text, got {fault}")


def _meant(name: str, columns: list[str], text: TextField) -> str:
    """Ask for a column whose name differs in case or in a few letters."""
    found = [each for each in columns if each.casefold() == name.casefold()]
    found = found or get_close_matches(name, columns, n=1, cutoff=0.75)
    if not found or not found[0].isprintable() or set(found[0]) & set('{}"'):
        return ""
    written = f"{{{found[0]}}}" if text.parts else f"--text-field {shlex.quote(found[0])}"
    return f"did you mean {written:.120}?\n"


def csv_header(
    path: Path, separators: str, text: TextField, id_field: str
) -> tuple[str, list[str]]:
    """Return the separator and the column names of a CSV file.

    Args:
        path: The file.
        separators: The signs that may be the separator; the first under which the header
            holds the text columns is. A first line `sep=;` names another.
        text: The columns of the text.
        id_field: The column of the ids.

    Raises:
        SourceError: There is no header, or not one with these columns.
    """
    separators = named_separator(path) or separators
    found: list[tuple[str, list[str]]] = []
    for separator in separators:
        try:
            found.append((separator, _columns(path, separator)))
        except SourceError:
            # A quoted header is malformed under every separator but its own.
            if separator == separators[-1] and not found:
                raise
    separator, columns = next(
        (each for each in found if set(text.columns) <= set(each[1])),
        max(found, key=lambda each: len(each[1])),
    )
    # A .txt file may hold records, and more often is a text.
    else_do = "; --format text reads the file as one text" if path.suffix != ".csv" else ""
    require_columns(f"the header of {path}", columns, text, id_field, else_do=else_do)
    return separator, columns


def _columns(path: Path, separator: str) -> list[str]:
    for _, cells, refusal in csv_rows(path, separator):
        if refusal:
            hint = "the first line names the columns, for example: id,text"
            if refusal.code == "document.encoding":
                hint = convert_hint(path) or hint
            raise SourceError(
                f"{path} must be a CSV file with a header: {refusal.message}", hint=hint
            )
        return [name or f"column {number}" for number, name in enumerate(cells, 1)]
    return []
