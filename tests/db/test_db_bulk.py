"""Rows handed to SQLite as they are: the same rows as through SQLAlchemy."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Float, Integer, MetaData, String, Table, create_engine

from weighbridge.db import Store, bulk, open_engine, sqlite_url
from weighbridge.db.bulk import insert_rows
from weighbridge.db.errors import StoreError

WRITTEN = ("item", "answer", "answer_choice", "answer_probability", "choice_probability")


def recorded(make: Any, path: Path) -> dict[str, list[Any]]:
    """Record a batch in a new store; return what stands in its tables, with types."""
    engine = open_engine(sqlite_url(path))
    store = Store(engine)
    run_id = store.begin_run(make.start()).run_id
    items = [
        make.scored(0, "naïve 価格", metadata={"a": [1, None, "é"], "b": True}),
        *(make.scored(number, metadata=None if number % 2 else {}) for number in range(1, 6)),
        make.rejected(6),
    ]
    store.record_batch(run_id, make.batch(*items))
    engine.dispose()
    with sqlite3.connect(path) as connection:
        found: dict[str, list[Any]] = {}
        for table in WRITTEN:
            rows = connection.execute(f"select * from {table}").fetchall()
            found[table] = sorted([[(type(each).__name__, each) for each in row] for row in rows])
    connection.close()
    return found


def test_the_same_rows_stand_in_the_store(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    direct = recorded(make, tmp_path / "direct.db")
    monkeypatch.setattr(bulk, "DIRECT", False)
    assert recorded(make, tmp_path / "plain.db") == direct
    assert all(len(rows) >= 6 for rows in direct.values())


@pytest.mark.parametrize("direct", [True, False])
def test_values_by_name_whatever_their_order(monkeypatch: pytest.MonkeyPatch, direct: bool):
    monkeypatch.setattr(bulk, "DIRECT", direct)
    table = Table(
        "t",
        MetaData(),
        Column("a", Integer),
        Column("b", String),
        Column("c", Float),
        Column("d", String),
    )
    engine: Engine = create_engine("sqlite://")
    rows: list[dict[str, Any]] = [
        {"c": 0.1 + 0.2, "a": 2**53 + 1, "b": "' ? :a"},
        {"b": None, "c": None, "a": -1},
    ]
    with engine.begin() as connection:
        table.create(connection)
        insert_rows(connection, table, [])
        insert_rows(connection, table, rows)
        found = connection.exec_driver_sql("select a, b, c, d from t order by rowid").fetchall()
    assert [tuple(row) for row in found] == [
        (2**53 + 1, "' ? :a", 0.1 + 0.2, None),
        (-1, None, None, None),
    ]


def test_what_the_database_refuses_comes_out_as_ours(make: Any, store: Store, path: Path):
    run_id = store.begin_run(make.start()).run_id
    with sqlite3.connect(path) as connection:
        connection.execute(
            "create trigger full before insert on choice_probability "
            "begin select raise(abort, 'disk'); end"
        )
    connection.close()
    with pytest.raises(StoreError, match="disk"):
        store.record_batch(run_id, make.batch(make.scored(0, "SECRET")))
    with sqlite3.connect(path) as connection:
        # The batch is one transaction.
        assert connection.execute("select count(*) from answer").fetchone() == (0,)
    connection.close()
