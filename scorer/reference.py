"""The reference algorithm, as a baseline for benchmarks only: nothing else scores with it.

Written from the published description of the scorer that Bespoke Nimble came with, in the
same library and on the same tokens as `Engine`, so that a ratio of the two says what the
algorithm brings and not what a language or a machine does. What it does in its own way:

- the shared prefix is prefilled in one piece, and its hidden state is evaluated with it;
- caches are forked by broadcasting them to all rows, and every row appends to a copy;
- gated delta layers run as mlx-lm brings them;
- hidden states are read at the last position of each row, and the rows of the head that the
  candidates need are gathered and multiplied in float32 each time;
- documents are scored one after the other, with nothing kept between them.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta as stock

from weighbridge.scorer import gated_delta
from weighbridge.scorer.caches import Prefix, arrays, empty_prefix, fork
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.quantized import is_packed, plain_weight
from weighbridge.scorer.rows import Mode, Row, Timings, common_prefix


@contextmanager
def stock_gated_delta() -> Generator[None]:
    """Let gated delta layers run as mlx-lm brings them within this block."""
    before = stock.gated_delta_ops
    gated_delta.uninstall()
    try:
        yield
    finally:
        if stock.gated_delta_ops is not before:
            gated_delta.install()


class ReferenceScorer:
    """Computes candidate logits as the reference does.

    Args:
        model: A text model of mlx-lm with evaluated weights, whose backbone is `model` and
            whose head is `lm_head` or the tied embeddings. May be one an `Engine` uses.

    Raises:
        CheckpointError: The model is built otherwise.
    """

    def __init__(self, model: Any) -> None:
        text = getattr(model, "language_model", model)
        self._model = model
        self._backbone: Any = getattr(text, "model", None)
        tied: Any = getattr(self._backbone, "embed_tokens", None)
        self._head: Any = getattr(text, "lm_head", tied)
        if self._backbone is None or self._head is None:
            raise CheckpointError(
                "the reference needs a model with a backbone and a head, got another architecture",
                hint="benchmark a checkpoint of the llama or qwen family",
            )

    def score(
        self, rows: Sequence[Row], *, mode: Mode = Mode.PARALLEL
    ) -> tuple[list[np.ndarray], Timings]:
        """Compute the candidate logits of rows that share a document.

        Args:
            rows: B rows.
            mode: `parallel`, `cached_serial` or `independent`.

        Returns:
            For each row its K logits, float32, and what it took.
        """
        start_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        with stock_gated_delta():
            if mode is Mode.INDEPENDENT:
                shared, prefilled = 0, start
                found = [self._read([row], [row.tokens], None)[0] for row in rows]
            else:
                shared = common_prefix([row.tokens for row in rows])
                prefix = self._prefill(rows[0].tokens[:shared])
                prefilled = time.perf_counter()
                size = 1 if mode is Mode.CACHED_SERIAL else len(rows)
                found: list[np.ndarray] = []
                for first in range(0, len(rows), size):
                    some = rows[first : first + size]
                    suffixes = [row.tokens[shared:] for row in some]
                    found += self._read(some, suffixes, fork(prefix, len(some)))
        return found, Timings(
            mode=mode,
            prefill_seconds=prefilled - start,
            branch_seconds=time.perf_counter() - prefilled,
            total_seconds=time.perf_counter() - start,
            prefix_tokens=shared,
            suffix_tokens=sum(len(row.tokens) - shared for row in rows),
            prefills=int(shared > 0),
            start_bytes=start_bytes,
            peak_bytes=mx.get_peak_memory(),
        )

    def _prefill(self, tokens: tuple[int, ...]) -> Prefix:
        caches = list(empty_prefix(self._model).caches)
        if tokens:
            hidden = self._backbone(mx.array([tokens]), caches)
            mx.eval(hidden, arrays(tuple(caches)))
        return Prefix(tokens=tokens, caches=tuple(caches))

    def _read(
        self, rows: Sequence[Row], suffixes: Sequence[tuple[int, ...]], caches: list[Any] | None
    ) -> list[np.ndarray]:
        """Run rows as one right-padded batch and read each at its last token."""
        width = max(map(len, suffixes))
        padded = mx.array([suffix + (0,) * (width - len(suffix)) for suffix in suffixes])
        hidden = self._backbone(padded, caches)
        last = mx.array([len(suffix) - 1 for suffix in suffixes])
        picked = hidden[mx.arange(len(rows)), last].astype(mx.float32)
        logits = [picked[index] @ self._rows(row.candidates).T for index, row in enumerate(rows)]
        mx.eval(logits)
        return [np.array(each) for each in logits]

    def _rows(self, candidates: tuple[int, ...]) -> mx.array:
        wanted = mx.array(candidates)
        if is_packed(self._head):
            return plain_weight(self._head, wanted)
        return self._head.weight[wanted].astype(mx.float32)
