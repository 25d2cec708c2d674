"""Where a store is: database URLs, paths, and what is said about them in errors."""

from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from weighbridge.db.errors import StoreUnavailable

URL_HINT = "write a file as sqlite:///relative/path.db or sqlite:////absolute/path.db"


def parse_url(url: str) -> URL:
    """Parse a database URL, without ever repeating it in an error (it may hold a password).

    Raises:
        StoreUnavailable: The text is not a database URL, or one whose password cannot be
            told from its host.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StoreUnavailable(
            "the database URL must have the form dialect://…, and what came cannot be parsed",
            hint=URL_HINT,
        ) from None
    # SQLAlchemy ends the password at the first @, so the rest of one would be shown as the host.
    if parsed.password is not None and url.count("@") > 1:
        raise StoreUnavailable(
            "a database URL with a password must have one @, before the host, and what came has"
            " several",
            hint="write any other @ as %40",
        )
    return parsed


def display_url(url: str) -> str:
    """Give the URL as it may be shown: no password, no query (which may hold one)."""
    return parse_url(url).set(query={}).render_as_string(hide_password=True)


def sqlite_url(path: Path) -> str:
    """Give the URL of a store file, with what means something in a URL escaped."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def store_path(url: str) -> Path | None:
    """Give the absolute path of the file a SQLite URL names; None for other databases.

    Raises:
        StoreUnavailable: The URL does not parse, or names SQLite but no plain file.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if parsed.drivername not in {"sqlite", "sqlite+pysqlite"}:
        raise StoreUnavailable(
            f"a SQLite URL must start with sqlite:///, got the driver {parsed.drivername}",
            hint=URL_HINT,
        )
    database = parsed.database
    if not database or database == ":memory:":
        raise StoreUnavailable(
            "a store must be a file that several processes can open, got SQLite in memory",
            hint=URL_HINT,
        )
    if parsed.query or database.startswith("file:"):
        raise StoreUnavailable(
            "a SQLite URL must be a plain path, got one with parameters",
            hint=f"leave out everything from the question mark on; {URL_HINT}",
        )
    return Path(database).expanduser().absolute()
