"""The scorer as a library, on a tiny random checkpoint: any caller, any document."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from weighbridge.scorer import ParallelScorer, Rejection, ScoreResult
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.encodings import plan_codes
from weighbridge.scorer.errors import CheckpointError, DocumentError, SchemaError, ScorerError
from weighbridge.scorer.results import field_result
from weighbridge.scorer.rows import Timings
from weighbridge.scorer.schema import Field, FieldKind, Schema

pytestmark = pytest.mark.mlx

DOCUMENTS = [
    "The invoice was charged twice.",
    "Login is not possible since the outage, and the customer is furious.",
    "שלום 👩‍👩‍👧‍👦 — «ça va»?",
    "Thanks!",
]
BAD = {
    "": "document.empty",
    " \n": "document.empty",
    "a\0b": "document.encoding",
    "a\udbc0b": "document.encoding",
    "refund " * 2000: "document.too_long",
}
MODES = ("auto", "parallel", "cached_serial", "independent")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("scorer") / "tiny", seed=7)


@pytest.fixture(scope="module")
def scorer(folder) -> ParallelScorer:
    return ParallelScorer(folder)


@pytest.fixture(scope="module")
def tolerance(scorer) -> float:
    """Return by how much logits may differ where the order of sums does."""
    return {"float32": 1e-4, "bfloat16": 0.2}[scorer.dtype]


def logits(result: ScoreResult | Rejection) -> dict[tuple[str, str], float]:
    """Return every logit of a result, by field and choice."""
    assert isinstance(result, ScoreResult), result
    return {
        (name, key): value
        for name, field in result.fields.items()
        for key, value in field.logits.items()
    }


# --- answers ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["schema-first", "context-first"])
@pytest.mark.parametrize("encoding", ["labels", "codes"])
def test_answers_of_every_combination(folder, tiny, tolerance, mode, layout, encoding):
    scorer = ParallelScorer(folder, layout=layout, encoding=encoding)
    schema = tiny.schema()
    result = scorer.score(DOCUMENTS[0], schema, mode=mode, field_batch_size=2)
    reference = scorer.score(DOCUMENTS[0], schema, mode="independent")
    # All modes give the same logits; the whole prompt is the oracle.
    assert logits(result) == pytest.approx(logits(reference), abs=tolerance)
    for field, (name, answer) in zip(schema.fields, result.fields.items(), strict=True):
        assert (name, answer.kind) == (field.name, field.kind)
        assert tuple(answer.scores) == tuple(answer.logits) == field.keys
        assert math.isclose(math.fsum(answer.scores.values()), 1.0, abs_tol=1e-12)
        # The answer is the choice of the highest logit, as a native boolean or text.
        best = max(answer.logits, key=lambda key: answer.logits[key])
        assert answer.value == field.choices[field.keys.index(best)]
        assert type(answer.value) is (bool if field.kind is FieldKind.BOOLEAN else str)
        # First minus second, before temperature.
        first, second = sorted(answer.logits.values(), reverse=True)[:2]
        assert answer.margin == first - second
        code = "ABCD"[field.keys.index(best)] if encoding == "codes" else None
        assert answer.code == code
    assert result.output == {name: field.value for name, field in result.fields.items()}


def test_expected_value_of_a_score_field(scorer, tiny):
    result = scorer.score(DOCUMENTS[1], tiny.schema())
    calm, annoyed, furious = result.fields["mood"].scores.values()
    # Σ i·pᵢ over the levels from 0; other kinds have no order to average over.
    assert result.fields["mood"].expected_value == pytest.approx(0 * calm + annoyed + 2 * furious)
    assert 0 < (result.fields["mood"].expected_value or 0) < 2
    assert result.fields["team"].expected_value is None
    assert result.fields["urgent"].expected_value is None


def test_field_result_by_hand():
    field = Field("mood", FieldKind.SCORE, "How?", ("calm", "annoyed", "furious"))
    codes = plan_codes(("A", "B", "C"), (1, 2, 3))
    result = field_result(field, codes, (0.0, math.log(4), math.log(16)), 2.0)
    # At T = 2 the weights 1, 4, 16 become 1, 2, 4: sevenths.
    assert list(result.scores.values()) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    # 0·1/7 + 1·2/7 + 2·4/7 = 10/7.
    assert result.expected_value == pytest.approx(10 / 7)
    # ln 16 - ln 4 = ln 4: raw, whatever T is.
    assert result.margin == pytest.approx(math.log(4))
    assert (result.value, result.code) == ("furious", "C")


def test_the_first_of_equals_is_selected():
    field = Field("urgent", FieldKind.BOOLEAN, "Is it?", (True, False))
    result = field_result(field, plan_codes(("A", "B"), (1, 2)), (0.5, 0.5), 1.0)
    # Reproducible, and the margin says that it is a tie.
    assert (result.value, result.margin, result.code) == (True, 0.0, "A")


@pytest.mark.parametrize("encoding", ["labels", "codes"])
def test_a_single_choice_is_certain(folder, encoding):
    schema = Schema((Field("only", FieldKind.ENUM, "Which?", ("this one",)),))
    result = ParallelScorer(folder, encoding=encoding).score(DOCUMENTS[0], schema)
    answer = result.fields["only"]
    # There is nothing else to say, and no second choice to be ahead of.
    assert (answer.value, answer.scores, answer.margin) == ("this one", {"this one": 1.0}, None)


def test_temperature_scales_probabilities_and_nothing_else(folder, tiny, scorer):
    hot = ParallelScorer(folder, temperature=3.0)
    one, three = (each.score(DOCUMENTS[1], tiny.schema()) for each in (scorer, hot))
    # The record is the raw logits; the temperature is applied afterwards.
    assert logits(one) == logits(three)
    assert one.output == three.output
    for name, field in three.fields.items():
        weights = {key: math.exp(value / 3.0) for key, value in field.logits.items()}
        total = math.fsum(weights.values())
        assert field.scores == pytest.approx({k: w / total for k, w in weights.items()})
        # Above 1 a temperature makes every answer less sure.
        assert max(field.scores.values()) < max(one.fields[name].scores.values())
        assert field.margin == one.fields[name].margin
    assert (one.temperature, one.temperature_kind) == (1.0, "default")
    assert (three.temperature, three.temperature_kind) == (3.0, "explicit")
    # Neither was fitted for these weights, and nobody says so.
    assert not one.temperature_fitted
    assert not three.temperature_fitted


# --- batches and threads ---


def test_batch_equals_one_by_one(scorer, tiny, tolerance):
    together = scorer.score_batch(DOCUMENTS, tiny.schema())
    alone = [scorer.score(text, tiny.schema()) for text in DOCUMENTS]
    for one, other in zip(together, alone, strict=True):
        # A document's answer does not depend on its neighbours.
        assert logits(one) == pytest.approx(logits(other), abs=tolerance / 10)


@given(
    order=st.lists(st.sampled_from([*DOCUMENTS, *BAD]), max_size=6),
    mode=st.sampled_from(MODES),
    size=st.none() | st.integers(1, 3),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bad_documents_disturb_nobody(scorer, tiny, tolerance, order, mode, size):
    found = scorer.score_batch(order, tiny.schema(), mode=mode, field_batch_size=size)
    assert len(found) == len(order)
    for text, result in zip(order, found, strict=True):
        if text in BAD:
            # In its place, with its code and without its text.
            assert isinstance(result, Rejection)
            assert result.code == BAD[text]
            assert len(result.message) < 200
        else:
            alone = scorer.score(text, tiny.schema(), mode="independent")
            # The same answer as with nobody around, in any mode and order.
            assert logits(result) == pytest.approx(logits(alone), abs=tolerance)


def test_several_threads_at_once(scorer, tiny, tolerance):
    schemas = [tiny.schema(), tiny.schema("mood"), tiny.schema("urgent", "team")]
    jobs = [(text, schema) for text in DOCUMENTS for schema in schemas] * 2
    expected = [scorer.score(*job) for job in jobs]
    barrier = threading.Barrier(6)

    def work(number: int) -> list[ScoreResult]:
        barrier.wait(timeout=30)
        return [scorer.score(*job) for job in jobs[number::6]]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(work, range(6)))
    for number in range(6):
        for one, other in zip(found[number], expected[number::6], strict=True):
            # Plans, tokenizer and resident prefixes are shared, answers are not mixed up.
            assert logits(one) == pytest.approx(logits(other), abs=tolerance / 10)


def test_the_model_runs_on_the_one_thread_only(scorer, tiny, monkeypatch):
    from mlx import nn

    seen: set[int] = set()
    embed = nn.Embedding.__call__

    def recorded(self: Any, x: Any) -> Any:
        seen.add(threading.get_ident())
        return embed(self, x)

    monkeypatch.setattr(nn.Embedding, "__call__", recorded)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda text: scorer.score(text, tiny.schema()), DOCUMENTS))
    # Wherever the caller is: a lazy array must not cross threads.
    assert seen == {on_mlx_thread(threading.get_ident)}


def test_an_empty_batch(scorer, tiny):
    assert scorer.score_batch([], tiny.schema()) == []


def test_a_batch_of_rejections_loads_nothing(tiny, tmp_path):
    scorer = ParallelScorer(tiny.checkpoint(tmp_path / "tiny", seed=8))
    found = scorer.score_batch(list(BAD), tiny.schema())
    # Minutes of loading would be for nothing.
    assert all(isinstance(each, Rejection) for each in found)
    assert not scorer.model_loaded
    scorer.plan(tiny.schema()).prompt("x", tiny.schema().fields[0])
    # Looking at prompts needs the tokenizer only.
    assert not scorer.model_loaded
    scorer.score("x", tiny.schema())
    assert scorer.model_loaded


def test_one_bad_document_is_an_error(scorer, tiny):
    # Alone there is no batch to go on with.
    with pytest.raises(DocumentError, match="must hold text") as caught:
        scorer.score(" ", tiny.schema())
    assert caught.value.code == "document.empty"


def test_what_is_no_text_is_rejected_alone(scorer, tiny):
    contexts: list[Any] = ["The invoice", None, 7, b"The invoice", ["a"]]
    first, *others = scorer.score_batch(contexts, tiny.schema())
    # Whatever a caller's data frame holds: never an AttributeError for the whole batch.
    assert isinstance(first, ScoreResult)
    assert {each.code for each in others} == {"document.not_text"}
    assert [each.message.rpartition(" ")[2] for each in others] == [
        "NoneType",
        "int",
        "bytes",
        "list",
    ]


def test_limit_is_met_exactly(folder, tiny, scorer):
    needed = scorer.plan(tiny.schema()).rows(DOCUMENTS[0]).input_tokens
    exact = ParallelScorer(folder, max_input_tokens=needed)
    short = ParallelScorer(folder, max_input_tokens=needed - 1)
    # At the limit is allowed; one below is refused with both numbers, and nothing is cut.
    assert logits(exact.score(DOCUMENTS[0], tiny.schema()))
    with pytest.raises(DocumentError, match=f"at most {needed - 1} tokens, got {needed} "):
        short.score(DOCUMENTS[0], tiny.schema())


# --- what comes out ---


def test_result_is_json_and_comes_back(scorer, tiny):
    result = scorer.score(DOCUMENTS[2], tiny.schema())
    text = json.dumps(result.model_dump(mode="json"), allow_nan=False)
    # Every number finite, every enum a text; nothing is lost on the way.
    assert ScoreResult.model_validate_json(text) == result
    assert json.loads(text)["fields"]["mood"]["kind"] == "score"
    assert json.loads(text)["output"]["urgent"] in {True, False}
    assert set(json.loads(text)["timings"]) == {field.name for field in fields(Timings)}


def test_results_are_frozen(scorer, tiny):
    result = scorer.score(DOCUMENTS[3], tiny.schema("urgent"))
    # A value that was recorded must be the value that is shown.
    with pytest.raises(ValidationError, match="frozen"):
        result.temperature = 2.0
    with pytest.raises(ValidationError, match="frozen"):
        result.fields["urgent"].value = "other"


def test_timings_of_a_document(scorer, tiny):
    timings = scorer.score(DOCUMENTS[0], tiny.schema()).timings
    # Its parts are within the whole, which holds tokenization too.
    assert 0 < timings.prefill_seconds + timings.branch_seconds < timings.total_seconds
    assert min(timings.prefix_tokens, timings.suffix_tokens, timings.peak_bytes) > 0


def test_what_enters_the_key_of_a_decision(scorer, folder, tiny):
    other = ParallelScorer(folder, layout="context-first", encoding="codes")
    # Dtype as it is computed with; wording by layout and encoding.
    assert scorer.dtype in scorer.backend
    one, two = scorer.key(tiny.schema()), other.key(tiny.schema())
    assert (one.layout, one.encoding) == ("schema-first", "labels")
    assert (two.layout, two.encoding) == ("context-first", "codes")
    assert one.checkpoint == two.checkpoint == scorer.info.fingerprint
    assert one.schema_sha256 == two.schema_sha256 == tiny.schema().sha256
    # Each answer names what it depends on, so that it cannot be kept under another key.
    assert scorer.score("x", tiny.schema()).key == one


# --- what goes in ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "middle-out"}, "layout must be one of schema-first, context-first, got 'mid"),
        ({"encoding": "emoji"}, "encoding must be one of codes, labels, got 'emoji'"),
        ({"max_input_tokens": 0}, "max_input_tokens must be at least 1, got 0"),
        ({"permutations": 0}, "permutations must be a number from 1 to 32, got 0"),
        ({"permutations": 33}, "permutations must be a number from 1 to 32, got 33"),
        ({"dtype": "int8"}, "dtype must be one of float64, .*got 'int8'"),
        ({"temperature": 0.0}, "temperature must be a number, finite and above 0, got 0.0"),
    ],
)
def test_options_that_do_not_exist(folder, options, message):
    with pytest.raises(ScorerError, match=message):
        ParallelScorer(folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "quick"}, "mode must be one of auto, .*independent, got 'quick'"),
        ({"field_batch_size": 0}, "field_batch_size must be at least 1, got 0"),
        ({"field_batch_size": -1}, "field_batch_size must be at least 1, got -1"),
    ],
)
def test_calls_that_cannot_be(scorer, tiny, options, message):
    # Before any document is looked at: not one of them would go well.
    with pytest.raises(ScorerError, match=message):
        scorer.score_batch(DOCUMENTS, tiny.schema(), **options)


def test_one_text_is_no_batch(scorer, tiny):
    # Its characters would be scored one by one.
    with pytest.raises(ScorerError, match="sequence of documents, got one text") as caught:
        scorer.score_batch("The invoice", tiny.schema())
    assert "score(text, schema)" in str(caught.value.hint)


def test_schema_as_a_dict(scorer, tiny):
    result = scorer.score(DOCUMENTS[0], tiny.triage)
    # What json.load gives for a schema file, or any other mapping.
    assert logits(result) == logits(scorer.score(DOCUMENTS[0], tiny.schema()))
    assert scorer.plan(MappingProxyType(tiny.triage)) is scorer.plan(tiny.schema())


@pytest.mark.parametrize("schema", [{}, {"a": 1}, {"a": {"type": "enum", "choices": {"x", "y"}}}])
def test_a_dict_that_is_no_schema(scorer, schema: Any):
    # Also where Python has values that JSON has not.
    with pytest.raises(SchemaError):
        scorer.score(DOCUMENTS[0], schema)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="must be an existing folder") as caught:
        ParallelScorer(tmp_path / "gone")
    assert "checkpoint demo" in str(caught.value.hint)
