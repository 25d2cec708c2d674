"""All that stands behind a prefix in one pass: documents, their fields and their labels.

The rows behind a prefix are a trie. Its segments are the rows of one padded batch, each at its
own position; their keys stand packed behind those of the prefix, as in `branching`, and a mask
shows each token the prefix and what it goes on from. That is for models whose layers all keep
keys and values by token, take a position for each row, and attend with the mask of the cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from weighbridge.scorer.branching import PackedRows, UnmaskedError, packed_cache
from weighbridge.scorer.caches import Prefix
from weighbridge.scorer.trie import Segments, Trie

Read = Callable[[mx.array, Sequence[Any], list[int]], np.ndarray]
"""Tokens (B, W), caches, and for each row a place in; logits (B, K) there out. That is
`CandidateHead.logits` of some candidates."""


class _Segments(PackedRows):
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
        cache = packed_cache(parent, rows)
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
    # Rows end where segments do. Where a segment ends no row, nothing is wanted.
    last = (segments.lengths - 1).tolist()
    caches = pack_trie(prefix, trie, segments)
    return read(mx.array(trie.tokens[segments.nodes]), caches, last)[owners]
