"""The command that lists runs."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weighbridge.deployments.cli.options import DatabaseOption, JsonOption, parse_age
from weighbridge.deployments.cli.reading import FIRST_RUN, counted, reading_store, shown
from weighbridge.deployments.console import Column, print_hint, print_json, print_note, print_table

if TYPE_CHECKING:
    from weighbridge.db.records import RunSummary

_COLUMNS = (
    Column("run", "right"),
    Column("started"),
    Column("status"),
    Column("documents", "right"),
    Column("scored", "right"),
    Column("reused", "right"),
    Column("rejected", "right"),
    Column("schema"),
)
_SHOWN = 20


def runs(
    status: Annotated[
        Literal["running", "completed", "failed", "cancelled", "crashed"] | None,
        typer.Option(
            metavar="STATUS",
            help="Only these: running, completed, failed, cancelled or crashed.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the schema, or start of its hash.", show_default=False
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name or model id of the checkpoint, or start of its fingerprint.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="Begun then or later: a date as 2026-11-30 (local time), or an age: 12h, 7d, 2w.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"At most so many; {_SHOWN} in a table.", show_default=False),
    ] = None,
    offset: Annotated[int, typer.Option(min=0, help="Leave out so many of the latest.")] = 0,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """List the runs, the latest first.

    Example: weighbridge runs --status failed --since 7d
    """
    moment = None if since is None else moment_of(since)
    from weighbridge.db import queries

    only = queries.RunFilter(status, schema, checkpoint, moment)
    with reading_store(database) as engine:
        most = limit if limit is not None or as_json else _SHOWN
        found = queries.runs(engine, limit=most, offset=offset, only=only)
        total = queries.count_runs(engine, only)
        any_run = bool(total) or queries.latest_run_id(engine) is not None
    if as_json:
        print_json([run_values(run) for run in found])
    elif found:
        print_table(_COLUMNS, [_row(run) for run in found])
        if len(found) < total:
            print_note(f"{len(found)} of {counted(total, 'run')}")
            print_hint(f"--limit {total} shows all of them")
    elif any_run:
        print_note("no such runs" if not total else f"there are only {counted(total, 'run')}")
    else:
        print_note("no runs yet")
        print_hint(FIRST_RUN)


def run_values(run: "RunSummary") -> dict[str, Any]:
    """Give a run as JSON values."""
    finished = run.finished_at and run.finished_at.isoformat()
    return {**asdict(run), "started_at": run.started_at.isoformat(), "finished_at": finished}


def moment_of(since: str, now: datetime | None = None) -> datetime:
    """Read a date, a time or an age.

    Raises:
        typer.BadParameter: It is none of them.
    """
    try:
        age = parse_age(since)
        if age is not None:
            return (now or datetime.now(UTC)) - age
        return datetime.fromisoformat(since.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"must be a date as 2026-11-30, a time as 2026-11-30T06:00, or an age as 12h, 7d or "
            f"2w, got {since!r:.80}",
            param_hint="--since",
        ) from None


def _row(run: "RunSummary") -> dict[str, Any]:
    started = run.started_at.astimezone().strftime("%Y-%m-%d %H:%M")
    return {**asdict(run), "run": run.run_id, "started": started, "schema": shown(run.schema)}
