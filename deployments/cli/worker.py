"""The commands of the worker that keeps the model."""

import logging
import os
import platform
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from weighbridge.deployments.cli.options import DatabaseOption
from weighbridge.deployments.cli.worker_install import install
from weighbridge.deployments.console import print_note
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.host_locks import take_name
from weighbridge.deployments.prefect_api import describe_api, kept_server, quiet_prefect
from weighbridge.deployments.server_errors import server_errors
from weighbridge.deployments.signals import exit_on_signals

if TYPE_CHECKING:
    from weighbridge.deployments.worker import WeighbridgeWorker

worker_app = typer.Typer(
    help="Run scheduled and triggered runs, with the model kept loaded.", no_args_is_help=True
)

_LOGGERS = ("weighbridge", "prefect.workers", "prefect.flow_runs", "prefect.task_runs")
# What is logged of each run and task run, beside what the worker and the flow say of it.
_DOUBLE = ("prefect.flow_runs.worker", "prefect.task_runs")
_FLUSH_SECONDS = 5
_NOISE = ("Beginning flow run", "View at http", "Finished in state")


@worker_app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Run scheduled and triggered runs, with the model kept loaded."""


@worker_app.command()
def start(
    pool: Annotated[
        str, typer.Option("--pool", help="The work pool; made if there is none.")
    ] = "weighbridge",
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="What the Prefect UI calls this worker; the name of the machine if left out.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="MODEL",
            help="The model of runs that name none, loaded ahead of them: a folder or hub id; "
            "the setting if left out.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="FOLDER",
            help="A LoRA adapter of that model: a folder or hub id.",
            show_default=False,
        ),
    ] = None,
    no_warm_up: Annotated[
        bool, typer.Option("--no-warm-up", help="Load no model before a run needs it.")
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Load a second model beside another program of this machine that holds one.",
        ),
    ] = False,
    database: DatabaseOption = None,
    allow_remote_api: Annotated[
        bool, typer.Option("--allow-remote-api", help="Consent to a Prefect API elsewhere.")
    ] = False,
) -> None:
    """Run what is scheduled or triggered, one run at a time, until a signal ends it.

    The model is loaded once and stays. SIGTERM or Ctrl-C lets the batch in
    flight end; its run goes on with the next worker. Needs a Prefect server:
    prefect server start

    Example: weighbridge worker start

    Example: weighbridge worker start --checkpoint ~/models/nimble --db answers.db
    """
    exit_on_signals()
    if name is not None and set(name) & set("/%"):
        raise typer.BadParameter("must not contain / or %", param_hint="--name")
    from weighbridge.db.place import require_place
    from weighbridge.tasks.lease import LeasePolicy, set_policy
    from weighbridge.tasks.settings import load_settings

    settings = load_settings(database_url=database, allow_remote_api=allow_remote_api or None)
    require_place(settings.database_url)
    if database is not None:
        # Flow runs that name no store, or no model, read the setting, in this process.
        os.environ["WEIGHBRIDGE_DATABASE_URL"] = settings.database_url
    if checkpoint is not None:
        os.environ["WEIGHBRIDGE_CHECKPOINT"] = checkpoint
        os.environ.pop("WEIGHBRIDGE_ADAPTER", None)  # that of another model
    if adapter is not None:
        os.environ["WEIGHBRIDGE_ADAPTER"] = adapter
    set_policy(LeasePolicy.SHARE if anyway else LeasePolicy.WAIT, what="worker")
    quiet_prefect()
    with kept_server(allow_remote=settings.allow_remote_api, say=print_note):
        try:
            taken, held = take_name(settings.cache / "workers", platform.node(), pool)
        except OSError as error:
            raise CommandError(
                f"{settings.cache} must be a folder that can be written, got: {error.strerror}",
                hint="name another one with WEIGHBRIDGE_CACHE",
            ) from error
        with held, _lines_on_stderr(), server_errors(f"take runs of the work pool {pool:.80}"):
            from weighbridge.deployments.worker import WeighbridgeWorker

            worker = WeighbridgeWorker(pool, name=name or taken, warm_up=not no_warm_up)
            _run(worker, pool)


worker_app.command()(install)


def _run(worker: "WeighbridgeWorker", pool: str) -> None:
    import asyncio

    print_note(f"worker {worker.name} takes runs of the work pool {pool}, one at a time")
    api = describe_api()
    if api is not None:
        print_note(f"runs and workers: {api.removesuffix('/api')}/work-pools/work-pool/{pool}")
    asyncio.run(worker.start(printer=lambda *_: None))
    _end_process()


def _end_process() -> None:
    """End with 0 now that all runs are put away.

    Not by returning: Python would wait for a model that is still loading, and a process
    that has used MLX and Prefect aborts at times while its libraries are taken down
    ("terminate called without an active exception"), which a service manager takes for a
    crash.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=_FLUSH_SECONDS)
    EventsWorker.drain_all(timeout=_FLUSH_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def _lines_on_stderr() -> Generator[None]:
    """Print what the worker and its runs log, one line each with the time."""
    import prefect.main  # noqa: F401  # pyright: ignore[reportUnusedImport] - sets up logging

    handler = _Lines(logging.INFO)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _Lines(logging.Handler):
    """Prints log records as lines for people."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter(datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; what says a thing twice is left out."""
        text = record.getMessage()
        told = record.levelno < logging.WARNING and record.name in _DOUBLE
        told = told and not text.startswith("loaded ")  # a model, which is said nowhere else
        if told or text.startswith(_NOISE):
            return
        formatter = self.formatter or logging.Formatter()
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        print_note(f"{formatter.formatTime(record, '%H:%M:%S')} {level}{text}")
        if record.exc_info and record.exc_info[1] is not None:
            print_note(f"  {type(record.exc_info[1]).__name__}: {record.exc_info[1]}")
