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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_PERMUTATIONS = 32


@dataclass(frozen=True, slots=True)
class Averaged:
    """What several orders say together about one field.

    Attributes:
        logits: One per choice, in the schema's own order.
        flip_rate: Share of the orders whose own most likely choice is another one than
            that of `logits`; None for a single order.
    """

    logits: tuple[float, ...]
    flip_rate: float | None


def average_orders(said: Sequence[Mapping[str, float]]) -> Averaged:
    """Average the logits of a field by the name of the choice.

    A single order is given back bit for bit. Of equal logits the choice that comes first
    in the schema counts, whatever the order it was asked in.

    Args:
        said: For each order the finite logit of every choice by its key. The first one
            is the schema's own order.
    """
    own, *others = said
    if not others:
        return Averaged(tuple(own.values()), None)
    # Rounded once, so that the mean does not depend on which order came first.
    mean = {key: math.fsum(logits[key] for logits in said) / len(said) for key in own}
    answer = _most_likely(own, mean)
    flips = sum(_most_likely(own, logits) != answer for logits in said)
    return Averaged(tuple(mean.values()), flips / len(said))


def _most_likely(keys: Mapping[str, float], logits: Mapping[str, float]) -> str:
    return max(keys, key=logits.__getitem__)
