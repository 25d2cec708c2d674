"""Answers asked for by filter, order and page: what comes, in what order, by which index."""

import pytest
from sqlalchemy import event

from weighbridge.db import (
    AnswerFilter,
    AnswerPage,
    QueryRefused,
    column_types,
    count_answers,
    count_wide,
    reading_answers,
    reading_rescaled,
    reading_wide,
    results,
)
from weighbridge.db.probabilities import softmax


@pytest.fixture
def run(store, make):
    """Topic logits n against 1.5 for billing and login: margins 1.5, 0.5, 0.5, 1.5."""
    run_id = store.begin_run(make.start()).run_id
    items = [make.scored(n, answers=make.answers(topic={"billing": float(n), "login": 1.5}))
             for n in range(4)]  # fmt: skip
    store.record_batch(run_id, make.batch(*items, make.rejected(4)))
    store.finish_run(run_id, "completed", documents=5)
    return run_id


def places(rows):
    return [(row["position"], row["field"]) for row in rows]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (AnswerFilter(fields=("topic",)), [(n, "topic") for n in range(4)]),
        # Login wins for 0 and 1.
        (AnswerFilter(fields=("topic",), values=("login",)), [(0, "topic"), (1, "topic")]),
        # sigmoid(1.5) = 0.818 for 0 and 3, sigmoid(0.5) = 0.622 for 1 and 2.
        (AnswerFilter(("topic",), min_probability=0.7), [(0, "topic"), (3, "topic")]),
        (AnswerFilter(("topic",), max_probability=0.7), [(1, "topic"), (2, "topic")]),
        (AnswerFilter(("topic", "urgent"), external_id="T-2"), [(2, "topic"), (2, "urgent")]),
        (AnswerFilter(external_id="nobody"), []),
        (AnswerFilter(values=("true",), external_id="T-0"), [(0, "urgent")]),
    ],
)
def test_filters(engine, run, only, expected):
    assert places(results(engine, run, only=only)) == expected
    assert count_answers(engine, run, only) == len(expected)


@pytest.mark.parametrize("fields", [(), ("topic",), ("topic", "anger")])
@pytest.mark.parametrize("order", ["position", "probability", "margin", "field"])
@pytest.mark.parametrize("descending", [False, True])
def test_orders_and_pages_are_those_of_a_plain_sort(engine, run, fields, order, descending):
    only = AnswerFilter(fields)
    # The slow definition: all rows, sorted here. Equals stay in the order of the documents.
    rows = results(engine, run, only=only)
    names = ["topic", "urgent", "anger"]
    place = {"field": lambda row: names.index(row["field"])}
    key = place.get(order, lambda row: row[order])
    wanted = sorted(rows, key=key, reverse=descending)
    if descending:
        # `reverse` keeps equals as they were; so does ours.
        assert sorted(wanted, key=key) == sorted(rows, key=key)
    page = AnswerPage(order, descending)
    assert places(results(engine, run, only=only, page=page)) == places(wanted)
    part = AnswerPage(order, descending, limit=2, offset=1)
    assert places(results(engine, run, only=only, page=part)) == places(wanted[1:3])


def plan(engine, ask):
    """Give the plans of what `ask` sends, without the look-ups that every question has."""
    plans = []

    def explain(connection, cursor, statement, parameters, context, many):
        if "answer_probability" in statement and not statement.startswith("EXPLAIN"):
            rows = connection.connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.append([row[3] for row in rows])

    event.listen(engine, "before_cursor_execute", explain)
    ask()
    event.remove(engine, "before_cursor_execute", explain)
    (found,) = plans
    return found


INDEX = "answer_probability USING {}INDEX ix_answer_probability_field (scaling_id=? AND field=?"


def test_one_field_by_probability_goes_by_the_index(engine, run):
    page = AnswerPage("probability", limit=50)
    found = plan(engine, lambda: results(engine, run, only=AnswerFilter(("topic",)), page=page))
    assert any(INDEX.format("") in step for step in found)
    # Only equal probabilities are sorted, never the whole field.
    assert "USE TEMP B-TREE FOR ORDER BY" not in found
    assert not any(step.startswith("SCAN") for step in found)


def test_counting_above_a_probability_reads_that_part_of_the_index(engine, run):
    only = AnswerFilter(("topic",), min_probability=0.9)
    found = plan(engine, lambda: count_answers(engine, run, only))
    wanted = f"{INDEX.format('COVERING ')} AND probability>?)"
    assert any(wanted in step for step in found)
    assert not any(step.startswith("SCAN") for step in found)


