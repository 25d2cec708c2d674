"""Prefill, branch and read: token rows in, candidate logits out.

The engine knows tokens only. Documents, fields and temperatures are the
business of its callers. All of it runs on the thread that owns MLX.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import mlx.core as mx
import numpy as np

from weighbridge.scorer.caches import Prefix, PrefixStore, arrays, empty_prefix, fork
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.heads import candidate_logits, candidate_rows, vocabulary_size

ROW_LIMIT = 64
"""Rows of one branch batch when the caller sets no limit."""

RESIDENT_LIMIT_BYTES = 256 * 2**20
"""What prefixes kept between documents may hold together."""

HEAD_ROW_SETS = 32


class Mode(StrEnum):
    """How the rows of a document are computed. The tokens are the same in all."""

    AUTO = "auto"
    PARALLEL = "parallel"
    CACHED_SERIAL = "cached_serial"
    INDEPENDENT = "independent"


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt whose next token is asked for.

    Attributes:
        tokens: The whole prompt, T tokens.
        candidates: The K tokens allowed next.
    """

    tokens: tuple[int, ...]
    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, tokens and bytes of the rows of one or more documents.

    Attributes:
        mode: How the rows were computed, never `auto` once something was.
        prefill_seconds: Computing shared prefixes.
        branch_seconds: Computing suffixes and candidate logits.
        total_seconds: Wall time of the call, tokenization included.
        prefix_tokens: Tokens of shared prefixes that were computed.
        suffix_tokens: Tokens of suffixes that were computed, without padding.
        resident_tokens: Prefix tokens taken from a resident prefix instead.
        prefills: Number of prefill passes.
        start_bytes: Bytes MLX held before.
        peak_bytes: Most bytes MLX held meanwhile.
    """

    mode: Mode = Mode.AUTO
    prefill_seconds: float = 0.0
    branch_seconds: float = 0.0
    total_seconds: float = 0.0
    prefix_tokens: int = 0
    suffix_tokens: int = 0
    resident_tokens: int = 0
    prefills: int = 0
    start_bytes: int = 0
    peak_bytes: int = 0

    def __add__(self, other: "Timings") -> "Timings":
        """Add seconds and tokens; keep the first mode and start and the highest peak."""
        return Timings(
            mode=self.mode if self.mode is not Mode.AUTO else other.mode,
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            branch_seconds=self.branch_seconds + other.branch_seconds,
            total_seconds=self.total_seconds + other.total_seconds,
            prefix_tokens=self.prefix_tokens + other.prefix_tokens,
            suffix_tokens=self.suffix_tokens + other.suffix_tokens,
            resident_tokens=self.resident_tokens + other.resident_tokens,
            prefills=self.prefills + other.prefills,
            start_bytes=self.start_bytes or other.start_bytes,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
        )


def common_prefix(rows: Sequence[tuple[int, ...]]) -> int:
    """Return how many leading tokens all rows share, leaving each row at least one.

    Prefixes are compared as tokens, never cut as strings: a tokenizer may merge
    across any text boundary.
    """
    shortest, longest = min(rows), max(rows)
    limit = min(len(row) for row in rows) - 1
    for position in range(limit):
        if shortest[position] != longest[position]:
            return position
    return max(limit, 0)


class Engine:
    """Computes candidate logits of token rows with one model.

    Args:
        model: A text model of mlx-lm with evaluated weights.
        chunk: Prefill chunk in tokens.
    """

    def __init__(self, model: Any, *, chunk: int = 256) -> None:
        backbone = getattr(model, "model", None)
        if not callable(backbone):
            raise CheckpointError(
                f"a text model must have a backbone `model`, got {type(model).__module__}",
                hint="this architecture is not supported",
            )
        self._model = model
        self._backbone: Any = backbone
        self._chunk = chunk
        self._head_rows: dict[tuple[int, ...], mx.array] = {}
        self.resident = PrefixStore(RESIDENT_LIMIT_BYTES)

    def score(
        self,
        rows: Sequence[Row],
        *,
        mode: Mode = Mode.PARALLEL,
        batch_size: int | None = None,
        resident_tokens: int = 0,
    ) -> tuple[list[np.ndarray], Timings]:
        """Compute the candidate logits of rows that share a document.

        Args:
            rows: B rows.
            mode: `auto` recomputes a single row as a whole unless a resident
                prefix spares it part of the work, and is `parallel` otherwise.
            batch_size: Rows per branch batch in `parallel`.
            resident_tokens: Length of the leading part, shared by the rows,
                that later documents will share too; it is computed once and
                kept. 0 keeps nothing.

        Returns:
            For each row its K logits, float32 (float64 for float64 weights),
            and what it took.
        """
        if not rows:
            return [], Timings()
        start_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        union = tuple(sorted({token for row in rows for token in row.candidates}))
        if mode is Mode.AUTO:
            alone = len(rows) == 1 and resident_tokens == 0
            mode = Mode.INDEPENDENT if alone else Mode.PARALLEL
        start = time.perf_counter()
        if mode is Mode.INDEPENDENT:
            shared, resident, prefills = 0, 0, 0
            prefilled = start
            blocks = [self._read(row.tokens, None, union) for row in rows]
        else:
            shared = common_prefix([row.tokens for row in rows])
            prefix, resident, prefills = self._prefix(rows[0].tokens[:shared], resident_tokens)
            prefilled = time.perf_counter()
            size = 1 if mode is Mode.CACHED_SERIAL else min(batch_size or ROW_LIMIT, len(rows))
            suffixes = [row.tokens[shared:] for row in rows]
            blocks = [
                self._branch(prefix, suffixes[first : first + size], union)
                for first in range(0, len(rows), size)
            ]
        logits = np.concatenate(blocks)
        column = {token: index for index, token in enumerate(union)}
        picked = [
            logits[index, [column[token] for token in row.candidates]]
            for index, row in enumerate(rows)
        ]
        return picked, Timings(
            mode=mode,
            prefill_seconds=prefilled - start,
            branch_seconds=time.perf_counter() - prefilled,
            prefix_tokens=shared - resident,
            suffix_tokens=sum(len(row.tokens) - shared for row in rows),
            resident_tokens=resident,
            prefills=prefills,
            start_bytes=start_bytes,
            peak_bytes=mx.get_peak_memory(),
        )

    def prefill(self, tokens: tuple[int, ...], base: Prefix | None = None) -> Prefix:
        """Compute the caches of a prefix, from a base it starts with.

        Works in chunks and evaluates the caches only: the hidden states of a
        prefix are never read, so the last layer's feed-forward part never runs.

        Args:
            tokens: The whole prefix, T tokens.
            base: A prefix that `tokens` starts with; it stays unchanged.
        """
        base = base or empty_prefix(self._model)
        caches = fork(base)
        for first in range(len(base.tokens), len(tokens), self._chunk):
            chunk = tokens[first : min(first + self._chunk, len(tokens))]
            self._backbone(mx.array([chunk]), cache=caches)
            mx.eval(arrays(tuple(caches)))
        return Prefix(tokens=tokens, caches=tuple(caches))

    def _prefix(self, tokens: tuple[int, ...], resident: int) -> tuple[Prefix, int, int]:
        """Return the prefix, how many of its tokens were resident, and the prefills done."""
        resident = min(resident, len(tokens))
        if resident == 0:
            return self.prefill(tokens), 0, 1
        base = self.resident.get(tokens[:resident])
        if base is None:
            base = self.prefill(tokens[:resident])
            self.resident.put(base)
            return self.prefill(tokens, base), 0, 2
        return self.prefill(tokens, base), resident, 1

    def _branch(
        self, prefix: Prefix, suffixes: Sequence[tuple[int, ...]], union: tuple[int, ...]
    ) -> np.ndarray:
        """Run suffixes as one right-padded batch and read each at its last token."""
        width = max(len(suffix) for suffix in suffixes)
        padded = mx.array([suffix + (0,) * (width - len(suffix)) for suffix in suffixes])
        hidden = self._backbone(padded, cache=fork(prefix, len(suffixes)))
        last = mx.array([len(suffix) - 1 for suffix in suffixes])
        return self._project(hidden[mx.arange(len(suffixes)), last], union)

    def _read(
        self, tokens: tuple[int, ...], caches: Sequence[Any] | None, union: tuple[int, ...]
    ) -> np.ndarray:
        hidden = self._backbone(mx.array([tokens]), cache=caches)
        return self._project(hidden[:, -1], union)

    def _project(self, hidden: mx.array, union: tuple[int, ...]) -> np.ndarray:
        rows = self._head_rows.get(union)
        if rows is None:
            if len(self._head_rows) >= HEAD_ROW_SETS:
                self._head_rows.clear()
            rows = candidate_rows(self._model, union)
            mx.eval(rows)
            self._head_rows[union] = rows
        logits = candidate_logits(hidden, rows)
        mx.eval(logits)
        return np.array(logits)

    def head_difference(self) -> float:
        """Compare candidate logits with the whole model, head included, on one prompt.

        The only place where the full head runs: once, when a checkpoint is loaded.
        An architecture that caps or scales its logits shows here.

        Returns:
            The largest difference relative to the largest logit; not a number where
            the logits are none, which is for the documents to tell.
        """
        step = max(vocabulary_size(self._model) // 97, 1)
        tokens, candidates = (1, 2, 3, 4), tuple(index * step for index in range(8))
        whole = self._model(mx.array([tokens]))[0, -1][mx.array(candidates)]
        own = self._read(tokens, None, candidates)[0]
        return _relative(own, np.array(whole.astype(mx.float32)))

    def probe(self) -> float:
        """Compare fork with recompute on this very model.

        Returns:
            The largest difference between `parallel` and `independent` logits on
            rows of unequal length, relative to the largest logit; infinite if
            branching fails or gives a number that is not finite.

        Raises:
            CheckpointError: The model cannot compute a plain prompt.
        """
        vocabulary = vocabulary_size(self._model)
        step = max(vocabulary // 97, 1)
        tokens = tuple((7 + 3 * index * step) % vocabulary for index in range(40))
        candidates = tuple(sorted({(index * step) % vocabulary for index in range(8)}))
        rows = [Row(tokens[:end], candidates) for end in (33, 35, 40)]
        failures = (ValueError, TypeError, AttributeError, RuntimeError, LookupError)
        try:
            reference, _ = self.score(rows, mode=Mode.INDEPENDENT)
        except failures as error:
            raise CheckpointError(
                f"a model must compute a plain prompt, got {type(error).__name__}: {error}",
                hint="this architecture is not supported",
            ) from error
        try:
            parallel, _ = self.score(rows, mode=Mode.PARALLEL)
        except failures:
            return float("inf")
        worst = _relative(np.array(parallel), np.array(reference))
        return worst if np.isfinite(worst) else float("inf")


def _relative(found: np.ndarray, reference: np.ndarray) -> float:
    scale = max(float(np.abs(reference).max()), 1.0)
    return float(np.abs(found - reference).max()) / scale
