"""How large a store is, what lies in it, and how fast it grows."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Connection, Engine, func, select

from weighbridge.db import tables
from weighbridge.db.engine import reading

DAYS = 30
_RUN = tables.table(tables.Run)
_COUNTED = {
    "runs": _RUN,
    "documents": tables.table(tables.Document),
    "decisions": tables.table(tables.Decision),
    "answers": tables.table(tables.Answer),
}


@dataclass(frozen=True)
class Growth:
    """Means per day over the runs of the last days; bytes are estimated from the answers."""

    days: float
    documents: float
    decisions: float
    bytes: float


@dataclass(frozen=True)
class StoreSize:
    """What a store takes and holds.

    Attributes:
        bytes: File and log; on a server None, as are the next three.
        log_bytes: The log's part.
        free_bytes: What a vacuum would give back.
        backups: Copies that lie beside the store, with their bytes.
        runs: Rows, as are the next three.
        growth: None when no run began in the last 30 days.
    """

    bytes: int | None
    log_bytes: int | None
    free_bytes: int | None
    backups: tuple[tuple[str, int], ...]
    runs: int
    documents: int
    decisions: int
    answers: int
    growth: Growth | None


def store_size(engine: Engine, *, now: datetime | None = None) -> StoreSize:
    """Measure a store.

    Raises:
        StoreError: It cannot be read.
    """
    now = now or datetime.now(UTC)
    with reading(engine) as connection:
        rows = {
            name: int(connection.execute(select(func.count()).select_from(table)).scalar_one())
            for name, table in _COUNTED.items()
        }
        if engine.dialect.name != "sqlite" or engine.url.database is None:
            growth = _growth(connection, now, rows["decisions"], None)
            return StoreSize(None, None, None, (), **rows, growth=growth)
        page = int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())
        pages = int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())
        free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
        growth = _growth(connection, now, rows["decisions"], (pages - free) * page)
    path = Path(engine.url.database)
    log = _bytes(path.with_name(f"{path.name}-wal"))
    return StoreSize(
        bytes=_bytes(path) + log,
        log_bytes=log,
        free_bytes=free * page,
        backups=_backups(path),
        **rows,
        growth=growth,
    )


def _growth(
    connection: Connection, now: datetime, decisions: int, used_bytes: int | None
) -> Growth | None:
    since = now - timedelta(days=DAYS)
    documents, scored = connection.execute(
        select(func.sum(_RUN.c.documents), func.sum(_RUN.c.scored)).where(
            _RUN.c.started_at >= since
        )
    ).one()
    if documents is None:
        return None
    first = connection.execute(select(func.min(_RUN.c.started_at))).scalar_one()
    # A store of two days has grown for two days, not for thirty; one of an hour, for a day.
    days = min(float(DAYS), max(1.0, (now - first) / timedelta(days=1)))
    # Old sizes are kept nowhere: answers make the size, so their share stands for it.
    share = min(1.0, scored / decisions) if decisions else 0.0
    return Growth(days, documents / days, scored / days, (used_bytes or 0) * share / days)


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # no log, or a copy that was removed meanwhile


def _backups(path: Path) -> tuple[tuple[str, int], ...]:
    try:
        found = sorted(
            each
            for each in path.parent.iterdir()
            if each.name.startswith(f"{path.name}.") and each.name.endswith(".backup")
        )
    except OSError:
        return ()  # the folder cannot be listed, which is no reason to say nothing
    return tuple((str(each), _bytes(each)) for each in found)
