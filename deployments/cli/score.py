"""The command that scores documents through the flow, in this process."""

import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from weighbridge.deployments.answers import write_run
from weighbridge.deployments.cli.against import against_request, report_against
from weighbridge.deployments.cli.document_file import document_file
from weighbridge.deployments.cli.errors import ExitCode
from weighbridge.deployments.cli.options import DatabaseOption, JsonOption
from weighbridge.deployments.cli.score_options import (
    CheckpointOption,
    EncodingOption,
    FormatOption,
    IdFieldOption,
    LayoutOption,
    LimitOption,
    MaxInputTokensOption,
    PermutationsOption,
    QueryOption,
    SchemaOption,
    TextFieldOption,
    TextOption,
)
from weighbridge.deployments.console import print_hint, print_json, print_note, warnings_shown
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.prefect_api import quiet_prefect, reporting
from weighbridge.deployments.progress import progress_bar
from weighbridge.deployments.report import print_answers, print_closing, print_distribution

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import ValidationError
    from sqlalchemy import Engine

    from weighbridge.flows import ScoreRequest
    from weighbridge.tasks.settings import Settings

_T = TypeVar("_T")

_SCORER = "Scorer"
_ANSWERS = "Answers"
_GOES_ON = "what is recorded is kept: the same command scores only the rest"


