"""The command that asks a worker, through the Prefect server, to score documents."""

import platform
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.errors import CancelledElsewhere, ExitCode
from weighbridge.deployments.cli.options import JsonOption
from weighbridge.deployments.cli.request_options import (
    DocumentsOption,
    IdFieldOption,
    OutputOption,
    ParameterOption,
    QueryOption,
    RequestSchemaOption,
    SinceOption,
    TextFieldOption,
    require_request,
    typed_request,
)
from weighbridge.deployments.console import (
    print_hint,
    print_json,
    print_note,
    print_pairs,
    progress_console,
)
from weighbridge.deployments.deployments_file import FLOW, POOL
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.prefect_api import kept_server
from weighbridge.deployments.progress import progress_bar
from weighbridge.deployments.server_errors import server_errors

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

    from weighbridge.deployments.following import Ended
    from weighbridge.flows.progress import Listener, Progress

_LONGEST_NAME = 255
_KEPT = "what it recorded is kept: trigger it again, and it scores only the rest"


def trigger(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Which deployment: adhoc, nightly or one of yours."),
    ],
    documents: DocumentsOption = None,
    schema: RequestSchemaOption = None,
    output: OutputOption = None,
    query: QueryOption = None,
    since: SinceOption = None,
    text_field: TextFieldOption = None,
    id_field: IdFieldOption = None,
    parameters: ParameterOption = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Follow the run, and end with its exit code."),
    ] = False,
    allow_remote_api: Annotated[
        bool,
        typer.Option("--allow-remote-api", help="Consent to a Prefect API elsewhere."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a run of a deployment on a worker, and print its id and page.

    What is not typed is as the deployment has it. A schema file is read here,
    and its questions are sent. With --wait: ends with 3 when some documents
    were rejected, with 1 when the run failed, with 130 when it was cancelled;
    Ctrl-C leaves the run going.

    Example: weighbridge trigger nightly --wait

    Example: weighbridge trigger adhoc --documents t.csv --schema s.json --wait

    Example: weighbridge trigger nightly --since '{date-7}' -p rescore=true
    """
    options = {
        "documents": documents,
        "schema": schema,
        "output": output,
        "query": query,
        "since": since,
        "text_field": text_field,
        "id_field": id_field,
    }
    typed = typed_request(options, parameters, follow_schema=False)
    from weighbridge.tasks.settings import load_settings

    settings = load_settings(allow_remote_api=allow_remote_api or None)
    with (
        kept_server(allow_remote=settings.allow_remote_api, say=print_note),
        server_errors(f"trigger {name:.80}"),
    ):
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            deployment = _deployment(client, name)
            made = _start(client, deployment, typed)
            if not (wait and as_json):
                _print(made, as_json=as_json)
            _hints(client, deployment, typed)
            if wait:
                _wait(client, made, settings.database_url, as_json=as_json)


def _deployment(client: "SyncPrefectClient", name: str) -> "DeploymentResponse":
    from weighbridge.deployments.deploying import deployed_names, find

    short = name.removeprefix(f"{FLOW}/")
    if "/" in short or not short.isprintable() or not 0 < len(short) <= _LONGEST_NAME:
        raise typer.BadParameter(
            f"must be the name of a deployment of {FLOW}, got {name!r:.80}", param_hint="NAME"
        )
    found = find(client, short)
    if found is None:
        there = deployed_names(client)
        raise CommandError(
            f"there is no deployment {short!r:.80}"
            + (f", only {_listed(there)}" if there else ", nor any other"),
            hint="weighbridge deploy makes nightly and adhoc",
        )
    return found


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _start(
    client: "SyncPrefectClient", deployment: "DeploymentResponse", typed: dict[str, Any]
) -> dict[str, Any]:
    from prefect.utilities.urls import url_for

    from weighbridge.deployments.deploying import overlaid, request_of

    # Prefect merges parameters by name, and ours is one: `request`.
    request = overlaid(request_of(deployment), typed)
    require_request(request, whole=True, of=deployment.name)
    run = client.create_flow_run_from_deployment(deployment.id, parameters={"request": request})
    return {
        "flow_run_id": str(run.id),
        "deployment": deployment.name,
        "name": run.name,
        "url": url_for("flow-run", obj_id=run.id),
    }


def _print(made: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(made)
    else:
        print_pairs((("run", made["flow_run_id"]), ("page", made["url"] or "")))


def _hints(
    client: "SyncPrefectClient", deployment: "DeploymentResponse", typed: dict[str, Any]
) -> None:
    from weighbridge.deployments.pools import online_workers

    pool = deployment.work_pool_name
    if pool and not online_workers(client, pool):
        other = "" if pool == POOL else f" --pool {shlex.quote(pool)}"
        print_hint(f"no worker is online in the pool {pool}: weighbridge worker start{other}")
    documents = typed.get("documents", "://")
    if not set("{*?[") & set(documents) and "://" not in documents and not _exists(documents):
        print_hint(f"{documents} is not on this machine; the worker's must have it")


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _wait(
    client: "SyncPrefectClient", made: dict[str, Any], database_url: str, *, as_json: bool
) -> None:
    from uuid import UUID

    from weighbridge.deployments.following import follow

    # On a terminal the bar says the state, and a line beside it would break it; elsewhere a
    # line says it, and the bar's lines only count.
    terminal = progress_console().is_terminal
    try:
        with progress_bar() as listener:
            ended = follow(
                client,
                UUID(made["flow_run_id"]),
                say=_nothing if terminal else print_note,
                listener=listener if terminal else _counts_only(listener),
            )
    except KeyboardInterrupt:
        print_hint(f"the run goes on: {made['url'] or made['flow_run_id']}")
        print_hint(f"to end it: prefect flow-run cancel {made['flow_run_id']}")
        raise
    run = client.read_flow_run(UUID(made["flow_run_id"]))  # a flow names its run when it starts
    if as_json:
        outcome = ended.published.outcome
        values = {**made, "name": run.name, "state": ended.state.lower(), "message": ended.message}
        print_json({**values, "outcome": None if outcome is None else dict(outcome)})
    _close(run.name, ended, database_url)


def _nothing(sentence: str) -> None:
    del sentence


def _counts_only(listener: "Listener") -> "Listener":
    def listen(progress: "Progress") -> None:
        if progress.total is not None:
            listener(progress)

    return listen


def _close(name: str, ended: "Ended", database_url: str) -> None:
    outcome, kept = ended.published.outcome, ended.published.recorded
    if ended.state == "CANCELLED":
        # Our own messages begin with the word: cancelled through Prefect.
        own = ended.message.startswith("cancelled")
        said = ended.message if own else f"cancelled: {ended.message}".removesuffix(": ")
        print_note(f"{name} was {said}")
        if kept:
            print_hint(_KEPT)
        raise CancelledElsewhere
    if ended.state != "COMPLETED":
        raise CommandError(
            f"{name} {ended.state.lower()}: {ended.message or 'its page says more'}",
            hint=_KEPT if kept else None,
        )
    if outcome is None:
        raise CommandError(
            f"{name} completed without saying what became of its documents",
            hint="its page says more; weighbridge runs, where it ran, says what is recorded",
        )
    from weighbridge.flows.summary import documents

    print_note(
        f"{name}: run {outcome['run_id']}, {documents(outcome['documents'])}, "
        f"{outcome['scored']:,} scored, {outcome['reused']:,} reused, "
        f"{outcome['rejected']:,} rejected in {outcome['seconds']:.1f} s"
    )
    where, store = _place(ended, database_url)
    if output := ended.published.output:
        print_note(f"written to {output}{where and f' on {where}'}")
    there = f"{store}{where and f', on {where},'}"
    if outcome["rejected"]:
        print_hint(f"weighbridge rejected {outcome['run_id']}{there} says which and why")
    if outcome["documents"] > outcome["rejected"]:
        print_hint(f"weighbridge results {outcome['run_id']}{there} shows each answer")
    if outcome["rejected"]:
        raise typer.Exit(ExitCode.REJECTED)


def _place(ended: "Ended", database_url: str) -> tuple[str, str]:
    """Say on which other machine the answers are, and with which option; empty where needless."""
    from weighbridge.db import store_path

    host, store = ended.published.host, ended.published.store
    if host != platform.node():
        return host or "the machine it ran on", store
    own = store_path(database_url)
    return "", "" if own is not None and store == f" --db {shlex.quote(str(own))}" else store
