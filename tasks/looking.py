"""Looking at documents before they are scored: their tokens, and what would be rejected.

Needs the tokenizer only, and holds one document at a time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from weighbridge.scorer.parallel_scorer import ParallelScorer
from weighbridge.scorer.preparing import measure
from weighbridge.scorer.schema import Schema
from weighbridge.tasks.sources import BadRecord, Document

_FIRST_IDS = 20


@dataclass(frozen=True, slots=True)
class Looked:
    """What a record would become.

    Attributes:
        record: The record.
        input_tokens: Tokens of its longest prompt; None where it makes no prompt.
        code: Why it would be rejected, None where it would not.
        message: The same in a sentence.
    """

    record: Document | BadRecord
    input_tokens: int | None
    code: str | None
    message: str | None


class TokenCounts:
    """How many documents have how many tokens: as large as the numbers differ, no larger."""

    def __init__(self) -> None:
        self._documents: Counter[int] = Counter()

    def add(self, tokens: int) -> None:
        """Count a document."""
        self._documents[tokens] += 1

    def over(self, limit: int) -> int:
        """Count the documents with more tokens than a limit."""
        return sum(count for tokens, count in self._documents.items() if tokens > limit)

    def percentile(self, percent: int) -> int | None:
        """Return the fewest tokens that so many percent of the documents do not exceed.

        Args:
            percent: 1 to 100; 50 is the median, of two middle ones the lower.

        Returns:
            The tokens of a real document, None when there is none.
        """
        needed = Fraction(percent * self._documents.total(), 100)
        below = 0
        for tokens, count in sorted(self._documents.items()):
            below += count
            if below >= needed:
                return tokens
        return None


class RepeatedIds:
    """Which ids come more than once: hashes of so many different ids are kept, and no more.

    Attributes:
        first: The first of them, each once.
        complete: Whether every id was compared with every other.
    """

    def __init__(self, most: int = 1_000_000) -> None:
        self._most = most
        self._seen: set[int] = set()
        self._repeated: set[int] = set()
        self.first: list[str] = []
        self.complete = True

    @property
    def count(self) -> int:
        """How many different ids come more than once."""
        return len(self._repeated)

    def add(self, external_id: str | None) -> None:
        """Take the id of a record, if it has one."""
        if external_id is None:
            return
        key = hash(external_id)  # 64 bits: of a million ids two clash once in 37 million files
        if key in self._seen:
            if key not in self._repeated:
                self._repeated.add(key)
                if len(self.first) < _FIRST_IDS:
                    self.first.append(external_id)
        elif len(self._seen) < self._most:
            self._seen.add(key)
        else:
            self.complete = False


def look_at(
    scorer: ParallelScorer, schema: Schema, records: Iterable[Document | BadRecord]
) -> Iterator[Looked]:
    """Say of each record what `score` would reject, in input order.

    Args:
        scorer: The scorer; its weights are not loaded.
        schema: The questions.
        records: What `read_documents` gives.
    """
    plans = scorer.plans(schema)
    for record in records:
        if isinstance(record, BadRecord):
            yield Looked(record, None, record.code, record.message)
            continue
        measured = measure(plans, record.text)
        refusal = measured.rejection
        yield Looked(
            record,
            measured.input_tokens,
            refusal.code if refusal else None,
            refusal.message if refusal else None,
        )
