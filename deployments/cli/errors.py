"""Runs the app and turns what goes wrong into `error:` and `hint:` lines and an exit code.

A traceback never reaches the terminal; that of an unexpected error goes to a file.
"""

import importlib.metadata
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path

import typer

from weighbridge.deployments.cli.misuse import misuse_hints
from weighbridge.deployments.console import (
    escape_unencodable,
    print_error,
    print_hint,
    print_note,
    style_help,
)

PROGRAM = "weighbridge"
_LONGEST = 1600  # some twenty lines

# Looked up by name: an error can only be one of these if its module is loaded, and
# importing them here would make `--help` slow.
_KNOWN = {
    "weighbridge.scorer.errors": "ScorerError",
    "weighbridge.db.errors": "StoreError",
    "weighbridge.tasks.errors": "TaskError",
    "weighbridge.deployments.errors": "CommandError",
}


class ExitCode(IntEnum):
    """What a command tells the shell."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REJECTED = 3
    INTERRUPTED = 130


class CancelledElsewhere(Exception):  # noqa: N818 - nothing went wrong
    """Ends a command with 130, as Ctrl-C does, that has said what it has to say.

    Somebody else has cancelled the run that it followed.
    """


EXIT_MEANINGS = {
    ExitCode.DONE: "all done",
    ExitCode.FAILED: "failed; `error:` and `hint:` on stderr say why",
    ExitCode.USAGE: "an option or argument is missing, unknown or of the wrong kind",
    ExitCode.REJECTED: "done, and some documents were rejected",
    ExitCode.INTERRUPTED: "interrupted; the next run finishes the rest",
}
"""What README and docs say of each code."""


def run_app(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        app: The commands; none of them returns a value, `typer.Exit` carries a code.
        arguments: What was typed after the program's name; by default `sys.argv`.

    Returns:
        The exit code.
    """
    escape_unencodable()
    words = sys.argv[1:] if arguments is None else list(arguments)
    groups = {group.name for group in app.registered_groups}
    if not words or {"-h", "--help"} & set(words) or words[-1] in groups:
        style_help()
    try:
        ended = app(args=arguments, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        ended = ExitCode.INTERRUPTED
    except CancelledElsewhere:
        return ExitCode.INTERRUPTED
    except typer.TyperException as error:
        return _misused(app, error, words)
    except BrokenPipeError:
        # The reader has gone (`… | head`); what is left to flush must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:  # noqa: BLE001 - the last stop before the terminal
        return _failed(error)
    if ended == ExitCode.INTERRUPTED:
        print_note("interrupted")
    return int(ended or ExitCode.DONE)


def _misused(app: typer.Typer, error: typer.TyperException, words: Sequence[str]) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.exit_code  # its help has been printed
    print_error(_shortened(error.format_message()))
    for hint in misuse_hints(app, error, words):
        print_hint(hint)
    return error.exit_code


def _failed(error: Exception) -> int:
    if _is_known(error):
        print_error(_shortened(str(error)))
        if hint := getattr(error, "hint", None):
            print_hint(_shortened(hint))
        return ExitCode.FAILED
    first_line = str(error).partition("\n")[0][:200]
    print_error(f"unexpected {type(error).__name__}: {first_line}")
    try:
        print_hint(f"the traceback is in {_write_traceback(error)}; please report it")
    except OSError as unwritable:
        print_hint(f"the traceback could not be kept: {unwritable}")
    return ExitCode.FAILED


def _shortened(text: str) -> str:
    """Cut what would fill the screen: errors quote what was typed, however long it was."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 4 :]}"


def _is_known(error: Exception) -> bool:
    for module, name in _KNOWN.items():
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and isinstance(error, known):
            return True
    return False


def _write_traceback(error: Exception) -> Path:
    """Keep a traceback where only the user can read it: it may quote a document."""
    from weighbridge.tasks.settings import SettingsError, load_settings

    try:
        folder = load_settings().cache / "logs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (SettingsError, OSError):
        folder = Path(tempfile.gettempdir())
    prefix = f"weighbridge-error-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-"
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=".log", dir=folder)  # mode 0600
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"weighbridge {importlib.metadata.version(PROGRAM)}, Python {sys.version}\n\n")
        file.writelines(traceback.format_exception(error))
    return Path(name)
