"""Rows that go on from other rows, computed level by level.

The labels of a field begin with its question, and the fields of a document with the document.
So each token is computed once: a pass for all documents, a pass for all their fields, and
one for their labels, instead of two for each document. Needs caches that rows can go on from
(`branching.pack_twigs`), and a model for which `trials.try_packed` has found that right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from weighbridge.scorer.branching import pack, pack_twigs
from weighbridge.scorer.caches import Prefix
from weighbridge.scorer.rows import Tokens, common_prefix
from weighbridge.scorer.trie import MASK_LIMIT_BYTES

TREE_GAIN = 1.5
"""How much less attention a tree of rows must compute to be worth its second pass."""

TOGETHER = 320
"""Most tokens of documents computed together, padding included: rows compute scores of all
keys of each other, which from here on costs more than fewer passes save."""

STATES = 64
"""Most rows of a level of documents computed together: a recurrent layer keeps a state for each,
a mebibyte if it is 16 heads of 128 · 128 float32 numbers. Eight fields of five tokens reach
`TOGETHER` before. Measured with fields of one or two, on a CPU: 5 to 37 % slower, with a quarter
to a half of the memory."""

Run = Callable[[list[Any], Sequence[Tokens]], np.ndarray]
"""Caches and rows in, logits (B, K) at the last token of each out."""

Advance = Callable[[list[Any], Sequence[Tokens]], None]
"""Caches and rows in; the caches hold the rows then, and no logits are computed."""


@dataclass(frozen=True, slots=True)
class Level:
    """Rows of one pass.

    Attributes:
        rows: For each of B rows the tokens that it adds, one or more.
        owners: For each row the one of the level before that it goes on from; empty on the
            first level, where all go on from the prefix.
        places: For each row where its logits stand among those of all levels, None for a
            row that is there to be gone on from only.
    """

    rows: tuple[Tokens, ...]
    owners: tuple[int, ...]
    places: tuple[int | None, ...]

    @property
    def packed(self) -> int:
        """B·N, the rows with their padding."""
        return len(self.rows) * max(map(len, self.rows))


def run_levels(
    run: Run, prefix: Prefix, levels: Sequence[Level], advance: Advance | None = None
) -> np.ndarray:
    """Compute rows that go on from a prefix and from each other.

    Args:
        run: Runs the model.
        prefix: Evaluated caches of at least one token; they stay unchanged.
        levels: The rows. Their places are all numbers from 0 to R - 1.
        advance: Runs the model without its head, for levels of which nothing is read;
            without it, `run` does.

    Returns:
        (R, K) logits by place.

    Raises:
        UnmaskedError: The model does not attend with the mask of its caches, or has
            caches that rows cannot go on from.
    """
    caches: list[Any] = []
    found: dict[int, np.ndarray] = {}
    for number, level in enumerate(levels):
        lengths = [len(row) for row in level.rows]
        ends = number + 1 < len(levels)
        caches = (
            pack_twigs(caches, lengths, level.owners, ends=ends)
            if number
            else pack(prefix, lengths, ends=ends)
        )
        if advance is not None and all(place is None for place in level.places):
            advance(caches, level.rows)
            continue
        logits = run(caches, level.rows)
        found |= {
            place: row for place, row in zip(level.places, logits, strict=True) if place is not None
        }
    return np.stack([found[place] for place in range(len(found))])


def mask_bytes(held: int, levels: Sequence[Level]) -> int:
    """Return the bytes of the largest mask of some levels, padding counted in.

    Args:
        held: Tokens of their prefix, T.
        levels: The rows.
    """
    behind = accumulate(level.packed for level in levels)
    return max(level.packed * (held + keys) for level, keys in zip(levels, behind, strict=True))


def at_once(documents: Sequence[Sequence[Tokens]], held: int) -> int:
    """Return how many documents, from the first on, are faster together than one by one.

    Args:
        documents: As for `plant`, one or more; those of like length stand best side by side.
        held: Tokens of the prefix of all of them, T.
    """
    for count in range(2, len(documents) + 1):
        levels = plant(documents[:count])
        if levels is None or sum(level.packed for level in levels) > TOGETHER:
            return count - 1
        if mask_bytes(held, levels) > MASK_LIMIT_BYTES:
            return count - 1
        if max(len(level.rows) for level in levels) > STATES:
            return count - 1
    return len(documents)


def as_levels(suffixes: Sequence[Tokens], held: int) -> list[Level] | None:
    """Return rows as stems and twigs, None where that computes not much less.

    Args:
        suffixes: Tokens of each row.
        held: Tokens of their prefix, T.
    """
    levels = _nested(suffixes)
    if len(levels) < 2 or len(levels[0].rows) < 2:
        return None
    packed = sum(level.packed for level in levels)
    width = max(map(len, suffixes))
    tree, flat = packed * (held + packed), len(suffixes) * width * (held + width)
    if tree > MASK_LIMIT_BYTES or tree * TREE_GAIN > flat:
        return None
    return levels


def plant(documents: Sequence[Sequence[Tokens]], *, twigs: bool = False) -> list[Level] | None:
    """Return the rows of several documents as levels: what those of one share, and the rest.

    Places count all rows, document by document.

    Args:
        documents: For each document the tokens of its rows behind the prefix of all of them.
        twigs: Whether rows that begin with another one of their document go on from it.

    Returns:
        Two levels, or three with twigs; one for documents of one row each; None where the rows
        of a document share nothing.
    """
    if all(len(rows) == 1 for rows in documents):
        return [Level(tuple(row for (row,) in documents), (), tuple(range(len(documents))))]
    cuts = [common_prefix(rows) for rows in documents]
    if 0 in cuts:
        return None
    stems = tuple(rows[0][:cut] for rows, cut in zip(documents, cuts, strict=True))
    # For each level behind the documents its rows, the rows they go on from, their places.
    behind: list[Level] = [Level((), (), ())]
    first = 0
    for number, (rows, cut) in enumerate(zip(documents, cuts, strict=True)):
        suffixes = [row[cut:] for row in rows]
        start = len(behind[0].rows)
        fields, *labels = _nested(suffixes) if twigs else [_apart(suffixes)]
        behind[0] = _joined(behind[0], fields, (number,) * len(fields.rows), first)
        for each in labels:
            behind[1:] = behind[1:] or [Level((), (), ())]
            behind[1] = _joined(behind[1], each, [start + owner for owner in each.owners], first)
        first += len(rows)
    return [Level(stems, (), (None,) * len(stems)), *behind]


def _apart(suffixes: Sequence[Tokens]) -> Level:
    return Level(tuple(suffixes), (), tuple(range(len(suffixes))))


def _nested(suffixes: Sequence[Tokens]) -> list[Level]:
    """Return rows that begin with no other one, and if there are any, the rest behind them."""
    stems: list[int] = []
    owners: dict[int, int] = {}
    # In this order a stem stands just before all that begins with it.
    for each in sorted(range(len(suffixes)), key=lambda each: suffixes[each]):
        stem = suffixes[stems[-1]] if stems else None
        if stem is not None and suffixes[each][: len(stem)] == stem and suffixes[each] != stem:
            owners[each] = len(stems) - 1
        else:
            stems.append(each)
    levels = [Level(tuple(suffixes[each] for each in stems), (), tuple(stems))]
    if owners:
        rest = tuple(
            suffixes[each][len(suffixes[stems[owner]]) :] for each, owner in owners.items()
        )
        levels.append(Level(rest, tuple(owners.values()), tuple(owners)))
    return levels


def _joined(level: Level, more: Level, owners: Sequence[int], first: int) -> Level:
    places = (None if place is None else first + place for place in more.places)
    return Level(level.rows + more.rows, (*level.owners, *owners), (*level.places, *places))
