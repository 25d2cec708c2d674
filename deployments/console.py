"""What the commands print: the answer on stdout, everything else on stderr.

Text of documents never reaches the terminal raw: a document may hold escape
sequences that rewrite the screen, or bidirectional controls that show a line
in another order than it is stored. JSON keeps the same value, escaped.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from rich.theme import Theme

# C0, DEL and C1 controls; line and paragraph separators; bidirectional embeddings,
# overrides and isolates; invisible operators, the BOM and tags; surrogates. The
# joiners of emoji and of Persian, and the marks of right-to-left text, stay.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# The least width of a column of text whose words are longer than that.
_READABLE = 8
_GAP = "  "
# A float above this has digits of its own making before the point.
_EXACT = 1e15
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


# Cyan, green and yellow, the usual colours of progress and help, are next to unreadable on
# a white terminal, and blue on a black one: what is to be read has no colour of its own.
_PLAIN = Theme(dict.fromkeys(("progress.remaining", "progress.download", "progress.elapsed"), ""))
_HELP = {
    "STYLE_OPTION": "bold",
    "STYLE_SWITCH": "bold",
    "STYLE_TYPES": "magenta",
    "STYLE_USAGE": "bold",
    "STYLE_HELPTEXT": "",
    "STYLE_REQUIRED_LONG": "red",
    "STYLE_COMMANDS_TABLE_FIRST_COLUMN": "bold",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its header.
        align: `right` for numbers.
        digits: Decimals shown of a float.
        significant: Significant digits shown of a float, where its size is not known; what
            stands before the point stays whole.
    """

    name: str
    align: Literal["left", "right"] = "left"
    digits: int | None = None
    significant: int | None = None


def style_help() -> None:
    """Let help screens have colours that can be read on light and on dark terminals."""
    from typer import rich_utils  # which a command that prints no help need not load

    for name, style in _HELP.items():
        setattr(rich_utils, name, style)


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
        _labelled("hint", "magenta", line)


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
    typer.echo(_safe_json(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)))


def print_json_with_list(
    head: Mapping[str, Any], name: str, entries: Iterable[Mapping[str, Any]]
) -> None:
    """Write `head` as `print_json` does, with one more key: a list too long to be in memory.

    Args:
        head: At least one key and its value.
        name: Key of the list.
        entries: Its values.

    Raises:
        ValueError: A float is NaN or infinite, which JSON cannot hold.
    """
    opened = json.dumps(head, ensure_ascii=False, allow_nan=False, indent=2)
    typer.echo(_safe_json(f"{opened.removesuffix('}').rstrip()},\n  {json.dumps(name)}: ["))
    before = ""
    for entry in entries:
        text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
        typer.echo(f"{before}    {_safe_json(text)}", nl=False)
        before = ",\n"
    typer.echo(f"{before and chr(10)}  ]\n}}")


class SafeOutput:
    """A text file that escapes what a terminal would act on, for what comes in many parts.

    Args:
        file: Where it goes.
        as_json: Escape as JSON does, which changes no value; else as `printable`.
    """

    def __init__(self, file: IO[str], *, as_json: bool) -> None:
        self._file = file
        self._escape = _json_escaped if as_json else _escaped

    def write(self, text: str) -> int:
        """Write a part; line breaks stay."""
        return self._file.write(_escaped_lines(text, self._escape))


def print_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to stdout: folded to the width of a terminal, whole in a pipe.

    On a terminal that has no room for readable columns each row is a record, a line for
    each column; nothing is left out.

    Args:
        columns: What to show; a row's other keys are left out.
        rows: Values by column name.
    """
    cells = [[_cell(row.get(column.name), column) for column in columns] for row in rows]
    console = answer_console()
    if not console.is_terminal:
        for line in _aligned(columns, cells):
            typer.echo(line)
        return
    widths = _widths(columns, cells, console.width)
    if widths is None:
        _print_records(console, columns, cells)
        return
    header = _folded([printable(column.name) for column in columns], columns, widths, console)
    for line in header:
        console.print(Text(line, style="bold"), soft_wrap=True)
    for row in cells:
        for line in _folded(row, columns, widths, console):
            console.print(Text(line), soft_wrap=True)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Write names and values to stdout, one pair a line."""
    found = [(name, printable(value)) for name, value in pairs]
    width = max((cell_len(name) for name, _ in found), default=0)
    for name, value in found:
        typer.echo(f"{name.ljust(width)}  {value}".rstrip())


