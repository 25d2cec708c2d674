"""Averaging over orders of the choices, and how often the order alone decides the answer.

A small model prefers what stands first or last, and in `codes` one letter to another.
Asked in several orders, such a preference falls on another choice each time: it cancels
in the mean, and where it was stronger than the document the orders disagree.

Cyclic orders as in Zheng et al., "Large Language Models Are Not Robust Multiple Choice
Selectors" (2024). Different from it: logits are averaged instead of probabilities, so
that any temperature can be applied afterwards, and fewer orders than choices are
allowed. `Schema.in_order` says which orders those are.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_PERMUTATIONS = 32


@dataclass(frozen=True, slots=True)
class Averaged:
    """What several orders say together about one field.

    Attributes:
        logits: One per choice, in the schema's own order.
        flip_rate: Share of the rotations whose own most likely choice is another one
            than that of `logits`; None for a single order or a single choice.
    """

    logits: tuple[float, ...]
    flip_rate: float | None


def average_orders(said: Sequence[Mapping[str, float]]) -> Averaged:
    """Average the logits of a field by the name of the choice.

    Each rotation of the field counts alike: of three orders a field of two choices has
    one rotation twice, and a preference for the first place would not cancel otherwise.
    A single order is given back bit for bit. Of equal logits the choice that comes first
    in the schema counts, whatever the order it was asked in.

    Args:
        said: For each order the finite logit of every choice by its key, in the order
            they were shown. The first one is the schema's own order.
    """
    own, *others = said
    if not others:
        return Averaged(tuple(own.values()), None)
    rotations: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
    for logits in said:
        rotations[next(iter(logits))].append(logits)
    # Rounded once, so that the mean does not depend on which order came first.
    mean = {
        key: _mean(_mean(logits[key] for logits in alike) for alike in rotations.values())
        for key in own
    }
    answer = _most_likely(own, mean)
    flips = _mean(
        _mean(float(_most_likely(own, logits) != answer) for logits in alike)
        for alike in rotations.values()
    )
    return Averaged(tuple(mean.values()), flips if len(own) > 1 else None)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def _most_likely(keys: Mapping[str, float], logits: Mapping[str, float]) -> str:
    return max(keys, key=logits.__getitem__)
