"""A backup is whole, private, and never in the way; the size of a store is what lies on disk."""

import os
import sqlite3
import stat
import subprocess
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from weighbridge.db import Store, open_engine, results, runs, sqlite_url
from weighbridge.db.backup import back_up
from weighbridge.db.errors import BackupFailed, StoreUnavailable
from weighbridge.db.housekeeping import vacuum_store
from weighbridge.db.store_size import store_size


def record(store: Store, make: Any, count: int = 3) -> int:
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(*(make.scored(i) for i in range(count))))
    store.finish_run(run_id, "completed")
    return run_id


def test_a_backup_is_a_whole_private_store(store: Store, engine: Engine, path: Path, make: Any):
    run_id = record(store, make)
    made = back_up(sqlite_url(path))
    assert made.path.parent == path.parent
    assert made.path.name.startswith("store.db.2")
    assert made.path.name.endswith("Z.backup")
    assert made.bytes == made.path.stat().st_size > 0
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    copy = open_engine(sqlite_url(made.path), readonly=True)
    assert results(copy, run_id) == results(engine, run_id)
    copy.dispose()
    assert sorted(each.suffix for each in path.parent.glob("*.partial")) == []


def test_a_backup_while_a_run_writes_is_one_moment_of_it(
    path: Path, tmp_path: Path, child: Callable[..., "subprocess.Popen[str]"]
):
    writer = child(
        """
        store = Store(open_engine(sqlite_url(path)))
        run = store.begin_run(make.start()).run_id
        say("ready")
        for i in range(10**6):
            store.record_batch(run, make.batch(make.scored(2 * i), make.scored(2 * i + 1)))
            if i == 20: say("writing")
        """
    )
    assert writer.stdout is not None
    assert [writer.stdout.readline() for _ in range(2)] == ["ready\n", "writing\n"]
    documents: list[int] = []
    for number in range(5):
        target = tmp_path / f"{number}.backup"
        back_up(sqlite_url(path), target)
        copy = open_engine(sqlite_url(target), readonly=True)
        (run,) = runs(copy)
        # A batch of two is in it whole or not at all, with its answers and its counts.
        assert run.documents % 2 == 0
        assert len(results(copy, run.run_id)) == 3 * run.documents
        documents.append(run.documents)
        copy.dispose()
    assert writer.poll() is None
    # It went on writing all the while.
    assert documents == sorted(documents)
    assert documents[-1] > documents[0] > 40


def test_a_file_is_replaced_only_when_that_is_asked(store: Store, path: Path, make: Any):
    record(store, make)
    target = path.with_name("answers.backup")
    target.write_text("what was there")
    with pytest.raises(BackupFailed, match="must not replace a file") as caught:
        back_up(sqlite_url(path), target)
    assert "--force" in (caught.value.hint or "")
    assert target.read_text() == "what was there"
    back_up(sqlite_url(path), target, overwrite=True)
    assert target.read_bytes().startswith(b"SQLite format 3")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_folder_gets_a_file_named_after_the_store(
    store: Store, path: Path, tmp_path: Path, make: Any
):
    record(store, make)
    folder = tmp_path / "backups"
    folder.mkdir()
    assert back_up(sqlite_url(path), folder).path.parent == folder


@pytest.mark.parametrize("name", ["store.db", "link.db"])
def test_the_store_itself_is_never_replaced(name: str, store: Store, path: Path, make: Any):
    record(store, make)
    path.with_name("link.db").symlink_to(path)
    with pytest.raises(BackupFailed, match="another file than the store"):
        back_up(sqlite_url(path), path.with_name(name), overwrite=True)


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_names_of_sqlites_own_files_are_refused(
    end: str, overwrite: bool, store: Store, path: Path, make: Any
):
    record(store, make)
    # Taken for the store's own log, the copy would destroy it at the next opening.
    with pytest.raises(BackupFailed, match="beside the store"):
        back_up(sqlite_url(path), Path(f"{path}{end}"), overwrite=overwrite)
    record(store, make)


def test_a_database_in_use_is_never_replaced(store: Store, path: Path, tmp_path: Path, make: Any):
    record(store, make)
    other = tmp_path / "other.db"
    engine = open_engine(sqlite_url(other))
    Store(engine).begin_run(make.start())
    with pytest.raises(BackupFailed, match="a log beside it"):
        back_up(sqlite_url(path), other, overwrite=True)
    engine.dispose()


