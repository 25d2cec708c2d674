"""What a run of a deployment is asked to score, as options and as parameters."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import ValidationError

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

ParameterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        "-p",
        metavar="NAME=VALUE",
        help="Any other field of the form in the UI, with a JSON value or plain text; can be "
        "given again.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]

# A worker runs in a folder of its own.
_PATHS = {"checkpoint", "database", "documents", "output"}


def typed_request(
    documents: str | None,
    schema: str | None,
    output: str | None,
    parameters: list[str] | None,
    *,
    follow_schema: bool,
) -> dict[str, Any]:
    """Return what is typed as fields of a `ScoreRequest`, with paths that hold anywhere.

    Args:
        documents: Of --documents.
        schema: Of --schema.
        output: Of --output.
        parameters: Of -p.
        follow_schema: Name a schema file by its path, so that each run reads it anew; else
            its questions are sent, and the file is not asked for again.

    Raises:
        typer.BadParameter: Something typed cannot be a parameter.
        SchemaError: The schema does not hold what it must.
    """
    typed = dict(_parameter(each) for each in parameters or [])
    for name, value in (("documents", documents), ("schema", schema), ("output", output)):
        if value is None:
            continue
        if name in typed:
            raise typer.BadParameter(f"{name} must be named once: --{name} or -p {name}=…")
        typed[name] = value
    if typed.get("documents") == "-":
        raise typer.BadParameter(
            "documents must be a file, folder, glob or database URL that the worker can read, "
            "and it cannot read this stdin",
            param_hint="--documents",
        )
    for name in _PATHS & typed.keys():
        if isinstance(typed[name], str):
            typed[name] = _absolute(typed[name])
    if isinstance(typed.get("schema"), str):
        typed |= _schema(typed["schema"], typed.get("schema_name"), follow=follow_schema)
    return typed


def require_request(request: Mapping[str, Any], *, whole: bool) -> None:
    """Find what the server or the flow would refuse, before anything leaves this machine.

    A database URL with a password must not reach Prefect, which keeps parameters.

    Args:
        request: Fields of a `ScoreRequest`.
        whole: Whether a run could start with it, so that nothing may be missing.

    Raises:
        typer.BadParameter: It is no such request; the message names the field.
    """
    from pydantic import ValidationError

    from weighbridge.flows.request import ScoreRequest

    missing = [name for name in ("documents", "schema") if name not in request]
    if whole and missing:
        raise typer.BadParameter(
            f"a run needs {' and '.join(missing)}, and the deployment has none",
            param_hint=" ".join(f"--{name}" for name in missing),
        )
    try:
        ScoreRequest.model_validate({**dict.fromkeys(missing, "x"), **request})
    except ValidationError as error:
        raise _refused(error) from error


def _refused(error: "ValidationError") -> typer.BadParameter:
    first = error.errors()[0]
    field = str(first["loc"][0]).rstrip("_")
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        reason = "there is no such field; weighbridge trigger --help names some"
    value = repr(first["input"])
    # A URL is not repeated: it may hold a password.
    came = "" if "://" in value else f", got {value:.80}"
    named = f"--{field}" if field in {"documents", "schema", "output"} else f"-p {field}"
    return typer.BadParameter(f"{field}: {reason}{came}", param_hint=named)


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
