"""Rows of SQL statements: real SQLite files, read only, with errors that say what to do."""

import sqlite3
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from weighbridge.tasks import sql_source
from weighbridge.tasks.sources import BadRecord, Document, SourceError, read_documents

QUERY = "select id, text, n from t order by id"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "tickets.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table t (id integer, text text, n real)")
        connection.executemany("insert into t values (?, ?, ?)", [(1, "a", 0.5), (2, "b", None)])
        connection.commit()
    return path


def read(source: Path | str, query: str = QUERY, **options: Any) -> list[Document | BadRecord]:
    return list(read_documents(source, query=query, **options))


def refused(source: Path | str, query: str | None = QUERY, **options: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        list(read_documents(source, query=query, **options))
    assert caught.value.hint
    return caught.value


def test_rows_keep_their_types(database: Path):
    first, second = read(database)
    assert isinstance(first, Document)
    assert isinstance(second, Document)
    assert (first.external_id, first.text, first.metadata) == ("1", "a", {"n": 0.5})
    assert second.metadata == {"n": None}
    assert (first.line, first.position, second.position) == (None, 0, 1)


def test_format_sql_may_be_named_and_a_template_may_be_used(database: Path):
    first, _ = read(database, format="sql", text_field="{id}: {text}")
    assert isinstance(first, Document)
    assert first.text == "1: a"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("select id, text from missing", "no such table: missing"),
        ("select id, body from t", "no such column: body"),
        ("selec", "syntax error"),
        ("", "gives none"),
        ("-- nothing", "gives none"),
        ("delete from t", "something else than read"),
        ("create table u (a)", "something else than read"),
        ("insert into t values (3, 'c', 1) returning id, text", "something else than read"),
        ("select 1; select 2", "one statement at a time"),
        ("attach 'other.db' as o", "something else than read"),
        ("pragma query_only = off", "something else than read"),
        ("pragma journal_mode = wal", "read"),
        ("select id, text from t where id > :since", "since"),
        ("select id, id from t", "different names"),
        ("select id from t", 'the query must have a column "text"'),
        ("select load_extension('x') as text", "something else than read"),
        ("select abs(-9223372036854775808) as text", "integer overflow"),
        ("select \0", "refuses it"),
    ],
)
def test_a_statement_that_does_not_read_is_refused(
    database: Path, tmp_path: Path, query: str, words: str
):
    before = database.read_bytes()
    error = refused(database, query)
    assert words in f"{error.message} {error.hint}"
    assert database.read_bytes() == before
    assert not (tmp_path / "other.db").exists()


def test_an_error_in_a_later_row_is_told_too(database: Path):
    # SQLite computes rows as they are fetched: only a late one fails.
    query = (
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 2000) "
        "select abs(case i when 2000 then -9223372036854775808 else i end) || '' as text from n"
    )
    records = read_documents(database, query=query)
    assert isinstance(next(records), Document)
    with pytest.raises(SourceError, match="refuses it") as caught:
        list(records)
    assert "integer overflow" in str(caught.value.hint)


def test_what_a_database_says_of_a_text_stays_here(tmp_path: Path):
    path = tmp_path / "letters.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table t (id, body)")
        rows = [(number, "$.ok") for number in range(300)]
        connection.executemany("insert into t values (?, ?)", [*rows, (300, "Dear Mrs SECRET")])
        connection.commit()
    query = """select id, coalesce(json_extract('{"ok": "x"}', body), '') as text from t"""
    with pytest.raises(SourceError) as caught:
        list(read_documents(path, query=query))
    # Prefect keeps the message of an error and those of its causes; a terminal shows the hint.
    shown = "".join(traceback.format_exception(caught.value))
    assert "SECRET" not in shown
    assert "SECRET" in str(caught.value.hint)


def test_parameters_have_their_place(database: Path):
    query = "select id, text from t where id > :since"
    found = sql_source.sql_records(str(database), query, {"since": 1})
    assert [record.values for record in found] == [{"id": 2, "text": "b"}]


def test_places_that_hold_no_database(database: Path, tmp_path: Path):
    (tmp_path / "a.csv").write_text("id,text\n1,a\n" * 100)
    for source, words in (
        (tmp_path / "none.db", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "a.csv", "another kind of file"),
        (f"sqlite:///{tmp_path}/none.db", "does not exist"),
        ("sqlite://", "in memory"),
        ("nosuch://host/db", "SQLAlchemy knows"),
        ("mysql://host/db", "mysqlclient"),
        ("://", "cannot be parsed"),
    ):
        error = refused(source)
        assert words in f"{error.message} {error.hint}", source
    assert not (tmp_path / "none.db").exists()


