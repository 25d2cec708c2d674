"""Documents measured without a model: the same are rejected as when they are scored."""

import json
from pathlib import Path

import pytest

from weighbridge.scorer import ParallelScorer, Rejection
from weighbridge.scorer.preparing import measure
from weighbridge.scorer.schema import Schema

GOOD = ["The invoice was charged twice.", "שלום 👩‍👩‍👧‍👦 — «ça va»?", "<|end|>", "Thanks!"]
BAD = ["", " \n", "a\0b", "a\udbc0b", "refund " * 2000, 7, None]


@pytest.fixture(scope="module")
def triage(tiny) -> Schema:
    return Schema.parse(json.dumps(tiny.triage))


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("measured") / "tiny", seed=11)


@pytest.mark.parametrize("permutations", [1, 3])
def test_nothing_is_loaded_and_limits_are_told(folder, triage, permutations):
    scorer = ParallelScorer(folder, permutations=permutations)
    plans = scorer.plans(triage)
    measured = [measure(plans, text) for text in [*GOOD, *BAD]]
    assert not scorer.model_loaded
    for each, text in zip(measured, GOOD, strict=False):
        # The oracle: the longest row of any order.
        assert each.rejection is None
        assert each.input_tokens == max(
            len(row.tokens) for plan in plans for row in plan.rows(text).rows
        )
    codes = [each.rejection.code if each.rejection else None for each in measured[len(GOOD) :]]
    assert codes == [
        *("document.empty", "document.empty", "document.encoding", "document.encoding"),
        *("document.too_long", "document.not_text", "document.not_text"),
    ]
    # What is too long still has a length, so that a limit can be chosen; others make no prompt.
    lengths = [each.input_tokens for each in measured[len(GOOD) :]]
    assert lengths[4] == max(plan.input_tokens("refund " * 2000) for plan in plans)
    assert {*lengths[:4], *lengths[5:]} == {None}


@pytest.mark.mlx
def test_scoring_rejects_the_same_in_the_same_words(folder, triage):
    scorer = ParallelScorer(folder)
    texts = [*GOOD, *BAD]
    scored = scorer.score_batch(texts, triage)  # type: ignore[arg-type]
    plans = scorer.plans(triage)
    foreseen = [measure(plans, text).rejection for text in texts]
    assert foreseen == [each if isinstance(each, Rejection) else None for each in scored]
