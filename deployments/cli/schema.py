"""Commands on schemas: what one asks, and the same questions in other forms."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from weighbridge.deployments.cli.options import JsonOption
from weighbridge.deployments.console import (
    Column,
    answer_console,
    print_answer,
    print_hint,
    print_json,
    print_note,
    print_pairs,
    print_table,
    printable,
)
from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from weighbridge.scorer.schema import Field, Schema

schema_app = typer.Typer(
    help="Schemas: what they ask, and the same questions in other forms.",
    no_args_is_help=True,
    add_completion=False,
)

SchemaArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCHEMA",
        help="A schema or System One file, JSON, or a Pydantic model as module:Class.",
        show_default=False,
    ),
]


class Form(StrEnum):
    """A form that a schema is written in."""

    NATIVE = "native"
    NIMBLE = "nimble"
    SYSTEM_ONE = "systemone"
    JSON_SCHEMA = "json-schema"


@schema_app.command("show")
def show(schema: SchemaArgument, as_json: JsonOption = False) -> None:
    """Show the fields of a schema with their choices, and its hash.

    Example: weighbridge schema show triage.json
    """
    from weighbridge.tasks.questions import read_schema

    read = read_schema(schema)
    if as_json:
        print_json(
            {
                "name": read.name,
                "sha256": read.sha256,
                "fields": [
                    {
                        "field": each.name,
                        "kind": each.kind.value,
                        "description": each.description,
                        "choices": _choices(each),
                    }
                    for each in read.fields
                ],
            }
        )
        return
    print_pairs([("schema", read.name or "inline"), ("sha256", read.sha256)])
    for each in read.fields:
        print_answer()
        _print_field(each)


@schema_app.command("convert")
def convert(
    schema: SchemaArgument,
    to: Annotated[
        Form,
        typer.Option(
            "--to",
            metavar="FORM",
            help="native (ours, holds everything), nimble (ours without scores and labels), "
            "systemone (a question file), or json-schema (of the answers).",
        ),
    ] = Form.NATIVE,
    output: Annotated[
        Path | None,
        typer.Option(help="Write it to this file instead of stdout.", show_default=False),
    ] = None,
) -> None:
    """Write the questions of a schema in another form, as JSON.

    What a form cannot hold is refused by name; nothing is left out in silence.

    Example: weighbridge schema convert questions.json --to native --output triage.json

    Example: weighbridge schema convert triage:Ticket --to json-schema
    """
    from weighbridge.tasks.questions import read_schema

    read = read_schema(schema)
    written = _written(read, to)
    if output is None:
        print_json(written)
    else:
        _write(json.dumps(written, ensure_ascii=False, indent=2) + "\n", output)
        print_note(f"written to {output}")


def _written(schema: "Schema", form: Form) -> dict[str, Any]:
    from weighbridge.scorer import schema_forms

    if form is Form.JSON_SCHEMA:
        for left_out in schema_forms.not_in_json_schema(schema):
            print_hint(left_out)
        return schema_forms.json_schema(schema)
    write = {
        Form.NATIVE: schema_forms.native_form,
        Form.NIMBLE: schema_forms.nimble_form,
        Form.SYSTEM_ONE: schema_forms.system_one_form,
    }[form]
    return write(schema)


def _write(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandError(
            f"the output must be a file that can be written, got {path}: {reason}",
            hint="name a file in an existing folder",
        ) from error


def _choices(field: "Field") -> list[dict[str, Any]]:
    return [
        {
            "choice": choice,
            "description": field.choice_descriptions.get(key),
            "label": field.labels.get(key),
        }
        for key, choice in zip(field.keys, field.choices, strict=True)
    ]


def _print_field(field: "Field") -> None:
    kind = "score, from low to high" if field.kind == "score" else field.kind.value
    print_answer(f"{field.name}  ({kind})")
    _print_indented(field.description)
    columns = [Column("  choice")]
    if field.labels:
        columns.append(Column("said as"))
    if field.choice_descriptions:
        columns.append(Column("meaning"))
    print_table(
        columns,
        [
            {
                "  choice": f"  {key}",
                "said as": field.labels.get(key),
                "meaning": field.choice_descriptions.get(key),
            }
            for key in field.keys
        ],
    )


def _print_indented(text: str) -> None:
    console = answer_console()
    if console.is_terminal:
        console.print(Padding(Text(printable(text)), (0, 0, 0, 2)))
    else:
        print_answer(f"  {text}")
