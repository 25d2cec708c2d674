"""The view of each schema: its columns, its names, and what of the user's it leaves alone."""

import logging
import sqlite3
from contextlib import closing

import pytest

from weighbridge.db import (
    AnswerRecord,
    ChoiceRecord,
    SchemaRow,
    Store,
    open_engine,
    run_sql,
    schema_view,
    sqlite_url,
)
from weighbridge.db.engine import writing
from weighbridge.db.migrate import create_schema_views
from weighbridge.db.schema_views import MOST_FIELDS, view_name

OTHER = SchemaRow("6" * 64, "triage", '{"another":1}')


def answered(make, position, *names):
    choices = (ChoiceRecord("no", 0.0), ChoiceRecord("yes", 1.0))
    answers = tuple(AnswerRecord(name, "enum", choices, 1, 1.0) for name in names)
    return make.scored(position, answers=answers)


def record(store, make, *items, **changes):
    run_id = store.begin_run(make.start(**changes)).run_id
    store.record_batch(run_id, make.batch(*(items or (make.scored(0), make.rejected(1)))))
    return run_id


def views(path):
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'view'")
        return sorted(name for (name,) in rows if name.startswith("answers_"))


def test_a_row_for_each_answered_document_of_every_run_of_the_schema(engine, store, make):
    run_id = record(store, make)
    found = run_sql(engine, "SELECT * FROM answers_triage")
    assert found.columns == (
        *("run_id", "position", "external_id", "topic", "topic_probability"),
        *("urgent", "urgent_probability", "anger", "anger_probability"),
    )
    (row,) = found.rows
    assert row[:4] == (run_id, 0, "T-0", "billing")
    assert (row[5], row[7]) == ("true", "annoyed")
    # At the temperature of the row's own run: sigmoid(1) = 0.731, and of half that 0.622.
    assert row[6] == pytest.approx(0.7310586)
    second = store.begin_run(make.start(temperature=2.0)).run_id
    store.record_batch(second, make.batch(make.reused(0)))
    rows = run_sql(engine, "SELECT run_id, urgent_probability FROM answers_triage").rows
    assert rows == [(run_id, pytest.approx(0.7310586)), (second, pytest.approx(0.6224593))]
    assert schema_view(engine, second).name == "answers_triage"


def test_it_is_there_from_the_first_answers_on(path, engine, store, make):
    run_id = store.begin_run(make.start()).run_id
    assert views(path) == []
    assert "once there are answers" in (schema_view(engine, run_id).remark or "")
    store.record_batch(run_id, make.batch(make.rejected(0)))
    assert views(path) == []
    store.record_batch(run_id, make.batch(make.scored(1)))
    assert views(path) == ["answers_triage"]


def test_the_latest_schema_of_a_name_has_it_and_the_older_keeps_its_answers(
    path, engine, store, make
):
    first = record(store, make)
    second = record(store, make, answered(make, 0, "colour"), schema=OTHER)
    assert views(path) == ["answers_triage", "answers_triage_55555555"]
    assert schema_view(engine, second).name == "answers_triage"
    assert schema_view(engine, first).name == "answers_triage_55555555"
    assert run_sql(engine, "SELECT colour FROM answers_triage").rows == [("yes",)]
    assert run_sql(engine, "SELECT topic FROM answers_triage_55555555").rows == [("billing",)]
    # Asked again, the first is the latest again.
    third = record(store, make, make.reused(0))
    assert schema_view(engine, third).name == "answers_triage"
    assert schema_view(engine, second).name == "answers_triage_66666666"
    assert run_sql(engine, "SELECT count(*) FROM answers_triage").rows == [(2,)]


@pytest.mark.parametrize("kind", ["VIEW {} AS SELECT 1 AS mine", "TABLE {} (mine)"])
def test_what_the_user_has_under_that_name_is_left_alone(path, engine, make, kind, caplog):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE {kind.format('Answers_Triage')}")
    caplog.set_level(logging.WARNING, "weighbridge.db")
    run_id = record(Store(engine), make)
    assert run_sql(engine, "SELECT * FROM answers_triage").columns[0] in {"mine", "1"}
    found = schema_view(engine, run_id)
    assert found.name == "answers_triage_55555555"
    assert found.remark == "answers_triage is a table or view of your own and is left alone"
    assert found.remark in caplog.text


def test_hostile_field_names_are_columns_all_the_same(engine, store, make):
    names = [
        *('qu"ote', "it's", "two words", "日本", "Topic", "topic", "position", "x" * 5000, "100%"),
        *("a;--", ":colon", "", "nul\0", "line\nbreak", "topic_probability"),
    ]
    record(store, make, answered(make, 0, *names), schema=OTHER)
    found = run_sql(engine, "SELECT * FROM answers_triage")
    folded = [name.casefold() for name in found.columns]
    # Each field has both its columns, and no two of them are one to a database.
    assert len(set(folded)) == len(folded) == 3 + 2 * len(names)
    assert found.columns[3:13:2] == ('qu"ote', "it's", "two words", "日本", "Topic")
    assert {"topic_2", "position_2", "100%", ":colon", "field", "nul\\x00"} <= set(found.columns)
    assert [row[3::2] for row in found.rows] == [("yes",) * len(names)]


def test_more_fields_than_a_view_has_room_for(path, engine, store, make):
    fits = [f"f{n}" for n in range(MOST_FIELDS)]
    record(store, make, answered(make, 0, *fits))
    assert len(run_sql(engine, "SELECT * FROM answers_triage").rows[0]) == 3 + 2 * MOST_FIELDS
    many = record(store, make, answered(make, 1, *fits, "more"), schema=OTHER)
    # The answers are recorded, and the view of the other schema stays.
    assert views(path) == ["answers_triage"]
    found = schema_view(engine, many)
    assert (found.name, found.remark) == (
        None,
        f"a view has room for {MOST_FIELDS} fields, and there are {MOST_FIELDS + 1}",
    )


def test_a_view_that_cannot_be_made_loses_no_answer(engine, store, make, monkeypatch, caplog):
    monkeypatch.setattr(
        "weighbridge.db.schema_views._create",
        lambda connection, *_: connection.exec_driver_sql("CREATE VIEW nonsense"),
    )
    record(store, make)
    assert "has no view" in caplog.text
    assert run_sql(engine, "SELECT count(*) FROM results").rows == [(3,)]


def test_made_anew_they_are_as_they_were(path, engine, store, make):
    record(store, make)
    record(store, make, answered(make, 0, "colour"), schema=OTHER)
    before = [run_sql(engine, f"SELECT * FROM {name}") for name in views(path)]
    with closing(sqlite3.connect(path)) as connection:
        for name in views(path):
            connection.execute(f"DROP VIEW {name}")
    with writing(engine) as connection:
        create_schema_views(connection)
    assert [run_sql(engine, f"SELECT * FROM {name}") for name in views(path)] == before


def test_readers_make_none(path, engine, store, make):
    record(store, make)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP VIEW answers_triage")
    reader = open_engine(sqlite_url(path), readonly=True)
    assert schema_view(reader).name is None
    reader.dispose()
    assert views(path) == []


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ("triage", "answers_triage"),
        ("Triage v2.1", "answers_triage_v2_1"),
        ('"; DROP', "answers_drop"),
        ("日本", "answers_日本"),
        ("--", "answers_schema"),
        ("x" * 500, "answers_" + "x" * 60),
    ],
)
def test_names(schema, name):
    assert view_name(schema) == name
