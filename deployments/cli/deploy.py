"""The command that puts our deployments and automations on a Prefect server."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.deploy_report import Done, print_report, say_what_is_next, values
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
from weighbridge.deployments.console import print_json, print_note
from weighbridge.deployments.deployments_file import NAME, POOL, SCHEDULED, file_text, read_entries
from weighbridge.deployments.prefect_api import kept_server, quiet_prefect
from weighbridge.deployments.server_errors import server_errors
from weighbridge.deployments.time_zone import is_zone, local_zone

if TYPE_CHECKING:
    from prefect.client.schemas.responses import DeploymentResponse

    from weighbridge.deployments.deploying import Wanted
    from weighbridge.deployments.deployments_file import Entry

_WHEN = "When it runs"


def deploy(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Which deployment: nightly, adhoc, or a new one made like nightly; all that "
            "come with Weighbridge if left out.",
            show_default=False,
        ),
    ] = None,
    documents: DocumentsOption = None,
    schema: RequestSchemaOption = None,
    output: OutputOption = None,
    query: QueryOption = None,
    since: SinceOption = None,
    text_field: TextFieldOption = None,
    id_field: IdFieldOption = None,
    parameters: ParameterOption = None,
    cron: Annotated[
        str | None,
        typer.Option(
            metavar="CRON",
            help="When it runs, as '0 6 * * *' (06:00 every day).",
            rich_help_panel=_WHEN,
            show_default=False,
        ),
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option(
            metavar="ZONE",
            help="Time zone of that and of {date}, as Europe/Berlin; the machine's own at first.",
            rich_help_panel=_WHEN,
            show_default=False,
        ),
    ] = None,
    activate: Annotated[
        bool | None,
        typer.Option(
            "--activate/--paused",
            help="Switch its schedule on or off; left as it is otherwise, off at first.",
            rich_help_panel=_WHEN,
            show_default=False,
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="POOL",
            help=f"Work pool of its runs, made if it is missing; {POOL} at first.",
            show_default=False,
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCK",
            help="Notify by this block of yours, as slack-webhook/ops, when a run rejects many "
            "documents.",
            show_default=False,
        ),
    ] = None,
    rejected_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="How many are many: more than this share; 0.1 at first.",
            show_default=False,
        ),
    ] = None,
    print_file: Annotated[
        bool,
        typer.Option("--print", help="Print prefect.yaml for prefect deploy, and apply nothing."),
    ] = False,
    allow_remote_api: Annotated[
        bool,
        typer.Option("--allow-remote-api", help="Consent to a Prefect API elsewhere."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Put the deployments on the Prefect server, or bring them up to date.

    Can be done again at any time: what is typed is changed, and what is not
    typed stays as it is on the server, also what was changed in the UI. Each
    run reads a schema file anew. The server also gets an automation that ends
    runs whose process is gone.

    Example: weighbridge deploy

    Example: weighbridge deploy nightly --documents 't-{date}.csv' --schema s.json

    Example: weighbridge deploy nightly --timezone Europe/Berlin --activate

    Example: weighbridge deploy mails --documents m.csv --schema s.json
    """
    if print_file:
        typer.echo(file_text(), nl=False)
        return
    _require_choices(name, cron, timezone, pool)
    options = {
        "documents": documents,
        "schema": schema,
        "output": output,
        "query": query,
        "since": since,
        "text_field": text_field,
        "id_field": id_field,
    }
    request = typed_request(options, parameters, follow_schema=True)
    if name is None and (request or cron or timezone or activate is not None):
        raise typer.BadParameter(
            "name the deployment that this is about, as in: weighbridge deploy nightly …",
            param_hint="NAME",
        )
    from weighbridge.tasks.settings import load_settings

    settings = load_settings(allow_remote_api=allow_remote_api or None)
    with (
        kept_server(allow_remote=settings.allow_remote_api, say=print_note),
        server_errors("deploy"),
    ):
        from weighbridge.deployments.deploying import Wanted

        paused = None if activate is None else not activate
        wanted = Wanted(request, cron, timezone, paused, pool, rejected_share)
        entries = _entries(name)
        done = _apply(entries, wanted, notify)
    if as_json:
        print_json(values(done))
    else:
        print_report(done)
    say_what_is_next(done)


def _require_choices(
    name: str | None, cron: str | None, timezone: str | None, pool: str | None
) -> None:
    for value, hint in ((name, "NAME"), (pool, "--pool")):
        if value is not None and not NAME.fullmatch(value):
            raise typer.BadParameter(
                f"must be letters, digits, dots, dashes and spaces, got {value!r:.80}",
                param_hint=hint,
            )
    if timezone is None and cron is None:
        return
    quiet_prefect()
    if timezone is not None and not is_zone(timezone):
        raise typer.BadParameter(
            f"must be the IANA name of a zone, as Europe/Berlin, got {timezone!r:.80}",
            param_hint="--timezone",
        )
    if cron is not None:
        _require_cron(cron)


def _require_cron(cron: str) -> None:
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    try:
        CronSchedule(cron=cron)
    except ValidationError as error:
        raise typer.BadParameter(
            f"must be a cron expression, as '0 6 * * *', got {cron!r:.80}", param_hint="--cron"
        ) from error


def _entries(name: str | None) -> "list[Entry]":
    known = read_entries()
    if name is None:
        return list(known.values())
    return [known.get(name) or replace(known[SCHEDULED], name=name)]


def _apply(entries: "list[Entry]", wanted: "Wanted", notify: str | None) -> Done:
    from prefect.client.orchestration import get_client

    from weighbridge.deployments import automations as ours
    from weighbridge.deployments.deploying import apply, ensure_pool, find
    from weighbridge.deployments.deployments_file import FLOW
    from weighbridge.deployments.pools import online_workers

    zone = local_zone()
    with get_client(sync_client=True) as client:
        # Everything that can be refused is looked at before anything is changed.
        block = None if notify is None else ours.notification_block(client, notify)
        plans = [(entry, find(client, entry.name)) for entry in entries]
        requests = [_request(entry, existing, wanted) for entry, existing in plans]
        wanted_pools = [
            wanted.pool or (existing and existing.work_pool_name) or POOL for _, existing in plans
        ]
        pools = [pool for pool in wanted_pools if ensure_pool(client, pool)]
        applied = [
            apply(client, entry, wanted, existing, request, zone)
            for (entry, existing), request in zip(plans, requests, strict=True)
        ]
        asked = [ours.zombie_automation(client.create_flow_from_name(FLOW))]
        if block is not None:
            asked.append(ours.rejected_automation(block))
        automations = ours.apply_automations(client, asked)
        idle = [pool for pool in dict.fromkeys(wanted_pools) if not online_workers(client, pool)]
        return Done(applied, automations, pools, idle)


def _request(
    entry: "Entry", existing: "DeploymentResponse | None", wanted: "Wanted"
) -> dict[str, Any]:
    """Return what runs of a deployment will be asked, if all that is typed fits it."""
    from weighbridge.deployments.deploying import has_cron, merged_request

    request = merged_request(wanted, existing)
    new = existing is None and entry.name not in read_entries()
    require_request(request, whole=new or wanted.paused is False, of=entry.name)
    if wanted.timezone and not wanted.cron and not has_cron(entry, existing):
        raise typer.BadParameter(
            f"is the zone of a schedule, and {entry.name} has none: name it with --cron, or the "
            f"zone of {{date}} with -p timezone={wanted.timezone}",
            param_hint="--timezone",
        )
    return request
