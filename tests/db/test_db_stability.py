"""Flip rates: kept with the answer, averaged by field of a run, and apart by number of orders."""

from dataclasses import replace

import pytest

from weighbridge.db import RecordRefused, RunRefused, mean_flip_rate, run_sql, run_summary, runs

FOUR = "1/4"
STABILITY = "SELECT * FROM stability WHERE run_id = {} ORDER BY field, position"


def flipping(make, position, **rates):
    """Return a scored item whose fields have these flip rates, 0 where none is given."""
    item = make.scored(position)
    return replace(
        item,
        answers=tuple(
            replace(answer, flip_rate=rates.get(answer.field, 0.0)) for answer in item.answers
        ),
    )


def several(make, **changes):
    return make.start(permutations=4, prompt_version=FOUR, **changes)


def test_the_view_has_the_answers_of_a_run(store, engine, make):
    run_id = store.begin_run(several(make)).run_id
    items = [flipping(make, 0, topic=0.5), flipping(make, 1, topic=0.25, urgent=1.0)]
    store.record_batch(run_id, make.batch(*items, make.rejected(2)))
    found = run_sql(engine, STABILITY.format(run_id))
    assert found.columns == (
        *("run_id", "position", "external_id", "field", "value", "flip_rate", "permutations"),
    )
    # One row for each answer of what was not rejected.
    assert [(row[1], row[3], row[5], row[6]) for row in found.rows] == [
        (0, "anger", 0.0, 4),
        (1, "anger", 0.0, 4),
        (0, "topic", 0.5, 4),
        (1, "topic", 0.25, 4),
        (0, "urgent", 0.0, 4),
        (1, "urgent", 1.0, 4),
    ]
    # Over all six answers: 0.5, 0.25, 1 and three times 0.
    assert mean_flip_rate(engine, run_id) == pytest.approx(1.75 / 6)
    assert run_summary(engine, run_id).permutations == 4


def test_a_run_that_reused_has_the_flip_rates_of_what_it_reused(store, engine, make):
    first, second = (store.begin_run(several(make)).run_id for _ in range(2))
    store.record_batch(first, make.batch(flipping(make, 0, topic=0.75)))
    store.record_batch(second, make.batch(make.reused(0), make.reused(1, "document 0")))
    rows = run_sql(engine, STABILITY.format(second)).rows
    # Two items of the same decision are two answers.
    assert [row[5] for row in rows if row[3] == "topic"] == [0.75, 0.75]
    assert mean_flip_rate(engine, second) == mean_flip_rate(engine, first) == 0.25


def test_one_order_has_no_flip_rate(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.scored(0)))
    rows = run_sql(engine, STABILITY.format(run_id)).rows
    # Not 0: nothing was compared.
    assert [row[5:] for row in rows] == [(None, 1)] * 3
    assert mean_flip_rate(engine, run_id) is None
    assert [run.permutations for run in runs(engine)] == [1]
    with pytest.raises(RunRefused, match="no run 99"):
        mean_flip_rate(engine, 99)


def test_another_number_of_orders_reuses_nothing(store, make):
    run_id = store.begin_run(several(make)).run_id
    store.record_batch(run_id, make.batch(flipping(make, 0)))
    document = make.sha("document 0")
    decided: dict[str, int] = {}
    for orders, version in ((1, "1"), (2, "1/2"), (4, FOUR)):
        start = make.start(permutations=orders, prompt_version=version)
        decided[version] = len(store.decided(store.begin_run(start).run_id, [document]))
    assert decided == {"1": 0, "1/2": 0, FOUR: 1}


@pytest.mark.parametrize("rate", [-0.01, 1.01, float("nan"), float("inf")])
def test_a_share_is_from_0_to_1(store, engine, make, rate):
    run_id = store.begin_run(several(make)).run_id
    with pytest.raises(RecordRefused, match=r"field 'topic': the flip rate must be from 0 to 1"):
        store.record_batch(run_id, make.batch(flipping(make, 0, topic=rate)))
    assert run_summary(engine, run_id).documents == 0
