"""Documents computed together: the answers and costs of documents one by one.

They are sorted, share passes and are taken apart again, so order and neighbours are the risk.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scorer.documents_together import (
    EXACT,
    RESIDENT,
    SPOILED,
    TOGETHER,
    WAYS,
    alike,
    asked,
    exact,
    make,
    mixed,
    numbers,
    off,
    one_by_one,
    shared_passes,
    text,
    whole,
)

from weighbridge.scorer import ParallelScorer, ScoreResult
from weighbridge.scorer import engine as engine_module
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.prior import label_prior
from weighbridge.scorer.resident import release_checkpoints, resident_checkpoint
from weighbridge.scorer.rows import Mode, Timings

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

Make = Callable[[str], Engine]


@pytest.fixture(scope="module")
def fresh(tiny, table) -> Make:
    """Return a way to make an engine that holds no prefix."""
    return lambda way: make(tiny, table, way)


@pytest.fixture(scope="module")
def engines(fresh) -> Make:
    """Return an engine for each way, the same to all tests: they leave it as it is."""
    made: dict[str, Engine] = {}

    def get(way: str) -> Engine:
        with mx.stream(mx.cpu):
            if way not in made:
                made[way] = fresh(way)
        return made[way]

    return get


# --- the same answers ---


@pytest.mark.parametrize("way", WAYS)
def test_documents_together_equal_whole_prompts_and_each_alone(tiny, engines, way):
    engine, documents = engines(way), mixed()
    assert bool(shared_passes(engine, documents)) == (way in TOGETHER)
    right = whole(tiny, engine, documents)
    for mode, batch_size in (*((mode, None) for mode in Mode), (Mode.PARALLEL, 2)):
        options: dict[str, Any] = {"mode": mode, "batch_size": batch_size}
        found = engine.score_documents(documents, **options)
        assert off(found, right) <= exact(way), options
        alone = one_by_one(engine, documents, **options)
        assert off(found, [logits for logits, _ in alone]) <= exact(way), options
    # Not nearly the same everywhere, or an order would not show.
    assert np.std([numbers(each)[:6] for each in right if each], axis=0).min() > 0.05


BODY = st.lists(st.integers(0, 2), max_size=12).map(tuple)
END = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
DOCUMENT = st.builds(
    lambda start, body, ends, held: asked(start, body, ends, min(held, len(start))),
    st.sampled_from(RESIDENT),
    BODY,
    st.lists(END, max_size=4),
    st.sampled_from([0, 4, 40, 40, 40]),
)


@pytest.mark.parametrize("way", [way for way in TOGETHER if way != "gemma3_text, levels"])
@settings(max_examples=20)
@given(documents=st.lists(DOCUMENT, min_size=1, max_size=7))
def test_any_documents_equal_whole_prompts(tiny, engines, way, documents):
    engine = engines(way)
    with mx.stream(mx.cpu):
        found = engine.score_documents(documents, mode=Mode.AUTO)
        if any(each.rows for each in documents):
            assert off(found, whole(tiny, engine, documents)) <= exact(way)
        assert [len(logits) for logits, _ in found] == [len(each.rows) for each in documents]


def test_nothing_asked_is_nothing_found(engines):
    engine = engines("llama")
    assert engine.score_documents([]) == []
    assert engine.score_documents([asked((), (), [], 40)] * 2) == [([], Timings())] * 2


@pytest.mark.parametrize("way", ["llama", "qwen3_5"])
def test_a_prefix_that_leaves_rows_nothing_of_their_own(tiny, engines, way):
    engine = engines(way)
    # As long as a row, longer, and beyond where rows begin to differ.
    documents = [asked(RESIDENT[0], (), [(1,)], 41), asked(RESIDENT[0], (), [(1,)], 50)]
    documents += [asked(RESIDENT[0], text(4, 3), [(1, 2), (3, 4)], 45)] * 2
    documents += [asked(RESIDENT[0], text(4, 3), [(1, 2), (3, 4)], 44)] * 2
    found = engine.score_documents(documents)
    assert off(found, whole(tiny, engine, documents)) <= EXACT


# --- a bad neighbour ---


def spoil(model: Any) -> None:
    """Make the embedding of a token no number."""
    (embedding,) = (each for name, each in model.named_modules() if name.endswith("embed_tokens"))
    embedding.weight[SPOILED] = float("nan")


@pytest.mark.parametrize("way", TOGETHER)
def test_a_document_without_numbers_spoils_no_other(tiny, fresh, way):
    engine, documents = fresh(way), mixed()
    right = whole(tiny, engine, documents)
    spoil(engine._model)
    bad = asked(RESIDENT[0], (3, SPOILED, 4), [(1, 2), (5,), (5, 6)], 40)
    for place in (0, 7, len(documents)):
        found = engine.score_documents([*documents[:place], bad, *documents[place:]])
        assert not np.isfinite(numbers(found.pop(place)[0])).any()
        assert off(found, right) <= exact(way)
    # And the prefix that all of them share is still a good one.
    assert off(engine.score_documents(documents), right) <= exact(way)


TEXTS = ["The invoice was charged twice.", "Login is not possible.", "Queen", "It works now."]


@pytest.fixture
def served(tiny, tmp_path) -> Callable[..., ParallelScorer]:
    """Return a scorer of a checkpoint whose backend lets documents share passes."""
    release_checkpoints()

    def make(architecture: str, *, spoiled: str | None = None, **options: Any) -> ParallelScorer:
        folder: Path = tiny.checkpoint(tmp_path / "served", architecture=architecture, seed=700)
        scorer = ParallelScorer(folder, **options)
        resident = resident_checkpoint(scorer.info, dtype=options.get("dtype"))
        resident.backend = replace(resident.backend, pass_tokens=512)
        if spoiled:
            (token,) = resident.chat.encode(spoiled)

            def write() -> None:
                model = resident.load()._model
                names = [(name, each) for name, each in model.named_modules()]
                (embedding,) = (each for name, each in names if name.endswith("embed_tokens"))
                embedding.weight[token] = float("nan")

            on_mlx_thread(write)
        return scorer

    return make


@pytest.mark.parametrize("permutations", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_just_the_document_without_numbers_is_rejected(tiny, served, architecture, permutations):
    schema, options = tiny.schema("urgent", "mood"), {"permutations": permutations}
    scorer = served(architecture, spoiled="Q", **options)
    found = scorer.score_batch(TEXTS, schema)
    assert [isinstance(each, ScoreResult) for each in found] == [True, True, False, True]
    assert found[2].code == "document.not_finite"
    for each, body in zip(found, TEXTS, strict=True):
        if isinstance(each, ScoreResult):
            alone = scorer.score(body, schema, mode="independent")
            for name, field in each.fields.items():
                assert field.logits == pytest.approx(alone.fields[name].logits, abs=1e-5)


# --- masks that a model stops asking for ---


@pytest.mark.parametrize("way", ["llama", "llama, levels"])
@pytest.mark.parametrize("least", [30, 60, 120])
def test_a_model_that_stops_asking_for_the_mask(tiny, fresh, way, least):
    from mlx_lm.models import llama

    class Own(llama.LlamaModel):
        def __call__(self, inputs: mx.array, cache: Any = None, *_: Any) -> mx.array:
            if inputs.size < least or cache is None:
                return super().__call__(inputs, cache)
            hidden, mask = self.embed_tokens(inputs), cast("Any", "causal")
            for layer, each in zip(self.layers, cache, strict=True):
                hidden = layer(hidden, mask, cache=each)
            return self.norm(hidden)

    engine, documents = fresh(way), mixed()
    right = whole(tiny, engine, documents)
    engine._model.model.__class__ = Own
    assert shared_passes(engine, documents)
    for _ in range(2):
        assert off(engine.score_documents(documents), right) <= EXACT
    # Found out at some document; from then on each is computed on its own.
    assert (engine.packs, engine.trees, engine.passes) == (False, False, False)
    assert not shared_passes(engine, documents)


# --- the label prior ---


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_the_label_prior_is_that_of_references_one_by_one(tiny, served, architecture):
    scorer = served(architecture, dtype="float64", encoding="labels")
    resident = resident_checkpoint(scorer.info, dtype="float64")
    plan = scorer.plan(tiny.schema())
    references = plan.reference_rows()

    def measure() -> tuple[Any, Any, list[int]]:
        with mx.stream(mx.cpu):
            engine = resident.load()
            shared = shared_passes(engine, references)
            alone = label_prior(
                [plan.choice_logits(rows) for rows, _ in one_by_one(engine, references)]
            )
        return resident.prior(plan), alone, shared

    found, alone, shared = on_mlx_thread(measure)
    assert shared
    assert len(found) == len(plan.schema.fields)
    for one, other in zip(found, alone, strict=True):
        assert one == pytest.approx(other, abs=EXACT)


# --- negative controls ---


@pytest.mark.parametrize("by", [1, 3], ids=["a neighbour's row", "a neighbour's answers"])
@pytest.mark.parametrize("way", ["llama", "qwen3_5"])
def test_control_answers_of_a_neighbour_show(tiny, engines, monkeypatch, way, by):
    engine, documents = engines(way), alike()
    right = whole(tiny, engine, documents)
    assert off(engine.score_documents(documents), right) <= EXACT
    run, levels = Engine._pass, engine_module.run_levels
    monkeypatch.setattr(Engine, "_pass", lambda *given: np.roll(run(*given), by, axis=0))
    monkeypatch.setattr(
        engine_module, "run_levels", lambda *given: np.roll(levels(*given), by, axis=0)
    )
    assert off(engine.score_documents(documents), right) > 1e-3
