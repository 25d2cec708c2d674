import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from weighbridge.db import AnswerRecord, ChoiceRecord, results, run_sql
from weighbridge.db.engine import reading
from weighbridge.db.probabilities import softmax

LOGITS = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=12)


def rows(engine, sql):
    with reading(engine) as connection:
        return [tuple(row) for row in connection.execute(text(sql))]


def test_softmax_by_hand():
    # exp(ln 3) : exp(0) = 3 : 1
    assert softmax([math.log(3), 0.0], 1.0) == pytest.approx([0.75, 0.25])
    # Halving the logits takes the square root of the odds: sqrt(9) = 3.
    assert softmax([math.log(9), 0.0], 2.0) == pytest.approx([0.75, 0.25])
    assert softmax([1e308, -1e308], 1e-3) == [1.0, 0.0]
    assert softmax([-7.5], 3.0) == [1.0]


@given(LOGITS, st.floats(1e-3, 1e3))
def test_softmax_sums_to_one_and_keeps_the_order(logits, temperature):
    probabilities = softmax(logits, temperature)
    assert math.isclose(sum(probabilities), 1.0, abs_tol=1e-12)
    assert probabilities[logits.index(max(logits))] == max(probabilities)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(LOGITS, min_size=1, max_size=4), st.floats(1e-2, 1e2))
def test_choice_probabilities_sum_to_one(store, engine, make, fields, temperature):
    answers = tuple(
        AnswerRecord(
            f"field {number}",
            "enum",
            tuple(ChoiceRecord(f"choice {i}", logit) for i, logit in enumerate(logits)),
            logits.index(max(logits)),
            None,
        )
        for number, logits in enumerate(fields)
    )
    start = make.start(temperature=temperature, rescore=True)
    run_id = store.begin_run(start).run_id
    store.record_batch(run_id, make.batch(make.scored(0, answers=answers)))
    sums = rows(
        engine,
        "SELECT sum(probability), max(probability) FROM choice_probabilities"
        f" WHERE run_id = {run_id} GROUP BY field ORDER BY field",
    )
    told = [row["probability"] for row in results(engine, run_id)]
    assert len(sums) == len(fields)
    for (total, top), probability in zip(sums, told, strict=True):
        assert abs(total - 1) < 1e-6
        # The selected choice is the top one, in both views.
        assert probability == top


def test_another_temperature_changes_probabilities_and_nothing_else(store, engine, make):
    cold = store.begin_run(make.start()).run_id
    store.record_batch(cold, make.batch(make.scored(0), make.scored(1)))
    warm = store.begin_run(make.start(temperature=2.0, temperature_kind="explicit")).run_id
    store.record_batch(warm, make.batch(make.reused(0), make.reused(1)))

    def told(run_id, columns):
        return rows(
            engine,
            f"SELECT position, field, choice, {columns} FROM choice_probabilities"
            f" WHERE run_id = {run_id} ORDER BY 1, 2, 3",
        )

    assert told(cold, "logit") == told(warm, "logit")
    assert told(cold, "probability") != told(warm, "probability")
    same = ("position", "external_id", "document_id", "field", "kind", "value", "margin")
    before, after = results(engine, cold), results(engine, warm)
    assert [[row[key] for key in same] for row in before] == [
        [row[key] for key in same] for row in after
    ]
    assert {row["temperature"] for row in after} == {2.0}
    assert all(b["probability"] > a["probability"] for b, a in zip(before, after, strict=True))
    # The hand computation, from the logits of `urgent`: 1 / (1 + exp(-(0.75 + 0.25) / 2)).
    urgent = [row["probability"] for row in after if row["field"] == "urgent"]
    assert urgent == pytest.approx([1 / (1 + math.exp(-0.5))] * 2)
    # Probabilities are kept once per scaling, however many runs use it.
    third = store.begin_run(make.start(temperature=2.0, temperature_kind="fitted")).run_id
    store.record_batch(third, make.batch(make.reused(0)))
    assert rows(engine, "SELECT count(*) FROM scaling") == [(2,)]
    assert rows(engine, "SELECT count(*) FROM answer_probability") == [(2 * 2 * 3,)]


def test_score_fields_have_an_expected_value(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.scored(0)))
    calm, annoyed, furious = (math.exp(logit) for logit in (1.0, 2.0, 0.0))
    by_hand = (0 * calm + 1 * annoyed + 2 * furious) / (calm + annoyed + furious)
    values = {row["field"]: row["expected_value"] for row in results(engine, run_id)}
    assert values == {"topic": None, "urgent": None, "anger": pytest.approx(by_hand)}


def test_the_results_view_explains_itself(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.scored(0)))
    told = run_sql(engine, "select * from results limit 3")
    assert told.columns == (
        *("run_id", "position", "external_id", "document_id", "field", "kind", "value"),
        *("probability", "margin", "expected_value", "temperature", "checkpoint", "schema"),
    )
    assert [dict(zip(told.columns, row, strict=True)) for row in told.rows] == results(engine)
    by_field = {row[4]: row for row in told.rows}
    assert by_field["urgent"][5:7] == ("boolean", "true")
    assert by_field["anger"][5:7] == ("score", "annoyed")
    assert by_field["topic"][11:] == ("smollm2-135m", "triage")
    told = run_sql(engine, "select * from choice_probabilities limit 1")
    assert told.columns == (
        *("run_id", "position", "external_id", "field", "choice", "logit", "probability"),
    )
