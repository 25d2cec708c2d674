"""What answers depend on and what they do not, at the scorer's own door, on tiny checkpoints."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.scorer import ParallelScorer, ScoreResult
from weighbridge.scorer import passes as passes_module
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.caches import Prefix
from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.model_weights import load_model
from weighbridge.scorer.plan import SchemaPlan
from weighbridge.scorer.rows import Mode
from weighbridge.scorer.schema import Schema

pytestmark = pytest.mark.mlx

FAMILIES = ("llama", "qwen3_5", "gemma3_text")
OTHERS = ("qwen2", "qwen3", "gemma2", "cohere2")
COMBINATIONS = [
    (layout, encoding)
    for layout in ("schema-first", "context-first")
    for encoding in ("labels", "codes")
]
MODES = ("auto", "parallel", "cached_serial", "independent")
TEXT = "The invoice was charged twice."

# Choices that are hard to tell apart: several tokens, a shared first token, one that begins
# another, letters of several bytes, and a field with nothing to choose.
HARD: dict[str, Any] = {
    "area": {
        "type": "enum",
        "description": "Which?",
        "choices": ["billing", "billing late", "login", "login reset", "logic", "счёт", "çà 漢"],
    },
    "only": {"type": "enum", "description": "Which?", "choices": ["this one"]},
    "mood": {"type": "score", "description": "How?", "levels": ["calm", "annoyed", "furious"]},
}


@pytest.fixture(scope="module")
def folder_of(tiny, tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            place = tmp_path_factory.mktemp("properties") / architecture
            layers = {"num_hidden_layers": 2}
            made[architecture] = tiny.checkpoint(place, architecture=architecture, **layers)
        return made[architecture]

    return folder


def logits(result: Any) -> dict[tuple[str, str], float]:
    """Return every logit of a result, by field and choice."""
    assert isinstance(result, ScoreResult), result
    return {
        (name, key): value
        for name, field in result.fields.items()
        for key, value in field.logits.items()
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", [*FAMILIES, *OTHERS])
def test_a_folder_holds_the_model_it_was_made_from(tiny, tmp_path, architecture, tied):
    size = {"vocab_size": 420, "tie_word_embeddings": tied}
    folder = tiny.checkpoint(tmp_path / "tiny", architecture=architecture, **size)
    rows = tiny.rows(20, [3, 1])

    def compare() -> float:
        made = tiny.model(architecture=architecture, dtype="float32", **size)
        return tiny.apart(tiny.full(made, rows), tiny.full(load_model(folder, "float32"), rows))

    # mlx-lm rearranges some weights when it loads them (adds 1 to norms, drops heads): what
    # it makes of our folders must be the very model that `test_exact.py` proves things of.
    assert on_mlx_thread(compare) == 0.0


# --- other documents ---

ROUNDING = 1e-5

TEXTS = st.text(max_size=30)
BATCHES = st.tuples(
    st.lists(TEXTS, max_size=2), st.lists(TEXTS, max_size=2), st.integers(1, 20), TEXTS
)


@pytest.mark.parametrize(
    ("architecture", "layout", "encoding"),
    [
        *[("llama", *each) for each in COMBINATIONS],
        ("qwen3_5", "schema-first", "labels"),
        ("gemma3_text", "schema-first", "labels"),
    ],
)
@given(batch=BATCHES, mode=st.sampled_from(MODES))
@settings(max_examples=8)
def test_other_documents_never_change_an_answer(
    folder_of, tiny, architecture, layout, encoding, batch, mode
):
    scorer = ParallelScorer(folder_of(architecture), layout=layout, encoding=encoding)
    schema = tiny.schema("urgent", "mood")
    before, behind, times, other = batch
    alone = logits(scorer.score(TEXT, schema, mode))
    for neighbours in (
        (before, behind),  # added
        ([*before, other], [other, *behind]),  # changed
        ([text * times for text in before], [TEXT * times]),  # lengthened
        ([TEXT], [TEXT]),  # repeated
    ):
        found = scorer.score_batch([*neighbours[0], TEXT, *neighbours[1]], schema, mode)
        # Short documents are computed together, and rounded otherwise. Neighbours may be
        # rejected (empty, control characters): that must not matter either.
        answer = logits(found[len(neighbours[0])])
        assert answer == pytest.approx(alone, abs=ROUNDING)


def test_control_a_document_that_leaves_traces_shows(folder_of, tiny, monkeypatch):
    scorer = ParallelScorer(folder_of("qwen3_5"))
    schema = tiny.schema("urgent", "mood")
    alone = logits(scorer.score(TEXT, schema))

    def sharing(prefix: Prefix, rows: int = 1) -> list[Any]:
        if rows > 1:
            return fork(prefix, rows)
        return [type(cache).from_state(cache.state) for cache in prefix.caches]

    fork = passes_module.fork
    monkeypatch.setattr(passes_module, "fork", sharing)
    try:
        scorer.score("Thanks!", schema)
        found = scorer.score(TEXT, schema)
    finally:
        scorer._resident.release()
    # The resident prefix has read "Thanks!" into its recurrent state.
    assert logits(found) != pytest.approx(alone, abs=1e-3)


# --- other fields ---


@pytest.mark.parametrize(("layout", "encoding"), COMBINATIONS)
def test_another_field_does_change_an_answer(folder_of, tiny, layout, encoding):
    scorer = ParallelScorer(folder_of("llama"), layout=layout, encoding=encoding)
    one = logits(scorer.score(TEXT, tiny.schema("urgent")))
    two = logits(scorer.score(TEXT, tiny.schema("urgent", "mood")))
    moved = max(abs(value - two[key]) for key, value in one.items())
    # A negative result, kept: both layouts show all questions in every prompt, so a schema is
    # one whole, and its hash is part of the key of a decision.
    assert moved > 1e-3
    # So one field's answers are never reused for the other schema.
    assert scorer.key(tiny.schema("urgent")) != scorer.key(tiny.schema("urgent", "mood"))


# --- modes, over architectures, layouts and encodings ---


def worst_of_modes(scorer: ParallelScorer, schema: Any, text: str = TEXT) -> float:
    reference = logits(scorer.score(text, schema, "independent"))
    # Logits that are all alike would agree by themselves.
    assert np.std(list(reference.values())) > 1e-3
    worst = 0.0
    for mode, size in (("auto", None), ("cached_serial", None), ("parallel", 2)):
        found = logits(scorer.score(text, schema, mode, size))
        worst = max(worst, *(abs(value - found[key]) for key, value in reference.items()))
    return worst


@pytest.mark.parametrize(("layout", "encoding"), COMBINATIONS)
@pytest.mark.parametrize("architecture", [*FAMILIES, *OTHERS])
def test_modes_agree_in_every_combination(folder_of, tiny, architecture, layout, encoding):
    scorer = ParallelScorer(
        folder_of(architecture), layout=layout, encoding=encoding, dtype="float64"
    )
    # Whole prompts are the oracle; float64 leaves no room for a difference but rounding.
    assert worst_of_modes(scorer, tiny.schema("urgent", "mood")) <= 1e-9
    # And the check at load let rows branch, so that there was something to compare.
    assert scorer.branching


@pytest.mark.parametrize("layout", ["schema-first", "context-first"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_hard_labels_equal_enumeration(folder_of, architecture, layout):
    scorer = ParallelScorer(folder_of(architecture), layout=layout, dtype="float64")
    schema = Schema.parse(json.dumps(HARD))
    plan = scorer.plan(schema)
    area = plan.choices[0]
    # The schema is as hard as it claims: some choice ends where another goes on, the first
    # tokens are fewer than the choices, and a single choice needs no row.
    chat = ChatTokenizer.load(folder_of(architecture))
    assert any(chat.end_of_turn in each.candidates for each in area.branchings)
    assert len(area.branchings[0].candidates) < len(area.steps)
    assert plan.choices[1].branchings == ()

    def compute() -> tuple[list[list[float]], list[list[float]]]:
        import mlx.core as mx

        with mx.stream(mx.cpu):
            model = load_model(folder_of(architecture), "float64")
            prompted = plan.rows(TEXT)
            rows, _ = Engine(model).score(
                prompted.rows, mode=Mode.PARALLEL, resident_tokens=prompted.resident_tokens
            )
            found = [np.exp(field).tolist() for field in plan.choice_logits(rows)]
            return found, [enumerated(plan, chat, model, each) for each in (0, 1, 2)]

    found, oracle = on_mlx_thread(compute)
    for probabilities, expected in zip(found, oracle, strict=True):
        # Every whole text, token by token through mlx-lm's model: no trie, cache or branch.
        np.testing.assert_allclose(probabilities, expected, rtol=0, atol=1e-9)
        assert math.isclose(math.fsum(expected), 1.0, abs_tol=1e-12)
    # All modes at the scorer's door, label prior included.
    assert worst_of_modes(scorer, schema) <= 1e-9


def enumerated(plan: SchemaPlan, chat: ChatTokenizer, model: Any, number: int) -> list[float]:
    """Return the probability of each label of a field among all of them, the slow way."""
    import mlx.core as mx

    field = plan.schema.fields[number]
    prompt = chat.encode(plan.prompt(TEXT, field))
    said = [
        chat.encode(f"{plan.prompt(TEXT, field)} {word}")[len(prompt) :] for word in field.words
    ]
    texts = [
        (*one, chat.end_of_turn)
        if any(one == other[: len(one)] != other for other in said)
        else one
        for one in said
    ]
    probabilities: list[float] = []
    for text in texts:
        logarithm = 0.0
        for length in range(len(text)):
            allowed = sorted({each[length] for each in texts if each[:length] == text[:length]})
            values = np.array(model(mx.array([prompt + text[:length]]))[0, -1])[allowed]
            weights = np.exp(values - values.max())
            logarithm += math.log(weights[allowed.index(text[length])] / weights.sum())
        probabilities.append(math.exp(logarithm))
    return probabilities


# --- codes of any width ---


@pytest.fixture(scope="module")
def wide(embedded, tiny, tmp_path_factory) -> Path:
    """Make a tiny model with the embedded checkpoint's tokenizer: it has 255 codes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded, local_files_only=True)
    return tiny.checkpoint(tmp_path_factory.mktemp("wide") / "wide", tokenizer=tokenizer)


