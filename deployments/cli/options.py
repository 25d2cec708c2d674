"""Options that several commands share."""

import re
from datetime import timedelta
from typing import Annotated

import typer

_AGE = re.compile(r"(\d{1,6})([hdw])", re.ASCII)
_HOURS = {"h": 1, "d": 24, "w": 24 * 7}

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH",
        help="The store: a SQLite file or a database URL.",
        show_default=False,
    ),
]

RunArgument = Annotated[
    int | None,
    typer.Argument(
        metavar="RUN", help="Number of a run; the latest one if left out.", show_default=False
    ),
]


def parse_age(text: str) -> timedelta | None:
    """Read an age such as 12h, 7d or 2w; None when it is none."""
    match = _AGE.fullmatch(text.strip())
    return timedelta(hours=int(match[1]) * _HOURS[match[2]]) if match else None


def parse_temperature(text: str) -> float:
    """Read a temperature; in contrast to the type alone, an error tells what was typed."""
    try:
        return float(text)
    except ValueError:
        message = f"temperature must be a number, got {text!r:.80}"
        raise typer.BadParameter(message) from None
