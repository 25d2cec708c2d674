"""Branches that never copy their prefix: packed keys, and a mask that keeps rows apart.

A fork holds the keys and values of a prefix once per row. Here all rows attend to one and the
same sequence, the prefix and behind it the suffixes of all rows, spread over the rows with
stride 0; a mask shows each row the prefix and its own suffix. That is for caches of keys and
values, whole or of a window. Recurrent states are small, and caches of other kinds are forked.

The mask must be the one the model attends with. A model that makes its own mask is found
out here when it does not ask for ours, and by `Engine.probe` when it asks and does otherwise.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from weighbridge.scorer.caches import Prefix, fork
from weighbridge.scorer.heads import relative_difference

ROW_LIMIT = 32
"""Rows packed at a time: beyond, the keys of other rows cost more than copies do."""

PREFIX_LEAST = 256
"""Tokens of a prefix from which it is packed; copies of a shorter one cost next to nothing."""

PREFIX_SHARE = 0.5
"""Most tokens of packed suffixes, padding included, for each token of their prefix: a row
computes scores of all of them, and copies nothing but its prefix."""

TREE_GAIN = 1.5
"""How much less attention a tree of rows must compute to be worth its second pass."""

MASK_LIMIT_BYTES = 4 * 2**20
"""Bound of the mask of a batch. Attention scores of it take so much for each head and byte of
a number: 128 MiB with 8 heads in float32."""

TOLERANCE = {mx.float64: 1e-9, mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 5e-2}
"""Most that packed and forked branches may differ, relative to the spread, by dtype of keys."""


FAILURES = (ValueError, TypeError, AttributeError, RuntimeError, LookupError)
"""What a model may raise over caches that it cannot use."""


class UnmaskedError(RuntimeError):
    """A model attends to packed keys without having asked for their mask."""


class _Rows:
    """The suffixes of one branch batch, as the caches of all layers share them.

    Args:
        lengths: Tokens of each suffix, B of them; the batch is padded to N, the longest.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self.width = max(lengths)
        inside = np.arange(self.width) < np.array(lengths)[:, None]
        row, place = np.nonzero(inside)
        # Padding is left out of what is packed: S columns instead of B·N.
        self.packed = None if inside.all() else mx.array(row * self.width + place)
        self.row, self.place = row, place
        self._masks: dict[tuple[int, int], mx.array] = {}
        self._asked: set[tuple[type, int]] = set()

    def pack(self, array: mx.array) -> mx.array:
        """Return keys or values (B, H, N, D) as one sequence (1, H, S, D)."""
        rows, heads, width, size = array.shape
        if (rows, width) != (len(self.lengths), self.width):
            raise UnmaskedError(f"packed branches must be of shape {(rows, width)}")
        flat = array.swapaxes(0, 1).reshape(1, heads, rows * width, size)
        return flat if self.packed is None else mx.take(flat, self.packed, axis=2)

    def mask(self, kind: tuple[type, int], held: int, window: int) -> mx.array:
        """Return what each token of each row may see, (B, 1, N, held + S), true where it may.

        Args:
            kind: What layers the mask is for.
            held: Keys of the prefix, those just before the suffixes.
            window: How many keys a token sees, itself included.
        """
        self._asked.add(kind)
        key = (held, window)
        if key not in self._masks:
            whole: Any = np.concatenate(self._visible(held, window), axis=-1)[:, None]
            self._masks[key] = mx.array(whole)
        return self._masks[key]

    def _visible(self, held: int, window: int) -> list[np.ndarray]:
        query = np.arange(self.width)[:, None]
        before = query - np.arange(-held, 0) < window
        near = (self.place <= query) & (query - self.place < window)
        own = (self.row == np.arange(len(self.lengths))[:, None])[:, None] & near
        return [np.broadcast_to(before, (*own.shape[:2], held)), own]

    def check_asked(self, kind: tuple[type, int]) -> None:
        """Refuse layers that attend without a mask of their kind.

        Raises:
            UnmaskedError: No such mask was made for this batch.
        """
        if kind not in self._asked:
            raise UnmaskedError("a model must attend to packed keys with their mask")


class _Twigs(_Rows):
    """Suffixes that go on where one of some packed suffixes, their stems, ends.

    Args:
        lengths: Tokens of each twig, B of them.
        stems: What they go on from.
        owners: For each twig the row of its stem.
    """

    def __init__(self, lengths: Sequence[int], stems: _Rows, owners: Sequence[int]) -> None:
        super().__init__(lengths)
        self._stems = stems
        self._owners = np.array(owners)[:, None, None]
        self.starts = [stems.lengths[owner] for owner in owners]

    def _visible(self, held: int, window: int) -> list[np.ndarray]:
        """Behind the prefix, (B, N, held), all stems and then all twigs."""
        start = np.array(self.starts)[:, None, None]
        query = start + np.arange(self.width)[:, None]
        before = query - np.arange(-held, 0) < window
        stem = (self._stems.row == self._owners) & (query - self._stems.place < window)
        behind = query - start - self.place
        own = self.row == np.arange(len(self.lengths))[:, None, None]
        return [before, stem, own & (behind >= 0) & (behind < window)]


