"""Two runs compared by the database equal two runs compared here, document by document."""

import random
from collections import Counter

import pytest

from weighbridge.db import (
    CheckpointRow,
    QueryRefused,
    RunRefused,
    SchemaRow,
    count_pairs,
    pair_runs,
    reading_expected,
    reading_pairs,
    results,
    unpaired_documents,
)

OTHER = CheckpointRow("d" * 64, "another")


def logits(chance):
    """Give answers to all fields; topic has its choices in an order of its own each time."""
    topic = [(name, chance.gauss(0, 1)) for name in ("billing", "login", "other")]
    chance.shuffle(topic)
    return {"topic": dict(topic), "urgent": {"false": 0.0, "true": chance.gauss(0, 1)}}


@pytest.fixture
def two(store, make):
    """Documents 0 to 39 in the first run (3 twice), 20 to 59 in the second, backwards."""
    chance = random.Random(1)
    first = store.begin_run(make.start()).run_id
    order = ["billing", "login", "other"]
    items = [make.scored(n, answers=make.answers(**fixed(chance, order))) for n in range(40)]
    store.record_batch(first, make.batch(*items, make.reused(40, "document 3"), make.rejected(41)))
    start = make.start(checkpoint=OTHER, temperature=2.0)
    second = store.begin_run(start).run_id
    order = ["other", "billing", "login"]
    items = [
        make.scored(
            place,
            f"document {n}",
            external_id=f"B-{n}",
            answers=make.answers(**fixed(chance, order)),
            metadata={"truth": ["login", "Billing", None, "nonsense"][n % 4], "n": n},
        )
        for place, n in enumerate(range(59, 19, -1))
    ]
    store.record_batch(second, make.batch(*items))
    return first, second


def fixed(chance, order):
    """Give answers whose topic has its choices in this order."""
    values = logits(chance)
    return {**values, "topic": {name: values["topic"][name] for name in order}}


def test_pairs_are_those_of_a_plain_comparison(engine, two):
    first, second = two
    pairing = pair_runs(engine, first, second)
    assert (pairing.paired, pairing.only_first, pairing.only_second) == (20, 20, 20)
    assert [field.name for field in pairing.fields] == ["topic", "urgent", "anger"]
    # The slow definition: by document and field, each document once.
    mine, theirs = (
        {(row["document_id"], row["field"]): row for row in reversed(results(engine, run))}
        for run in two
    )
    for counted in count_pairs(engine, pairing):
        keys = [key for key in mine.keys() & theirs.keys() if key[1] == counted.field.name]
        expected = Counter((mine[key]["value"], theirs[key]["value"]) for key in keys)
        assert counted.counts == expected
        assert counted.paired == 20
        assert counted.same == sum(n for (a, b), n in expected.items() if a == b)
    with reading_pairs(engine, pairing) as rows:
        changed = list(rows)
    wanted = {key for key in mine.keys() & theirs.keys()
              if mine[key]["value"] != theirs[key]["value"]}  # fmt: skip
    assert wanted
    assert {(row["document_id"], row["field"]) for row in changed} == wanted
    for row in changed:
        key = row["document_id"], row["field"]
        assert row["first_probability"] == mine[key]["probability"]
        assert row["second_probability"] == theirs[key]["probability"]
    with reading_pairs(engine, pairing, changed=False, limit=3) as rows:
        assert len(list(rows)) == 9


def test_the_change_is_that_of_the_first_runs_answer(engine, two, path):
    pairing = pair_runs(engine, *two, fields=["topic"])
    (counted,) = count_pairs(engine, pairing)
    from weighbridge.db import document_items

    total, orders = 0.0, set()
    for n in range(20, 40):
        (one,) = document_items(engine, f"T-{n}", run_id=two[0])
        (other,) = document_items(engine, f"B-{n}", run_id=two[1])
        answer, theirs = one.answers[0], other.answers[0]
        same = next(each for each in theirs.choices if each.choice == answer.value)
        orders |= {tuple(each.choice for each in it.choices) for it in (answer, theirs)}
        total += abs(answer.probability - same.probability)
    # By the choice's name: the two runs have the choices in different orders.
    assert len(orders) == 2
    assert counted.probability_change == pytest.approx(total / 20)


def test_a_run_against_itself_is_the_same(engine, two):
    pairing = pair_runs(engine, two[0], two[0])
    assert (pairing.paired, pairing.only_first, pairing.only_second) == (40, 0, 0)
    for counted in count_pairs(engine, pairing):
        assert (counted.same, counted.probability_change) == (40, 0.0)


def test_documents_of_one_run_only_are_named(engine, two):
    pairing = pair_runs(engine, *two)
    told = unpaired_documents(engine, pairing, "first")
    assert [row["external_id"] for row in told] == [f"T-{n}" for n in range(20)]
    told = unpaired_documents(engine, pairing, "second", limit=2)
    assert [row["external_id"] for row in told] == ["B-59", "B-58"]


def test_what_was_expected_comes_from_the_metadata_of_either_run(engine, two):
    pairing = pair_runs(engine, *two)
    with reading_expected(engine, pairing, pairing.fields[0], "truth") as rows:
        told = [expected for _, _, expected in rows]
    assert told == [["login", "Billing", None, "nonsense"][n % 4] for n in range(20, 40)]
    with reading_expected(engine, pairing, pairing.fields[0], "absent") as rows:
        assert {expected for _, _, expected in rows} == {None}


def test_fields_that_cannot_be_compared_are_told(engine, store, make, two):
    run = store.begin_run(make.start(schema=SchemaRow("7" * 64, "other", "{}"))).run_id
    answers = make.answers(topic={"billing": 1.0, "sales": 0.0})[:2]
    store.record_batch(run, make.batch(make.scored(0, answers=answers)))
    pairing = pair_runs(engine, two[0], run)
    assert [field.name for field in pairing.fields] == ["urgent"]
    assert pairing.left_out == {
        "topic": "its choices differ",
        "anger": f"only run {two[0]} has it",
    }
    with pytest.raises(QueryRefused, match="got 'topic': its choices differ") as caught:
        pair_runs(engine, two[0], run, fields=["topic"])
    assert caught.value.hint == "such fields are: urgent"
    with pytest.raises(QueryRefused, match="neither has it"):
        pair_runs(engine, *two, fields=["colour"])
    with pytest.raises(RunRefused, match="no run 99"):
        pair_runs(engine, two[0], 99)
    empty = store.begin_run(make.start()).run_id
    assert pair_runs(engine, two[0], empty).paired == 0


def test_nothing_is_looked_up_run_by_run_for_each_document(engine, two):
    # What made 100,000 documents take hours: every item of the other run for each of one.
    from sqlalchemy import event

    plans: list[str] = []

    def explain(connection, cursor, statement, parameters, context, many):
        if "pairs" in statement:
            rows = connection.connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.append("\n".join(row[3] for row in rows))

    event.listen(engine, "before_cursor_execute", explain)
    pairing = pair_runs(engine, *two)
    count_pairs(engine, pairing)
    with reading_pairs(engine, pairing) as rows:
        list(rows)
    event.remove(engine, "before_cursor_execute", explain)
    assert len(plans) == 7
    for plan in plans:
        # Once for each side, where the side's documents are gathered; no more.
        assert plan.count("item USING PRIMARY KEY (run_id=?)") == 2
        assert "theirs USING AUTOMATIC COVERING INDEX (document_id=?)" in plan
        assert "(scaling_id=?)" not in plan
