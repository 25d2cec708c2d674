"""The embedded checkpoint, real weights: modes agree, and the full head stays unused."""

from typing import Any

import pytest

from weighbridge.scorer import ParallelScorer, ScoreResult
from weighbridge.scorer.backend import on_mlx_thread

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

DOCUMENTS = [
    "The app crashes whenever I open the invoice screen.",
    "Thank you, everything works again!",
    "I was charged twice. Please send the money back today.",
]

# Short, because every field of every document is also computed as a whole prompt.
SCHEMA = {
    "urgent": {"type": "boolean", "description": "Urgent?"},
    "team": {"type": "enum", "description": "Team?", "choices": ["billing", "login", "login app"]},
    "mood": {"type": "score", "description": "Mood?", "levels": ["calm", "upset", "furious"]},
}


@pytest.fixture(scope="module")
def scorer(embedded) -> ParallelScorer:
    return ParallelScorer(embedded)


def every_logit(results: list[Any]) -> list[float]:
    return [
        logit
        for result in results
        for field in result.fields.values()
        for logit in field.logits.values()
    ]


@pytest.mark.parametrize(
    ("layout", "encoding"),
    [("schema-first", "labels"), ("context-first", "codes")],
)
def test_modes_agree_on_real_weights(embedded, layout, encoding):
    scorer = ParallelScorer(embedded, layout=layout, encoding=encoding)
    if scorer.dtype != "float32":
        pytest.skip(f"the bound is that of float32, and this backend computes in {scorer.dtype}")
    reference = scorer.score_batch(DOCUMENTS, SCHEMA, mode="independent")
    for mode, size in (("parallel", None), ("parallel", 2), ("cached_serial", None)):
        found = scorer.score_batch(DOCUMENTS, SCHEMA, mode=mode, field_batch_size=size)
        # DESIGN invariant 7: logits within 1e-4 of the whole prompt, and equal answers.
        assert every_logit(found) == pytest.approx(every_logit(reference), rel=0, abs=1e-4)
        for one, other in zip(found, reference, strict=True):
            assert isinstance(one, ScoreResult)
            assert isinstance(other, ScoreResult)
            assert one.output == other.output
    # Logits that hardly differ between choices and documents would agree by themselves.
    assert max(every_logit(reference)) - min(every_logit(reference)) > 1


@pytest.mark.parametrize(
    ("layout", "encoding"),
    [("schema-first", "codes"), ("context-first", "labels")],
)
def test_the_other_combinations_run(embedded, layout, encoding):
    scorer = ParallelScorer(embedded, layout=layout, encoding=encoding)
    result = scorer.score(DOCUMENTS[0], SCHEMA)
    # Untrained on either, so no more than well-formed answers can be asked of it.
    assert set(result.output) == set(SCHEMA)
    assert all(sum(field.scores.values()) == pytest.approx(1) for field in result.fields.values())


def test_the_full_head_is_never_called_over_a_whole_score(scorer, monkeypatch):
    from mlx import nn

    calls: list[int] = []
    as_linear = nn.Embedding.as_linear

    def counted(self: Any, x: Any) -> Any:
        calls.append(1)
        return as_linear(self, x)

    monkeypatch.setattr(nn.Embedding, "as_linear", counted)
    for mode in ("auto", "parallel", "cached_serial", "independent"):
        scorer.score(DOCUMENTS[1], SCHEMA, mode=mode)
    # 49,152 columns of which a handful are read; its head is the tied embedding.
    assert not calls

    def whole_model() -> None:
        import mlx.core as mx

        model = scorer._resident._engine._model  # type: ignore[union-attr]
        mx.eval(model(mx.array([[1, 2]])))

    on_mlx_thread(whole_model)
    # The counter does count.
    assert calls == [1]
