"""What a mistyped command line was probably meant to be, as hints."""

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import Any

import typer

_UNKNOWN_COMMAND = re.compile(r"No such command '([a-z-]+)'")
_CODEC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{1,30}")
_TAKE_A_SCHEMA = {"score", "validate"}


def misuse_hints(app: typer.Typer, error: typer.TyperException, words: Sequence[str]) -> list[str]:
    """Say what was probably meant; the last hint names the help to read.

    Args:
        app: The commands.
        error: What is wrong with the words.
        words: What was typed after the program's name.
    """
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return []
    program = context.command_path
    unknown = _UNKNOWN_COMMAND.search(error.format_message())
    if unknown and context.parent is None:
        meant = [f"{program} {group} {unknown[1]} --help" for group in _groups(app, unknown[1])]
        if meant:
            return meant
    hints: list[str] = []
    if context.info_name in _TAKE_A_SCHEMA:
        if getattr(getattr(error, "param", None), "name", None) == "encoding":
            hints += _about_encoding(words)
        if schema := _schema_without_option(context.command, words[1:]):
            hints.append(f"--schema {schema:.200}")
    return [*hints, f"{program} --help"]


def _groups(app: typer.Typer, name: str) -> Iterator[str]:
    """Yield the groups that have a command of this name."""
    for group in app.registered_groups:
        commands = group.typer_instance.registered_commands if group.typer_instance else []
        if any(command.name == name for command in commands):
            yield str(group.name)


def _about_encoding(words: Sequence[str]) -> list[str]:
    """Part two things of one name: what the model says, and how a file is written."""
    came = next((word for word in words if word.startswith("--encoding=")), None)
    if came is None and "--encoding" in words[:-1]:
        came = words[words.index("--encoding") + 1]
    came = (came or "").removeprefix("--encoding=")
    encoding = came if _CODEC_NAME.fullmatch(came) and _is_codec(came) else "FROM"
    return [
        "--encoding is what the model says, labels or codes, not how a file is written",
        f"files must be UTF-8: iconv -f {encoding} -t UTF-8 FILE > utf8-FILE",
    ]


def _is_codec(name: str) -> bool:
    try:
        codecs.lookup(name)
    except (LookupError, ValueError):
        return False
    return True


def _schema_without_option(command: Any, words: Sequence[str]) -> str | None:
    """Find a JSON file that was named behind the documents, where --schema is left out."""
    takes_value = {
        name
        for each in command.params
        if each.param_type_name == "option" and not each.is_flag
        for name in each.opts
    }
    if any(word == "--schema" or word.startswith("--schema=") for word in words):
        return None
    positional = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("--") and before not in takes_value
    ]
    found = [word for word in positional[1:] if word.lower().endswith(".json")]
    return found[-1] if found else None
