"""Prefill, branch and read: token rows in, candidate logits out.

The engine knows tokens only. Documents, fields and temperatures are the
business of its callers. All of it runs on the thread that owns MLX.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from weighbridge.scorer.branching import FAILURES, UnmaskedError, pack, rows_at_once
from weighbridge.scorer.caches import Prefix, PrefixStore, arrays, empty_prefix, fork
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.heads import CandidateHead, HeadCut, relative_difference
from weighbridge.scorer.trees import common_prefix, grow, run_levels
from weighbridge.scorer.trials import try_packed

logger = logging.getLogger(__name__)

ROW_LIMIT = 64
"""Rows of one branch batch when the caller sets no limit."""

RESIDENT_LIMIT_BYTES = 256 * 2**20
"""What prefixes kept between documents may hold together."""

_PROBE_CHUNK = 16

_SAME = 0.02
"""Most that rounding makes of the same prompt with and without caches, relative to the
spread of the logits, in bfloat16. Gemma 3n without caches is off by 0.2."""


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
        resident_hits: How often a resident prefix was taken.
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
    resident_hits: int = 0
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
            resident_hits=self.resident_hits + other.resident_hits,
            prefills=self.prefills + other.prefills,
            start_bytes=self.start_bytes or other.start_bytes,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
        )


class Engine:
    """Computes candidate logits of token rows with one model.

    Args:
        model: A text model of mlx-lm with evaluated weights.
        chunk: Prefill chunk in tokens.
        packed: Whether rows may branch without copies of their prefix: where that is
            faster, and not before `probe` has found it right. Else they fork.

    Raises:
        CheckpointError: The model does not turn tokens into logits.
    """

    PAD = 0
    """What right padding is made of. Any token would do: what stands behind the last
    token of a row is never read, and branch caches are thrown away."""

    def __init__(self, model: Any, *, chunk: int = 256, packed: bool = True) -> None:
        self._model = model
        self._chunk = chunk
        self._head = CandidateHead(model)
        self._cached = False
        self._packed = packed
        self.packs = self.trees = False
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
            blocks = [self._whole(row, union) for row in rows]
        else:
            shared = common_prefix([row.tokens for row in rows])
            prefix, resident, prefills = self._prefix(rows[0].tokens[:shared], resident_tokens)
            prefilled = time.perf_counter()
            suffixes = [row.tokens[shared:] for row in rows]
            size = 1 if mode is Mode.CACHED_SERIAL else self._size(prefix, suffixes, batch_size)
            whole = mode is Mode.PARALLEL and batch_size is None
            blocks = (self._tree(prefix, suffixes, union) if whole else []) or [
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
            resident_hits=int(resident > 0),
            prefills=prefills,
            start_bytes=start_bytes,
            peak_bytes=mx.get_peak_memory(),
        )

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

    def _whole(self, row: Row, union: tuple[int, ...]) -> np.ndarray:
        """Compute a whole prompt at once, without caches, or with empty ones: see `probe`."""
        caches = list(empty_prefix(self._model).caches) if self._cached else None
        return self._head.logits(mx.array([row.tokens]), caches, [len(row.tokens) - 1], union)

    def _size(self, prefix: Prefix, suffixes: Sequence[tuple[int, ...]], asked: int | None) -> int:
        """Return how many rows go into one batch: as many as can be packed, if any can."""
        limit = min(asked or ROW_LIMIT, len(suffixes))
        width = max(map(len, suffixes))
        return (rows_at_once(len(prefix.tokens), width, limit) if self.packs else 0) or limit

    def _branch(
        self, prefix: Prefix, suffixes: Sequence[tuple[int, ...]], union: tuple[int, ...]
    ) -> np.ndarray:
        """Run suffixes as one right-padded batch and read each at its last token."""
        width, rows = max(map(len, suffixes)), len(suffixes)
        if self.packs and rows_at_once(len(prefix.tokens), width, rows) == rows:
            try:
                return self._run(pack(prefix, [len(each) for each in suffixes]), suffixes, union)
            except UnmaskedError as error:
                # Met later than at load, by a mask that only some lengths have.
                self._stop_packing(str(error))
        return self._run(fork(prefix, rows), suffixes, union)

    def _tree(
        self, prefix: Prefix, suffixes: Sequence[tuple[int, ...]], union: tuple[int, ...]
    ) -> list[np.ndarray]:
        """Run all rows as a tree; nothing where they are none, or trees are not right."""
        levels = grow(suffixes, len(prefix.tokens)) if self.trees else None
        if levels is None:
            return []
        try:
            return [run_levels(partial(self._run, union=union), prefix, levels)]
        except UnmaskedError as error:
            self._stop_packing(str(error))
            return []

    def _run(
        self, caches: list[Any], suffixes: Sequence[tuple[int, ...]], union: tuple[int, ...]
    ) -> np.ndarray:
        width = max(map(len, suffixes))
        padded = mx.array([suffix + (self.PAD,) * (width - len(suffix)) for suffix in suffixes])
        return self._head.logits(padded, caches, [len(suffix) - 1 for suffix in suffixes], union)

    def _stop_packing(self, reason: str) -> None:
        self.packs = self.trees = False
        logger.debug("prefixes are copied for every row: %s", reason)

    def check_head(self, tolerance: float) -> HeadCut:
        """Compare the head cut down to candidates with the whole one: `CandidateHead.check`."""
        return self._head.check(tolerance)

    def probe(self) -> float:
        """Compare fork, and packed branches, with recompute on this very model.

        Whole prompts are computed without caches, the plainest way there is. Where a model
        then gives something else than with empty ones, they get empty ones from now on: so
        mlx-lm computes prompts, and without any the last layers of Gemma 3n would make keys
        and values of their own instead of taking those of earlier layers.

        Rows of unequal length, over chunk ends, with a resident prefix that is made
        and one that is taken. Where packed branches are not as right as forked ones, all
        rows fork from now on.

        Returns:
            The largest difference between `parallel` and `independent` logits,
            relative to their spread; infinite if branching fails or gives a
            number that is not finite.

        Raises:
            CheckpointError: The model cannot compute a plain prompt.
        """
        vocabulary = self._head.vocabulary
        step = max(vocabulary // 97, 1)
        tokens = tuple((7 + 3 * index * step) % vocabulary for index in range(40))
        candidates = tuple(sorted({(index * step) % vocabulary for index in range(8)}))
        # Rows that begin alike and then differ: what one sees of another one shows.
        rows = [
            Row(
                (*tokens[:33], *((token + end) % vocabulary for token in tokens[33:end])),
                candidates,
            )
            for end in (33, 35, 40)
        ]
        try:
            reference = np.array(self.score(rows, mode=Mode.INDEPENDENT)[0])
        except FAILURES as error:
            raise CheckpointError(
                f"a model must compute a plain prompt, got {type(error).__name__}: {error}",
                hint="this architecture is not supported",
            ) from error
        self._cached = True
        try:
            filled = np.array(self.score(rows, mode=Mode.INDEPENDENT)[0])
        except FAILURES:
            filled = reference  # caches that a model cannot fill: whole prompts do without
        self._cached = relative_difference(filled, reference) > _SAME
        reference = filled if self._cached else reference
        chunk, self._chunk = self._chunk, _PROBE_CHUNK
        self.packs = self.trees = False
        try:
            branched = [
                self.score(rows, mode=Mode.PARALLEL, resident_tokens=20)[0] for _ in range(2)
            ]
            worst = relative_difference(np.array(branched), reference)
            if not np.isfinite(worst):
                return float("inf")
            return max(worst, self._probe_packed(tokens[:32], candidates, worst))
        except FAILURES:
            return float("inf")
        finally:
            self._chunk = chunk
            self.resident.clear()

    def _probe_packed(
        self, tokens: tuple[int, ...], union: tuple[int, ...], forked: float
    ) -> float:
        """Decide on packed branches; return by how much those differ that are used."""
        if not self._packed:
            return 0.0
        trial = try_packed(partial(self._run, union=union), self.prefill(tokens), forked)
        if trial.reason:
            self._stop_packing(trial.reason)
        self.packs, self.trees = trial.packs, trial.trees
        return trial.difference