def score(
    schema: SchemaOption,
    documents: Annotated[
        str | None,
        typer.Argument(
            metavar="DOCS",
            help="A JSONL, JSON, CSV, TSV or Parquet file; a folder or quoted glob of text "
            "files; a SQLite file or database URL with --query; - reads stdin.",
            show_default=False,
        ),
    ] = None,
    text: TextOption = None,
    text_field: TextFieldOption = "text",
    id_field: IdFieldOption = "id",
    format: FormatOption = None,
    query: QueryOption = None,
    limit: LimitOption = None,
    checkpoint: CheckpointOption = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="FOLDER",
            help="Another checkpoint: score with it too, and compare the answers.",
            rich_help_panel=_SCORER,
            show_default=False,
        ),
    ] = None,
    model_id: Annotated[
        str | None,
        typer.Option(
            help="Its model id, which may select a temperature.",
            rich_help_panel=_SCORER,
            show_default=False,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            help="Its full revision, likewise.", rich_help_panel=_SCORER, show_default=False
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Divides the logits; overrides the checkpoint's.",
            rich_help_panel=_SCORER,
            show_default=False,
        ),
    ] = None,
    allow_uncalibrated: Annotated[
        bool,
        typer.Option(
            "--allow-uncalibrated",
            help="Consent to temperature 1 where the policy refuses it.",
            rich_help_panel=_SCORER,
        ),
    ] = False,
    max_input_tokens: MaxInputTokensOption = None,
    layout: LayoutOption = None,
    encoding: EncodingOption = None,
    mode: Annotated[
        Literal["auto", "parallel", "cached_serial", "independent"],
        typer.Option(
            metavar="MODE",
            help="How fields are computed: auto, parallel, cached_serial or independent.",
            rich_help_panel=_SCORER,
        ),
    ] = "auto",
    field_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompt rows at once; all if left out.",
            rich_help_panel=_SCORER,
            show_default=False,
        ),
    ] = None,
    permutations: PermutationsOption = 1,
    rescore: Annotated[
        bool,
        typer.Option("--rescore", help="Decide again what is decided.", rich_help_panel=_ANSWERS),
    ] = False,
    no_store_text: Annotated[
        bool,
        typer.Option(
            "--no-store-text",
            help="Keep answers, but neither texts nor metadata.",
            rich_help_panel=_ANSWERS,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Also write the answers to a .json, .jsonl, .csv or .parquet file.",
            rich_help_panel=_ANSWERS,
            show_default=False,
        ),
    ] = None,
    database: DatabaseOption = None,
    allow_remote_api: Annotated[
        bool,
        typer.Option("--allow-remote-api", help="Consent to report to a Prefect API elsewhere."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Score documents against a schema and keep the answers.

    What the store has decided already is not scored again. Ends with 3 when
    some documents were rejected: weighbridge rejected says which and why.

    Example: weighbridge score tickets.jsonl --schema triage.json

    Example: weighbridge score mails.csv --schema triage.json --text-field '{subject}: {body}'

    Example: weighbridge score tickets.db --schema triage.json --query 'SELECT id, text FROM t'

    Example: weighbridge score tickets.jsonl --schema triage.json --against other-checkpoint
    """
    if (documents is None) == (text is None):
        raise typer.BadParameter("name documents (a file, or - for stdin), or --text, not both")
    if text is not None and (format or query):
        raise typer.BadParameter("--format and --query are for documents, not for --text")
    if against is not None and output is not None:
        raise typer.BadParameter("--output is for one run: write each with weighbridge results")
    from weighbridge.tasks.settings import load_settings

    settings = load_settings(database_url=database, allow_remote_api=allow_remote_api or None)
    with document_file(documents, text) as (path, source):
        request: dict[str, Any] = {
            "documents": path,
            "source": source,
            **named_schema(schema),
            "text_field": "text" if text is not None else text_field,
            "id_field": "id" if text is not None else id_field,
            "format": format,
            "query": query,
            "limit": limit,
            "checkpoint": checkpoint,
            "model_id": model_id,
            "revision": revision,
            "temperature": temperature,
            "allow_uncalibrated": allow_uncalibrated,
            "max_input_tokens": max_input_tokens,
            "layout": layout,
            "encoding": encoding,
            "mode": mode,
            "field_batch_size": field_batch_size,
            "permutations": permutations,
            "rescore": rescore,
            "store_text": not no_store_text,
        }
        outcome = run_flow(settings, request, output=output)
        not_utf8 = _not_utf8(settings.database_url, request, outcome)
        other = None if against is None else run_flow(settings, against_request(request, against))
    if other is not None:
        report_against(settings.database_url, outcome, other, as_json=as_json)
    elif as_json:
        print_json(outcome)
    else:
        _print_outcome(settings.database_url, outcome, one_text=text is not None)
    if not_utf8:
        print_hint(not_utf8)
    if outcome["rejected"] or (other and other["rejected"]):
        raise typer.Exit(ExitCode.REJECTED)


def named_schema(schema: str) -> dict[str, str | None]:
    """Return a schema as parameters of a flow.

    A Pydantic model is written out: the flow may run where its module is not.
    """
    from weighbridge.tasks.questions import names_model, read_schema

    if not names_model(schema):
        return {"schema": schema}
    read = read_schema(schema)
    return {"schema": read.canonical, "schema_name": read.name}


def _print_outcome(database_url: str, outcome: dict[str, Any], *, one_text: bool) -> None:
    from weighbridge.db import answer_distribution, rejected, results

    run = outcome["run_id"]
    if one_text:
        print_answers(ask_store(database_url, results, run))
        for refusal in ask_store(database_url, rejected, run):
            print_note(f"rejected: {refusal['code']}: {refusal['message']}")
        print_closing(outcome)
        return
    print_distribution(ask_store(database_url, answer_distribution, run))
    print_closing(outcome)
    if outcome["rejected"]:
        print_hint(f"weighbridge rejected {run} says what was rejected, and why")
    if outcome["documents"] > outcome["rejected"]:
        print_hint(f"weighbridge results {run} shows each answer")


def _not_utf8(database_url: str, request: dict[str, Any], outcome: dict[str, Any]) -> str | None:
    """Say what to do if most records were rejected for their encoding."""
    if not outcome["rejected"]:
        return None
    from weighbridge.db import rejected_codes
    from weighbridge.tasks.encodings import encoding_hint

    codes = ask_store(database_url, rejected_codes, outcome["run_id"])
    refused = codes.get("document.encoding", 0)
    return encoding_hint(
        request["documents"], refused, outcome["documents"], known_as=request["source"]
    )


def ask_store(database_url: str, query: "Callable[[Engine, int], _T]", run_id: int) -> _T:
    """Ask the store one question about a run."""
    from weighbridge.db import open_engine

    engine = open_engine(database_url, readonly=True)
    try:
        return query(engine, run_id)
    finally:
        engine.dispose()


@warnings_shown()
def run_flow(
    settings: "Settings", request: dict[str, Any], *, output: Path | None = None
) -> dict[str, Any]:
    """Run the scoring flow in this process, with progress on stderr.

    Args:
        settings: Where the store is, and the consent to a Prefect API elsewhere.
        request: The fields of a `ScoreRequest`, without `database`.
        output: A file to write the answers to.

    Returns:
        What the flow returns.
    """
    import httpx
    from pydantic import ValidationError

    from weighbridge.db import export_format, store_path
    from weighbridge.db.place import require_place

    if output is not None:
        export_format(output)  # a wrong name is told before hours of scoring, not after
    require_place(settings.database_url)
    path = store_path(settings.database_url)
    quiet_prefect()
    from weighbridge.flows import ScoreRequest, listening, score_documents

    try:
        made = ScoreRequest.model_validate({**request, "database": path and str(path)})
    except ValidationError as error:
        raise _refused(error) from error
    _check(made)
    try:
        with (
            nullcontext() if path else _store_setting(settings.database_url),
            reporting(allow_remote=settings.allow_remote_api, say=print_note),
            progress_bar() as listener,
            listening(listener),
        ):
            outcome = score_documents(made)
    except KeyboardInterrupt:
        print_hint(_GOES_ON)
        raise
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CommandError(
            f"the Prefect API must answer until the run is done, and it does not: {reason}",
            hint=_GOES_ON,
        ) from error
    if output is not None:
        ask_store(
            settings.database_url,
            lambda engine, run_id: write_run(engine, run_id, output),
            outcome["run_id"],
        )
    return outcome


@contextmanager
def _store_setting(url: str) -> Generator[None]:
    """Name the store to the flow by its setting within this block.

    Prefect keeps the parameters of a flow, and this URL may hold a password.
    """
    name = "WEIGHBRIDGE_DATABASE_URL"
    before = os.environ.get(name)
    os.environ[name] = url
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _check(request: "ScoreRequest") -> None:
    """Find in a moment what the flow would find after a server has started."""
    from weighbridge.tasks import open_scorer, read_documents, read_schema

    read_schema(request.schema_)
    open_scorer(request.scorer())
    read_documents(
        request.documents,
        text_field=request.text_field,
        id_field=request.id_field,
        format=request.format,
        query=request.query,
    )


def _refused(error: "ValidationError") -> typer.BadParameter:
    """Say the first thing that is wrong with a request, by the name of its option."""
    first = error.errors()[0]
    field = str(first["loc"][0])
    named = {"documents": "DOCS", "database": "--db"}
    reason = first["msg"].removeprefix("Value error, ")
    # A URL is not repeated: it may hold a password.
    came = "" if "://" in str(first["input"]) else f", got {first['input']!r:.80}"
    return typer.BadParameter(
        f"{reason}{came}",
        param_hint=named.get(field, f"--{field.rstrip('_').replace('_', '-')}"),
    )
