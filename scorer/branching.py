"""Branches that never copy their prefix: packed keys, and a mask that keeps rows apart.

A fork holds the keys and values of a prefix once per row. Here all rows attend to one and the
same sequence, the prefix and behind it the suffixes of all rows, spread over the rows with
stride 0; a mask shows each row the prefix and its own suffix. That is for caches of keys and
values, whole or of a window. Recurrent states are small, and caches of other kinds are forked.

Rows can be gone on from (`trees`): packed keys stay where they are, behind them come those of
the next rows, each at its own position. Of recurrent states each row takes over that of the
row it goes on from; mlx-lm keeps it at the end of a padded row where it knows the lengths.

The mask must be the one the model attends with. A model that makes its own mask is found
out here when it does not ask for ours, and by `Engine.probe` when it asks and does otherwise.
"""

import sys
from collections.abc import Sequence
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from weighbridge.scorer.caches import Prefix, fork
from weighbridge.scorer.trie import MASK_LIMIT_BYTES

PACKED_ROW_LIMIT = 32
"""Rows packed at a time: beyond, the keys of other rows cost more than copies do."""

PREFIX_LEAST = 192
"""Tokens of a prefix from which it is packed. Copies of a shorter one cost next to nothing; of
one just below 256 they are made twice, where a suffix makes them grow by mlx-lm's step of 256."""

PREFIX_SHARE = 0.5
"""Most tokens of packed suffixes, padding included, for each token of their prefix: a row
computes scores of all of them, and copies nothing but its prefix."""

FAILURES = (ValueError, TypeError, AttributeError, RuntimeError, LookupError)
"""What a model may raise over caches that it cannot use."""


class UnmaskedError(RuntimeError):
    """A model attends to packed keys without having asked for their mask."""


class PackedRows:
    """The suffixes of one branch batch, as the caches of all layers share them.

    Args:
        lengths: Tokens of each suffix, B of them; the batch is padded to N, the longest.
        stems: Rows computed before that these go on from, None for the prefix.
        owners: For each row the one of `stems` that it goes on from.
    """

    def __init__(
        self, lengths: Sequence[int], stems: "PackedRows | None" = None, owners: Sequence[int] = ()
    ) -> None:
        self.lengths = tuple(lengths)
        self.width = max(lengths)
        inside = np.arange(self.width) < np.array(lengths)[:, None]
        row, place = np.nonzero(inside)
        # Padding is left out of what is packed: S columns instead of B·N.
        self.packed = None if inside.all() else mx.array(row * self.width + place)
        self.row, self.place = row, place
        self.stems, self.owners = stems, np.array(owners, dtype=int)
        self.starts = np.zeros(len(lengths), dtype=int)
        if stems is not None:
            self.starts = (stems.starts + stems.lengths)[self.owners]
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

        With stems, their columns are between those of the prefix and those of the rows.

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
        rows = len(self.lengths)
        within = np.arange(self.width)[:, None]
        query = self.starts[:, None, None] + within
        near = (self.place <= within) & (within - self.place < window)
        shown = [(self.row == np.arange(rows)[:, None])[:, None] & near]
        stems, owners = self.stems, self.owners
        while stems is not None:
            own = (stems.row == owners[:, None])[:, None]
            if window <= query.max():
                own = own & (query - (stems.starts[stems.row] + stems.place) < window)
            shown.append(np.broadcast_to(own, (rows, self.width, stems.row.size)))
            stems, owners = stems.stems, stems.owners[owners] if stems.stems else owners
        bounded = window <= query.max() + held
        before = query + np.arange(held, 0, -1) < window if bounded else np.True_
        return [np.broadcast_to(before, (rows, self.width, held)), *reversed(shown)]

    def check_asked(self, kind: tuple[type, int]) -> None:
        """Refuse layers that attend without a mask of their kind.

        Raises:
            UnmaskedError: No such mask was made for this batch.
        """
        if kind not in self._asked:
            raise UnmaskedError("a model must attend to packed keys with their mask")


