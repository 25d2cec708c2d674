"""Passes of one model: prefixes kept, whole prompts, and rows behind a prefix.

The caller says which passes; `Engine` does. All of it runs on the thread that owns MLX.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from weighbridge.scorer.caches import Prefix, PrefixStore, arrays, empty_prefix, fork
from weighbridge.scorer.heads import CandidateHead
from weighbridge.scorer.one_pass import run_trie
from weighbridge.scorer.rows import Row, Tokens
from weighbridge.scorer.trie import grow

RESIDENT_LIMIT_BYTES = 256 * 2**20
"""What prefixes kept between documents may hold together."""


class Passes:
    """What a model computes, and the prefixes that stay.

    Args:
        model: A text model of mlx-lm with evaluated weights.
        chunk: Prefill chunk in tokens.

    Raises:
        CheckpointError: The model does not turn tokens into logits.
    """

    PAD = 0
    """What right padding is made of. Any token would do: what stands behind the last
    token of a row is never read, and branch caches are thrown away."""

    def __init__(self, model: Any, chunk: int) -> None:
        self._model = model
        self._chunk = chunk
        self._head = CandidateHead(model)
        self._cached = False
        self.resident = PrefixStore(RESIDENT_LIMIT_BYTES)

    def prefill(self, tokens: tuple[int, ...], base: Prefix | None = None) -> Prefix:
        """Compute the caches of a prefix, from a base it starts with.

        Works in chunks and evaluates the caches only: the logits of a prefix are
        never read, so neither the head nor the last layer's feed-forward part runs.

        Args:
            tokens: The whole prefix, T tokens.
            base: A prefix that `tokens` starts with; it stays unchanged.
        """
        base = base or empty_prefix(self._model)
        caches = fork(base)
        for first in range(len(base.tokens), len(tokens), self._chunk):
            chunk = tokens[first : min(first + self._chunk, len(tokens))]
            self._head.advance(mx.array([chunk]), caches)
            mx.eval(arrays(tuple(caches)))
        return Prefix(tokens=tokens, caches=tuple(caches))

    def _prefix(self, tokens: Tokens, resident: int) -> tuple[Prefix, int, int]:
        """Return the prefix, how many of its tokens were resident, and the prefills done."""
        resident = min(resident, len(tokens))
        if resident == 0:
            return self.prefill(tokens), 0, 1
        base = self.resident.get(tokens[:resident])
        held, prefills = resident, int(len(tokens) > resident)
        if base is None:
            base = self.prefill(tokens[:resident])
            self.resident.put(base)
            held, prefills = 0, prefills + 1
        return self.prefill(tokens, base), held, prefills

    def _whole(self, row: Row, union: Tokens) -> np.ndarray:
        """Compute a whole prompt at once, without caches, or with empty ones: see `probe`."""
        caches = list(empty_prefix(self._model).caches) if self._cached else None
        return self._head.logits(mx.array([row.tokens]), caches, [len(row.tokens) - 1], union)

    def _pass(
        self,
        prefix: Prefix,
        rows: Sequence[Tokens],
        passes: Sequence[tuple[int, ...]],
        union: Tokens,
    ) -> np.ndarray:
        """Run rows in one pass, or in some, behind a prefix that is part of them."""
        read = partial(self._head.logits, candidates=union)
        logits = [
            run_trie(read, prefix, grow([rows[place] for place in places], len(prefix.tokens)))
            for places in passes
        ]
        return np.concatenate(logits)[np.argsort(np.concatenate(passes))]

    def _run(self, caches: list[Any], suffixes: Sequence[Tokens], union: Tokens) -> np.ndarray:
        last = [len(suffix) - 1 for suffix in suffixes]
        return self._head.logits(self._padded(suffixes), caches, last, union)

    def _advance(self, caches: list[Any], rows: Sequence[Tokens]) -> None:
        self._head.advance(self._padded(rows), caches)

    def _padded(self, rows: Sequence[Tokens]) -> mx.array:
        width = max(map(len, rows))
        return mx.array([row + (self.PAD,) * (width - len(row)) for row in rows])