@pytest.mark.parametrize(
    "only",
    [
        AnswerFilter(),
        AnswerFilter(("topic",), min_probability=0.5),
        AnswerFilter(("topic", "urgent"), min_probability=0.5),
        AnswerFilter(values=("true",)),
    ],
)
def test_the_first_page_reads_no_further_than_itself(engine, run, only):
    found = plan(engine, lambda: results(engine, run, only=only, page=AnswerPage(limit=50)))
    # Items first, in their order, each answer by its key: nothing is sorted or scanned.
    assert "item USING PRIMARY KEY (run_id=?)" in found[1]
    assert "answer_probability USING PRIMARY KEY (scaling_id=? AND decision_id=?" in found[2]
    assert not any("B-TREE" in step or step.startswith("SCAN") for step in found)


@pytest.mark.parametrize("order", ["probability", "margin", "field"])
def test_no_order_looks_at_every_item_for_every_answer(engine, run, order):
    # What made one such question take minutes: answers first, and the whole run for each.
    found = plan(engine, lambda: results(engine, run, page=AnswerPage(order, limit=50)))
    assert "item USING PRIMARY KEY (run_id=?)" in found[1]


def test_an_id_is_found_by_its_index(engine, run):
    found = plan(engine, lambda: results(engine, run, only=AnswerFilter(external_id="T-1")))
    assert any("ix_item_external_id (external_id=? AND run_id=?)" in step for step in found)


def test_what_the_run_does_not_have_is_refused_by_name(engine, run, store, make):
    with pytest.raises(QueryRefused, match=r"field must be one .* got 'colour'") as caught:
        results(engine, run, only=AnswerFilter(("colour",)))
    assert caught.value.hint == "the fields are: topic, urgent, anger"
    # A choice of another field is no choice of this one.
    with pytest.raises(QueryRefused, match=r"value must be a choice .* got 'true'") as caught:
        count_answers(engine, run, AnswerFilter(("topic",), values=("true",)))
    assert caught.value.hint == "the choices are: billing, login"
    with (
        pytest.raises(QueryRefused, match="field must be one"),
        reading_wide(engine, run, AnswerFilter(("colour",))),
    ):
        pass  # fmt: skip
    empty = store.begin_run(make.start()).run_id
    # A run without answers knows no field, and refuses none.
    assert results(engine, empty, only=AnswerFilter(("colour",))) == []


def wide(engine, run, only, page=None):
    with reading_wide(engine, run, only, page or AnswerPage()) as (columns, rows):
        return [each.value for each in columns], list(rows)


def test_wide_rows_are_documents(engine, run):
    names, rows = wide(engine, run, AnswerFilter())
    assert names == ["topic", "urgent", "anger"]
    assert [row[:3] for row in rows] == [(run, n, f"T-{n}") for n in range(4)]
    long = results(engine, run)
    for row in rows:
        told = [each for each in long if each["position"] == row[1]]
        cells = [cell for each in told for cell in (each["value"], each["probability"])]
        assert list(row[3:]) == cells
    assert count_wide(engine, run) == 4


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (AnswerFilter(("topic",), values=("login",)), [0, 1]),
        (AnswerFilter(("topic",), max_probability=0.7), [1, 2]),
        # Of any field: sigmoid(1) = 0.731 for urgent is in every document.
        (AnswerFilter(min_probability=0.73, max_probability=0.74), [0, 1, 2, 3]),
        (AnswerFilter(external_id="T-3"), [3]),
    ],
)
def test_wide_rows_are_those_with_such_an_answer(engine, run, only, expected):
    names, rows = wide(engine, run, only)
    assert [row[1] for row in rows] == expected
    assert names == list(only.fields or ("topic", "urgent", "anger"))
    assert count_wide(engine, run, only) == len(expected)
    page = AnswerPage(descending=True, limit=2)
    assert [row[1] for row in wide(engine, run, only, page)[1]] == expected[::-1][:2]


def test_wide_rows_have_no_order_by_answer(engine, run):
    with pytest.raises(QueryRefused, match="ordered by position"):
        wide(engine, run, AnswerFilter(), AnswerPage("margin"))


def test_another_temperature_gives_what_the_logits_give(engine, run):
    with reading_rescaled(engine, run, temperature=2.0) as rows:
        found = list(rows)
    with reading_answers(engine, run) as rows:
        own = list(rows)
    assert len(found) == len(own) == 12
    for new, old in zip(found, own, strict=True):
        # Value, margin and place stay; the probability is that of the logits halved.
        assert new[:7] == list(old[:7])
        assert new[8] == old[8]
        assert new[10] == 2.0
    assert found[0][7] == pytest.approx(softmax([0.0, 1.5], 2.0)[1], abs=1e-15)
    # anger: levels 1, 2, 0; expected value is 0 p0 + 1 p1 + 2 p2.
    calm, annoyed, furious = softmax([1.0, 2.0, 0.0], 2.0)
    assert found[2][9] == pytest.approx(annoyed + 2 * furious, abs=1e-15)
    assert calm + annoyed + furious == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_is_finite_and_above_0(engine, run, temperature):
    with (
        pytest.raises(QueryRefused, match="finite and above 0"),
        reading_rescaled(engine, run, temperature=temperature),
    ):
        pass  # fmt: skip


