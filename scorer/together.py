"""Which documents are computed together, and what each of them took.

Documents behind the same resident prefix may share the passes of a model: sorted by length,
so that little is padding, and up to a budget of tokens, beyond which they only compute scores
of each other's keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weighbridge.scorer.rows import Asked, Timings, Tokens, common_prefix
from weighbridge.scorer.trie import MASK_LIMIT_BYTES


@dataclass(frozen=True)
class Tail:
    """What stands behind the resident prefix in the rows of a document.

    Attributes:
        place: The document's place among those of its batch.
        resident: The tokens of the prefix.
        rows: The tokens of each row behind it.
    """

    place: int
    resident: Tokens
    rows: tuple[Tokens, ...]

    @cached_property
    def shared(self) -> int:
        """Tokens that all rows share behind the prefix."""
        return common_prefix(self.rows)

    @property
    def behind(self) -> int:
        """Tokens of the rows behind those they share."""
        return sum(map(len, self.rows)) - len(self.rows) * self.shared

    @property
    def size(self) -> int:
        """Tokens to compute, padding left out."""
        return self.shared + self.behind


def tails(documents: Sequence[Asked]) -> list[list[Tail]]:
    """Return the documents behind each resident prefix, shortest first.

    Those without one are left out, and those with a row that does not go on behind it.
    """
    found: dict[Tokens, list[Tail]] = {}
    for place, document in enumerate(documents):
        held = document.resident_tokens
        if held and document.rows:
            resident = document.rows[0].tokens[:held]
            rows = tuple(row.tokens[held:] for row in document.rows)
            if all(rows) and all(row.tokens[:held] == resident for row in document.rows):
                found.setdefault(resident, []).append(Tail(place, resident, rows))
    return [sorted(each, key=lambda tail: tail.size) for each in found.values()]


def within(some: Sequence[Tail], budget: int) -> int:
    """Return how many documents, from the first on and at least one, are within a budget.

    The mask of their pass is bounded too: behind a long prefix it is what counts.
    """
    total, count = 0, 0
    for tail in some:
        total += tail.size
        masked = total * (len(tail.resident) + total)
        if count and (total > budget or masked > MASK_LIMIT_BYTES):
            break
        count += 1
    return count


def parts(some: Sequence[Tail], whole: Timings) -> list[Timings]:
    """Divide what documents took together, by their tokens.

    Args:
        some: The documents.
        whole: Seconds and bytes of all; `total_seconds` are those of the passes, which
            computed shared tokens and others alike.
    """
    size = sum(tail.size for tail in some)
    held = len(some[0].resident)
    second = whole.total_seconds / size
    taken: list[Timings] = []
    for number, tail in enumerate(some):
        taken.append(
            replace(
                whole,
                prefill_seconds=tail.shared * second + (0 if number else whole.prefill_seconds),
                branch_seconds=tail.behind * second,
                total_seconds=0.0,
                prefix_tokens=tail.shared + (0 if number else whole.prefix_tokens),
                suffix_tokens=tail.behind,
                resident_tokens=held if number or whole.resident_hits else 0,
                resident_hits=1 if number else whole.resident_hits,
                prefills=0 if number else whole.prefills,
            )
        )
    return taken
