"""What is wrong with a request, by the name of the option that it was typed as."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pydantic import ValidationError


def refused(
    error: "ValidationError", option: Callable[[str], str], fields: tuple[str, ...] = ()
) -> typer.BadParameter:
    """Say the first thing that is wrong with a `ScoreRequest`.

    Args:
        error: Of its validation.
        option: Names the option of a field.
        fields: What may be typed where a field is unknown.
    """
    first = error.errors()[0]
    field = str(first["loc"][0]).rstrip("_")
    if first["type"] == "extra_forbidden":
        return typer.BadParameter(_unknown(field, fields), param_hint=option(field))
    reason = first["msg"].removeprefix("Value error, ")
    value = repr(first["input"])
    # A URL is not repeated: it may hold a password. Nor is what the reason repeats already.
    came = "" if "://" in value or ", got " in reason else f", got {value:.80}"
    return typer.BadParameter(f"{reason}{came}", param_hint=option(field))


def _unknown(field: str, fields: tuple[str, ...]) -> str:
    close = get_close_matches(field, fields, 1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"must be one of {', '.join(fields)}, got {field:.80}{meant}"
