"""Caches of a prefix: made, extended, forked. A fork never writes into its parent."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefilled token prefix.

    Attributes:
        tokens: The T tokens whose state the caches hold.
        caches: One cache per layer, batch size 1, evaluated.
    """

    tokens: tuple[int, ...]
    caches: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(array.nbytes for array in arrays(self.caches))


def arrays(caches: tuple[Any, ...]) -> list[mx.array]:
    """Return every array in the states of the caches."""
    leaves = tree_flatten([cache.state for cache in caches])
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def empty_prefix(model: Any) -> Prefix:
    """Return the prefix of no tokens for a model."""
    return Prefix(tokens=(), caches=tuple(make_prompt_cache(model)))


def fork(prefix: Prefix, rows: int = 1) -> list[Any]:
    """Return new caches that hold the prefix once per row.

    Works on any cache of mlx-lm through its `state`: arrays of batch 1 are
    broadcast to `rows`, everything else is taken over. `broadcast_to` gives a
    new array object, which matters: caches assign into their arrays in place,
    and an object shared with the parent would change with the branch.

    Args:
        prefix: Evaluated caches of batch size 1.
        rows: B, the batch size of the branch.
    """

    def spread(leaf: Any) -> Any:
        if isinstance(leaf, mx.array) and leaf.ndim > 0:
            return mx.broadcast_to(leaf, (rows, *leaf.shape[1:]))
        return leaf

    return [type(cache).from_state(tree_map(spread, cache.state)) for cache in prefix.caches]


class PrefixStore:
    """Prefixes kept for later documents, least recently used first to go.

    Args:
        limit_bytes: Upper bound of what all kept prefixes hold together. A
            prefix larger than that is used but not kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all kept prefixes."""
        return sum(prefix.nbytes for prefix in self._kept.values())

    def __len__(self) -> int:
        """Return the number of kept prefixes."""
        return len(self._kept)

    def get(self, tokens: tuple[int, ...]) -> Prefix | None:
        """Return the kept prefix of exactly these tokens, now the most recent one."""
        prefix = self._kept.get(tokens)
        if prefix is not None:
            self._kept.move_to_end(tokens)
        return prefix

    def put(self, prefix: Prefix) -> None:
        """Keep a prefix, dropping the least recent ones until all fit."""
        if prefix.nbytes > self.limit_bytes:
            return
        self._kept[prefix.tokens] = prefix
        self._kept.move_to_end(prefix.tokens)
        while self._kept and self.nbytes > self.limit_bytes:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