def test_a_query_is_needed_and_must_fit_the_format(database: Path):
    assert "--query" in str(refused(database, None).hint)
    assert "--query" in str(refused("sqlite:///x.db", None).hint)
    assert "--query" in str(refused(database, None, format="sql").hint)
    with pytest.raises(SourceError, match="no format or with sql, got csv"):
        read_documents(database, query=QUERY, format="csv")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:S3CRET@host/db",
        "postgresql://user:S3C@RET@host/db",
        "postgresql://host/db?password=S3CRET",
        "mysql://host/db?passwd=S3CRET",
        "sqlite:///x.db?key=S3CRET",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3DS3CRET",
    ],
)
def test_a_password_is_refused_and_not_repeated(url: str):
    error = refused(url)
    assert "S3C" not in f"{error.message}{error.hint}{error.__cause__}"


def test_a_file_of_secrets_may_be_named():
    # It is the way that the hint recommends; what fails is the host.
    error = refused("postgresql://nobody@127.0.0.1:9/db?passfile=/home/me/.pgpass")
    assert "must hold no password" not in error.message


def test_the_hint_says_where_passwords_go():
    assert "PGPASSWORD" in str(refused("postgresql://user:x@host/db").hint)


def test_a_locked_database_is_told(database: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sql_source, "_BUSY_SECONDS", 0)
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("begin exclusive")
        assert "locked" in refused(database).message


def test_a_damaged_database_is_told(database: Path):
    data = bytearray(database.read_bytes())
    data[4096:8192] = b"\xff" * 4096  # the page of the table
    database.write_bytes(data)
    assert "damaged" in refused(database).message


def test_rows_are_fetched_as_they_are_used_and_the_file_is_let_go(database: Path):
    records = read_documents(
        database,
        query="with recursive n(i) as (select 1 union all select i + 1 from n) "
        "select i as id, 'text ' || i as text from n",
    )
    # A statement without an end: read lazily, or never.
    assert [next(records).external_id for _ in range(1000)][-1] == "1000"
    del records
    with closing(sqlite3.connect(database, timeout=0)) as connection:
        connection.execute("begin exclusive")


def test_the_store_itself_can_be_read_while_it_is_written(tmp_path: Path):
    from weighbridge.db.engine import open_engine, writing

    path = tmp_path / "store.db"
    engine = open_engine(f"sqlite:///{path}")
    records = read_documents(path, query="select name as text from sqlite_master order by name")
    next(records)
    with writing(engine) as connection:
        connection.execute(sqlalchemy.text("create table extra (a)"))
    # One statement sees one state: what is written meanwhile is not among its rows.
    assert "extra" not in [each.text for each in records if isinstance(each, Document)]
    engine.dispose()


def test_names_that_mean_something_in_a_url(tmp_path: Path):
    path = tmp_path / "a b?mode=rwc#%41.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table t as select 1 as id, 'a' as text, 2 as n")
        connection.commit()
    assert len(read(path)) == 1


def server_rows(url: str, query: str, **parameters: Any) -> list[dict[str, Any]]:
    # The way of database servers, on the one database that is always here.
    with sql_source._on_server(url, query, parameters) as found:  # pyright: ignore[reportPrivateUsage]
        return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def test_the_way_of_servers(database: Path):
    url = f"sqlite:///{database}"
    assert server_rows(url, "select id, text from t where id > :n", n=1) == [{"id": 2, "text": "b"}]
    for query, words in (
        ("select x from t", "no such column"),
        ("select id from t where id = :n", "'n'"),
        ("delete from t", "gives none"),
    ):
        with pytest.raises(SourceError) as caught:
            server_rows(url, query)
        assert words in f"{caught.value.message} {caught.value.hint}"
    # What was written was not committed.
    assert len(read(database)) == 2


@pytest.fixture
def many(tmp_path: Path) -> Path:
    path = tmp_path / "many.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table t (id integer primary key, text text, n integer)")
        rows = ((None, f"text {number}", number) for number in range(3000))
        connection.executemany("insert into t values (?, ?, ?)", rows)
        connection.commit()
    return path


def test_every_row_comes_once_whatever_the_size_of_a_fetch(many: Path):
    found = read(many)
    assert [each.text for each in found if isinstance(each, Document)] == [
        f"text {number}" for number in range(3000)
    ]
    assert len(server_rows(f"sqlite:///{many}", QUERY)) == 3000
