"""Asked in several orders of the choices: which orders, their mean, and how often they differ."""

import math
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer import ParallelScorer, Rejection, ScoreResult
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import CheckpointError, DocumentError
from weighbridge.scorer.permutations import average_orders
from weighbridge.scorer.prompts import Layout, prompt_version
from weighbridge.scorer.resident import resident_checkpoint
from weighbridge.scorer.rows import Mode
from weighbridge.scorer.schema import Field, FieldKind, Schema

DOCUMENTS = [
    "The invoice was charged twice.",
    "Login is not possible since the outage, and the customer is furious.",
    "Thanks!",
]
ENCODINGS = ("labels", "codes")


def letters(count: int) -> Field:
    """Return a field of so many choices: a, b, c and so on."""
    return Field("pick", FieldKind.ENUM, "Which?", tuple("abcdefghijklmnopqrst"[:count]))


# --- which orders ---


@pytest.mark.parametrize(
    ("choices", "orders", "expected"),
    [
        # k·n // K places: 0, 1, 2.
        (3, 3, ["abc", "bca", "cab"]),
        # Both orders of a pair.
        (2, 2, ["ab", "ba"]),
        # 0·5 // 2 = 0 and 1·5 // 2 = 2: spread, not neighbours.
        (5, 2, ["abcde", "cdeab"]),
        # More orders than choices repeat them evenly.
        (2, 4, ["ab", "ab", "ba", "ba"]),
        (1, 3, ["a", "a", "a"]),
    ],
)
def test_orders_by_hand(choices: int, orders: int, expected: list[str]):
    schema = Schema((letters(choices),))
    made = [schema.in_order(order, orders) for order in range(orders)]
    assert ["".join(each.fields[0].keys) for each in made] == expected


@given(st.integers(1, 20), st.integers(1, 32))
def test_orders_are_spread_evenly(choices: int, orders: int):
    schema = Schema((letters(choices),))
    first = [schema.in_order(order, orders).fields[0].keys[0] for order in range(orders)]
    times = [first.count(key) for key in set(first)]
    # Each choice stands first as often as any other, give or take one; all do, if they can.
    assert max(times) - min(times) <= 1
    assert len(times) == min(choices, orders)


def test_an_order_is_a_schema_of_its_own():
    described = Field(
        *("team", FieldKind.ENUM, "Who?", ("billing", "login", "other")),
        {"billing": "money", "other": "the rest"},
        {"login": "sign in"},
    )
    mood = Field("mood", FieldKind.SCORE, "How?", ("calm", "annoyed", "furious"))
    urgent = Field("urgent", FieldKind.BOOLEAN, "Now?", (False, True))
    schema = Schema((described, mood, urgent), name="triage")
    turned = schema.in_order(1, 2)
    # All fields at once, each by half of its own choices; order 0 is the very schema.
    assert schema.in_order(0, 2) is schema
    assert [field.keys for field in turned.fields] == [
        ("login", "other", "billing"),
        ("annoyed", "furious", "calm"),
        ("true", "false"),
    ]
    assert turned.sha256 != schema.sha256
    assert turned.name == "triage"
    # Descriptions and words stay with their choice, written in the order of the choices.
    assert list(turned.fields[0].choice_descriptions.items()) == [
        ("other", "the rest"),
        ("billing", "money"),
    ]
    assert turned.fields[0].words == ("sign in", "other", "billing")


# --- the mean and the flip rate ---


def test_average_by_hand():
    averaged = average_orders(
        [
            {"a": 3.0, "b": 0.0, "c": 1.0},
            # Named, not numbered: this order says its choices in another sequence.
            {"b": 2.0, "c": 1.0, "a": 0.0},
            {"c": 2.5, "a": 3.0, "b": 4.0},
        ]
    )
    # By hand: 6 / 3 for a and for b, 4.5 / 3 for c; of equals the first.
    assert averaged.logits == (2.0, 2.0, 1.5)
    # The mean says a; the orders say a, b, b.
    assert averaged.flip_rate == pytest.approx(2 / 3)