@pytest.mark.parametrize("count", [1, 26, 27, 255])
def test_codes_of_any_width(wide, count):
    scorer = ParallelScorer(wide, encoding="codes", dtype="float64", max_input_tokens=10**5)
    choices = [f"c{number}" for number in range(count)]
    schema = {"wide": {"type": "enum", "description": "Which?", "choices": choices}}
    (row,) = scorer.plan(schema).rows(TEXT).rows
    # One row, whatever the width, and as many distinct tokens as choices.
    assert len(set(row.candidates)) == count
    reference = logits(scorer.score(TEXT, schema, "independent"))
    for mode in ("auto", "parallel", "cached_serial"):
        result = scorer.score(TEXT, schema, mode)
        # As the whole prompt at once has them.
        assert logits(result) == pytest.approx(reference, rel=0, abs=1e-9)
    field = result.fields["wide"]
    weights = np.exp(np.array(list(field.logits.values())))
    # A code's logit is its choice's: softmax over them, and the answer is the largest.
    assert list(field.scores.values()) == pytest.approx((weights / weights.sum()).tolist())
    assert field.value == choices[int(weights.argmax())]
    # And its code is the one at that place.
    assert field.code == scorer.plan(schema).choices[0].codes[int(weights.argmax())]


# --- scores ---


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("encoding", ["labels", "codes"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_expected_values_of_scores(folder_of, tiny, architecture, encoding, temperature):
    scorer = ParallelScorer(
        folder_of(architecture), encoding=encoding, temperature=temperature, dtype="float64"
    )
    field = scorer.score(TEXT, tiny.schema("mood")).fields["mood"]
    calm, annoyed, furious = (math.exp(each / temperature) for each in field.logits.values())
    total = calm + annoyed + furious
    # Σ i·pᵢ with p = softmax(logits / T): 0·calm + 1·annoyed + 2·furious, over their sum.
    assert field.expected_value == pytest.approx((annoyed + 2 * furious) / total, abs=1e-12)
    # Strictly between the ends: no level has all the probability.
    assert 0 < (field.expected_value or 0) < 2
