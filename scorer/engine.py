"""Prefill, branch and read: token rows in, candidate logits out.

The engine knows tokens only. Documents, fields and temperatures are the
business of its callers. All of it runs on the thread that owns MLX.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from weighbridge.scorer.branching import FAILURES, UnmaskedError, pack, rows_at_once
from weighbridge.scorer.caches import Prefix, fork
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.heads import HeadCut, relative_difference
from weighbridge.scorer.passes import Passes
from weighbridge.scorer.rows import Asked, Mode, Row, Scored, Timings, Tokens, common_prefix
from weighbridge.scorer.together import Tail, parts, tails, within
from weighbridge.scorer.trees import at_once, grow, plant, run_levels
from weighbridge.scorer.trials import try_one_pass, try_packed
from weighbridge.scorer.trie import Plan, plan

logger = logging.getLogger(__name__)

ROW_LIMIT = 64
"""Rows of one branch batch when the caller sets no limit."""

_PROBE_CHUNK = 16

_SAME = 0.02
"""Most that rounding makes of the same prompt with and without caches, relative to the
spread of the logits, in bfloat16. Gemma 3n without caches is off by 0.2."""


class Engine(Passes):
    """Computes candidate logits of token rows with one model.

    Args:
        model: A text model of mlx-lm with evaluated weights.
        chunk: Prefill chunk in tokens.
        packed: Whether rows may branch without copies of their prefix: where that is
            faster, and not before `probe` has found it right. Else they fork.
        one_pass: Whether all that stands behind a prefix may be computed in one pass, likewise.
        pass_tokens: Most tokens of documents that share such a pass; 0 for one document each.
        together: Whether short documents may share passes where that takes two of them, one
            for the documents and one for their fields.

    Raises:
        CheckpointError: The model does not turn tokens into logits.
    """

    def __init__(
        self,
        model: Any,
        *,
        chunk: int = 256,
        packed: bool = True,
        one_pass: bool = True,
        pass_tokens: int = 0,
        together: bool = True,
    ) -> None:
        super().__init__(model, chunk)
        self._packed, self._one_pass = packed, one_pass
        self._pass_tokens, self._together = pass_tokens, together
        self.packs = self.trees = self.passes = False

    def score(
        self,
        rows: Sequence[Row],
        *,
        mode: Mode = Mode.PARALLEL,
        batch_size: int | None = None,
        resident_tokens: int = 0,
    ) -> Scored:
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
        if mode is Mode.AUTO:
            alone = len(rows) == 1 and resident_tokens == 0
            mode = Mode.INDEPENDENT if alone else Mode.PARALLEL
        try:
            return self._score(rows, mode, batch_size, resident_tokens)
        except UnmaskedError as error:
            # Met later than at load, by a mask that only some lengths have.
            self._stop_packing(str(error))
            return self._score(rows, mode, batch_size, resident_tokens)

    def score_documents(
        self,
        documents: Sequence[Asked],
        *,
        mode: Mode = Mode.PARALLEL,
        batch_size: int | None = None,
    ) -> list[Scored]:
        """Compute the candidate logits of documents, short ones together where that is faster.

        Args:
            documents: What is asked of each. Those with the same resident prefix may be
                computed together, in `auto` and `parallel` and without `batch_size`.
            mode: As for `score`.
            batch_size: As for `score`.

        Returns:
            For each document what `score` returns, in their order.
        """
        found: dict[int, Scored] = {}
        if mode in {Mode.AUTO, Mode.PARALLEL} and batch_size is None:
            for group in self._groups(documents):
                found |= self._score_group(documents, group)
        return [
            found[place]
            if place in found
            else self.score(
                document.rows,
                mode=mode,
                batch_size=batch_size,
                resident_tokens=document.resident_tokens,
            )
            for place, document in enumerate(documents)
        ]

    def _score(
        self, rows: Sequence[Row], mode: Mode, batch_size: int | None, resident_tokens: int
    ) -> Scored:
        start_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        union = _union(rows)
        start = prefilled = time.perf_counter()
        shared = resident = prefills = 0
        early = 0.0
        tokens = [row.tokens for row in rows]
        if mode is Mode.INDEPENDENT:
            logits = np.concatenate([self._whole(row, union) for row in rows])
        else:
            whole = mode is Mode.PARALLEL and batch_size is None
            shared = common_prefix(tokens)
            if whole and len(rows) == 1:  # what is no whole chunk may be its branch
                resident_tokens = min(resident_tokens, shared)
                shared -= (shared - resident_tokens) % self._chunk
            made = Plan(shared, ())
            if whole and self.passes:
                made = plan(tokens, shared, min(resident_tokens, shared), self._chunk)
            prefix, resident, prefills = self._prefix(tokens[0][: made.held], resident_tokens)
            prefilled = time.perf_counter()
            if made.passes:
                logits = self._pass(prefix, tokens, made.passes, union)
                behind = sum(map(len, tokens)) - len(rows) * shared
                early = (shared - made.held) / (shared - made.held + behind)
            else:
                suffixes = [each[shared:] for each in tokens]
                size = 1 if mode is Mode.CACHED_SERIAL else batch_size
                logits = self._branches(prefix, suffixes, size, union)
        ended = time.perf_counter()
        # Of a pass over shared tokens and others alike, each token is a part.
        early *= ended - prefilled
        return _picked(logits, rows, union), Timings(
            mode=mode,
            prefill_seconds=prefilled - start + early,
            branch_seconds=ended - prefilled - early,
            prefix_tokens=shared - resident,
            suffix_tokens=sum(map(len, tokens)) - len(rows) * shared,
            resident_tokens=resident,
            resident_hits=int(resident > 0),
            prefills=prefills,
            start_bytes=start_bytes,
            peak_bytes=mx.get_peak_memory(),
        )

    def _groups(self, documents: Sequence[Asked]) -> Iterator[list[Tail]]:
        """Yield the documents that are computed together, where more than one are."""
        for some in tails(documents):
            first = 0
            while first < len(some):
                left, count = some[first:], 1
                if self.passes:
                    count = within(left, self._pass_tokens)
                elif self.trees and self._together:
                    count = at_once([tail.rows for tail in left], len(left[0].resident))
                if count > 1:
                    yield left[:count]
                first += count

    def _score_group(self, documents: Sequence[Asked], group: list[Tail]) -> dict[int, Scored]:
        """Compute documents together; nothing where each must be computed on its own."""
        rows = [row for tail in group for row in documents[tail.place].rows]
        union, resident = _union(rows), group[0].resident
        start_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        prefix, held, prefills = self._prefix(resident, len(resident))
        prefilled = time.perf_counter()
        try:
            if self.passes:
                tokens = [row.tokens for row in rows]
                logits = self._pass(prefix, tokens, (tuple(range(len(rows))),), union)
            else:
                levels = plant([tail.rows for tail in group], twigs=True)
                if levels is None:
                    return {}
                logits = run_levels(partial(self._run, union=union), prefix, levels, self._advance)
                prefills += len(levels) > 1  # else there are no documents apart from rows
        except UnmaskedError as error:
            self._stop_packing(str(error))
            return {}
        if not np.isfinite(logits).all():
            # One that overflows must not be the end of its neighbours: a masked value that
            # is no number is no number still.
            return {}
        whole = Timings(
            mode=Mode.PARALLEL,
            prefill_seconds=prefilled - start,
            total_seconds=time.perf_counter() - prefilled,
            prefix_tokens=len(resident) - held,
            resident_hits=int(held > 0),
            prefills=prefills,
            start_bytes=start_bytes,
            peak_bytes=mx.get_peak_memory(),
        )
        found: dict[int, Scored] = {}
        for tail, timings in zip(group, parts(group, whole), strict=True):
            own, logits = logits[: len(tail.rows)], logits[len(tail.rows) :]
            found[tail.place] = _picked(own, documents[tail.place].rows, union), timings
        return found

    def _branches(
        self, prefix: Prefix, suffixes: Sequence[Tokens], asked: int | None, union: Tokens
    ) -> np.ndarray:
        """Run suffixes behind a prefix that all of them share: as a tree, or in batches."""
        levels = grow(suffixes, len(prefix.tokens)) if self.trees and asked is None else None
        if levels is not None:
            return run_levels(partial(self._run, union=union), prefix, levels)
        size = min(asked or ROW_LIMIT, len(suffixes))
        width = max(map(len, suffixes))
        if self.packs:  # as many as can be packed, if any can
            size = rows_at_once(len(prefix.tokens), width, size) or size
        blocks = [
            self._branch(prefix, suffixes[first : first + size], union)
            for first in range(0, len(suffixes), size)
        ]
        return np.concatenate(blocks)

    def _branch(self, prefix: Prefix, suffixes: Sequence[Tokens], union: Tokens) -> np.ndarray:
        """Run suffixes as one right-padded batch and read each at its last token."""
        lengths, rows = [len(each) for each in suffixes], len(suffixes)
        packed = self.packs and rows_at_once(len(prefix.tokens), max(lengths), rows) == rows
        return self._run(pack(prefix, lengths) if packed else fork(prefix, rows), suffixes, union)

    def _stop_packing(self, reason: str) -> None:
        self.packs = self.trees = self.passes = False
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
        self.packs = self.trees = self.passes = False
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

    def _probe_packed(self, tokens: Tokens, union: Tokens, forked: float) -> float:
        """Decide on packed branches and one pass; return by how much those differ that are used."""
        differences = [0.0]
        prefix = self.prefill(tokens)
        if self._packed:
            trial = try_packed(partial(self._run, union=union), prefix, forked)
            if trial.reason:
                self._stop_packing(trial.reason)
            self.packs, self.trees = trial.packs, trial.trees
            differences.append(trial.difference)
        if self._one_pass:
            trial = try_one_pass(partial(self._head.logits, candidates=union), prefix, forked)
            self.passes = trial.passes
            differences.append(trial.difference)
        return max(differences)


def _union(rows: Sequence[Row]) -> Tokens:
    return tuple(sorted({token for row in rows for token in row.candidates}))


def _picked(logits: np.ndarray, rows: Sequence[Row], union: Tokens) -> list[np.ndarray]:
    """Return for each row the logits of its own candidates, from those of all candidates."""
    column = {token: index for index, token in enumerate(union)}
    return [
        logits[index, [column[token] for token in row.candidates]] for index, row in enumerate(rows)
    ]
