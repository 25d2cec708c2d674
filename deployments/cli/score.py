"""The command that scores documents through the flow, in this process."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weighbridge.deployments.cli.against import against_request, report_against
from weighbridge.deployments.cli.document_file import document_file
from weighbridge.deployments.cli.errors import ExitCode
from weighbridge.deployments.cli.options import DatabaseOption, JsonOption, parse_temperature
from weighbridge.deployments.cli.running import ask_store, run_flow
from weighbridge.deployments.cli.score_options import (
    AcceptPromptOption,
    AdapterOption,
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
    SinceOption,
    TextFieldOption,
    TextOption,
    TimezoneOption,
)
from weighbridge.deployments.console import print_hint, print_json, print_note
from weighbridge.deployments.interrupts import was_interrupted
from weighbridge.deployments.report import print_answers, print_closing, print_distribution

_SCORER = "Scorer"
_ANSWERS = "Answers"


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
    since: SinceOption = None,
    timezone: TimezoneOption = None,
    limit: LimitOption = None,
    checkpoint: CheckpointOption = None,
    adapter: AdapterOption = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODEL",
            help="Another checkpoint: score with it too, without --adapter, and compare.",
            rich_help_panel=_SCORER,
            show_default=False,
        ),
    ] = None,
    against_adapter: Annotated[
        str | None,
        typer.Option(
            "--against-adapter",
            metavar="FOLDER",
            help="The same with an adapter of it; of the first model without --against.",
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
            help="Its full revision, likewise; of a hub id what is fetched.",
            rich_help_panel=_SCORER,
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            parser=parse_temperature,
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
    accept_prompt: AcceptPromptOption = False,
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
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait while another program holds the model; an idle worker gives it up.",
            rich_help_panel=_SCORER,
        ),
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Load a second model beside that of another program.",
            rich_help_panel=_SCORER,
        ),
    ] = False,
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
    compares = against is not None or against_adapter is not None
    if compares and output is not None:
        raise typer.BadParameter("--output is for one run: write each with weighbridge results")
    if wait and anyway:
        raise typer.BadParameter("--wait and --anyway are two ways, name one of them")
    while_busy = "share" if anyway else "wait" if wait else "refuse"
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
            "since": since,
            "timezone": timezone,
            "limit": limit,
            "checkpoint": checkpoint,
            "adapter": adapter,
            "model_id": model_id,
            "revision": revision,
            "temperature": temperature,
            "allow_uncalibrated": allow_uncalibrated,
            "accept_prompt": accept_prompt,
            "max_input_tokens": max_input_tokens,
            "layout": layout,
            "encoding": encoding,
            "mode": mode,
            "field_batch_size": field_batch_size,
            "permutations": permutations,
            "rescore": rescore,
            "store_text": not no_store_text,
        }
        outcome = run_flow(settings, request, output=output, while_busy=while_busy)
        not_utf8 = _not_utf8(settings.database_url, request, outcome)
        other = None
        if compares:
            if was_interrupted():  # in the last batch of the first run
                raise KeyboardInterrupt
            asked = against_request(request, against, against_adapter)
            other = run_flow(settings, asked, while_busy=while_busy)
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
