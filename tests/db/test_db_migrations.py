import logging
import shutil
import signal
import sqlite3
import textwrap
from contextlib import closing

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from weighbridge.db import (
    MigrationFailed,
    NotAStore,
    StoreOutdated,
    StoreTooNew,
    open_engine,
    results,
    run_sql,
    sqlite_url,
    upgrade_store,
)
from weighbridge.db.engine import reading
from weighbridge.db.migrate import PACKAGE_VERSIONS, known_versions, upgrade_file
from weighbridge.db.tables import METADATA
from weighbridge.db.views import view_definitions

# What is recorded now, and the two versions that the tests put behind it.
HEAD = known_versions()[-1]
SECOND, THIRD = (f"{int(HEAD) + step:04}" for step in (1, 2))
NEXT = """
    import os, signal
    import sqlalchemy as sa
    from alembic import op

    revision = "{after}"
    down_revision = "{before}"
    branch_labels = None
    depends_on = None

    def upgrade():
{body}
"""
# Rebuilds `run`: the parent of items, batches and decisions, and below both views.
REBUILD = """
with op.batch_alter_table("run", recreate="always") as batch:
    batch.add_column(sa.Column("note", sa.String(), nullable=True))
"""


@pytest.fixture
def versions(tmp_path):
    """Give a folder of migrations, and a way to add the next."""
    folder = tmp_path / "versions"
    folder.mkdir()
    for file in PACKAGE_VERSIONS.glob("0*.py"):
        shutil.copy(file, folder)

    def add(body):
        before = known_versions([folder])[-1]
        after = f"{int(before) + 1:04}"
        lines = textwrap.indent(body.strip(), " " * 8)
        source = textwrap.dedent(NEXT.format(before=before, after=after, body=lines))
        (folder / f"{after}_test.py").write_text(source, encoding="utf-8")
        return [folder]

    return add


@pytest.fixture
def filled(engine, store, make):
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.scored(0), make.scored(1), make.rejected(2)))
    store.finish_run(run_id, "completed", documents=3)
    return run_id


def dump(path):
    """Give every row of every table, and the definition of every view."""
    with closing(sqlite3.connect(path)) as connection:
        schema = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        rows = {
            name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr)
            for kind, name, _ in schema
            if kind == "table" and not name.startswith(("sqlite_", "alembic_"))
        }
        return rows, {name: sql for kind, name, sql in schema if kind == "view"}


def version(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]


def copies(path):
    return sorted(path.parent.glob("store.db.*backup*"))


def test_the_migrated_store_is_what_the_tables_say(engine):
    with reading(engine) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
        for table in METADATA.sorted_tables:
            # Checks, clustering and autoincrement are nothing that Alembic compares.
            wanted = str(CreateTable(table).compile(dialect=engine.dialect))
            found = connection.execute(
                text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": table.name}
            ).scalar_one()
            assert sorted(found.replace(",", "").split()) == sorted(wanted.replace(",", "").split())


def test_a_drift_would_be_seen(engine):
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE run ADD COLUMN extra TEXT"))
    with reading(engine) as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) != []


def test_the_versions_are_one_line_and_end_where_alembic_says():
    scripts = ScriptDirectory(str(PACKAGE_VERSIONS.parent))
    revisions = [script.revision for script in scripts.walk_revisions()]
    assert known_versions() == revisions[::-1]
    assert scripts.get_current_head() == known_versions()[-1]


def test_tables_and_views_can_be_made_elsewhere():
    # Other databases stay possible: nothing here needs SQLite to compile.
    dialect = postgresql.dialect()
    for table in METADATA.sorted_tables:
        assert "ROWID" not in str(CreateTable(table).compile(dialect=dialect))
    assert set(view_definitions(dialect)) == {"results", "choice_probabilities", "stability"}


def test_a_store_that_needs_nothing_is_left_alone(path, filled):
    before = path.stat().st_mtime_ns
    assert upgrade_store(sqlite_url(path)).copy is None
    assert (path.stat().st_mtime_ns, copies(path)) == (before, [])


