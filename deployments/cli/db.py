"""Commands on the store as a file: where it is, upgrading, copying, and removing from it."""

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.errors import ExitCode
from weighbridge.deployments.cli.options import DatabaseOption, JsonOption, parse_age
from weighbridge.deployments.console import (
    print_answer,
    print_hint,
    print_json,
    print_note,
    print_pairs,
    printable,
)

if TYPE_CHECKING:
    from weighbridge.db.forget import Forgotten
    from weighbridge.db.prune import Pruned

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

db_app = typer.Typer(
    help="The store: where it is, copying it, and removing from it.",
    no_args_is_help=True,
    add_completion=False,
)


@db_app.command("path")
def path(as_json: JsonOption = False, database: DatabaseOption = None) -> None:
    """Print where the answers are kept, as a path or a database URL.

    Example: sqlite3 "$(weighbridge db path)" "select * from results limit 3"
    """
    from weighbridge.db.location import display_url, store_path
    from weighbridge.tasks.settings import load_settings

    url = load_settings(database_url=database).database_url
    file = store_path(url)
    if as_json:
        print_json({"path": None if file is None else str(file), "url": display_url(url)})
    else:
        print_answer(str(file or display_url(url)))


@db_app.command("upgrade")
def upgrade(database: DatabaseOption = None) -> None:
    """Bring an older store to the newest version; a copy of the old one is kept.

    Example: weighbridge db upgrade
    """
    from weighbridge.db.engine import upgrade_store
    from weighbridge.db.errors import StoreUnavailable
    from weighbridge.db.filesystems import require_local
    from weighbridge.db.location import display_url, store_path
    from weighbridge.tasks.settings import load_settings

    url = load_settings(database_url=database).database_url
    file = store_path(url)
    if file is not None:
        require_local(file)
    if file is not None and not file.exists():
        # An upgrade of a mistyped path must not leave an empty store there.
        raise StoreUnavailable(
            f"a store must exist to be upgraded, and there is no store at {file}",
            hint="weighbridge score creates one",
        )
    done = upgrade_store(url)
    where = file or display_url(url)
    if done.before == done.after:
        print_answer(f"{where} has the newest version already: {done.after}")
        return
    print_answer(f"{where} is upgraded from version {done.before or 'none'} to {done.after}")
    if done.copy:
        print_note(f"the store as it was: {done.copy}")


