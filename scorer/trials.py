"""Whether packed branches, rows that go on from others, and one pass are right on a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from weighbridge.scorer.backend import PROBE_TOLERANCE
from weighbridge.scorer.branching import FAILURES, pack, packed_dtype
from weighbridge.scorer.caches import Prefix, arrays, fork
from weighbridge.scorer.heads import at_least_float32, relative_difference
from weighbridge.scorer.one_pass import Read, run_trie
from weighbridge.scorer.rows import Tokens
from weighbridge.scorer.trees import Level, Run, run_levels
from weighbridge.scorer.trie import grow


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a way to compute rows on a model.

    Attributes:
        packs: Whether packed branches are right.
        trees: Whether rows may go on from others.
        passes: Whether one pass over all that is behind a prefix is right.
        difference: How far off is what is right, relative to the spread of the logits.
        reason: Why something is not.
    """

    packs: bool = False
    trees: bool = False
    passes: bool = False
    difference: float = 0.0
    reason: str = ""


def try_packed(run: Run, prefix: Prefix, forked: float) -> Trial:
    """Compare packed branches, and trees of rows, with forked ones on a model.

    Args:
        run: Runs the model.
        prefix: Some tokens, eight or more.
        forked: How far forked branches are from whole prompts.
    """
    allowed = _allowed(prefix)
    if not forked <= allowed:
        return Trial(reason="forked branches differ from whole prompts")
    one, two, *rest = prefix.tokens[:8]
    # Three rows, of several tokens and of one, for which models have ways of their own.
    rows = [(one,), (two, *rest[:2]), (one, *rest, two)]
    packs, worst, reason = True, 0.0, ""
    if packed_dtype(prefix) is None:
        packs, reason = False, "no layer keeps keys and values by token"
    for suffixes in (rows, [(one,), (two,), (rest[0],)]) if packs else ():
        caches = pack(prefix, [len(each) for each in suffixes])
        apart, reason = _apart(
            lambda caches=caches, suffixes=suffixes: run(caches, suffixes),
            run(fork(prefix, len(suffixes)), suffixes),
        )
        if not apart <= allowed:
            return Trial(reason=reason or f"packed branches differ by {apart:.2g} (relative)")
        worst = max(worst, apart)
    levels, suffixes = _tree(rows)
    reference = run(fork(prefix, len(suffixes)), suffixes)
    apart, _ = _apart(lambda: run_levels(run, prefix, levels), reference)
    # Logits may hide a lost state from the tolerance of 16 bits; the state itself does not.
    trees = apart <= allowed and _states_apart(run, prefix, rows) <= allowed
    return Trial(packs, trees, difference=max(worst, apart) if trees else worst, reason=reason)


def try_one_pass(read: Read, prefix: Prefix, forked: float) -> Trial:
    """Compare one pass over several documents with forked rows on a model.

    Args:
        read: Runs the model.
        prefix: Some tokens, eight or more.
        forked: How far forked branches are from whole prompts.
    """
    if packed_dtype(prefix) is None:
        return Trial(reason="no layer keeps keys and values by token")
    allowed = _allowed(prefix)
    if not forked <= allowed:
        return Trial(reason="forked branches differ from whole prompts")
    one, two, *text = prefix.tokens[:8]
    # Three documents, two of which begin alike, and one is a single token; labels behind a
    # field that is read itself, of which one begins with another; a row twice.
    documents = [(one, *text), (one, *text[:2], two), (two,)]
    rows = [(*start, *field) for start in documents for field in ((two, one), tuple(text[:3]))]
    rows += [(*rows[3], *label) for label in ((), (one,), (one, two), (two, *text[:2]))]
    padded = mx.array([row + (0,) * (max(map(len, rows)) - len(row)) for row in rows])
    reference = read(padded, fork(prefix, len(rows)), [len(row) - 1 for row in rows])
    trie, worst = grow(rows), 0.0
    for width in (1, 4):
        # It may fail over recurrent states, own masks, positions that must be one number.
        apart, reason = _apart(lambda width=width: run_trie(read, prefix, trie, width), reference)
        if not apart <= allowed:
            return Trial(reason=reason or f"one pass differs by {apart:.2g} (relative)")
        worst = max(worst, apart)
    return Trial(passes=True, difference=worst)


def _tree(stems: Sequence[Tokens]) -> tuple[list[Level], list[Tokens]]:
    """Return three levels, and whole suffixes by place.

    Rows of unequal length, shorter and longer than a convolution, are gone on from in another
    order than theirs and more than once; then all by one token, as labels are.
    """
    one, three, eight = stems
    twigs = [(three[0],), eight[:2], eight[1:6], (three[1],)]
    owners = (2, 1, 0, 2)
    ends = [(three[2],), (one[0],), (three[1],)]
    levels = [
        Level(tuple(stems), (), (0, 1, 2)),
        Level(tuple(twigs), owners, (3, 4, 5, 6)),
        Level(tuple(ends), (2, 0, 2), (7, 8, 9)),
    ]
    grown = [(*stems[owner], *twig) for owner, twig in zip(owners, twigs, strict=True)]
    whole = [(*grown[owner], *end) for owner, end in zip((2, 0, 2), ends, strict=True)]
    return levels, [*stems, *grown, *whole]


def _states_apart(run: Run, prefix: Prefix, rows: Sequence[Tokens]) -> float:
    """Return how far recurrent states at the end of padded rows are from those of rows alone."""
    padded = pack(prefix, [len(row) for row in rows], ends=True)
    run(padded, rows)
    worst = 0.0
    for index, row in enumerate(rows):
        alone = fork(prefix)
        run(alone, [row])
        for found, right in zip(_states(padded), _states(alone), strict=True):
            worst = max(worst, relative_difference(found[index], right[0]))
    return worst


def _states(caches: Sequence[Any]) -> list[np.ndarray]:
    recurrent = tuple(cache for cache in caches if type(cache) is ArraysCache)
    # Lengths and left padding, of one axis, are none.
    states = [array for array in arrays(recurrent) if array.ndim > 1]
    return [np.array(at_least_float32(array)) for array in states]


def _apart(compute: Callable[[], np.ndarray], reference: np.ndarray) -> tuple[float, str]:
    """Return how far something is off, infinitely where it fails or is no number, and why."""
    try:
        found = compute()
    except FAILURES as error:
        return float("inf"), f"{type(error).__name__}: {error}"
    if not np.isfinite(found).all():
        return float("inf"), ""
    return relative_difference(found, reference), ""


def _allowed(prefix: Prefix) -> float:
    """Return the tolerance of the coarsest numbers in the caches of a prefix."""
    names = {str(array.dtype).removeprefix("mlx.core.") for array in arrays(prefix.caches)}
    return max((PROBE_TOLERANCE[name] for name in names & {*PROBE_TOLERANCE}), default=0.0)
