import pytest
from sqlalchemy import text

from weighbridge.db import (
    QueryRefused,
    RunRefused,
    answer_distribution,
    existing_run,
    open_engine,
    rejected,
    results,
    run_sql,
    run_summary,
    sqlite_url,
)


@pytest.fixture
def filled(store, make):
    for temperature in (1.0, 2.0):
        run_id = store.begin_run(make.start(temperature=temperature)).run_id
        items = [
            make.scored(
                n,
                answers=make.answers(
                    topic={"billing": float(n), "login": 1.5},
                    urgent={"false": 0.0, "true": 1.0 + n},
                ),
            )
            for n in range(4)
        ]
        if temperature == 2.0:
            items = [make.reused(n) for n in range(4)]
        store.record_batch(run_id, make.batch(*items, make.rejected(4)))
        store.finish_run(run_id, "completed", documents=5)
    return run_id


def test_results_come_in_order_or_the_least_certain_first(engine, filled):
    everything = results(engine)
    assert {row["run_id"] for row in everything} == {filled}
    assert [(row["position"], row["field"]) for row in everything[:4]] == [
        (0, "topic"),
        (0, "urgent"),
        (0, "anger"),
        (1, "topic"),
    ]
    # Topic logits n against 1.5: login wins for 0 and 1.
    topics = [row["value"] for row in results(engine, 1) if row["field"] == "topic"]
    assert topics == ["login", "login", "billing", "billing"]
    # The closest logits of all: 1 and 2 against 1.5, sigmoid(0.5) = 0.622 each.
    uncertain = results(engine, 1, uncertain=True, limit=2)
    assert [(row["position"], row["field"]) for row in uncertain] == [(1, "topic"), (2, "topic")]
    assert [row["probability"] for row in uncertain] == pytest.approx([0.62246] * 2, abs=1e-5)


def test_no_run_is_said_so(engine, store, make):
    for query in (results, existing_run):
        with pytest.raises(RunRefused, match=r"must have a run .* no run yet") as caught:
            query(engine)
        assert caught.value.hint
    store.begin_run(make.start())
    assert results(engine) == []
    for query in (results, rejected, answer_distribution, run_summary, existing_run):
        with pytest.raises(RunRefused, match=r"store has, .* no run 9") as caught:
            query(engine, 9)
        assert "weighbridge runs" in (caught.value.hint or "")


def test_the_run_that_is_meant(engine, filled):
    assert (existing_run(engine), existing_run(engine, 1)) == (filled, 1)


def test_the_distribution_of_answers(engine, filled):
    told = answer_distribution(engine, 1)
    assert [(row.field, row.kind, row.value, row.count) for row in told] == [
        ("topic", "enum", "billing", 2),
        ("topic", "enum", "login", 2),
        ("urgent", "boolean", "true", 4),
        ("anger", "score", "annoyed", 4),
    ]
    anger = [row["probability"] for row in results(engine, 1) if row["field"] == "anger"]
    assert told[-1].mean_probability == pytest.approx(sum(anger) / 4)


def test_the_named_queries_use_their_indexes(engine, filled):
    # With a scan instead, both grow with the whole store; the plan is what a small store can show.
    topic = "FROM results WHERE run_id = 1 AND field = 'topic'"
    order = f"SELECT * {topic} ORDER BY probability LIMIT 5"
    plan = " ".join(str(row[3]) for row in run_sql(engine, f"EXPLAIN QUERY PLAN {order}").rows)
    assert "ix_answer_probability_field (scaling_id=? AND field=?" in plan
    assert "TEMP B-TREE" not in plan
    count = f"SELECT count(*) {topic} AND probability > 0.9"
    plan = " ".join(str(row[3]) for row in run_sql(engine, f"EXPLAIN QUERY PLAN {count}").rows)
    assert "scaling_id=? AND field=? AND probability>?" in plan
    assert "SCAN" not in plan


def test_readers_read_and_cannot_write(path, engine, filled):
    reader = open_engine(sqlite_url(path), readonly=True)
    assert results(reader) == results(engine)
    with (
        reader.connect() as connection,
        pytest.raises(Exception, match="readonly database"),
    ):
        connection.execute(text("DELETE FROM item"))
    reader.dispose()


def test_typed_sql_gives_columns_and_rows(engine, filled):
    told = run_sql(engine, "SELECT position AS p, count(*) FROM results GROUP BY 1")
    assert (told.columns, told.rows[:2]) == (("p", "count(*)"), [(0, 6), (1, 6)])
    assert len(told.rows) == 4
    told = run_sql(engine, "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n LIMIT 3)"
                   " SELECT sum(i) FROM n;")  # fmt: skip
    assert told.rows == [(6,)]
    assert run_sql(engine, "PRAGMA table_info(results)").rows[0][1] == "run_id"
    assert run_sql(engine, "SELECT name FROM pragma_table_info('results')").rows[0] == ("run_id",)
    assert run_sql(engine, "SELECT value FROM json_each('[7]')").rows == [(7,)]


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("DELETE FROM item", "only read"),
        ("UPDATE run SET name = 'x'", "only read"),
        ("CREATE TABLE t (x)", "only read"),
        ("DROP VIEW results", "only read"),
        ("WITH x AS (SELECT 1) INSERT INTO scaling SELECT * FROM scaling", "only read"),
        ("ATTACH DATABASE '{other}' AS other", "only read"),
        ("VACUUM INTO '{other}'", "only read"),
        ("PRAGMA query_only = OFF", "only read"),
        ("PRAGMA journal_mode = DELETE", "only read"),
        ("BEGIN IMMEDIATE", "only read"),
        ("SELECT load_extension('x')", "only read"),
        ("UPDATE sqlite_master SET sql = ''", "may not be modified"),
        ("SELECT 1; DELETE FROM item", "one statement"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT", "refused the statement"),
        ("SELECT colour FROM results", "no such column: colour"),
        ("SELECT * FROM results WHERE run_id = ?", "one statement"),
        ("", "must give rows"),
        ("-- nothing", "must give rows"),
        ("SELECT '\ud800'", "plain text"),
        ("SELECT 1\0", "plain text|one statement"),
    ],
)
def test_typed_sql_is_one_reading_statement(engine, tmp_path, filled, sql, words):
    other = tmp_path / "other.db"
    with pytest.raises(QueryRefused, match=words):
        run_sql(engine, sql.format(other=other))
    assert not other.exists()
    assert len(results(engine)) == 12


def test_typed_sql_ends_in_time(engine):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT max(i) FROM n"
    with pytest.raises(QueryRefused, match="must finish within"):
        run_sql(engine, endless, seconds=0.1)
