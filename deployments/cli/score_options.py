"""Options of `score` that other commands take too: which documents, and which scorer."""

from typing import Annotated, Literal

import typer

_SCORER = "Scorer"
_DOCUMENTS = "Documents"

SchemaOption = Annotated[
    str,
    typer.Option(
        "--schema",
        metavar="SCHEMA",
        help="The questions: a schema or System One file, JSON, or a Pydantic model as "
        "module:Class.",
    ),
]

TextOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        help="This text instead of documents.",
        rich_help_panel=_DOCUMENTS,
        show_default=False,
    ),
]

TextFieldOption = Annotated[
    str,
    typer.Option(
        help="Column of the text, or a template: {subject}\\n\\n{body}", rich_help_panel=_DOCUMENTS
    ),
]

IdFieldOption = Annotated[str, typer.Option(help="Column of the id.", rich_help_panel=_DOCUMENTS)]

FormatOption = Annotated[
    Literal["jsonl", "json", "csv", "tsv", "parquet", "text", "sql"] | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="jsonl, json, csv, tsv, parquet, text or sql; name and content decide if left out.",
        rich_help_panel=_DOCUMENTS,
        show_default=False,
    ),
]

QueryOption = Annotated[
    str | None,
    typer.Option(
        "--query",
        metavar="SQL",
        help="The documents are the rows of this statement; DOCS is a SQLite file or a "
        "database URL.",
        rich_help_panel=_DOCUMENTS,
        show_default=False,
    ),
]

SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="WHEN",
        help="What :since in --query stands for: 2026-11-01, 2026-11-01T06:00+01:00 or {date-7}.",
        rich_help_panel=_DOCUMENTS,
        show_default=False,
    ),
]

TimezoneOption = Annotated[
    str | None,
    typer.Option(
        "--timezone",
        metavar="ZONE",
        help="Zone of {date} in paths, such as Europe/Berlin; this machine's if left out.",
        rich_help_panel=_DOCUMENTS,
        show_default=False,
    ),
]

LimitOption = Annotated[
    int | None,
    typer.Option(
        min=0, help="Only so many documents.", rich_help_panel=_DOCUMENTS, show_default=False
    ),
]

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The model: a folder, or org/name or org/name@revision of a hub; the setting or the "
        "embedded one if left out.",
        rich_help_panel=_SCORER,
        show_default=False,
    ),
]

AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="FOLDER",
        help="A LoRA adapter (mlx or PEFT) that is fused into the model when it is loaded.",
        rich_help_panel=_SCORER,
        show_default=False,
    ),
]

AcceptPromptOption = Annotated[
    bool,
    typer.Option(
        "--accept-prompt",
        help="Consent to a system text that is not the one the model was trained with.",
        rich_help_panel=_SCORER,
    ),
]

MaxInputTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest prompt; 4096 or the checkpoint's own if left out.",
        rich_help_panel=_SCORER,
        show_default=False,
    ),
]

LayoutOption = Annotated[
    Literal["schema-first", "context-first"] | None,
    typer.Option(
        metavar="LAYOUT",
        help="What the prompt begins with: schema-first or context-first; "
        "the checkpoint's own if left out.",
        rich_help_panel=_SCORER,
        show_default=False,
    ),
]

EncodingOption = Annotated[
    Literal["labels", "codes"] | None,
    typer.Option(
        metavar="ENCODING",
        help="What the model says: labels or codes; the checkpoint's own if left out.",
        rich_help_panel=_SCORER,
        show_default=False,
    ),
]

PermutationsOption = Annotated[
    int,
    typer.Option(
        metavar="K",
        min=1,
        help="Average K orders of the choices and tell how often they disagree.",
        rich_help_panel=_SCORER,
    ),
]