def test_a_preference_for_a_place_cancels_whatever_the_number_of_orders():
    # Three orders of a pair have one of them twice; this reader sees the first place only.
    first, second = {"a": 2.0, "b": 0.0}, {"b": 2.0, "a": 0.0}
    averaged = average_orders([first, first, second])
    # Each rotation counts alike: a tie, and half of the rotations disagree with either answer.
    assert averaged.logits == (1.0, 1.0)
    assert averaged.flip_rate == 0.5
    # Within a rotation the orders differ by the other fields, and are averaged as well.
    mixed = average_orders([{"a": 3.0, "b": 0.0}, {"a": 1.0, "b": 0.0}, second])
    assert mixed.logits == (1.0, 1.0)


def test_a_tie_goes_to_the_first_of_the_schema():
    averaged = average_orders([{"a": 1.0, "b": 0.0}, {"b": 1.0, "a": 1.0}])
    # In the second order b was shown first, and is still not another answer.
    assert averaged == average_orders([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0}])
    assert averaged.flip_rate == 0.0


def test_a_single_order_and_a_single_choice():
    # 0.1 + 0.2 has no short form: what comes in comes out.
    alone = average_orders([{"a": 0.1 + 0.2, "b": -0.0}])
    assert alone.logits == (0.1 + 0.2, -0.0)
    assert math.copysign(1, alone.logits[1]) == -1
    # One order has nothing to disagree with; one choice nothing to disagree about.
    assert alone.flip_rate is None
    assert average_orders([{"a": 1.0}] * 3).flip_rate is None


def test_the_mean_does_not_depend_on_which_order_came_first():
    said = [{"a": 0.1, "b": 1e16}, {"a": 0.7, "b": 1.0}, {"a": -0.3, "b": -1e16}]
    # Summed one after the other 1e16 + 1 - 1e16 would be 0, or 1.
    assert average_orders(said).logits == average_orders(said[::-1]).logits
    assert average_orders(said).logits[1] == 1 / 3


# --- on a checkpoint ---


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("permutations") / "tiny", seed=7)


def scorer(folder: Path, permutations: int = 1, **options: Any) -> ParallelScorer:
    return ParallelScorer(folder, permutations=permutations, dtype="float64", **options)


def said(result: ScoreResult) -> dict[str, dict[str, float]]:
    return {name: field.logits for name, field in result.fields.items()}


def worst(one: ScoreResult, other: ScoreResult) -> float:
    """Return the largest difference between two results, by the name of the choice."""
    left, right = said(one), said(other)
    return max(abs(left[f][key] - right[f][key]) for f in left for key in left[f])


@pytest.mark.mlx
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_order_is_bitwise_what_it_was(folder: Path, tiny: Any, encoding: str):
    schema: Schema = tiny.schema()
    plain = ParallelScorer(folder, encoding=encoding)
    found = ParallelScorer(folder, encoding=encoding, permutations=1).score(DOCUMENTS[0], schema)
    plan = plain.plan(schema)
    resident = resident_checkpoint(plain.info)

    def by_hand() -> list[list[float]]:
        prompted = plan.rows(DOCUMENTS[0])
        ((rows, _),) = resident.score([prompted], Mode.AUTO, None)
        prior = resident.prior(plan) or [(0.0,) * len(field.choices) for field in schema.fields]
        return [
            [logit - lean for logit, lean in zip(logits, leans, strict=True)]
            for logits, leans in zip(plan.choice_logits(rows), prior, strict=True)
        ]

    # Decisions of earlier versions are reused: not one bit, and no part of the key, may move.
    assert [list(each.values()) for each in said(found).values()] == on_mlx_thread(by_hand)
    assert found.key == plain.key(schema)
    assert found.key.prompt_version == {"labels": "3.2", "codes": "3.1"}[encoding]
    assert found.key.schema_sha256 == schema.sha256
    assert {field.flip_rate for field in found.fields.values()} == {None}