class _Packed:
    """What both kinds of packed caches do; `held` keys of the prefix, all rows behind it."""

    keys: Any
    values: Any
    offset: Any
    max_size: int

    def _start(self, parts: tuple[mx.array, mx.array], offset: Any, rows: _Rows) -> None:
        self._prefix: tuple[mx.array, mx.array] | None = parts
        self._held = parts[0].shape[2]
        self._rows = rows
        self.keys = self.values = None
        self.offset = offset

    @property
    def _kind(self) -> tuple[type, int]:
        return type(self), getattr(self, "max_size", 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the suffixes (B, H, N, D), once; return prefix and all suffixes for each row."""
        self._rows.check_asked(self._kind)
        if self._prefix is None:
            raise UnmaskedError("packed branches must be appended to once")
        count = keys.shape[0]
        self.keys, self.values = (
            _spread(mx.concatenate([held, self._rows.pack(new)], axis=2), count)
            for held, new in zip(self._prefix, (keys, values), strict=True)
        )
        self._prefix = None
        self.offset = self.offset + keys.shape[2]
        return self.keys, self.values

    def twigs(self, rows: _Twigs) -> "_Packed":
        """Return a cache that goes on from the rows of this one, each at its own position."""
        child = type(self).__new__(type(self))
        child.__dict__.update(self.__dict__)
        base = self.offset - self._rows.width
        starts = mx.array([base + start for start in rows.starts])
        child._start((self.keys[:1], self.values[:1]), starts, rows)
        child._held = self._held
        return child

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what `update_and_fetch` did, for layers that reuse it."""
        return self.keys, self.values

    def make_mask(
        self,
        N: int,  # noqa: N803
        window_size: int | None = None,
        return_array: bool = True,  # noqa: ARG002
    ) -> mx.array:
        """Return the mask of the rows, always as an array."""
        if self._rows.width != N:
            raise UnmaskedError(f"packed branches must be of {self._rows.width} tokens, got {N}")
        window = window_size or self._kind[1] or sys.maxsize
        return self._rows.mask(self._kind, self._held, window)


class PackedKVCache(_Packed, KVCache):
    """All rows behind one prefix, each token seeing all before it."""

    def __init__(self, parent: Any, rows: _Rows) -> None:
        keys, values, offset = parent.state
        self._start((keys[..., :offset, :], values[..., :offset, :]), offset, rows)


class PackedWindowCache(_Packed, RotatingKVCache):
    """All rows behind the last tokens of one prefix, each token seeing a window."""

    def __init__(self, parent: Any, rows: _Rows) -> None:
        keys, values, offset, self.keep, self.max_size, end = parent.state
        self._idx = 0

        def ordered(array: mx.array) -> mx.array:
            # Written in a circle once it is full: the oldest stands at `end`. Not full, or
            # just appended to, it is in order, and what is behind `end` is unused.
            if end < min(offset, array.shape[2]):
                array = mx.concatenate([array[..., end:, :], array[..., :end, :]], axis=2)
            else:
                array = array[..., :end, :]
            seen = min(array.shape[2], self.max_size - 1)
            return array[..., array.shape[2] - seen :, :]

        self._start((ordered(keys), ordered(values)), offset, rows)


def pack(prefix: Prefix, lengths: Sequence[int]) -> list[Any]:
    """Return caches for one batch of suffixes behind a prefix; to be used once.

    Args:
        prefix: Evaluated caches of batch size 1, of at least one token.
        lengths: Tokens of each suffix, B of them.
    """
    rows = _Rows(lengths)
    forked = fork(prefix, len(lengths))
    return [
        _packed(parent, rows) or other for parent, other in zip(prefix.caches, forked, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of which some go on from others, as the labels of a field do from its question.

    Attributes:
        stems: Rows that begin with no other one.
        twigs: The rest.
        owners: For each twig the place of its stem in `stems`.
    """

    stems: tuple[int, ...]
    twigs: tuple[int, ...]
    owners: tuple[int, ...]


def grow(suffixes: Sequence[tuple[int, ...]], held: int) -> Tree | None:
    """Return rows as a tree, None where that computes not much less.

    Args:
        suffixes: Tokens of each row.
        held: Tokens of their prefix, T.
    """
    order = sorted(range(len(suffixes)), key=lambda each: suffixes[each])
    stems: list[int] = []
    owners: dict[int, int] = {}
    for each in order:
        # In this order a stem stands just before all that begins with it.
        stem = suffixes[stems[-1]] if stems else None
        if stem is not None and suffixes[each][: len(stem)] == stem and suffixes[each] != stem:
            owners[each] = len(stems) - 1
        else:
            stems.append(each)
    if len(stems) < 2 or not owners:
        return None
    long = max(len(suffixes[each]) for each in stems)
    short = max(len(suffixes[each]) - len(suffixes[stems[owner]]) for each, owner in owners.items())
    width = max(map(len, suffixes))
    packed = len(stems) * long + len(owners) * short
    tree, flat = packed * (held + packed), len(suffixes) * width * (held + width)
    if tree > MASK_LIMIT_BYTES or tree * TREE_GAIN > flat:
        return None
    return Tree(tuple(stems), tuple(owners), tuple(owners.values()))


def pack_twigs(caches: Sequence[Any], lengths: Sequence[int], owners: Sequence[int]) -> list[Any]:
    """Return caches that go on from packed branches which have been computed.

    Args:
        caches: What `pack` returned, all of it packed.
        lengths: Tokens of each twig, B of them.
        owners: For each twig the row of the branch that it goes on from.
    """
    rows = _Twigs(lengths, caches[0]._rows, owners)
    return [cache.twigs(rows) for cache in caches]


def rows_at_once(held: int, width: int, rows: int) -> int:
    """Return how many of some rows to pack together, evenly; 0 where copies are faster.

    Args:
        held: Tokens of their prefix, T.
        width: Tokens of the longest suffix, N.
        rows: B, of which the batches are made.
    """
    if held < PREFIX_LEAST:
        return 0
    # B rows have a mask of B·N·(T + B·N) bytes, and B·N is bounded by a share of T.
    masked = MASK_LIMIT_BYTES / (width * held * (1 + PREFIX_SHARE))
    most = int(min(ROW_LIMIT, held * PREFIX_SHARE / width, masked))
    if rows < 2 or most < 2:
        return 0
    return ceil(rows / ceil(rows / most))


Run = Callable[[list[Any], Sequence[tuple[int, ...]]], np.ndarray]
"""Caches and suffixes in, logits (B, K) at the last token of each out."""


def run_tree(
    run: Run, prefix: Prefix, suffixes: Sequence[tuple[int, ...]], tree: Tree
) -> np.ndarray:
    """Run the rows that others begin with, then what these have more, from there."""
    stems = [suffixes[each] for each in tree.stems]
    twigs = [
        suffixes[each][len(stems[owner]) :]
        for each, owner in zip(tree.twigs, tree.owners, strict=True)
    ]
    caches = pack(prefix, [len(each) for each in stems])
    logits = [run(caches, stems)]
    logits.append(run(pack_twigs(caches, [len(each) for each in twigs], tree.owners), twigs))
    return np.concatenate(logits)[np.argsort([*tree.stems, *tree.twigs])]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of packed branches on a model: which are right, how far off, or why not."""

    packs: bool = False
    trees: bool = False
    difference: float = 0.0
    reason: str = ""


def try_packed(run: Run, prefix: Prefix, forked: float) -> Trial:
    """Compare packed branches, and trees of them, with forked ones on a model.

    Args:
        run: Runs the model.
        prefix: Some tokens.
        forked: How far forked branches are from whole prompts.
    """
    dtype = packed_dtype(prefix)
    if dtype is None:
        return Trial(reason="no layer keeps keys and values by token")
    allowed = TOLERANCE[dtype]
    if not forked <= allowed:
        return Trial(reason="forked branches differ from whole prompts")
    one, two, *rest = prefix.tokens[:8]
    # Three rows, of several tokens and of one, for which models have ways of their own;
    # a tree with twigs at unequal positions, in another order than their stems.
    rows = [(one,), (two, *rest[:2]), (one, *rest, two)]
    worst = 0.0
    for suffixes in (rows, [(one,), (two,), (rest[0],)]):
        try:
            found = run(pack(prefix, [len(each) for each in suffixes]), suffixes)
        except FAILURES as error:
            return Trial(reason=f"{type(error).__name__}: {error}")
        worst = max(worst, relative_difference(found, run(fork(prefix, 3), suffixes)))
        if not worst <= allowed or not np.isfinite(found).all():
            return Trial(reason=f"packed branches differ by {worst:.2g} (relative)")
    suffixes = [*rows, (*rows[2], two, one), (*rows[1], one)]
    try:
        found = run_tree(run, prefix, suffixes, Tree((0, 1, 2), (3, 4), (2, 1)))
    except FAILURES:  # recurrent states, or positions that must be one number
        return Trial(packs=True, difference=worst)
    apart = relative_difference(found, run(fork(prefix, 5), suffixes))
    trees = apart <= allowed
    return Trial(packs=True, trees=trees, difference=max(worst, apart) if trees else worst)


def packed_dtype(prefix: Prefix) -> mx.Dtype | None:
    """Return the dtype of keys that can be packed, None where no layer has any."""
    dtypes = [cache.keys.dtype for cache in prefix.caches if _packed(cache, _Rows([1]))]
    return dtypes[0] if dtypes else None


def _packed(parent: Any, rows: _Rows) -> PackedKVCache | PackedWindowCache | None:
    # Exactly these types: what is derived from them may hold something else. A layer that
    # holds nothing takes the keys of another one.
    if type(parent) is KVCache and parent.keys is not None:
        return PackedKVCache(parent, rows)
    if type(parent) is RotatingKVCache and parent.keys is not None and parent.keep == 0:
        return PackedWindowCache(parent, rows)
    return None


def _spread(array: mx.array, rows: int) -> mx.array:
    return mx.broadcast_to(array, (rows, *array.shape[1:]))