@pytest.mark.parametrize("place", ["no/such/folder/file", "file/below", "/proc/no.backup"])
def test_a_place_that_cannot_be_written(
    place: str, store: Store, path: Path, tmp_path: Path, make: Any
):
    record(store, make)
    (tmp_path / "file").write_text("")
    with pytest.raises(BackupFailed, match="a folder that is there and yours"):
        back_up(sqlite_url(path), tmp_path / place)


def test_a_damaged_store_is_not_passed_on_as_a_backup(
    store: Store, engine: Engine, path: Path, make: Any
):
    record(store, make, 200)
    engine.dispose()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(os.urandom(8192))
    target = path.with_name("copy.backup")
    with pytest.raises(BackupFailed, match="must be whole, and SQLite finds"):
        back_up(sqlite_url(path), target)
    assert not target.exists()
    assert list(path.parent.glob("*.partial")) == []


@pytest.mark.parametrize("name", ["loop", "a\0b", "9" * 5000])
def test_a_path_that_leads_nowhere_is_no_store(name: str, tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    for readonly in (True, False):
        with pytest.raises(StoreUnavailable, match="must be at a path that leads to a file"):
            open_engine(sqlite_url(tmp_path / name), readonly=readonly)


def test_no_store_is_created_to_be_backed_up(tmp_path: Path):
    with pytest.raises(StoreUnavailable, match="there is no store at"):
        back_up(sqlite_url(tmp_path / "absent.db"))
    assert list(tmp_path.iterdir()) == []


def test_the_size_is_that_of_the_files(store: Store, engine: Engine, path: Path, make: Any):
    record(store, make)
    back_up(sqlite_url(path), path.with_name("store.db.old.backup"))
    path.with_name("other.db.old.backup").write_text("of another store")
    size = store_size(engine)
    log = path.with_name("store.db-wal").stat().st_size
    assert size.bytes == path.stat().st_size + log
    assert size.log_bytes == log > 0
    assert (size.runs, size.documents, size.decisions, size.answers) == (1, 3, 3, 9)
    ((copy, copied),) = size.backups
    assert (copy, copied) == (str(path.with_name("store.db.old.backup")), Path(copy).stat().st_size)


def test_growth_is_a_mean_over_the_last_thirty_days(engine: Engine, make: Any):
    now = datetime.now(UTC)
    for age, texts in ((60, 40), (10, 20), (1, 10)):
        store = Store(engine, clock=lambda age=age: now - timedelta(days=age))
        run_id = store.begin_run(make.start()).run_id
        items = [make.scored(i, f"{age} {i}") for i in range(texts)]
        store.record_batch(run_id, make.batch(*items))
        store.finish_run(run_id, "completed")
    size = store_size(engine, now=now)
    assert size.growth is not None
    # 20 and 10 documents began in the last 30 days, of 70 that the store has.
    assert (size.growth.days, size.growth.documents) == (30, 1)
    assert size.bytes is not None
    assert size.log_bytes is not None
    with closing(sqlite3.connect(str(engine.url.database))) as connection:
        used = connection.execute(
            "select (page_count - freelist_count) * page_size"
            " from pragma_page_count, pragma_page_size, pragma_freelist_count"
        ).fetchone()[0]
    assert size.growth.bytes == pytest.approx(used * (30 / 70) / 30)


def test_a_young_store_grows_per_day_of_its_own_age(engine: Engine, make: Any):
    now = datetime.now(UTC)
    store = Store(engine, clock=lambda: now - timedelta(hours=1))
    store.record_batch(store.begin_run(make.start()).run_id, make.batch(make.scored(0)))
    growth = store_size(engine, now=now).growth
    assert growth is not None
    assert (growth.days, growth.documents) == (1, 1)
    later = store_size(engine, now=now + timedelta(days=31))
    assert later.growth is None


def test_vacuum_gives_free_pages_back(store: Store, engine: Engine, path: Path, make: Any):
    record(store, make, 300)
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in ("choice_probability", "answer_probability"):
            connection.execute(f"delete from {table}")
    free = store_size(engine).free_bytes
    before, after = vacuum_store(sqlite_url(path))
    assert free is not None
    assert free > 0
    assert after <= before
    assert store_size(engine).free_bytes == 0
