"""Options that several commands share."""

from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH",
        help="The store: a SQLite file or a database URL.",
        show_default=False,
    ),
]

RunArgument = Annotated[
    int | None,
    typer.Argument(
        metavar="RUN", help="Number of a run; the latest one if left out.", show_default=False
    ),
]
