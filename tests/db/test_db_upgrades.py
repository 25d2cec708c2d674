"""Stores of earlier versions, made by the migrations of their time, upgrade with nothing lost."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from weighbridge.db import (
    MigrationFailed,
    StoreOutdated,
    mean_flip_rate,
    open_engine,
    results,
    run_summary,
    sqlite_url,
)
from weighbridge.db.migrate import PACKAGE_VERSIONS, known_versions, upgrade_file
from weighbridge.db.store import Store

ADDED = {
    "run": ["permutations", "checkpoint_source", "adapter_source", "accepted_prompt_sha256"],
    "answer": ["flip_rate"],
}
ADDED["batch"] = ["resident_tokens", "resident_hits"]


def columns(connection, table):
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def rows(path, tables):
    """Give the rows of tables by column name, in a fixed order."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return {
            table: sorted(
                (dict(row) for row in connection.execute(f"SELECT * FROM {table}")), key=repr
            )
            for table in tables
        }


@pytest.fixture
def old(tmp_path, engine, store, path, make):
    """A store as version 0001 left it: its own tables, filled with what was recorded."""
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.scored(0), make.scored(1), make.rejected(2)))
    store.finish_run(run_id, "completed", documents=3)
    engine.dispose()
    folder = tmp_path / "first"
    folder.mkdir()
    shutil.copy(PACKAGE_VERSIONS / "0001_initial.py", folder)
    old = tmp_path / "old.db"
    old.touch(mode=0o600)
    upgrade_file(old, [folder])
    with closing(sqlite3.connect(old)) as connection:
        # The views are those of today; that one came later.
        connection.execute("DROP VIEW stability")
        connection.execute("ATTACH ? AS filled", (str(path),))
        found = connection.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")
        for table in {name for (name,) in found} - {"alembic_version", "sqlite_sequence"}:
            names = ", ".join(f'"{name}"' for name in columns(connection, table))
            connection.execute(
                f"INSERT INTO main.{table} ({names}) SELECT {names} FROM filled.{table}"
            )
        connection.commit()
    return old


def test_an_old_store_has_none_of_what_was_added(old):
    # The negative control of the fixture.
    with closing(sqlite3.connect(old)) as connection:
        (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        assert version == "0001"
        for table, added in ADDED.items():
            assert not set(columns(connection, table)) & set(added)
    with pytest.raises(StoreOutdated, match="must have version"):
        open_engine(sqlite_url(old), readonly=True)


@pytest.mark.parametrize("kind", ["VIEW stability AS SELECT 42 AS mine", "TABLE stability (mine)"])
def test_a_name_that_the_user_has_taken_stops_the_upgrade(old, kind):
    with closing(sqlite3.connect(old)) as connection:
        connection.execute(f"CREATE {kind}")
        connection.commit()
    # Ours would replace it without a word.
    with pytest.raises(MigrationFailed, match="of its own called stability") as caught:
        open_engine(sqlite_url(old))
    assert caught.value.hint
    with closing(sqlite3.connect(old)) as connection:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'stability'")
        assert found.fetchall() == [(f"CREATE {kind}",)]
        # Given another name, both are there.
        connection.execute(f"DROP {kind.partition(' ')[0]} stability")
        connection.execute(f"CREATE {kind.replace('stability', 'steady')}")
        connection.commit()
    open_engine(sqlite_url(old)).dispose()
    with closing(sqlite3.connect(old)) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert {"stability", "steady"} <= names


def test_a_store_of_the_first_version_keeps_every_row(old, make):
    with closing(sqlite3.connect(old)) as connection:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = {name for (name,) in found} - {"alembic_version", "sqlite_sequence"}
        answers = connection.execute("SELECT * FROM results").fetchall()
    before = rows(old, tables)
    assert len(before["answer"]) == 6
    engine = open_engine(sqlite_url(old))
    after = rows(old, tables)
    # What was not measured is unknown; an older run asked in one order, always.
    defaults = {"permutations": 1, "flip_rate": None, "resident_tokens": None}
    unknown = ("resident_hits", "checkpoint_source", "adapter_source", "accepted_prompt_sha256")
    defaults |= dict.fromkeys(unknown)
    for table, values in before.items():
        added = {name: defaults[name] for name in ADDED.get(table, [])}
        assert after[table] == [{**row, **added} for row in values]
    assert run_summary(engine, 1).permutations == 1
    assert mean_flip_rate(engine, 1) is None
    with closing(sqlite3.connect(old)) as connection:
        assert connection.execute("SELECT * FROM results").fetchall() == answers
        stability = connection.execute(
            "SELECT field, flip_rate, permutations FROM stability ORDER BY field"
        ).fetchall()
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (
            known_versions()[-1],
        )
    assert stability == [(name, None, 1) for name in ("anger", "topic", "urgent") for _ in range(2)]
    # The copy that was kept is the old store, whole.
    (copy,) = old.parent.glob("old.db.0001-*.backup")
    assert rows(copy, tables) == before
    # Its decisions are still decisions: a new run of the same kind scores nothing.
    store = Store(engine)
    run_id = store.begin_run(make.start()).run_id
    documents = [make.sha("document 0"), make.sha("document 1"), make.sha("another")]
    assert set(store.decided(run_id, documents)) == set(documents[:2])
    store.record_batch(run_id, make.batch(make.reused(0), make.scored(1, "another")))
    assert len(results(engine, run_id)) == 6
    engine.dispose()


def test_an_upgraded_store_has_the_views_of_its_schemas_and_finds_a_document_by_id(old):
    open_engine(sqlite_url(old)).dispose()
    with closing(sqlite3.connect(old)) as connection:
        rows = connection.execute("SELECT external_id, topic FROM answers_triage").fetchall()
        plan = connection.execute(
            "EXPLAIN QUERY PLAN SELECT position FROM item WHERE external_id = 'T-1'"
        ).fetchall()
    assert rows == [("T-0", "billing"), ("T-1", "billing")]
    assert "ix_item_external_id" in plan[0][3]
