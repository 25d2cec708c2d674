"""Token rows as a trie, cut into segments that one padded batch can hold, and what that costs.

Rows that begin alike share their first tokens: the rows of a document share its text, those of
several documents what stands before it, labels their question. Here each token that rows share
stands once. Knows tokens and shapes only, no model.

Costs are in tokens: what one takes in all layers, attention left out. Measured on a CPU, where
most of attention is the exponentials of scores, of those that a mask hides as of all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

MASK_LIMIT_BYTES = 4 * 2**20
"""Bound of the mask of a batch. Attention scores of it take so much for each head and byte of
a number: 128 MiB with 8 heads in float32."""

WIDTH_LIMIT = 32
"""Widest segments: wider ones only add padding."""

PASS_TOKENS = 40.0
"""What a pass costs beyond its tokens: weights are read, layers are called."""

SEGMENT_TOKENS = 0.1
"""What a segment costs beyond its tokens, whatever they attend to: products of its own."""

PREFILL_SHARE = 0.875
"""What a token costs in a prefill, where the last layer makes keys and values only: with 8
layers. With more it is nearer to 1."""

KEYS_PER_TOKEN = 350.0
"""How many keys a token attends to at the cost of one more token."""

COPY_TOKENS = 0.028
"""What the copy of a key and its value costs, for a row that forks its prefix."""


@dataclass(frozen=True)
class Segments:
    """Tokens of a trie as B rows of a batch, in their order.

    Attributes:
        firsts: The first token of each segment, (B,).
        lengths: Tokens of each, (B,); the batch is padded to the longest, W.
    """

    firsts: np.ndarray
    lengths: np.ndarray

    @cached_property
    def nodes(self) -> np.ndarray:
        """The token of each place, (B, W); padding stands for the last one before it."""
        place = np.arange(self.lengths.max())
        return self.firsts[:, None] + np.minimum(place, self.lengths[:, None] - 1)


@dataclass(frozen=True)
class Trie:
    """Some rows with each shared token once, N in all, sorted: a row stands before what goes on.

    So what goes on from a token is in one piece behind it, up to its end in `ends`.

    Attributes:
        tokens: Their ids, (N,).
        depths: How many tokens stand before each of them in its rows, (N,).
        ends: Where what goes on from each of them ends, (N,): token n sees token m if
            m <= n < ends[m].
        stretches: Where stretches begin, (P,): each goes on from token to token, and at most
            its last token ends rows.
        reads: For each row its last token, (R,).
    """

    tokens: np.ndarray
    depths: np.ndarray
    ends: np.ndarray
    stretches: np.ndarray
    reads: np.ndarray

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each stretch, (P,)."""
        return np.diff(self.stretches, append=len(self.tokens))

    def segments(self, width: int) -> Segments:
        """Cut the stretches into segments of so many tokens, the last one of each shorter."""
        counts = -(-self.lengths // width)
        stretch = np.repeat(np.arange(len(counts)), counts)
        done = width * (np.arange(len(stretch)) - np.repeat(np.cumsum(counts) - counts, counts))
        lengths = np.minimum(self.lengths[stretch] - done, width)
        return Segments(self.stretches[stretch] + done, lengths)

    @cached_property
    def width(self) -> int:
        """The cheapest width of segments: little padding, and few of them."""
        return _shape(self.lengths)[1]


def grow(rows: Sequence[tuple[int, ...]], held: int = 0) -> Trie:
    """Make a trie of rows.

    Args:
        rows: R rows of tokens, in any order; some may be equal, or begin with others.
        held: Leading tokens to leave out, the same in all rows.

    Raises:
        ValueError: There is no row, or one with no token but those left out.
    """
    order, table, lengths, shared = _sorted(rows, held, held)
    added = lengths - shared
    begins = np.cumsum(added) - added
    row = np.repeat(np.arange(len(rows)), added)
    depths = np.arange(len(row)) - (begins - shared)[row]
    # What goes on from a token ends at the first row behind that shares less than it; and the
    # token at some depth in a row was brought by the latest row that shares less than it.
    ends = np.full((len(rows) + 1, table.shape[1]), len(row))
    for number in range(len(rows) - 1, 0, -1):
        ends[number] = ends[number + 1]
        ends[number, shared[number] :] = begins[number]
    number = np.arange(len(rows))
    brought = (shared < lengths[:, None]) & (number <= number[:, None])
    owner = len(rows) - 1 - brought[:, ::-1].argmax(axis=1)
    reads = np.empty(len(rows), np.int64)
    reads[order] = begins[owner] + lengths - 1 - shared[owner]
    # A segment is read at one place.
    stretches = np.unique(np.concatenate([begins[added > 0], reads[reads < len(row) - 1] + 1]))
    return Trie(table[row, depths], depths, ends[row + 1, depths], stretches, reads)


@dataclass(frozen=True)
class Schedule:
    """How to compute some rows.

    Attributes:
        held: Leading tokens to prefill, shared by all rows; 0 only if they share none.
        passes: Which rows to run in one pass behind them; none where copies of the prefix, one
            for each row, are cheaper or there is no prefix.
    """

    held: int
    passes: tuple[tuple[int, ...], ...]


def cheapest(rows: Sequence[tuple[int, ...]], shared: int, resident: int, chunk: int) -> Schedule:
    """Find the cheapest way to compute rows.

    In one pass rows compute scores of each other's keys, so many of them make several passes;
    and the last tokens that all share may join what is behind them: a pass less, for scores of
    keys that only come later.

    Args:
        rows: R whole rows of tokens.
        shared: Leading tokens that all share, fewer than any row has.
        resident: How many of these are computed.
        chunk: Tokens of a prefill chunk.

    Raises:
        ValueError: There is no row, or one with no token but those all share.
    """
    rest = (shared - resident) % chunk
    if rest == shared:  # nothing would be left to stand behind
        rest = 0
    order, _, lengths, common = _sorted(rows, shared - rest, shared)
    cost, best = _passes(lengths - rest, np.maximum(common - rest, 0), shared)
    held = shared
    if rest:
        joined, passes = _passes(lengths, common, shared - rest)
        if joined < cost + _cost(rest * PREFILL_SHARE, shared):
            held, best = shared - rest, passes
    return Schedule(held, tuple(tuple(order[first:end]) for first, end in best))


def _passes(
    lengths: np.ndarray, shared: np.ndarray, held: int
) -> tuple[float, list[tuple[int, int]]]:
    """Return what sorted rows cost, and from where to where they make passes."""
    rows, longest = len(lengths), int(lengths.max())
    cost = float(_cost(rows * longest, held + longest) + rows * held * COPY_TOKENS)
    if held == 0:
        return cost, []
    added = lengths - shared
    before, total = np.cumsum(added) - added, added.sum()
    best: list[tuple[int, int]] = []
    alone = total * (1 + held / KEYS_PER_TOKEN)
    for count in range(1, rows + 1):
        # Each row attends to the prefix, however few stand beside it.
        if count * PASS_TOKENS + alone >= cost:
            break
        # Cut where as much comes before as the rows allow.
        cuts = np.unique(np.searchsorted(before, np.arange(count) * total / count))
        cuts = cuts[cuts < rows]
        # The first row of a pass brings what it shares with the one before, too.
        tokens = np.add.reduceat(added, cuts) + shared[cuts]
        needed = float(_cost(tokens, held + tokens).sum())
        if needed < cost and _bounded(added, shared, cuts, held):
            cost = needed
            best = list(zip(cuts.tolist(), [*cuts[1:].tolist(), rows], strict=True))
    return cost, best


def _bounded(added: np.ndarray, shared: np.ndarray, cuts: np.ndarray, held: int) -> bool:
    """Return whether the masks of passes, padding counted in, are within their bound."""
    stretches = added.copy()
    stretches[cuts] += shared[cuts]
    tokens = np.add.reduceat(stretches, cuts)
    least = tokens * (held + tokens)
    # Segments of one token have no padding, so the cheapest ones have next to none.
    if (least * (1 + SEGMENT_TOKENS) <= MASK_LIMIT_BYTES).all():
        return True
    if (least > MASK_LIMIT_BYTES).any():
        return False
    for each in np.split(stretches, cuts[1:]):
        count, width = _shape(each[each > 0])
        if count * width * (held + each.sum()) > MASK_LIMIT_BYTES:
            return False
    return True


def _shape(stretches: np.ndarray) -> tuple[int, int]:
    """Return how many segments to cut stretches of such lengths into, and how wide: (B, W)."""
    widths = np.arange(1, min(int(stretches.max()), WIDTH_LIMIT) + 1)
    counts = (-(-stretches[:, None] // widths)).sum(axis=0)
    best = int((counts * (widths + SEGMENT_TOKENS)).argmin())
    return int(counts[best]), int(widths[best])


def _cost(tokens: Any, keys: Any) -> Any:
    return PASS_TOKENS + tokens * (1 + keys / KEYS_PER_TOKEN)


def _sorted(
    rows: Sequence[tuple[int, ...]], held: int, least: int
) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """Return rows sorted: their order, tokens (R, L), lengths (R,), and common tokens (R,).

    Of their tokens the first `held` are left out, and -1 stands behind the last. Common are
    those that a row begins with as the one before it does.
    """
    if not rows or min(map(len, rows)) <= least:
        raise ValueError(f"a trie must be of rows with more than {least} tokens")
    order = sorted(range(len(rows)), key=lambda each: rows[each][held:])
    lengths = np.array([len(rows[each]) - held for each in order])
    table = np.full((len(rows), int(lengths.max())), -1)
    for number, each in enumerate(order):
        table[number, : lengths[number]] = rows[each][held:]
    # In this order no earlier row shares more with it.
    shared = np.zeros_like(lengths)
    same = table[1:] == table[:-1]
    shared[1:] = np.where(same.all(axis=1), lengths[1:], same.argmin(axis=1))
    return order, table, lengths, shared
