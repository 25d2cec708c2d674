"""Runs the scoring flow in this process, for the commands that do."""

import json
import os
import shlex
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from weighbridge.deployments.answers import write_run
from weighbridge.deployments.cli.refusing import refused
from weighbridge.deployments.cli.request_options import OWN_OPTION
from weighbridge.deployments.console import print_hint, print_note, warnings_shown
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.interrupts import interruptible
from weighbridge.deployments.prefect_api import quiet_prefect, reporting
from weighbridge.deployments.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

    from weighbridge.flows import ScoreRequest
    from weighbridge.tasks.settings import Settings

_T = TypeVar("_T")

_GOES_ON = "what is recorded is kept: the same command scores only the rest"


@warnings_shown()
def run_flow(
    settings: "Settings",
    request: dict[str, Any],
    *,
    output: Path | None = None,
    while_busy: Literal["wait", "refuse", "share"] = "refuse",
) -> dict[str, Any]:
    """Run the scoring flow in this process, with progress on stderr.

    Args:
        settings: Where the store is, and the consent to a Prefect API elsewhere.
        request: The fields of a `ScoreRequest`, without `database`.
        output: A file to write the answers to.
        while_busy: What to do while another program of this machine holds a model.

    Returns:
        What the flow returns.
    """
    import httpx
    from pydantic import ValidationError

    from weighbridge.db import store_path
    from weighbridge.db.place import require_place

    require_place(settings.database_url)
    path = store_path(settings.database_url)
    quiet_prefect()
    from prefect.exceptions import CancelledRun

    from weighbridge.flows import ScoreRequest, listening, score_documents
    from weighbridge.tasks.lease import AcceleratorBusy, LeasePolicy, set_policy

    try:
        made = ScoreRequest.model_validate(
            {**request, "database": path and str(path), "output": output and str(output)}
        )
    except ValidationError as error:
        raise refused(error, _option) from error
    resolved, files = _check(made, settings.database_url)
    # Written by this command, which says so and warns on the terminal.
    made = made.model_copy(update={**files, "output": None})
    set_policy(LeasePolicy(while_busy), what="weighbridge command")
    try:
        with (
            nullcontext() if path else _store_setting(settings.database_url),
            reporting(allow_remote=settings.allow_remote_api, say=print_note),
            progress_bar() as listener,
            interruptible(listener, say=print_note) as told,
            listening(told),
        ):
            outcome = score_documents(made)
    except AcceleratorBusy as busy:
        raise CommandError(busy.message, hint=_while_busy(resolved, settings)) from busy
    except CancelledRun as cancelled:
        print_note(str(cancelled))
        print_hint(_GOES_ON)
        raise KeyboardInterrupt from cancelled
    except KeyboardInterrupt:
        print_hint(_GOES_ON)
        raise
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CommandError(
            f"the Prefect API must answer until the run is done, and it does not: {reason}",
            hint=_GOES_ON,
        ) from error
    if resolved.output is not None:
        written = Path(resolved.output)
        ask_store(
            settings.database_url,
            lambda engine, run_id: write_run(engine, run_id, written),
            outcome["run_id"],
        )
    return outcome


def _while_busy(request: "ScoreRequest", settings: "Settings") -> str:
    """Say what to do while another program of this machine holds a model."""
    from weighbridge.flows.request import is_schema_file

    ways = "wait for it with --wait, or load a second model with --anyway"
    if request.source is not None:  # typed, or from stdin: nothing a worker could read
        return ways
    asked = request.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if not is_schema_file(request.schema_):
        asked["schema"] = "SCHEMA"
    if settings.origin("database_url") == "default":
        asked.pop("database", None)  # which is the worker's own too
    trigger = ["weighbridge", "trigger", "adhoc"]
    for field, value in asked.items():
        text = value if isinstance(value, str) else json.dumps(value)
        own = field in OWN_OPTION
        trigger += [f"--{field.replace('_', '-')}", text] if own else ["-p", f"{field}={text}"]
    return f"let the worker do it: {shlex.join([*trigger, '--wait'])}; or {ways}"


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


def _check(
    request: "ScoreRequest", database_url: str
) -> "tuple[ScoreRequest, dict[str, str | None]]":
    """Find in a moment what the flow would find after a server has started.

    Returns:
        The request with its dates filled in, and the fields that name its checkpoint, with
        commits for hub ids, which are fetched.
    """
    from weighbridge.flows.delivering import check_output
    from weighbridge.flows.resolving import resolve_request
    from weighbridge.tasks import load_settings, open_scorer, pinned, read_documents, read_schema

    resolved = resolve_request(request)
    check_output(resolved.request, database_url)
    read_schema(resolved.request.schema_)
    spec = request.scorer()
    set_adapter = load_settings().adapter
    if spec.checkpoint and not spec.adapter and set_adapter:
        print_note(
            f"the adapter of the settings ({set_adapter}) is that of another model, and is not used"
        )
    files = pinned(spec, say=print_note)
    open_scorer(files)
    read_documents(
        resolved.request.documents,
        text_field=request.text_field,
        id_field=request.id_field,
        format=request.format,
        query=request.query,
        parameters=resolved.parameters,
    )
    if not (spec.checkpoint or spec.adapter):
        return resolved.request, {}  # the settings name both, for the flow too
    named = ("checkpoint", "adapter", "model_id", "revision")
    return resolved.request, {name: getattr(files, name) for name in named}


def _option(field: str) -> str:
    named = {"documents": "DOCS", "database": "--db"}
    return named.get(field, f"--{field.replace('_', '-')}")


def ask_store(database_url: str, query: "Callable[[Engine, int], _T]", run_id: int) -> _T:
    """Ask the store one question about a run."""
    from weighbridge.db import open_engine

    engine = open_engine(database_url, readonly=True)
    try:
        return query(engine, run_id)
    finally:
        engine.dispose()
