"""The label prior: which labels a model prefers before it has read anything.

A small model that spells out labels leans to one of them whatever the document
says, by its position and by how common the word is. What it says of texts that
speak for each choice alike measures that lean; subtracting it leaves what the
document adds. No labelled data is needed: the texts come from the schema, beside a
few of everyday matters.

After Zhao et al., "Calibrate Before Use" (2021) and Fei et al., "Mitigating
Label Biases for In-context Learning" (2023). Different from both: logits are
centred instead of probabilities divided, and the texts are the schema's own and
everyday ones instead of empty or random ones.
"""

from collections.abc import Sequence

import numpy as np

from weighbridge.scorer.prompts import spoken
from weighbridge.scorer.schema import Schema

REFERENCE_LIMIT = 32
"""Most reference texts taken from a schema. Fields are taken whole, the first ones, as
long as they fit: a choice without a text of its own beside one that has it would be
favoured."""

EVERYDAY_TEXTS = (
    "The new chairs are comfortable and everybody likes them.",
    "Please find the notes of the meeting below.",
    "Thank you for the quick help, it works now.",
    "We moved to a bigger office in May.",
    "Can you send me the report by tomorrow?",
    "The price went up and I am not happy about it.",
    "There was smoke in the kitchen, so we called for help at once.",
    "I love this song and play it every day.",
)
"""Added to those of a small schema, which are too few and too alike."""

REFERENCE_MINIMUM = 10


def reference_texts(schema: Schema) -> tuple[str, ...]:
    """Return a text for each choice: its description, or a plain sentence.

    Where those are fewer than ten, everyday texts are added.
    """
    texts: list[str] = []
    for field in schema.fields:
        if len(texts) + len(field.choices) <= REFERENCE_LIMIT:
            texts.extend(
                field.choice_descriptions.get(key) or f"The {spoken(field)} is {word}."
                for key, word in zip(field.keys, field.words, strict=True)
            )
    return (*texts, *EVERYDAY_TEXTS[: max(REFERENCE_MINIMUM - len(texts), 0)])


def label_prior(
    scored: Sequence[Sequence[Sequence[float]]],
) -> tuple[tuple[float, ...], ...]:
    """Average the logits of every field's choices over the reference texts.

    Args:
        scored: For each reference text, for each field, one logit per choice.

    Returns:
        For each field one number per choice, in logits; empty without texts.
    """
    return tuple(
        tuple(float(mean) for mean in np.mean(np.array(of_field), axis=0))
        for of_field in zip(*scored, strict=True)
    )
