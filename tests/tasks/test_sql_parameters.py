"""Which parameters a statement has, and what its values become."""

import sqlite3
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.tasks.sources import Document, read_documents
from weighbridge.tasks.sql_parameters import parameters_alone, parameters_of


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("select text from t where created >= :since", {"since"}),
        ("select text from t where created>=:since and n<:n", {"since", "n"}),
        ("select ':since', \":since\", `:since` from t", set[str]()),
        ("select 1 -- :since\n, 'it''s :since', :n", {"n"}),
        ("select 1 /* :since\n :since */ as text", set[str]()),
        ("select $$ :since $$, $a$ :since $$ $a$, :n", {"n"}),
        ("select created::since, '12:30', a[1:n] from t", set[str]()),
        ("select text from t where note = 'a' and created > :since or note = 'b'", {"since"}),
        ("", set[str]()),
    ],
)
def test_names(query: str, names: set[str]):
    assert parameters_of(query) == names
    # SQLAlchemy finds the same ones, and gives back the statement.
    clause = sqlalchemy.text(parameters_alone(query))
    assert set(clause.compile().params) == names
    literal = clause.compile(dialect=sqlalchemy.create_engine("sqlite://").dialect)
    if not names:
        assert str(literal) == query


@given(st.text("'\"-/*:$ab\\ \n", max_size=30))
def test_any_statement_has_the_parameters_that_sqlalchemy_is_left_with(query: str):
    assert set(sqlalchemy.text(parameters_alone(query)).compile().params) == parameters_of(query)


def test_a_moment_is_compared_with_what_sqlite_writes(tmp_path: Path):
    path = tmp_path / "mails.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table t (text, created default current_timestamp)")
        for text, created in (
            ("before", "2026-11-30 00:59:59"),
            ("at", "2026-11-30 01:00:00"),
            ("iso", "2026-11-30T01:00:00Z"),
            ("zone", "2026-11-30 02:30:00+01:00"),
        ):
            connection.execute("insert into t values (?, ?)", (text, created))
        connection.execute("insert into t (text) values ('now')")
    moment = datetime(2026, 11, 30, 2, 0, 0, 900_000, tzinfo=timezone(timedelta(hours=1)))
    for source in (str(path), f"sqlite:///{path}"):
        records = read_documents(
            source,
            query="select text from t where datetime(created) >= :since order by rowid",
            parameters={"since": moment},
        )
        texts = [each.text for each in records if isinstance(each, Document)]
        assert texts == ["at", "iso", "zone", "now"]
