"""What the commands print: the answer on stdout, everything else on stderr.

Text of documents never reaches the terminal raw: a document may hold escape
sequences that rewrite the screen, or bidirectional controls that show a line
in another order than it is stored. JSON keeps the same value, escaped.
"""

import json
import logging
import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

# C0, DEL and C1 controls; line and paragraph separators; bidirectional embeddings,
# overrides and isolates; invisible operators, the BOM and tags; surrogates. The
# joiners of emoji and of Persian, and the marks of right-to-left text, stay.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its header.
        align: `right` for numbers.
        digits: Decimals shown of a float.
    """

    name: str
    align: Literal["left", "right"] = "left"
    digits: int | None = None


def printable(text: str) -> str:
    r"""Escape what a terminal would act on, as `\n`, `\x1b` or `\u202e`.

    Backslashes stay as they are: this is for reading, not for turning back.
    """
    return _UNSAFE.sub(_escaped, text)


def answer_console() -> Console:
    """Return the console of stdout; as wide as needed when it is not a terminal."""
    return _console(stderr=False)


def progress_console() -> Console:
    """Return the console of stderr, for progress, hints and errors."""
    return _console(stderr=True)


def print_answer(text: str = "") -> None:
    """Write a line of the answer to stdout, escaped."""
    typer.echo(printable(text))


def print_note(text: str) -> None:
    """Write a line about the work to stderr, escaped."""
    progress_console().print(printable(text), soft_wrap=True)


def print_error(message: str) -> None:
    """Write `error: message` to stderr, escaped."""
    _labelled("error", "bold red", message)


def print_hint(hint: str) -> None:
    """Write `hint: …` to stderr, escaped; each line of a hint gets its own label."""
    for line in hint.splitlines():
        _labelled("hint", "cyan", line)


@contextmanager
def warnings_shown() -> Generator[None]:
    """Print warnings that our layers log within this block as hints, each of them once."""
    handler = _Hints(logging.WARNING)
    logger = logging.getLogger("weighbridge")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Hints(logging.Handler):
    """Prints log records as hints."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record unless its like was printed before."""
        text = record.getMessage()
        if text not in self._said:
            self._said.add(text)
            print_hint(text)


def print_json(value: Any) -> None:
    """Write a value to stdout as JSON that equals it and is safe on a terminal.

    Raises:
        ValueError: A float is NaN or infinite, which JSON cannot hold.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)
    # Line breaks and indents are ours; inside strings json has escaped C0 already.
    lines = (_UNSAFE.sub(_json_escaped, line) for line in text.split("\n"))
    typer.echo("\n".join(lines))


def print_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to stdout: folded to the width of a terminal, whole in a pipe.

    Args:
        columns: What to show; a row's other keys are left out.
        rows: Values by column name.
    """
    cells = [[_cell(row.get(column.name), column) for column in columns] for row in rows]
    console = answer_console()
    if console.is_terminal:
        console.print(_folded(columns, cells))
        return
    for line in _aligned(columns, cells):
        typer.echo(line)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Write names and values to stdout, one pair a line."""
    found = [(name, printable(value)) for name, value in pairs]
    width = max((cell_len(name) for name, _ in found), default=0)
    for name, value in found:
        typer.echo(f"{name.ljust(width)}  {value}".rstrip())


def _console(*, stderr: bool) -> Console:
    # Built on each use, because tests and shells redirect the streams in between.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def _labelled(label: str, style: str, text: str) -> None:
    line = Text.assemble((f"{label}:", style), " ", printable(text))
    progress_console().print(line, soft_wrap=True)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    code_point = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if code_point <= 0xFF:
        return f"\\x{code_point:02x}"
    return f"\\u{code_point:04x}" if code_point <= 0xFFFF else f"\\U{code_point:08x}"


def _json_escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and column.digits is not None:
        return f"{value:.{column.digits}f}"
    if isinstance(value, str):
        return printable(value)
    return printable(json.dumps(value, ensure_ascii=False, default=str))


def _folded(columns: Sequence[Column], cells: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        # Folding shows all of a value; a number that folds cannot be read.
        number = column.align == "right"
        table.add_column(column.name, justify=column.align, overflow="fold", no_wrap=number)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _aligned(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> Iterable[str]:
    rows = [[column.name for column in columns], *cells]
    widths = [max(cell_len(row[i]) for row in rows) for i in range(len(columns))]
    for row in rows:
        padded = (
            " " * (width - cell_len(cell)) + cell
            if column.align == "right"
            else cell + " " * (width - cell_len(cell))
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        yield "  ".join(padded).rstrip()


def escape_unencodable() -> None:
    """Let stdout and stderr escape what their encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")
