"""The command line: one Typer app, and `main`, its only way in.

Importing this loads typer and rich and nothing heavier: a command imports what
it needs when it runs, so that `--help` answers at once.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import Annotated

import typer

from weighbridge.deployments.cli.bench import bench
from weighbridge.deployments.cli.checkpoint import checkpoint_app
from weighbridge.deployments.cli.db import db_app
from weighbridge.deployments.cli.demo import demo
from weighbridge.deployments.cli.deploy import deploy
from weighbridge.deployments.cli.diff import diff
from weighbridge.deployments.cli.doctor import doctor
from weighbridge.deployments.cli.errors import PROGRAM, ExitCode, run_app
from weighbridge.deployments.cli.reading import query, rejected
from weighbridge.deployments.cli.results import results
from weighbridge.deployments.cli.runs import runs
from weighbridge.deployments.cli.schema import schema_app
from weighbridge.deployments.cli.score import score
from weighbridge.deployments.cli.show import show
from weighbridge.deployments.cli.trigger import trigger
from weighbridge.deployments.cli.validate import validate
from weighbridge.deployments.cli.worker import worker_app

__all__ = ["ExitCode", "app", "main"]

SCORE = "Score documents"
READ = "Read the answers"
SCHEDULE = "Score on a worker, by a schedule"
SET_UP = "Set up"

_FIRST_STEPS = """\
First steps:

weighbridge demo · score sample documents and see the answers

weighbridge score tickets.jsonl --schema triage.json · score your own

weighbridge results · the answers of the latest run, again
"""

app = typer.Typer(
    name=PROGRAM,
    help="Ask typed questions about documents with a local model, and keep the answers.",
    epilog=_FIRST_STEPS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weighbridge {importlib.metadata.version(PROGRAM)}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version


for command in (demo, validate, score):
    app.command(rich_help_panel=SCORE)(command)
for command in (results, rejected, runs, show, diff, query):
    app.command(rich_help_panel=READ)(command)
for command in (deploy, trigger):
    app.command(rich_help_panel=SCHEDULE)(command)
for command in (doctor, bench):
    app.command(rich_help_panel=SET_UP)(command)
app.add_typer(schema_app, name="schema", rich_help_panel=SET_UP)
app.add_typer(checkpoint_app, name="checkpoint", rich_help_panel=SET_UP)
app.add_typer(db_app, name="db", rich_help_panel=SET_UP)
app.add_typer(worker_app, name="worker", rich_help_panel=SCHEDULE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_app(app, arguments)
