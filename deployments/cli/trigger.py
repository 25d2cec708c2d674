"""The command that asks a worker, through the Prefect server, to score documents."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.errors import ExitCode
from weighbridge.deployments.cli.options import JsonOption
from weighbridge.deployments.cli.request_options import (
    DocumentsOption,
    OutputOption,
    ParameterOption,
    RequestSchemaOption,
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
from weighbridge.deployments.deployments_file import FLOW
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.prefect_api import kept_server
from weighbridge.deployments.progress import progress_bar
from weighbridge.deployments.server_errors import server_errors

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

    from weighbridge.deployments.following import Ended

_LONGEST_NAME = 255


def trigger(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Which deployment: adhoc, nightly or one of yours."),
    ],
    documents: DocumentsOption = None,
    schema: RequestSchemaOption = None,
    output: OutputOption = None,
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

    Example: weighbridge trigger nightly -p text_field='{subject}: {body}'
    """
    typed = typed_request(documents, schema, output, parameters, follow_schema=False)
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
                _wait(client, made, as_json=as_json)


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
            + (f"; there are {', '.join(there)}" if there else ", nor any other"),
            hint="weighbridge deploy makes nightly and adhoc",
        )
    return found


def _start(
    client: "SyncPrefectClient", deployment: "DeploymentResponse", typed: dict[str, Any]
) -> dict[str, Any]:
    from prefect.utilities.urls import url_for

    from weighbridge.deployments.deploying import overlaid, request_of

    # Prefect merges parameters by name, and ours is one: `request`.
    request = overlaid(request_of(deployment), typed)
    require_request(request, whole=True)
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
    from prefect.client.schemas.filters import WorkerFilter, WorkerFilterStatus

    pool = deployment.work_pool_name
    online = WorkerFilter(status=WorkerFilterStatus(any_=["ONLINE"]))
    if pool and not client.read_workers_for_work_pool(pool, worker_filter=online):
        other = "" if pool == "weighbridge" else f" --pool {pool}"
        print_hint(f"no worker is online in the pool {pool}: weighbridge worker start{other}")
    documents = typed.get("documents", "://")
    if not set("{*?[") & set(documents) and "://" not in documents and not _exists(documents):
        print_hint(f"{documents} is not on this machine; the worker's must have it")


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _wait(client: "SyncPrefectClient", made: dict[str, Any], *, as_json: bool) -> None:
    from uuid import UUID

    from weighbridge.deployments.following import follow

    # On a terminal the bar says the state; a line beside it would break it.
    say = _nothing if progress_console().is_terminal else print_note
    try:
        with progress_bar() as listener:
            ended = follow(client, UUID(made["flow_run_id"]), say=say, listener=listener)
    except KeyboardInterrupt:
        print_hint(f"the run goes on: {made['url'] or made['flow_run_id']}")
        raise
    run = client.read_flow_run(UUID(made["flow_run_id"]))  # a flow names its run when it starts
    if as_json:
        values = {**made, "name": run.name, "state": ended.state.lower(), "message": ended.message}
        print_json({**values, "outcome": None if ended.outcome is None else dict(ended.outcome)})
    _close(run.name, ended)


def _nothing(sentence: str) -> None:
    del sentence


def _close(name: str, ended: "Ended") -> None:
    if ended.state == "CANCELLED":
        print_note(f"{name} was cancelled: {ended.message}".removesuffix(": "))
        raise typer.Exit(ExitCode.INTERRUPTED)
    if ended.state != "COMPLETED":
        raise CommandError(
            f"{name} {ended.state.lower()}: {ended.message or 'its page says more'}",
            hint="what it recorded is kept: trigger it again, and it scores only the rest",
        )
    outcome = ended.outcome
    if outcome is None:
        print_note(f"{name} is done")
        return
    print_note(
        f"{name}: run {outcome['run_id']}, {outcome['documents']:,} documents, "
        f"{outcome['scored']:,} scored, {outcome['reused']:,} reused, "
        f"{outcome['rejected']:,} rejected in {outcome['seconds']:.1f} s"
    )
    if outcome["rejected"]:
        print_hint(f"weighbridge rejected {outcome['run_id']}, where it ran, says which and why")
        raise typer.Exit(ExitCode.REJECTED)