@pytest.mark.parametrize(
    ("only", "page"),
    [
        (AnswerFilter(min_probability=0.5), AnswerPage()),
        (AnswerFilter(), AnswerPage("probability")),
    ],
)
def test_another_temperature_is_not_searched_by_probability(engine, run, only, page):
    with (
        pytest.raises(QueryRefused, match="neither chosen nor sorted") as caught,
        reading_rescaled(engine, run, only, page, temperature=2.0),
    ):
        pass  # fmt: skip
    assert "margin" in (caught.value.hint or "")


WHERE = (("topic", "login"),)


@pytest.mark.parametrize(
    ("only", "documents"),
    [
        (AnswerFilter(where=WHERE), [0, 1]),
        (AnswerFilter(where=(*WHERE, ("urgent", "true"))), [0, 1]),
        (AnswerFilter(where=(*WHERE, ("urgent", "false"))), []),
        # The bounds are those of topic: 0.818 for 0, 0.622 for 1; urgent has 0.731.
        (AnswerFilter(where=WHERE, min_probability=0.8), [0]),
        (AnswerFilter(where=WHERE, max_probability=0.7), [1]),
        (AnswerFilter(where=WHERE, values=("true",)), [0, 1]),
        (AnswerFilter(("urgent",), where=WHERE), [0, 1]),
        # With fields the bounds are those of the fields.
        (AnswerFilter(("urgent",), where=WHERE, min_probability=0.8), []),
        (AnswerFilter(("urgent",), where=WHERE, min_probability=0.7), [0, 1]),
        (AnswerFilter(values=("login", "billing")), [0, 1, 2, 3]),
    ],
)
def test_where_chooses_documents_and_fields_choose_columns(engine, run, only, documents):
    names, rows = wide(engine, run, only)
    assert [row[1] for row in rows] == documents
    assert count_wide(engine, run, only) == len(documents)
    assert names == list(only.fields or ("topic", "urgent", "anger"))
    long = results(engine, run, only=only)
    assert sorted({row["position"] for row in long}) == documents
    assert count_answers(engine, run, only) == len(long)
    if not only.values:
        assert len(long) == len(documents) * len(names)
    by_probability = results(engine, run, only=only, page=AnswerPage("probability"))
    assert sorted(places(by_probability)) == sorted(places(long))


def test_what_where_does_not_know_is_refused(engine, run):
    with pytest.raises(QueryRefused, match=r"field must be one .* 'colour'") as caught:
        results(engine, run, only=AnswerFilter(where=(("colour", "red"),)))
    assert caught.value.hint == "the fields are: topic, urgent, anger"
    with pytest.raises(QueryRefused, match=r"value of topic must be one .* 'true'") as caught:
        count_wide(engine, run, AnswerFilter(where=(("topic", "true"),)))
    assert caught.value.hint == "the choices are: billing, login"
    with pytest.raises(QueryRefused, match="field must be one") as caught:
        results(engine, run, only=AnswerFilter(("topic, urgent",)))
    assert caught.value.hint == "name each on its own: --field topic --field urgent"


@pytest.mark.parametrize("fields", [(), ("topic",), ("urgent", "topic"), ("anger",)])
@pytest.mark.parametrize("descending", [False, True])
def test_wide_rows_by_the_least_probable_of_their_columns(engine, run, fields, descending):
    only = AnswerFilter(fields)
    found = [row[1] for row in wide(engine, run, only, AnswerPage("probability", descending))[1]]
    rows = wide(engine, run, only)[1]
    wanted = sorted(rows, key=lambda row: min(row[4::2]), reverse=descending)
    assert found == [row[1] for row in wanted]


def test_metadata_beside_the_answers(engine, store, make):
    told = [{"city": "Oslo", "n": 1}, {"city": 7, "n": 2.5}, None, {"n": None, "flag": True}]
    run_id = store.begin_run(make.start()).run_id
    items = [make.scored(n, metadata=each) for n, each in enumerate(told)]
    store.record_batch(run_id, make.batch(*items))
    columns = ["n", "city"]
    wanted = [[1, "Oslo"], [2.5, 7], [None, None], [None, None]]
    with reading_wide(engine, run_id, columns=columns) as (_, rows):
        assert [row[-2:] for row in rows] == wanted
    long = [values for values in wanted for _ in range(3)]
    with reading_answers(engine, run_id, columns=columns) as rows:
        assert [row[-2:] for row in rows] == long
    with reading_rescaled(engine, run_id, temperature=2.0, columns=columns) as rows:
        assert [row[-2:] for row in rows] == long
    assert column_types(engine, run_id, ["n", "city", "flag"]) == {
        "n": float,
        "city": str,
        "flag": bool,
    }
    with (
        pytest.raises(QueryRefused, match=r"column must be one .* 'nope'") as caught,
        reading_wide(engine, run_id, columns=["nope"]),
    ):
        pass  # fmt: skip
    assert caught.value.hint == "the columns are: city, n, flag"
