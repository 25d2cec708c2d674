"""The label prior: what a model says of texts that speak for each choice alike."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weighbridge.scorer import ParallelScorer, ScoreResult
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.prior import (
    EVERYDAY_TEXTS,
    REFERENCE_LIMIT,
    label_prior,
    reference_texts,
)
from weighbridge.scorer.resident import ResidentCheckpoint, resident_checkpoint
from weighbridge.scorer.rows import Mode
from weighbridge.scorer.schema import Schema

TEXT = "The invoice was charged twice."


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "prior")


def uncentred(scorer: ParallelScorer, schema: Schema, text: str) -> list[tuple[float, ...]]:
    """Return the choice logits as the trie gives them, before the prior."""
    plan = scorer.plan(schema)
    resident: ResidentCheckpoint = resident_checkpoint(scorer.info)
    ((rows, _),) = on_mlx_thread(resident.score, [plan.rows(text)], Mode.INDEPENDENT, None)
    return plan.choice_logits(rows)


def test_reference_texts_say_each_choice_once():
    schema = Schema.parse(
        json.dumps(
            {
                "topic": {
                    "type": "enum",
                    "description": "x",
                    "choices": ["billing", "login"],
                    "choice_descriptions": {"billing": "money and invoices"},
                },
                "due": {
                    "type": "boolean",
                    "description": "x",
                    "labels": {"true": "urgent", "false": "relaxed"},
                },
            }
        )
    )
    # A description speaks for its choice; without one a sentence with its word does.
    assert reference_texts(schema) == (
        "money and invoices",
        "The topic is login.",
        "The due is relaxed.",
        "The due is urgent.",
        *EVERYDAY_TEXTS[:6],  # up to ten
    )


@pytest.mark.parametrize("choices", [2, REFERENCE_LIMIT, REFERENCE_LIMIT + 1, 255])
def test_reference_texts_stay_few(choices: int):
    field = {"type": "enum", "description": "x", "choices": [f"c{i}" for i in range(choices)]}
    texts = reference_texts(Schema.parse(json.dumps({"a": field})))
    # Each costs a pass of the model; a large field must not cost hundreds, and some of
    # its choices with a text of their own would put the others at an advantage.
    assert len(texts) == {2: 10, REFERENCE_LIMIT: REFERENCE_LIMIT}.get(choices, len(EVERYDAY_TEXTS))


def test_reference_texts_favour_no_choice_of_a_field():
    fields = {f"f{i}": {"type": "boolean", "description": "x"} for i in range(40)}
    texts = reference_texts(Schema.parse(json.dumps(fields)))
    for name in fields:
        said = [text for text in texts if text.startswith(f"The {name} is ")]
        # Both values or neither; every second text would have been "is false" alone.
        assert len(said) in {0, 2}
    assert len(texts) == REFERENCE_LIMIT


def test_label_prior_is_the_mean_of_each_choice():
    # By hand: field one (0 + 2) / 2 and (4 + 0) / 2; field two alone.
    assert label_prior([[(0.0, 4.0), (1.0,)], [(2.0, 0.0), (3.0,)]]) == ((1.0, 2.0), (2.0,))
    assert label_prior([]) == ()


@pytest.mark.mlx
def test_logits_are_the_path_minus_the_mean_over_the_references(folder: Path, tiny: Any):
    scorer = ParallelScorer(folder)
    schema: Schema = tiny.schema()
    result = scorer.score(TEXT, schema)
    references = [uncentred(scorer, schema, text) for text in reference_texts(schema)]
    for number, (field, own) in enumerate(
        zip(result.fields.values(), uncentred(scorer, schema, TEXT), strict=True)
    ):
        mean = np.mean([reference[number] for reference in references], axis=0)
        # The definition, computed the slow way, one whole prompt at a time.
        np.testing.assert_allclose(list(field.logits.values()), own - mean, atol=1e-4)
        # Negative control: without the prior the numbers are others.
        assert not np.allclose(list(field.logits.values()), own, atol=1e-3)


@pytest.mark.mlx
def test_codes_have_no_prior(folder: Path, tiny: Any):
    scorer = ParallelScorer(folder, encoding="codes")
    schema: Schema = tiny.schema()
    result = scorer.score(TEXT, schema)
    # A trained contract was trained without one.
    for field, own in zip(result.fields.values(), uncentred(scorer, schema, TEXT), strict=True):
        np.testing.assert_allclose(list(field.logits.values()), own, atol=1e-4)


@pytest.mark.mlx
def test_the_prior_does_not_depend_on_the_limit(folder: Path, tiny: Any):
    schema: Schema = tiny.schema()
    needed = ParallelScorer(folder).plan(schema).rows("x").input_tokens
    wide = ParallelScorer(folder).score("x", schema)
    tight = ParallelScorer(folder, max_input_tokens=needed).score("x", schema)
    # The limit is not part of a decision's key, so the numbers must be the same,
    # though no reference text fits under it.
    assert isinstance(tight, ScoreResult)
    for name, field in wide.fields.items():
        np.testing.assert_allclose(
            list(tight.fields[name].logits.values()), list(field.logits.values()), atol=1e-4
        )
