"""Choices as tokens: the trie against plain enumeration, and the codes."""

import math
import string
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer.encodings import (
    MAX_CODES,
    ChoicePlan,
    code_names,
    plan_codes,
    plan_labels,
)
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.errors import CheckpointError, SchemaError
from weighbridge.scorer.rows import Mode, Row

END = 96
PATHS = st.lists(
    st.lists(st.integers(0, 3), max_size=4).map(tuple), min_size=1, max_size=12, unique=True
)


def planned(paths: list[tuple[int, ...]]) -> ChoicePlan:
    return plan_labels("field", [str(path) for path in paths], paths, END)


def closed(paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the whole sequences: a path that begins another one ends with END."""
    return [
        (*path, END) if any(other[: len(path)] == path != other for other in paths) else path
        for path in paths
    ]


def enumerated(paths: list[tuple[int, ...]], logits: Any) -> list[float]:
    """Return the probability of each sequence by walking it, one token at a time.

    Args:
        paths: Token sequences.
        logits: A function from the tokens said so far to V logits.
    """
    sequences = closed(paths)
    found: list[float] = []
    for sequence in sequences:
        probability = 1.0
        for length in range(len(sequence)):
            said = sequence[:length]
            allowed = {other[length] for other in sequences if other[:length] == said}
            weights = {token: math.exp(logits(said)[token]) for token in allowed}
            probability *= weights[sequence[length]] / math.fsum(weights.values())
        found.append(probability)
    return found


@given(paths=PATHS, seed=st.integers(0, 2**32 - 1))
def test_trie_equals_enumeration_for_any_set_of_paths(paths, seed):
    drawn: dict[tuple[int, ...], np.ndarray] = {}
    draw = np.random.default_rng(seed)

    def logits(said: tuple[int, ...]) -> np.ndarray:
        return drawn.setdefault(said, draw.normal(0, 3, END + 1))

    plan = planned(paths)
    rows = [logits(each.path)[list(each.candidates)] for each in plan.branchings]
    probabilities = np.exp(plan.logits(rows))
    # Walking every sequence token by token is the slow definition of the trie.
    np.testing.assert_allclose(probabilities, enumerated(paths, logits), rtol=1e-9)
    # Every branching hands on all it gets, so the whole sums to 1.
    assert math.isclose(math.fsum(probabilities), 1.0, abs_tol=1e-12)


@given(paths=PATHS, data=st.data())
def test_every_choice_can_be_reached(paths, data):
    plan = planned(paths)
    wanted = data.draw(st.integers(0, len(paths) - 1))
    rows = [np.zeros(len(branching.candidates)) for branching in plan.branchings]
    for branching, candidate in plan.steps[wanted]:
        rows[branching][candidate] = 60.0
    # A model that is sure at each turn gets to the choice, and to no other one.
    assert math.isclose(math.exp(plan.logits(rows)[wanted]), 1.0, abs_tol=1e-12)


@given(paths=PATHS)
def test_rows_are_only_spent_where_tokens_part(paths):
    plan = planned(paths)
    for branching in plan.branchings:
        # One allowed token needs no model, and a repeated one would count double.
        assert len(set(branching.candidates)) == len(branching.candidates) > 1
    # A tree with n leaves has at most n - 1 points where it parts.
    assert len(plan.branchings) <= len(paths) - 1
    # Each path to a branching belongs to some label, so none is longer than they are.
    assert plan.longest_path <= max(map(len, paths))


def test_hand_made_trie():
    #  1 ─ 2 ─ END   "a"      the prefix of "ab", closed by the end of the turn
    #        └ 3     "ab"
    #  4 ─ 5         "c"      no branching behind 4
    plan = planned([(1, 2), (1, 2, 3), (4, 5)])
    assert [(each.path, each.candidates) for each in plan.branchings] == [
        ((), (1, 4)),
        ((1, 2), (END, 3)),
    ]
    # exp(ln 3) : exp(0) is 3/4 to 1/4, then halves: 3/8, 3/8, 1/4.
    found = plan.logits([np.array([math.log(3), 0.0]), np.array([7.0, 7.0])])
    np.testing.assert_allclose(np.exp(found), [3 / 8, 3 / 8, 1 / 4], rtol=1e-12)
    assert plan.longest_path == 2
    assert plan.codes == ()


def test_one_choice_needs_no_row():
    plan = planned([(1, 2, 3)])
    # The only allowed text has probability 1: log 1 = 0, and no row.
    assert (plan.branchings, plan.logits([]), plan.longest_path) == ((), (0.0,), 0)


def test_extreme_logits_neither_overflow_nor_vanish():
    plan = planned([(1,), (2,)])
    # exp(1000) overflows; the log-softmax is 0 and -2000 all the same.
    assert plan.logits([np.array([1000.0, -1000.0], np.float32)]) == (0.0, -2000.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_visible(bad):
    found = planned([(1,), (2,)]).logits([np.array([bad, 1.0])])
    # Refused by the caller, which names the document: no warning, and no number made up.
    assert not all(map(math.isfinite, found))


def test_labels_of_the_same_tokens_are_refused():
    # No model could tell them apart.
    with pytest.raises(SchemaError, match=r"field 'team'.* got ' a' and ' b'") as caught:
        plan_labels("team", [" a", " b"], [(1, 2), (1, 2)], END)
    assert caught.value.hint


@pytest.mark.mlx
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "paths",
    [
        [(1, 2), (3,)],
        [(1, 2), (1, 3), (1, 4, 5)],
        [(1,), (1, 2), (1, 2, 3), (4,)],
        [(7, 8, 9)],
        [(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 6), (1, 7), (8,)],
    ],
    ids=["plain", "shared first token", "prefix of another", "single", "deep"],
)
def test_trie_of_a_random_model_equals_enumeration(tiny, paths):
    model = tiny.model()
    prompt = tiny.rows(20, [5])[0].tokens
    plan = planned(paths)
    rows = [Row(prompt + each.path, each.candidates) for each in plan.branchings]
    oracle = enumerated(
        paths, lambda said: np.array(model(mx.array([prompt + said]))[0, -1]).tolist()
    )
    for mode in Mode:
        logits, _ = Engine(model, chunk=16).score(rows, mode=mode)
        # The oracle uses the full head on whole sequences: no trie, no cache, no branch.
        np.testing.assert_allclose(np.exp(plan.logits(logits)), oracle, rtol=0, atol=1e-9)


def test_codes_keep_the_raw_logits():
    plan = plan_codes(("A", "B", "C"), (11, 7, 9))
    assert [(each.path, each.candidates) for each in plan.branchings] == [((), (11, 7, 9))]
    # A code's logit is the choice's, not normalised: the record is what the model said.
    assert plan.logits([np.array([1.5, -2.0, 0.25], np.float32)]) == (1.5, -2.0, 0.25)
    assert (plan.codes, plan.longest_path) == (("A", "B", "C"), 0)


@pytest.mark.parametrize("count", [1, 2, 26])
def test_up_to_26_choices_have_letters(count):
    # No vocabulary is looked at: letters are checked at the real boundary later.
    assert code_names(count, ()) == tuple(string.ascii_uppercase)


def test_wide_codes_are_ordered_by_length_and_then_text():
    vocabulary = ["ZZ", "AAA", "AB", "ab", "ABCD", "A1", "ĠAB", "Ab", "AAAA", "É", "AA", "AA\n"]
    # Two letters before three, the alphabet within; only A-Z counts.
    assert code_names(28, vocabulary)[26:] == ("AA", "AB", "ZZ", "AAA")


def test_at_most_255_codes():
    pairs = [one + two for one in string.ascii_uppercase for two in string.ascii_uppercase]
    codes = code_names(255, pairs)
    # 26 letters and the first 229 of 676 pairs: 8 × 26 + 21, so up to I and the 21st letter.
    assert (len(codes), codes[-1]) == (MAX_CODES, "IU")


def test_too_small_a_vocabulary_is_refused():
    # 26 letters and one pair are 27.
    assert len(code_names(27, ["AB"])) == 27
    with pytest.raises(CheckpointError, match=r"28 choices .* got 27") as caught:
        code_names(28, ["AB"])
    assert "labels" in str(caught.value.hint)
