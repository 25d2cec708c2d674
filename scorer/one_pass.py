"""All that stands behind a prefix in one pass: documents, their fields and their labels.

The rows behind a prefix are a trie. Its segments are the rows of one padded batch, each at its
own position; their keys stand packed behind those of the prefix, as in `branching`, and a mask
shows each token the prefix and what it goes on from. That is for models whose layers all keep
keys and values by token, take a position for each row, and attend with the mask of the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from weighbridge.scorer.branching import (
    FAILURES,
    TOLERANCE,
    UnmaskedError,
    _packed,  # pyright: ignore[reportPrivateUsage]
    _Rows,  # pyright: ignore[reportPrivateUsage]
    packed_dtype,
)
from weighbridge.scorer.caches import Prefix, fork
from weighbridge.scorer.heads import relative_difference
from weighbridge.scorer.trie import Segments, Trie, grow

Read = Callable[[mx.array, Sequence[Any], list[int]], np.ndarray]
"""Tokens (B, W), caches, and for each row a place in; logits (B, K) there out. That is
`CandidateHead.logits` of some candidates."""


class _Segments(_Rows):
    """The segments of a trie, as the caches of all layers share them."""

    def __init__(self, trie: Trie, segments: Segments) -> None:
        super().__init__(segments.lengths.tolist())
        self._trie, self._nodes = trie, segments.nodes
        self.starts = mx.array(trie.depths[segments.firsts])

    def _visible(self, held: int, window: int) -> list[np.ndarray]:
        """Behind the prefix, (B, W, held), all tokens of the trie, (B, W, N)."""
        trie, query = self._trie, self._nodes[..., None]
        depth = trie.depths[query]
        before = np.arange(held) > depth + held - window
        # Padding sees what the token before it does, so that nothing sees nothing.
        own = (np.arange(len(trie.tokens)) <= query) & (query < trie.ends)
        if window <= trie.depths.max():
            own &= depth - trie.depths < window
        return [before, own]


def pack_trie(prefix: Prefix, trie: Trie, segments: Segments) -> list[Any]:
    """Return caches for the segments of a trie behind a prefix; to be used once.

    Args:
        prefix: Evaluated caches of batch size 1, of at least one token.
        trie: What stands behind it.
        segments: All of it, B rows.

    Raises:
        UnmaskedError: A layer keeps something else than keys and values by token.
    """
    rows = _Segments(trie, segments)
    caches: list[Any] = []
    for parent in prefix.caches:
        cache = _packed(parent, rows)
        if cache is None:
            raise UnmaskedError("all layers must keep keys and values by token")
        cache.offset = rows.starts + cache.offset
        caches.append(cache)
    return caches


def run_trie(read: Read, prefix: Prefix, trie: Trie, width: int | None = None) -> np.ndarray:
    """Run all rows of a trie behind a prefix in one pass.

    Args:
        read: Runs the model.
        prefix: Evaluated caches of batch size 1, of at least one token; they stay unchanged.
        trie: R rows.
        width: Tokens of a segment at most; the cheapest if left out.

    Returns:
        For each row the logits at its last token, (R, K).

    Raises:
        UnmaskedError: The model does not attend with the mask it is given, or a layer keeps
            something else than keys and values by token.
    """
    segments = trie.segments(width or trie.width)
    owners = np.searchsorted(segments.firsts, trie.reads, side="right") - 1
    last = segments.lengths - 1  # of a segment where no row ends, nothing is wanted
    last[owners] = trie.reads - segments.firsts[owners]
    caches = pack_trie(prefix, trie, segments)
    return read(mx.array(trie.tokens[segments.nodes]), caches, last.tolist())[owners]


@dataclass(frozen=True, slots=True)
class TrieTrial:
    """What came of one pass on a model: whether it is right, how far off, or why not."""

    works: bool = False
    difference: float = 0.0
    reason: str = ""


def try_trie(read: Read, prefix: Prefix, forked: float) -> TrieTrial:
    """Compare one pass over several documents with forked rows on a model.

    Args:
        read: Runs the model.
        prefix: Some tokens, 8 or more.
        forked: How far forked branches are from whole prompts, relative.
    """
    dtype = packed_dtype(prefix)
    if dtype is None:
        return TrieTrial(reason="no layer keeps keys and values by token")
    allowed = TOLERANCE[dtype]
    if not forked <= allowed:
        return TrieTrial(reason="forked branches differ from whole prompts")
    one, two, *text = prefix.tokens[:8]
    # Three documents, two of which begin alike, and one is a single token; labels behind a
    # field that is read itself, of which one begins with another; a row twice.
    documents = [(one, *text), (one, *text[:2], two), (two,)]
    rows = [(*start, *field) for start in documents for field in ((two, one), tuple(text[:3]))]
    rows += [(*rows[3], *label) for label in ((), (one,), (one, two), (two, *text[:2]))]
    trie = grow(rows)
    worst = 0.0
    try:
        reference = _forked(read, prefix, rows)
        for width in (1, 4):
            found = run_trie(read, prefix, trie, width)
            worst = max(worst, relative_difference(found, reference))
            if not worst <= allowed or not np.isfinite(found).all():
                return TrieTrial(reason=f"one pass differs by {worst:.2g} (relative)")
    except FAILURES as error:  # recurrent states, own masks, positions that must be one number
        return TrieTrial(reason=f"{type(error).__name__}: {error}")
    return TrieTrial(works=True, difference=worst)


def _forked(read: Read, prefix: Prefix, rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    width = max(map(len, rows))
    padded = mx.array([row + (0,) * (width - len(row)) for row in rows])
    return read(padded, fork(prefix, len(rows)), [len(row) - 1 for row in rows])