class _Packed:
    """What both kinds of packed caches do; `held` keys of the prefix, all rows behind it."""

    keys: Any
    values: Any
    offset: Any
    max_size: int

    def _start(self, parts: tuple[mx.array, mx.array], offset: int, rows: PackedRows) -> None:
        self._held, self._base = parts[0].shape[2], offset
        self._go_on(parts, offset, rows)

    def _go_on(self, parts: tuple[mx.array, mx.array], offset: Any, rows: PackedRows) -> None:
        self._prefix: tuple[mx.array, mx.array] | None = parts
        self._rows = rows
        self.keys = self.values = None
        self.offset = offset

    @property
    def rows(self) -> PackedRows:
        """The rows that were appended, or are to be."""
        return self._rows

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

    def twigs(self, rows: PackedRows) -> "_Packed":
        """Return a cache that goes on from the rows of this one, each at its own position."""
        child = type(self).__new__(type(self))
        child.__dict__.update(self.__dict__)
        starts = mx.array((self._base + rows.starts).tolist())
        child._go_on((self.keys[:1], self.values[:1]), starts, rows)
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

    def __init__(self, parent: Any, rows: PackedRows) -> None:
        keys, values, offset = parent.state
        self._start((keys[..., :offset, :], values[..., :offset, :]), offset, rows)


class PackedWindowCache(_Packed, RotatingKVCache):
    """All rows behind the last tokens of one prefix, each token seeing a window."""

    def __init__(self, parent: Any, rows: PackedRows) -> None:
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


def pack(prefix: Prefix, lengths: Sequence[int], *, ends: bool = False) -> list[Any]:
    """Return caches for one batch of suffixes behind a prefix; to be used once.

    Args:
        prefix: Evaluated caches of batch size 1, of at least one token.
        lengths: Tokens of each suffix, B of them.
        ends: Whether rows are gone on from, so that recurrent states must be those at the
            end of each and not those behind its padding.
    """
    rows = PackedRows(lengths)
    forked = fork(prefix, len(lengths))
    if ends:
        _keep_ends(forked, lengths)
    return [
        packed_cache(parent, rows) or other
        for parent, other in zip(prefix.caches, forked, strict=True)
    ]


def pack_twigs(
    caches: Sequence[Any], lengths: Sequence[int], owners: Sequence[int], *, ends: bool = False
) -> list[Any]:
    """Return caches that go on from branches which have been computed; to be used once.

    Args:
        caches: What `pack` or this function returned, made with `ends`.
        lengths: Tokens of each twig, B of them.
        owners: For each twig the row of the branch that it goes on from.
        ends: As for `pack`.

    Raises:
        UnmaskedError: A cache is neither packed nor of recurrent states.
    """
    stems = next((each.rows for each in caches if isinstance(each, _Packed)), None)
    rows = PackedRows(lengths, stems, owners)
    taken = mx.array(list(owners))
    grown = [
        each.twigs(rows) if isinstance(each, _Packed) else _taken_over(each, taken)
        for each in caches
    ]
    if ends:
        _keep_ends(grown, lengths)
    return grown


def _taken_over(cache: Any, owners: mx.array) -> ArraysCache:
    """Return recurrent states, (B, ...) each, of the rows that others go on from."""
    if type(cache) is not ArraysCache:
        raise UnmaskedError(f"rows cannot go on from a {type(cache).__name__}")
    states = [None if each is None else each[owners] for each in cache.cache]
    return ArraysCache.from_state((states, None, None))


def _keep_ends(caches: Sequence[Any], lengths: Sequence[int]) -> None:
    if len(set(lengths)) > 1:  # else there is no padding
        for cache in caches:
            if type(cache) is ArraysCache:
                # An array for each: layers count down theirs in place.
                cache.prepare(lengths=list(lengths))


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
    most = int(min(PACKED_ROW_LIMIT, held * PREFIX_SHARE / width, masked))
    if rows < 2 or most < 2:
        return 0
    return ceil(rows / ceil(rows / most))


def packed_dtype(prefix: Prefix) -> mx.Dtype | None:
    """Return the dtype of keys that can be packed, None where no layer has any."""
    dtypes = [cache.keys.dtype for cache in prefix.caches if packed_cache(cache, PackedRows([1]))]
    return dtypes[0] if dtypes else None


def packed_cache(parent: Any, rows: PackedRows) -> PackedKVCache | PackedWindowCache | None:
    """Return a cache of rows behind what another one holds, None where that cannot be packed."""
    # Exactly these types: what is derived from them may hold something else. A layer that
    # holds nothing takes the keys of another one.
    if type(parent) is KVCache and parent.keys is not None:
        return PackedKVCache(parent, rows)
    if type(parent) is RotatingKVCache and parent.keys is not None and parent.keep == 0:
        return PackedWindowCache(parent, rows)
    return None


def _spread(array: mx.array, rows: int) -> mx.array:
    return mx.broadcast_to(array, (rows, *array.shape[1:]))
