"""What is asked of an engine, and what it took: plain values, without MLX."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

Tokens = tuple[int, ...]


class Mode(StrEnum):
    """How the rows of a document are computed. The tokens are the same in all."""

    AUTO = "auto"
    PARALLEL = "parallel"
    CACHED_SERIAL = "cached_serial"
    INDEPENDENT = "independent"


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt whose next token is asked for.

    Attributes:
        tokens: The whole prompt, T tokens.
        candidates: The K tokens allowed next.
    """

    tokens: Tokens
    candidates: Tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, tokens and bytes of the rows of one or more documents.

    Attributes:
        mode: How the rows were computed, never `auto` once something was.
        prefill_seconds: Computing shared prefixes.
        branch_seconds: Computing suffixes and candidate logits.
        total_seconds: All work for the document, tokenization and reading included; of passes
            that documents share, its part by tokens.
        prefix_tokens: Tokens of shared prefixes that were computed.
        suffix_tokens: Tokens of suffixes that were computed, without padding.
        resident_tokens: Prefix tokens taken from a resident prefix instead.
        resident_hits: How often a resident prefix was taken.
        prefills: Number of prefill passes.
        start_bytes: Bytes MLX held before.
        peak_bytes: Most bytes MLX held meanwhile.
    """

    mode: Mode = Mode.AUTO
    prefill_seconds: float = 0.0
    branch_seconds: float = 0.0
    total_seconds: float = 0.0
    prefix_tokens: int = 0
    suffix_tokens: int = 0
    resident_tokens: int = 0
    resident_hits: int = 0
    prefills: int = 0
    start_bytes: int = 0
    peak_bytes: int = 0

    def __add__(self, other: "Timings") -> "Timings":
        """Add seconds and tokens; keep the first mode and start and the highest peak."""
        return Timings(
            mode=self.mode if self.mode is not Mode.AUTO else other.mode,
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            branch_seconds=self.branch_seconds + other.branch_seconds,
            total_seconds=self.total_seconds + other.total_seconds,
            prefix_tokens=self.prefix_tokens + other.prefix_tokens,
            suffix_tokens=self.suffix_tokens + other.suffix_tokens,
            resident_tokens=self.resident_tokens + other.resident_tokens,
            resident_hits=self.resident_hits + other.resident_hits,
            prefills=self.prefills + other.prefills,
            start_bytes=self.start_bytes or other.start_bytes,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
        )


Scored = tuple[list[np.ndarray], Timings]
"""The logits of the rows of a document, (K,) each, and what they took."""


class Asked(Protocol):
    """The rows of a document, as an engine is given them."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """One prompt for each field, or several for its labels."""
        ...

    @property
    def resident_tokens(self) -> int:
        """Leading tokens that later documents will share too; 0 for none."""
        ...


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