def _console(*, stderr: bool) -> Console:
    # Built on each use, because tests and shells redirect the streams in between.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, theme=_PLAIN)


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


def _safe_json(text: str) -> str:
    # Line breaks and indents are ours; inside strings json has escaped C0 already.
    return _escaped_lines(text, _json_escaped)


def _escaped_lines(text: str, escape: Callable[[re.Match[str]], str]) -> str:
    """Escape what a terminal would act on, but for the ends of lines."""
    return "\n".join(_UNSAFE.sub(escape, line) for line in text.split("\n"))


def _json_escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and column.digits is not None:
        return f"{value:.{column.digits}f}"
    if isinstance(value, float) and column.significant is not None:
        whole = 10**column.significant <= abs(value) < _EXACT
        return f"{value:.0f}" if whole else f"{value:.{column.significant}g}"
    if isinstance(value, str):
        return printable(value)
    return printable(json.dumps(value, ensure_ascii=False, default=str))


def _widths(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], room: int
) -> list[int] | None:
    """Share the room of a terminal among columns; None when it has too little to read them."""
    natural: list[int] = []
    least: list[int] = []
    for place, column in enumerate(columns):
        texts = [row[place] for row in cells]
        name = cell_len(printable(column.name))
        natural.append(max(map(cell_len, texts), default=0))
        if column.align == "right":
            # A number that folds cannot be read.
            least.append(max(name, natural[-1]))
        else:
            word = max((cell_len(word) for text in texts for word in text.split()), default=0)
            least.append(max(name, min(word, _READABLE)))
        natural[-1] = max(name, natural[-1])
    room -= len(_GAP) * (len(columns) - 1)
    if sum(least) > room:
        return None
    # The widest give way first, each down to what it needs.
    most = min(max(natural, default=0), room)
    while True:
        widths = [max(few, min(all_, most)) for few, all_ in zip(least, natural, strict=True)]
        if sum(widths) <= room:
            return widths
        most -= 1


def _folded(
    row: Sequence[str], columns: Sequence[Column], widths: Sequence[int], console: Console
) -> Iterable[str]:
    """Give a row as the lines that it takes when each cell is folded to its width."""
    parts = [_lines(cell, width, console) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, parts), default=0)):
        line = [part[number] if number < len(part) else "" for part in parts]
        yield _GAP.join(map(_padded, line, widths, columns)).rstrip()


def _lines(text: str, width: int, console: Console) -> list[str]:
    if cell_len(text) <= width:
        return [text]
    # Folding shows all of a value.
    return [line.plain.rstrip() for line in Text(text).wrap(console, width, overflow="fold")]


def _print_records(
    console: Console, columns: Sequence[Column], cells: Sequence[Sequence[str]]
) -> None:
    names = [printable(column.name) for column in columns]
    width = max(map(cell_len, names), default=0)
    room = max(console.width - width - len(_GAP), _READABLE)
    sides = (Column("name"), Column("value"))
    # Without rows the names are all there is to tell.
    for number, row in enumerate(cells or [[""] * len(names)]):
        if number:
            typer.echo()
        for pair in zip(names, row, strict=True):
            for line in _folded(pair, sides, (width, room), console):
                typer.echo(line)


def _padded(cell: str, width: int, column: Column) -> str:
    blank = " " * (width - cell_len(cell))
    return blank + cell if column.align == "right" else cell + blank


def _aligned(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> Iterable[str]:
    rows = [[printable(column.name) for column in columns], *cells]
    widths = [max(cell_len(row[i]) for row in rows) for i in range(len(columns))]
    for row in rows:
        yield _GAP.join(map(_padded, row, widths, columns)).rstrip()


def escape_unencodable() -> None:
    """Let stdout and stderr escape what their encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")
