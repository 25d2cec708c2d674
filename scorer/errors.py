"""The errors of the scorer: one tree, each with what to do about it.

Every error is a `ScorerError`:

- `SchemaError`: a schema or question file does not hold what it must.
- `TemperatureError`: a temperature, or READY.json, cannot be used.
- `CheckpointError`: a checkpoint is missing, damaged or not supported.
- `BackendError`: the machine cannot run what was asked.
- `DocumentError`: one document cannot be scored; its batch goes on without it.
"""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

DocumentCode = Literal[
    "document.too_long",
    "document.empty",
    "document.encoding",
    "document.not_text",
    "document.control_tokens",
    "document.not_finite",
]


class ScorerError(Exception):
    """What must hold and what came instead.

    Attributes:
        message: The sentence for the reader; also `str(error)`.
        hint: What to do about it, or None when the message already says so.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class SchemaError(ScorerError):
    """A schema or question file does not hold what it must."""


class TemperatureError(ScorerError):
    """A temperature, or the READY.json that selects it, cannot be used."""


class CheckpointError(ScorerError):
    """A checkpoint is missing, damaged or not supported."""


class BackendError(ScorerError):
    """The machine cannot run what was asked."""


class DocumentError(ScorerError):
    """One document cannot be scored; its batch goes on without it.

    Attributes:
        code: The stable name of the reason, kept with the rejected document.
    """

    def __init__(self, message: str, *, code: DocumentCode, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code: DocumentCode = code

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt from their positional arguments, which would lose the code.
        return partial(type(self), code=self.code), (self.message,), self.__dict__


def quoted(text: str, *, limit: int = 80) -> str:
    r"""Quote text that came from outside, so that it is safe in an error message.

    Args:
        text: Anything, lone surrogates and terminal escapes included.
        limit: Longest text shown whole, in code points; the rest becomes "…".

    Returns:
        JSON quotes around the text; what is not printable is written as `\uXXXX`
        or `\UXXXXXXXX`.
    """
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(
        character if character.isprintable() else _escaped(character)
        for character in json.dumps(shown, ensure_ascii=False)
    )


def shown(value: object) -> str:
    """Describe a JSON value for an error message, in a few words."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return quoted(json.dumps(value, default=repr))[1:-1]


def listed(texts: Iterable[str]) -> str:
    """Quote the first ten texts and count the others."""
    texts = list(texts)
    more = f" and {len(texts) - 10} more" if len(texts) > 10 else ""
    return ", ".join(quoted(text) for text in texts[:10]) + more


def suggestion(given: str, known: Iterable[str], lead: str) -> str:
    """List the known texts after `lead`; first ask whether the closest one was meant."""
    known = list(known)
    close = get_close_matches(given[:200], known, n=1)
    asked = f"did you mean {quoted(close[0])}? " if close else ""
    return f"{asked}{lead} {listed(known)}"


def _escaped(character: str) -> str:
    code_point = ord(character)
    return f"\\u{code_point:04x}" if code_point <= 0xFFFF else f"\\U{code_point:08x}"