@pytest.mark.mlx
@pytest.mark.parametrize("orders", [2, 3, 4])
@pytest.mark.parametrize("layout", ["schema-first", "context-first"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_mean_of_scoring_each_order_by_hand(
    folder: Path, tiny: Any, encoding: str, layout: str, orders: int
):
    schema: Schema = tiny.schema()
    one = scorer(folder, encoding=encoding, layout=layout)
    several = scorer(folder, orders, encoding=encoding, layout=layout)
    for text, found in zip(DOCUMENTS, several.score_batch(DOCUMENTS, schema), strict=True):
        assert isinstance(found, ScoreResult)
        by_hand = [one.score(text, schema.in_order(order, orders)) for order in range(orders)]
        assert found.key.schema_sha256 == schema.sha256
        for field in schema.fields:
            answer = found.fields[field.name]
            shown = [
                schema.in_order(order, orders).field(field.name).keys for order in range(orders)
            ]
            alike = [
                [each for each, keys in zip(by_hand, shown, strict=True) if keys == rotation]
                for rotation in dict.fromkeys(shown)
            ]
            mean = {
                key: fmean(
                    fmean(each.fields[field.name].logits[key] for each in same) for same in alike
                )
                for key in field.keys
            }
            # Each order with its own label prior, averaged by name, in the schema's order.
            assert answer.logits == pytest.approx(mean, abs=1e-12)
            assert tuple(answer.logits) == tuple(answer.scores) == field.keys
            best = max(mean, key=mean.__getitem__)
            assert answer.value == field.choices[field.keys.index(best)]
            flips = fmean(
                fmean(each.output[field.name] != answer.value for each in same) for same in alike
            )
            assert answer.flip_rate == pytest.approx(flips)
            # The code that the own order has for it.
            code = "ABCD"[field.keys.index(best)] if encoding == "codes" else None
            assert answer.code == code
        mood = found.fields["mood"]
        # Σ i·pᵢ with i by the schema's levels, whatever order they were shown in.
        assert list(mood.scores) == ["calm", "annoyed", "furious"]
        assert mood.expected_value == pytest.approx(
            mood.scores["annoyed"] + 2 * mood.scores["furious"]
        )


@pytest.mark.mlx
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", ["urgent", "team", "mood"])
def test_all_orders_together_do_not_see_the_order(
    folder: Path, tiny: Any, name: str, encoding: str
):
    schema: Schema = tiny.schema(name)
    count = len(schema.fields[0].choices)
    every, alone = scorer(folder, count, encoding=encoding), scorer(folder, encoding=encoding)
    whole = every.score(DOCUMENTS[1], schema)
    for places in range(1, count):
        turned = Schema((schema.fields[0].rotated(places),))
        # The same set of prompts, so the same mean by name.
        assert worst(whole, every.score(DOCUMENTS[1], turned)) < 1e-12
        # The negative control: a single order does see it.
        assert worst(alone.score(DOCUMENTS[1], schema), alone.score(DOCUMENTS[1], turned)) > 1e-3


@pytest.mark.mlx
def test_orders_that_repeat_are_computed_once(folder: Path, tiny: Any):
    schema: Schema = tiny.schema("urgent")
    two, eight = (scorer(folder, orders).score(DOCUMENTS[0], schema) for orders in (2, 8))
    assert said(two) == said(eight)
    assert two.fields["urgent"].flip_rate == eight.fields["urgent"].flip_rate
    assert two.timings.suffix_tokens == eight.timings.suffix_tokens
    # Another number of orders is another decision all the same.
    assert [each.key.prompt_version for each in (two, eight)] == ["3.2/2", "3.2/8"]


@pytest.mark.mlx
def test_timings_are_those_of_all_orders(folder: Path, tiny: Any):
    schema: Schema = tiny.schema()
    one, three = scorer(folder), scorer(folder, 3)
    one.score_batch(DOCUMENTS, schema)
    three.score_batch(DOCUMENTS, schema)
    parts = [one.score(DOCUMENTS[0], schema.in_order(order, 3)).timings for order in range(3)]
    whole = three.score(DOCUMENTS[0], schema).timings
    for name in ("prefix_tokens", "suffix_tokens", "resident_tokens", "resident_hits", "prefills"):
        # Prefixes of all three orders are resident by now.
        assert getattr(whole, name) == sum(getattr(each, name) for each in parts)
    assert whole.resident_hits == 3
    assert whole.prefill_seconds + whole.branch_seconds < whole.total_seconds


@pytest.mark.mlx
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_single_choice_never_flips(folder: Path, encoding: str):
    schema = Schema((Field("only", FieldKind.ENUM, "Which?", ("this one",)),))
    answer = scorer(folder, 4, encoding=encoding).score("x", schema).fields["only"]
    assert (answer.value, answer.flip_rate, answer.margin) == ("this one", None, None)


MERGED = "!,"
"""A token of the tokenizer below: one choice says it where it is not the last one shown."""


@pytest.fixture(scope="module")
def merging(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny.tokenizer().train_new_from_iterator(
        [f"red{MERGED} green{MERGED} blue{MERGED}"] * 9, 300, show_progress=False
    )
    assert MERGED in tokenizer.get_vocab()
    folder = tmp_path_factory.mktemp("permutations") / "merging"
    return tiny.checkpoint(folder, seed=7, tokenizer=tokenizer)


@pytest.mark.mlx
def test_a_document_too_long_in_a_later_order_is_rejected(merging: Path):
    # "red!, green or blue." and "green, blue or red!.", which is a token longer.
    schema = Schema((Field("pick", FieldKind.ENUM, "Which?", ("red!", "green", "blue")),))
    lengths = [
        scorer(merging).plan(schema.in_order(order, 3)).rows("x").input_tokens for order in range(3)
    ]
    assert lengths[0] < lengths[1]
    tight = scorer(merging, 3, max_input_tokens=lengths[0])
    resident_checkpoint(tight.info, dtype="float64").release()
    long, empty = tight.score_batch(["x", " "], schema)
    assert isinstance(long, Rejection)
    assert (long.code, f"got {lengths[1]} " in long.message) == ("document.too_long", True)
    # Found before any order was computed, though the first one would have fitted.
    assert not tight.model_loaded
    # The first reason counts, and no later order takes it away.
    assert isinstance(empty, Rejection)
    assert empty.code == "document.empty"
    with pytest.raises(DocumentError, match=f"at most {lengths[0]} tokens"):
        tight.score("x", schema)
    # The negative control: in the own order alone the same document fits.
    assert scorer(merging, max_input_tokens=lengths[0]).score("x", schema).output


@pytest.mark.mlx
def test_no_number_in_a_later_order_rejects_the_document_by_field(merging: Path, tmp_path: Path):
    broken = shutil.copytree(merging, tmp_path / "broken")

    def spoil() -> None:
        import mlx.core as mx
        from transformers import AutoTokenizer

        token = AutoTokenizer.from_pretrained(str(broken)).convert_tokens_to_ids(MERGED)
        path = str(broken / "model.safetensors")
        arrays: Any = mx.load(path)
        weights = arrays["model.embed_tokens.weight"]
        weights[token] = float("nan")
        mx.save_safetensors(path, {**arrays, "model.embed_tokens.weight": weights})

    on_mlx_thread(spoil)
    # Only the last of three orders says "red!, blue or green".
    schema = Schema((Field("pick", FieldKind.ENUM, "Which?", ("blue", "green", "red!")),))
    (found,) = ParallelScorer(broken, permutations=3, encoding="codes").score_batch(["x"], schema)
    assert isinstance(found, Rejection)
    assert found.code == "document.not_finite"
    assert "field 'pick'" in found.message
    # The negative control: the own order does not say it.
    assert ParallelScorer(broken, encoding="codes").score("x", schema).output
    # In `labels` the texts of the schema itself come first: no document is to blame.
    with pytest.raises(CheckpointError, match="label prior of field 'pick' must be finite"):
        ParallelScorer(broken, permutations=3).score("x", schema)


def test_every_number_of_orders_has_its_own_version():
    versions = {
        prompt_version(layout, encoding, orders)
        for layout in Layout
        for encoding in Encoding
        for orders in range(1, 33)
    }
    # Layout and encoding are told apart beside it; the two layouts differ in number already.
    assert prompt_version(Layout.SCHEMA_FIRST, Encoding.LABELS) == "3.2"
    assert prompt_version(Layout.SCHEMA_FIRST, Encoding.LABELS, 4) == "3.2/4"
    assert len(versions) == 4 * 32
