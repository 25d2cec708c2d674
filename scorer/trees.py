"""Rows that go on from other rows, computed level by level.

The labels of a field begin with its question, and the fields of a document with the document.
So each token is computed once: a pass for all documents, a pass for all their fields, and
one for their labels, instead of two for each document. Needs caches that rows can go on from
(`branching.pack_twigs`), and a model for which `trials.try_packed` has found that right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from weighbridge.scorer.branching import MASK_LIMIT_BYTES, pack, pack_twigs
from weighbridge.scorer.caches import Prefix

TREE_GAIN = 1.5
"""How much less attention a tree of rows must compute to be worth its second pass."""

Tokens = tuple[int, ...]

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


def grow(suffixes: Sequence[Tokens], held: int) -> list[Level] | None:
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
    """Return the rows of several documents as levels: what a document's share, and the rest.

    Places count all rows, document by document.

    Args:
        documents: For each document the tokens of its rows behind the prefix of all of them.
        twigs: Whether rows that begin with another one of their document go on from it.

    Returns:
        Two levels, or three with twigs; None where the rows of a document share nothing.
    """
    shared: list[Tokens] = []
    parts: list[list[Level]] = []
    first = 0
    for rows in documents:
        cut = common_prefix(rows)
        if cut == 0:
            return None
        shared.append(rows[0][:cut])
        suffixes = [row[cut:] for row in rows]
        nested = _nested(suffixes) if twigs else [_apart(suffixes)]
        parts.append([_moved(level, first) for level in nested])
        first += len(rows)
    stems = Level(tuple(shared), (), (None,) * len(shared))
    fields = [part[0] for part in parts]
    owners = [(number,) * len(field.rows) for number, field in enumerate(fields)]
    levels = [stems, _joined([replace(f, owners=o) for f, o in zip(fields, owners, strict=True)])]
    if any(len(part) > 1 for part in parts):
        starts = accumulate((len(field.rows) for field in fields), initial=0)
        labels = [
            replace(part[1], owners=tuple(start + owner for owner in part[1].owners))
            for part, start in zip(parts, starts, strict=False)
            if len(part) > 1
        ]
        levels.append(_joined(labels))
    return levels


def common_prefix(rows: Sequence[Tokens]) -> int:
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


def _moved(level: Level, first: int) -> Level:
    places = tuple(None if place is None else place + first for place in level.places)
    return replace(level, places=places)


def _joined(levels: Sequence[Level]) -> Level:
    return Level(
        tuple(row for level in levels for row in level.rows),
        tuple(owner for level in levels for owner in level.owners),
        tuple(place for level in levels for place in level.places),
    )
