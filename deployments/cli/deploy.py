"""The command that puts our deployments and automations on a Prefect server."""

import re
import shlex
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    print_answer,
    print_hint,
    print_json,
    print_note,
)
from weighbridge.deployments.deployments_file import POOL, SCHEDULED, file_text, read_entries
from weighbridge.deployments.prefect_api import kept_server
from weighbridge.deployments.server_errors import server_errors
from weighbridge.deployments.time_zone import is_zone, local_zone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weighbridge.deployments.automations import AppliedAutomation
    from weighbridge.deployments.deploying import Applied, Wanted
    from weighbridge.deployments.deployments_file import Entry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}", re.ASCII)
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
    request = typed_request(documents, schema, output, parameters, follow_schema=True)
    one = {"documents/schema/output/-p": request, "--cron": cron, "--timezone": timezone}
    if name is None and (any(one.values()) or activate is not None):
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
        applied, automations, pools = _apply(entries, wanted, notify)
    if as_json:
        print_json(_values(applied, automations, pools))
    else:
        _report(applied, automations, pools)
    _say_what_is_next(applied, automations)


def _require_choices(
    name: str | None, cron: str | None, timezone: str | None, pool: str | None
) -> None:
    for value, hint in ((name, "NAME"), (pool, "--pool")):
        if value is not None and not _NAME.fullmatch(value):
            raise typer.BadParameter(
                f"must be letters, digits, dots, dashes and spaces, got {value!r:.80}",
                param_hint=hint,
            )
    if timezone is not None and not is_zone(timezone):
        raise typer.BadParameter(
            f"must be the IANA name of a zone, as Europe/Berlin, got {timezone!r:.80}",
            param_hint="--timezone",
        )
    if cron is not None:
        _require_cron(cron)


def _require_cron(cron: str) -> None:
    from pydantic import ValidationError

    from weighbridge.deployments.prefect_api import quiet_prefect

    quiet_prefect()
    from prefect.client.schemas.schedules import CronSchedule

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


def _apply(
    entries: "Sequence[Entry]", wanted: "Wanted", notify: str | None
) -> "tuple[list[Applied], list[AppliedAutomation], list[str]]":
    from prefect.client.orchestration import get_client

    from weighbridge.deployments import automations as ours
    from weighbridge.deployments.deploying import apply, ensure_pool, find, merged_request
    from weighbridge.deployments.deployments_file import FLOW

    zone = local_zone()
    with get_client(sync_client=True) as client:
        # Everything that can be refused is looked at before anything is changed.
        block = None if notify is None else ours.notification_block(client, notify)
        plans: list[tuple[Any, Any, dict[str, Any]]] = []
        for entry in entries:
            existing = find(client, entry.name)
            request = merged_request(wanted, existing)
            new = existing is None and entry.name not in read_entries()
            require_request(request, whole=new or wanted.paused is False)
            plans.append((entry, existing, request))
        pools: list[str] = []
        for _, existing, _ in plans:
            pool = wanted.pool or (existing and existing.work_pool_name) or POOL
            if ensure_pool(client, pool):
                pools.append(pool)
        applied = [
            apply(client, entry, wanted, existing, request, zone)
            for entry, existing, request in plans
        ]
        flow_id = client.create_flow_from_name(FLOW)
        asked = [ours.zombie_automation(flow_id)]
        if block is not None:
            asked.append(ours.rejected_automation(block))
        return applied, ours.apply_automations(client, asked), pools


def _values(
    applied: "Sequence[Applied]", automations: "Sequence[AppliedAutomation]", pools: "Sequence[str]"
) -> dict[str, Any]:
    return {
        "pools_made": list(pools),
        "deployments": [
            {**asdict(each), "id": str(each.id), "schedules": list(each.schedules)}
            for each in applied
        ],
        "automations": [{**asdict(each), "id": str(each.id)} for each in automations],
    }


def _report(
    applied: "Sequence[Applied]", automations: "Sequence[AppliedAutomation]", pools: "Sequence[str]"
) -> None:
    for pool in pools:
        print_answer(f"made     work pool {pool}")
    for each in applied:
        print_answer(f"{_done(each.made)}  deployment {each.name}, {_when(each)}")
        for name in ("documents", "output"):
            if value := each.request.get(name):
                print_answer(f"{'':9}{name} {value}")
        if value := each.request.get("schema"):
            name = each.request.get("schema_name") or "of its own"
            shown = f"{name}, kept with the deployment" if value.lstrip()[:1] == "{" else value
            print_answer(f"{'':9}schema {shown}")
    for each in automations:
        off = "" if each.enabled else ", switched off"
        print_answer(f"{_done(each.made)}  automation {each.name}{off}")


def _done(made: bool) -> str:
    return "made   " if made else "updated"


def _when(applied: "Applied") -> str:
    if not applied.schedules:
        return "started by weighbridge trigger"
    when = "; ".join(applied.schedules)
    return f"paused, would run at {when}" if applied.paused else f"runs at {when}"


def _say_what_is_next(
    applied: "Sequence[Applied]", automations: "Sequence[AppliedAutomation]"
) -> None:
    from weighbridge.deployments.automations import REJECTED

    if not any(each.name == REJECTED for each in automations):
        print_hint("--notify slack-webhook/ops tells you when a run rejects many documents")
    for each in applied:
        ready = {"documents", "schema"} <= each.request.keys()
        name = f"'{each.name}'" if " " in each.name else each.name
        if each.paused and each.schedules:
            what = "" if ready else " --documents DOCS --schema SCHEMA"
            print_hint(f"weighbridge deploy {name}{what} --activate")
        elif not each.schedules:
            what = "" if ready else " --documents DOCS --schema SCHEMA"
            print_hint(f"weighbridge trigger {name}{what} --wait")
    for pool in dict.fromkeys(each.pool for each in applied):
        other = "" if pool == POOL else f" --pool {shlex.quote(pool)}"
        print_hint(f"weighbridge worker start{other} runs them")