@db_app.command("backup")
def backup(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Where to; beside the store, named after the time, if left out.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Copy the store to one file, checked, also while a run writes to it.

    The copy holds the store as it was at one moment, and only its owner can
    read it. To restore it, stop all runs and put it in the store's place.

    Example: weighbridge db backup ~/backups/answers.db
    """
    from weighbridge.db.backup import back_up
    from weighbridge.tasks.settings import load_settings

    made = back_up(load_settings(database_url=database).database_url, file, overwrite=force)
    if as_json:
        print_json({"path": str(made.path), "bytes": made.bytes})
    else:
        print_answer(f"{made.path} ({readable_bytes(made.bytes)}, checked)")


@db_app.command("prune")
def prune(
    older_than: Annotated[
        str,
        typer.Option(
            metavar="AGE", help="Age of the runs to remove: 90d, 12w or 36h.", show_default=False
        ),
    ],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="Give the free space back to the disk; runs wait.")
    ] = False,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Remove finished runs that began before an age, and what only they needed.

    Answers that a newer run uses stay; texts stay while any answer needs
    them. Runs that are running are never touched, nor are older runs that a
    running one may take answers from. What is removed is overwritten, and
    would have to be scored again.

    Example: weighbridge db prune --older-than 90d --dry-run
    """
    from weighbridge.db.prune import plan_prune, prune_runs
    from weighbridge.tasks.settings import load_settings

    before = _moment(older_than)
    url = load_settings(database_url=database).database_url
    found = plan_prune(url, before)
    if not dry_run and not found.nothing:
        if not yes:
            _note_pairs(_pruned_pairs(found))
            _ask(f"Remove all this, from runs that began before {before:%Y-%m-%d %H:%M} UTC?")
        found = prune_runs(url, before, vacuum=vacuum)
    elif vacuum and not dry_run:
        _vacuum(url)
    if as_json:
        print_json({"before": before.isoformat(), "dry_run": dry_run, **asdict(found)})
    elif found.nothing:
        print_answer(f"nothing to remove: no finished run began before {before:%Y-%m-%d %H:%M} UTC")
    else:
        print_answer("would be removed:" if dry_run else "removed:")
        print_pairs(_pruned_pairs(found))
    if found.left:
        shown = ", ".join(str(each) for each in found.left[:10])
        more = ", …" if len(found.left) > 10 else ""
        print_hint(f"left alone: runs {shown}{more}; they run, or a running one needs them")


@db_app.command("forget")
def forget(
    external_id: Annotated[
        str, typer.Argument(metavar="ID", help="The id of the document, as the records had it.")
    ],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Remove one document from all runs: text, metadata and answers.

    The file is written anew, so that nothing of it is left in free space. A
    text that other ids have too stays with them. Copies of the store are not
    touched, and a source that still has the document brings it back.

    Example: weighbridge db forget T-1001
    """
    from weighbridge.db.forget import forget_document, plan_forget
    from weighbridge.tasks.settings import load_settings

    url = load_settings(database_url=database).database_url
    found = plan_forget(url, external_id)
    if not dry_run:
        if not yes:
            _note_pairs(_forgotten_pairs(found))
            _ask(f"Remove all this of {external_id!r}?")
        found = forget_document(url, external_id)
    if as_json:
        print_json({"dry_run": dry_run, **asdict(found)})
    else:
        print_answer("would be removed:" if dry_run else "removed:")
        print_pairs(_forgotten_pairs(found))
    if found.shared:
        others = "another id has" if found.others == 1 else f"{found.others} other ids have"
        print_hint(f"the text stays, because {others} the same")
    if not dry_run:
        print_hint(
            "copies of the store still have it: those that weighbridge named lie beside it "
            "(weighbridge doctor lists them), others are where you put them"
        )


@db_app.command("vacuum")
def vacuum(as_json: JsonOption = False, database: DatabaseOption = None) -> None:
    """Rewrite the store without its free space.

    Needs as much free disk as the store takes, and no run that writes.

    Example: weighbridge db vacuum
    """
    from weighbridge.tasks.settings import load_settings

    before, after = _vacuum(load_settings(database_url=database).database_url)
    if as_json:
        print_json({"bytes_before": before, "bytes_after": after})
    else:
        print_answer(f"{readable_bytes(before)} before, {readable_bytes(after)} now")


def readable_bytes(count: float) -> str:
    """Give bytes in the largest unit that leaves a whole number of them."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _vacuum(url: str) -> tuple[int, int]:
    from weighbridge.db.housekeeping import vacuum_store

    return vacuum_store(url)


def _moment(age: str) -> datetime:
    past = parse_age(age)
    now = datetime.now(UTC)
    if past is not None and past < now - datetime.min.replace(tzinfo=UTC):
        return now - past
    raise typer.BadParameter(
        f"an age must be a number and d, w or h, as in 90d, got {age!r:.80}",
        param_hint="--older-than",
    )


def _ask(question: str) -> None:
    """Ask on the terminal; end the command unless the answer is yes."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("without a terminal to ask on, this needs --yes (or --dry-run)")
    # Not typer.confirm: it writes a blank to stdout, where the answer goes.
    typer.echo(f"{printable(question)} [y/N]: ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        print_note("nothing is removed")
        raise typer.Exit(ExitCode.FAILED)


def _note_pairs(pairs: list[tuple[str, str]]) -> None:
    """Show what is asked about where the question is."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print_note(f"{name.ljust(width)}  {value}")


def _pruned_pairs(found: "Pruned") -> list[tuple[str, str]]:
    values: dict[str, Any] = {**asdict(found)}
    del values["left"]
    return [(name, f"{value:,}") for name, value in values.items()]


def _forgotten_pairs(found: "Forgotten") -> list[tuple[str, str]]:
    return [
        ("records", f"{found.items:,} (in runs {', '.join(str(run) for run in found.runs[:10])})"),
        ("texts", f"{found.documents:,}"),
        ("decisions", f"{found.decisions:,}"),
        ("answers", f"{found.answers:,}"),
    ]
