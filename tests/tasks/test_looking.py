"""Looking at documents: what would be rejected, how long they are, one at a time."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer import ParallelScorer, Schema
from weighbridge.tasks.looking import RepeatedIds, TokenCounts, look_at
from weighbridge.tasks.sources import BadRecord, Document, read_documents

CASES = Path(__file__).parents[1] / "cases"
SCHEMA = Schema.parse(
    json.dumps({"urgent": {"type": "boolean", "description": "Does it need an answer today?"}})
)


@pytest.fixture
def scorer(embedded: Path) -> ParallelScorer:
    return ParallelScorer(embedded)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=50), st.integers(1, 100))
def test_a_percentile_is_the_one_of_the_sorted_list(tokens: list[int], percent: int):
    counts = TokenCounts()
    for each in tokens:
        counts.add(each)
    # numpy's inverse of the empirical distribution is the textbook definition.
    expected = np.percentile(tokens, percent, method="inverted_cdf")
    assert counts.percentile(percent) == expected
    assert counts.over(15) == sum(each > 15 for each in tokens)


@given(st.lists(st.none() | st.sampled_from("abcdefgh"), max_size=40))
def test_ids_that_come_again_are_counted_once(ids: list[str | None]):
    repeated = RepeatedIds()
    for each in ids:
        repeated.add(each)
    assert repeated.count == sum(ids.count(each) > 1 for each in set(ids) - {None})
    assert set(repeated.first) == {each for each in ids if each and ids.count(each) > 1}
    assert repeated.complete


def test_only_so_many_ids_are_kept():
    repeated = RepeatedIds(most=2)
    for each in "abacca":
        repeated.add(each)
    # The third id was not kept, so that its second coming is not seen.
    assert (repeated.count, repeated.first, repeated.complete) == (1, ["a"], False)
    many = RepeatedIds()
    for number in range(120):
        many.add(str(number // 2))
    assert (many.count, len(many.first)) == (60, 20)


def test_no_documents_have_no_median():
    assert TokenCounts().percentile(50) is None
    assert TokenCounts().over(0) == 0


def test_the_hostile_cases_have_the_codes_that_are_expected(scorer: ParallelScorer):
    expected = {
        case["line"]: case["note"].split(":")[0]
        for case in json.loads((CASES / "documents_hostile_expected.json").read_text())
        if case["status"] == "rejected"
    }
    loaded = scorer.model_loaded
    looked = list(look_at(scorer, SCHEMA, read_documents(CASES / "documents_hostile.jsonl")))
    assert {each.record.line: each.code for each in looked if each.code} == expected
    # What makes a prompt has a length, and nothing else has.
    for each in looked:
        measurable = each.code in {None, "document.too_long"}
        assert (each.input_tokens is not None) == measurable
        assert (each.message is None) == (each.code is None)
    assert scorer.model_loaded == loaded


def test_records_are_looked_at_one_by_one(scorer: ParallelScorer):
    taken: list[int] = []

    def records() -> Iterator[Document | BadRecord]:
        for position in range(10**9):
            taken.append(position)
            yield Document(position, position + 1, None, f"text {position}", {})

    looking = look_at(scorer, SCHEMA, records())
    assert [next(looking).record.position for _ in range(3)] == [0, 1, 2]
    # Memory does not grow with the source: no record is taken before it is asked for.
    assert taken == [0, 1, 2]
