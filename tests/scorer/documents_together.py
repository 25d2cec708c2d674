"""Documents of all kinds, and the ways in which an engine computes them together."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from weighbridge.scorer.engine import Engine
from weighbridge.scorer.heads import relative_difference
from weighbridge.scorer.plan import Prompted
from weighbridge.scorer.rows import Row, Scored, Tokens

EXACT = 1e-9
SPOILED = 96
"""A token that only one document has, and no row asks for."""

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"pass_tokens": 500}),
    "llama, a few": ("llama", {"pass_tokens": 40}),
    "llama, alone": ("llama", {"pass_tokens": 0}),
    "llama, levels": ("llama", {"one_pass": False}),
    "gemma3_text": ("gemma3_text", {"pass_tokens": 500}),
    "gemma3_text, alone": ("gemma3_text", {"pass_tokens": 0}),
    "gemma3_text, levels": ("gemma3_text", {"one_pass": False}),
    "qwen3_5": ("qwen3_5", {"pass_tokens": 500}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "lfm2": ("lfm2", {}),
    "gemma2": ("gemma2", {"pass_tokens": 500}),
}
TOGETHER = [name for name in WAYS if "alone" not in name and name != "gemma2"]


def exact(way: str) -> float:
    return 1e-5 if way == "granitemoehybrid" else EXACT


def make(tiny: Any, table: Any, way: str) -> Engine:
    """Return a probed engine of float64 that holds no prefix."""
    architecture, options = WAYS[way]
    if architecture in tiny.architectures:
        model = tiny.model(architecture=architecture)
    else:
        model = table.build(architecture, table.A_TO_L[architecture])
        if architecture != "granitemoehybrid":  # MLX computes experts in float32 only
            model.set_dtype(mx.float64)
    engine = Engine(model, chunk=16, **options)
    engine.probe()
    return engine


def text(length: int, seed: int) -> Tokens:
    return tuple(np.random.default_rng(seed).integers(0, SPOILED, length).tolist())


# Longer than a window of 16 and than a chunk; and one that is neither.
RESIDENT = (text(40, 1), text(9, 2))


def asked(start: Tokens, body: Tokens, ends: Sequence[Tokens], resident: int) -> Prompted:
    """Make a document; each row asks for tokens of its own."""
    rows = tuple(
        Row((*start, *body, *end), tuple((7 * number + 5 * each) % SPOILED for each in range(6)))
        for number, end in enumerate(ends)
    )
    return Prompted(rows, 0, resident, 0.0)


def mixed() -> list[Prompted]:
    """Return documents of all kinds, in an order of no meaning."""
    fields = [text(length, 10 + length) for length in (9, 11, 3)]
    labels = [(*field, *label) for field in fields for label in ((), (1,), (2, 3), (2, 4))]
    long, other = RESIDENT
    documents = [
        asked(long, (5,), fields, 40),
        asked(long, text(30, 3), fields, 40),
        asked(long, text(600, 4), fields, 40),  # beyond each budget
        asked(long, text(30, 3), fields, 40),  # the same once more
        asked(long, text(12, 5), labels, 40),
        asked(long, text(12, 6), [(1,)], 40),  # one row
        asked(long, (), [(8,)], 40),  # of one token
        asked(long, (), [(8,), (9,), (8,)], 40),  # which share nothing behind the prefix
        asked(long, text(4, 7), [*fields, fields[0], fields[2][:2]], 40),
        asked(long, text(20, 8), [], 40),  # no field
        asked(long, text(8, 9), fields, 0),  # keeps nothing
        asked(long, text(8, 10), [(3,)], 0),
        *(asked(other, text(length, length), fields, 9) for length in (1, 13, 5)),
        asked(other, text(7, 11), fields, 4),  # a shorter prefix of its own
        *(asked(long, text(length, length), fields[:2], 40) for length in (17, 2, 33, 6)),
    ]
    return [documents[each] for each in np.random.default_rng(0).permutation(len(documents))]


def numbers(logits: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([*logits, np.zeros(0)])


def off(found: Sequence[Scored], right: Sequence[Sequence[np.ndarray]]) -> float:
    """Return how far the worst document is off, relative to the spread of its logits."""
    assert len(found) == len(right)
    return max(
        relative_difference(numbers(logits), numbers(expected))
        for (logits, _), expected in zip(found, right, strict=True)
        if expected or logits
    )


def whole(tiny: Any, engine: Engine, documents: Sequence[Prompted]) -> list[list[np.ndarray]]:
    return [tiny.full(engine._model, document.rows) for document in documents]


def one_by_one(engine: Engine, documents: Sequence[Prompted], **options: Any) -> list[Scored]:
    return [
        engine.score(each.rows, resident_tokens=each.resident_tokens, **options)
        for each in documents
    ]


def shared_passes(engine: Engine, documents: Sequence[Prompted]) -> list[int]:
    """Return how many documents each pass is for, where it is more than one."""
    return [len(group) for group in engine._groups(documents)]


def alike() -> list[Prompted]:
    """Return documents of as many rows each, so that no mistake of order ends in an error."""
    fields = [text(length, 10 + length) for length in (4, 6, 3)]
    return [asked(RESIDENT[0], text(5, each), fields, 40) for each in range(4)]