def test_a_parent_is_rebuilt_under_its_views_and_nothing_is_lost(path, filled, versions, caplog):
    rows, views = dump(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE VIEW mine AS SELECT count(*) AS n FROM run")
    caplog.set_level(logging.INFO, "weighbridge.db")
    done = upgrade_file(path, versions(REBUILD))
    assert (done.before, done.after, version(path)) == (HEAD, SECOND, SECOND)
    rows_after, views_after = dump(path)
    assert {**rows_after, "run": [row[:-1] for row in rows_after["run"]]} == rows
    assert views_after.pop("mine") == "CREATE VIEW mine AS SELECT count(*) AS n FROM run"
    assert views_after == views
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT n FROM mine").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (6,)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert done.copy is not None
    # The copy is the store as it was, complete, private, and named in the log.
    assert copies(path) == [done.copy]
    assert dump(done.copy)[0] == rows
    assert version(done.copy) == HEAD
    assert done.copy.stat().st_mode & 0o777 == 0o600
    assert str(done.copy) in caplog.text


def test_foreign_keys_left_on_would_stop_the_rebuild(path, filled):
    # The negative control of the order: asked for inside the transaction, "off" does nothing.
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("DROP VIEW results")
        connection.execute("DROP VIEW choice_probabilities")
        connection.execute("DROP VIEW stability")
        with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
            connection.execute("DROP TABLE run")
        connection.execute("ROLLBACK")


def test_views_left_standing_would_stop_the_rebuild(path, filled, versions, monkeypatch):
    # The negative control of dropping them first.
    before = dump(path)
    monkeypatch.setattr("weighbridge.db.migrate.drop_views", lambda *_: {})
    with pytest.raises(MigrationFailed, match="error in view"):
        upgrade_file(path, versions(REBUILD))
    assert dump(path) == before


def test_without_the_check_the_orphans_would_stay(path, filled, versions, monkeypatch):
    # The negative control of foreign_key_check: this is what it keeps from being committed.
    monkeypatch.setattr("weighbridge.db.migrate._check_foreign_keys", lambda _: None)
    upgrade_file(path, versions('op.execute("DELETE FROM answer WHERE field_position = 1")'))
    with closing(sqlite3.connect(path)) as connection:
        broken = connection.execute("PRAGMA foreign_key_check").fetchall()
    # Two documents, two choices: as many rows of answer_choice, and of each probability.
    assert {row[0] for row in broken} >= {"answer_choice", "answer_probability"}


@pytest.mark.parametrize("kill_at", ["middle", "end"])
def test_killed_half_way_nothing_is_lost_and_the_next_open_finishes(
    path, engine, filled, versions, child, kill_at
):
    engine.dispose()
    before = dump(path)
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    halves = [
        'op.execute("DELETE FROM answer_choice")',
        'op.rename_table("batch", "batch_old")',
        'op.rename_table("batch_old", "batch")',
    ]
    halves.insert(2 if kill_at == "middle" else 3, kill)
    folders = versions(REBUILD + "\n".join(halves))
    process = child(
        f"""
        from weighbridge.db.migrate import upgrade_file
        upgrade_file(path, [Path({str(folders[0])!r})])
        say("survived")
        """
    )
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout.read() == ""
    assert dump(path) == before
    assert version(path) == HEAD
    # The store works as it is, and a sound migration gets through on the next try.
    assert len(results(open_and_close(path))) == 6
    (folders[0] / f"{SECOND}_test.py").unlink()
    assert upgrade_file(path, versions(REBUILD)).after == SECOND
    rows = dump(path)[0]
    assert (len(rows["answer_choice"]), len(rows["decision"])) == (2 * 8, 2)
    assert len(copies(path)) == 2


def open_and_close(path):
    engine = open_engine(sqlite_url(path))
    engine.dispose()
    return engine


def test_killed_at_the_very_first_open_the_next_one_finishes(path, child):
    # The first migration's own tables must go too when it does not get to its end.
    process = child(
        """
        from weighbridge.db import migrate
        migrate.create_views = lambda *_: os._exit(9)
        open_engine(sqlite_url(path))
        """
    )
    assert process.wait(60) == 9
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    engine = open_and_close(path)
    assert run_sql(engine, "SELECT count(*) FROM results").rows == [(0,)]


def test_rows_without_parents_take_the_upgrade_back(path, filled, versions):
    before = dump(path)
    orphans = 'op.execute("DELETE FROM answer WHERE field_position = 1")'
    with pytest.raises(MigrationFailed, match=r"every foreign key must hold.*answer_choice"):
        upgrade_file(path, versions(orphans))
    assert dump(path) == before
    assert version(path) == HEAD


def test_a_copy_that_cannot_be_made_stops_the_upgrade(path, filled, versions):
    # A folder has the copy's working name: no copy, no migration.
    path.with_name("store.db.backup-partial").mkdir()
    with pytest.raises(MigrationFailed, match="could not be copied"):
        upgrade_file(path, versions(REBUILD))
    assert version(path) == HEAD


def test_a_migration_that_fails_is_taken_back_whole(path, filled, versions):
    before = dump(path)
    folders = versions(REBUILD + 'op.execute("INSERT INTO nowhere VALUES (1)")')
    with pytest.raises(MigrationFailed, match="as it was: no such table: nowhere"):
        upgrade_file(path, folders)
    assert dump(path) == before


def test_several_versions_at_once_and_two_processes_at_once(path, filled, versions, child):
    versions(REBUILD)
    folders = versions('op.add_column("batch", sa.Column("extra", sa.String(), nullable=True))')
    body = f"""
        from weighbridge.db.migrate import upgrade_file
        say(upgrade_file(path, [Path({str(folders[0])!r})]).before)
    """
    children = [child(body) for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0].strip() for process in children)
    # One migrates; the other waits, reads the version again and finds all done.
    assert said == [HEAD, THIRD]
    assert version(path) == THIRD
    assert len(copies(path)) == 1


def test_readers_refuse_what_a_writer_would_upgrade(path, filled, monkeypatch):
    monkeypatch.setattr("weighbridge.db.engine.known_versions", lambda: [HEAD, SECOND])
    with pytest.raises(StoreOutdated, match=f"must have version {SECOND}") as refused:
        open_engine(sqlite_url(path), readonly=True)
    assert refused.value.hint == "run: weighbridge db upgrade"
    assert version(path) == HEAD


def test_a_newer_store_is_refused_by_readers_and_writers(path, filled):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
    before = dump(path)
    for readonly in (True, False):
        with pytest.raises(StoreTooNew, match="version 0999"):
            open_engine(sqlite_url(path), readonly=readonly)
    assert dump(path) == before
    assert copies(path) == []


@pytest.mark.parametrize("readonly", [True, False])
def test_another_programs_database_is_refused(path, readonly):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('0001')")
        connection.execute("CREATE TABLE flow_run (id INTEGER)")
    with pytest.raises(NotAStore, match="database of its own"):
        open_engine(sqlite_url(path), readonly=readonly)
    assert set(dump(path)[0]) == {"flow_run"}
