"""What a run of a deployment is asked to score, as options and as parameters."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from weighbridge.deployments.cli.refusing import refused

OWN_OPTION = ("documents", "schema", "output", "query", "since", "text_field", "id_field")
OTHER_FIELDS = (
    *("limit", "rescore", "checkpoint", "adapter", "temperature", "permutations", "timezone"),
    *("format", "source", "schema_name", "alert_rejected_share", "store_text", "database"),
    "batch_size",
    *("field_batch_size", "max_input_tokens", "mode", "layout", "encoding", "model_id"),
    *("revision", "allow_uncalibrated", "accept_prompt"),
)
"""Fields of a `ScoreRequest` that have no option of their own here."""

_RUN = "What it scores"

DocumentsOption = Annotated[
    str | None,
    typer.Option(
        "--documents",
        metavar="DOCS",
        help="File, folder, quoted glob or database URL, as in score. {date} or {date-1} in it "
        "become the date of each run.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

RequestSchemaOption = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="SCHEMA",
        help="The questions: a schema or System One file, JSON, or a Pydantic model as "
        "module:Class.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Write the answers to a .json, .jsonl, .csv or .parquet file when all is scored.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

QueryOption = Annotated[
    str | None,
    typer.Option(
        "--query",
        metavar="SQL",
        help="The documents are the rows of this statement; :since in it is when the "
        "deployment's last completed run began.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="WHEN",
        help="What :since stands for instead: 2026-11-01, 2026-11-01T06:00+01:00 or {date-7}.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

TextFieldOption = Annotated[
    str | None,
    typer.Option(
        "--text-field",
        metavar="TEXT",
        help="Column of the text, or a template: {subject}\\n\\n{body}; text at first.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

IdFieldOption = Annotated[
    str | None,
    typer.Option(
        "--id-field",
        metavar="TEXT",
        help="Column of the id; id at first.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

ParameterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        "-p",
        metavar="NAME=VALUE",
        help="Another field, with a JSON value or plain text; can be given again. Fields: "
        f"{', '.join(OTHER_FIELDS)}.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

_NAMED = {"documents": "--documents DOCS", "schema": "--schema SCHEMA"}
# A worker runs in a folder of its own.
_PATHS = {"adapter", "checkpoint", "database", "documents", "output"}
_MAY_BE_ON_A_HUB = {"adapter", "checkpoint"}


def typed_request(
    options: Mapping[str, str | None], parameters: list[str] | None, *, follow_schema: bool
) -> dict[str, Any]:
    """Return what is typed as fields of a `ScoreRequest`, with paths that hold anywhere.

    Args:
        options: Fields that have an option of their own; None where it was not typed.
        parameters: Of -p.
        follow_schema: Name a schema file by its path, so that each run reads it anew; else
            its questions are sent, and the file is not asked for again.

    Raises:
        typer.BadParameter: Something typed cannot be a parameter.
        SchemaError: The schema does not hold what it must.
    """
    typed: dict[str, Any] = {}
    for each in parameters or []:
        name, value = _parameter(each)
        if name in typed:
            raise typer.BadParameter(f"{name} must be named once", param_hint=f"-p {name}")
        typed[name] = value
    for name, value in options.items():
        if value is None:
            continue
        if name in typed:
            raise typer.BadParameter(f"{name} must be named once: {_option(name)} or -p {name}=…")
        typed[name] = value
    if typed.get("documents") == "-":
        raise typer.BadParameter(
            "documents must be a file, folder, glob or database URL that the worker can read, "
            "and it cannot read this stdin",
            param_hint="--documents",
        )
    from weighbridge.tasks.checkpoints import on_hub

    for name in _PATHS & typed.keys():
        if isinstance(typed[name], str) and not (name in _MAY_BE_ON_A_HUB and on_hub(typed[name])):
            typed[name] = _absolute(typed[name])
    if isinstance(typed.get("schema"), str):
        typed |= _schema(typed["schema"], typed.get("schema_name"), follow=follow_schema)
    return typed


def require_request(request: Mapping[str, Any], *, whole: bool, of: str) -> None:
    """Find what the server or the flow would refuse, before anything leaves this machine.

    A database URL with a password must not reach Prefect, which keeps parameters.

    Args:
        request: Fields of a `ScoreRequest`.
        whole: Whether a run could start with it, so that nothing may be missing.
        of: The deployment.

    Raises:
        typer.BadParameter: It is no such request; the message names the field.
    """
    from pydantic import ValidationError

    from weighbridge.flows.request import ScoreRequest

    missing = [name for name in _NAMED if name not in request]
    if whole and missing:
        named = " ".join(_NAMED[name] for name in missing)
        raise typer.BadParameter(
            f"a run needs {' and '.join(missing)}, and {of} has none yet: "
            f"name {'them' if len(missing) > 1 else 'it'} with {named}"
        )
    try:
        asked = ScoreRequest.model_validate({**dict.fromkeys(missing, "x"), **request})
    except ValidationError as error:
        raise refused(error, _option, (*OWN_OPTION, *OTHER_FIELDS)) from error
    if asked.output is not None:
        _require_format(asked.output)


def _require_format(output: str) -> None:
    """Refuse a file name that would fail each run; the folder is that of the worker's machine."""
    from datetime import UTC, datetime

    from weighbridge.db.export import FORMATS
    from weighbridge.flows.when import resolve_dates

    name = Path(resolve_dates(output, datetime.now(UTC))).name
    if Path(name).suffix.lower() not in {f".{each}" for each in FORMATS}:
        raise typer.BadParameter(
            f"must end in {', '.join(f'.{each}' for each in FORMATS)}, got {name!r:.80}",
            param_hint="--output",
        )


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}" if field in OWN_OPTION else f"-p {field}"


def _parameter(typed: str) -> tuple[str, Any]:
    name, equals, value = typed.partition("=")
    if not equals or not name.isidentifier():
        raise typer.BadParameter(
            f"must be NAME=VALUE, as -p limit=100, got {typed!r:.80}", param_hint="-p"
        )
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _absolute(path: str) -> str:
    if "://" in path or not path:
        return path
    try:
        return str(Path.cwd() / Path(path).expanduser())
    except RuntimeError:  # ~somebody, who is not known here
        return str(Path.cwd() / path)


def _schema(schema: str, name: Any, *, follow: bool) -> dict[str, Any]:
    from weighbridge.tasks.questions import names_model, read_schema

    if schema.lstrip().startswith("{"):
        read_schema(schema)  # what is wrong with it is told here, not by a run at night
        return {"schema": schema}
    if names_model(schema):
        read = read_schema(schema)
        return {"schema": read.canonical, "schema_name": name or read.name}
    path = _absolute(schema)
    if "{" in schema and not Path(path).exists():
        return {"schema": path}  # a dated name, which is a file only when its run comes
    read = read_schema(path)
    return (
        {"schema": path} if follow else {"schema": read.canonical, "schema_name": name or read.name}
    )
