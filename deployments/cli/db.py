"""Commands on the store as a file: where it is, and bringing it to the newest version."""

import typer

from weighbridge.deployments.cli.options import DatabaseOption, JsonOption
from weighbridge.deployments.console import print_answer, print_json, print_note

db_app = typer.Typer(
    help="The store: where it is, and upgrading it.", no_args_is_help=True, add_completion=False
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
    from weighbridge.db.location import display_url, store_path
    from weighbridge.tasks.settings import load_settings

    url = load_settings(database_url=database).database_url
    file = store_path(url)
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
