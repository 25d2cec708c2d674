"""Which documents a run scores next: skip the decided, claim, cut into batches.

Knows the store, not the model. Holds a window of documents in memory at a time.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256

from weighbridge.db.errors import RecordRefused
from weighbridge.db.store import Store
from weighbridge.tasks.sources import BadRecord, Document
from weighbridge.tasks.stopping import check

logger = logging.getLogger(__name__)

WINDOW = 256
"""Records looked up in the store at once."""

FIRST_SIZE = 2
"""Small, so that progress shows at once; a quick machine soon has larger ones."""

MAX_BATCH = 256

MAX_FREE = 1000
"""Records that need no model and are recorded together at most."""

TARGET_SECONDS = 2.0
WAIT_SECONDS = 0.5


def text_sha256(text: str) -> str:
    """Hash the exact code points of a text, lone surrogates too: those are refused later."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Batch:
    """What is scored and recorded together.

    Attributes:
        to_score: One document for each distinct text that this run claimed.
        decided: Documents whose answers are in the store, or will be with this
            batch, because the same text is in `to_score`.
        bad: Records that are no documents.
        began_at: When the batch was made, UTC.
    """

    to_score: tuple[Document, ...]
    decided: tuple[Document, ...] = ()
    bad: tuple[BadRecord, ...] = ()
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts to score."""
        return tuple(document.text for document in self.to_score)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.to_score) + len(self.decided) + len(self.bad)


class BatchSizer:
    """Chooses batch sizes so that a batch takes about two seconds.

    Small enough that kill -9 loses little, large enough that Prefect and SQLite
    cost little beside it.

    Args:
        fixed: A size that always applies, None to adapt.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._size = fixed or FIRST_SIZE

    @property
    def size(self) -> int:
        """Documents of the next batch."""
        return self._size

    def observe(self, documents: int, seconds: float) -> None:
        """Take note of how long a batch took; at most doubles the size."""
        if self._fixed is None and documents and seconds > 0:
            wanted = round(documents * TARGET_SECONDS / seconds)
            self._size = max(1, min(wanted, 2 * self._size, MAX_BATCH))


@dataclass
class _Pending:
    """Records that wait for the next batch.

    `flying` are the texts of a batch that was given and may not be recorded yet; documents
    with such a text are `awaited` until it is.
    """

    to_score: dict[str, Document] = field(default_factory=dict[str, Document])
    decided: list[Document] = field(default_factory=list[Document])
    twins: list[Document] = field(default_factory=list[Document])
    bad: list[BadRecord] = field(default_factory=list[BadRecord])
    flying: frozenset[str] = frozenset()
    awaited: list[Document] = field(default_factory=list[Document])

    @property
    def free(self) -> int:
        """Records that need no model."""
        return len(self.decided) + len(self.twins) + len(self.bad)

    def add(self, document: Document, digest: str) -> None:
        """Add a document that needs scoring; a text already waiting is scored once."""
        if digest in self.flying:
            self.awaited.append(document)
        elif digest in self.to_score:
            self.twins.append(document)
        else:
            self.to_score[digest] = document


def plan_batches(
    store: Store,
    run_id: int,
    records: Iterable[Document | BadRecord],
    sizer: BatchSizer,
    *,
    ahead: bool = False,
) -> Iterator[Batch]:
    """Cut the records of a run into batches.

    A batch must be recorded before the next one is asked for, or, with `ahead`, before the
    one after the next: it is scored while the one before it is recorded. An empty batch
    then asks for nothing but that all before it be recorded, as what comes next hangs on it.

    Records that a run recorded before it was interrupted are skipped, if they are
    still the same. Texts that another live run is scoring right now wait until that
    run has decided them or lets go of them; each wait is logged once. How long a
    batch takes is measured from when it is given to when the next one is asked for; with
    `ahead` the caller tells the sizer.

    Args:
        store: The store of the run.
        run_id: The run.
        records: Its records, streamed.
        sizer: How large batches are.
        ahead: Whether a batch may be asked for before the one before it is recorded.

    Raises:
        RecordRefused: A recorded position now holds another text: skipping it would
            lose a document, and scoring it would give the position two.
        RunRefused: The run does not exist, is closed, or was taken over.
        Stopped: The run was asked to stop while another one had what is left.
    """
    for batch in _batches(store, run_id, records, sizer, ahead=ahead):
        given = time.perf_counter()
        yield batch
        if not ahead:
            sizer.observe(len(batch.to_score), time.perf_counter() - given)


def _batches(
    store: Store,
    run_id: int,
    records: Iterable[Document | BadRecord],
    sizer: BatchSizer,
    *,
    ahead: bool,
) -> Iterator[Batch]:
    pending = _Pending()
    deferred: dict[str, list[Document]] = {}
    waited_for: set[str] = set()

    def following() -> Iterator[Batch]:
        for batch in _next_batch(store, run_id, pending, sizer.size, deferred):
            yield batch
            _landed(store, run_id, pending)
            if ahead:
                pending.flying = frozenset(text_sha256(text) for text in batch.texts)

    def all_recorded() -> Iterator[Batch]:
        if pending.flying:
            yield Batch(())
            _landed(store, run_id, pending)

    for window in _windows(run_id, records, store.recorded_positions(run_id)):
        _sort_window(store, run_id, window, pending)
        while len(pending.to_score) >= sizer.size or pending.free >= MAX_FREE:
            yield from following()
        if sum(map(len, deferred.values())) >= WINDOW:
            # Two runs that each wait for what the other has in flight would wait for ever.
            yield from all_recorded()
            _retry_deferred(store, run_id, pending, deferred, waited_for)
    while pending.to_score or pending.free or deferred or pending.awaited:
        yield from following()
        if not pending.to_score and (deferred or pending.awaited):
            yield from all_recorded()
        if deferred and not pending.to_score:
            _retry_deferred(store, run_id, pending, deferred, waited_for)


def _landed(store: Store, run_id: int, pending: _Pending) -> None:
    """Take note that what was in flight is recorded, and look again at what awaited it."""
    pending.flying = frozenset()
    awaited, pending.awaited = pending.awaited, []
    if awaited:
        _sort_documents(store, run_id, awaited, pending)


def _windows(
    run_id: int, records: Iterable[Document | BadRecord], recorded: Mapping[int, str | None]
) -> Iterator[list[Document | BadRecord]]:
    window: list[Document | BadRecord] = []
    for record in records:
        if record.position in recorded:
            _require_same(run_id, record, recorded[record.position])
            continue
        window.append(record)
        if len(window) == WINDOW:
            yield window
            window = []
    if window:
        yield window


def _require_same(run_id: int, record: Document | BadRecord, recorded: str | None) -> None:
    digest = text_sha256(record.text) if isinstance(record, Document) else None
    if digest != recorded:
        line = "" if record.line is None else f" (line {record.line} of the source)"
        raise RecordRefused(
            f"a retry must find the text that run {run_id} recorded at position"
            f" {record.position}, got another{line}",
            hint="the source has changed since the run began: run it as a new run",
        )


def _sort_window(
    store: Store, run_id: int, window: list[Document | BadRecord], pending: _Pending
) -> None:
    pending.bad += [record for record in window if isinstance(record, BadRecord)]
    documents = [record for record in window if isinstance(record, Document)]
    _sort_documents(store, run_id, documents, pending)


def _sort_documents(
    store: Store, run_id: int, documents: list[Document], pending: _Pending
) -> None:
    digests = [text_sha256(document.text) for document in documents]
    decided = store.decided(run_id, digests)
    for document, digest in zip(documents, digests, strict=True):
        if digest in decided:
            pending.decided.append(document)
        else:
            pending.add(document, digest)


def _next_batch(
    store: Store,
    run_id: int,
    pending: _Pending,
    size: int,
    deferred: dict[str, list[Document]],
) -> Iterator[Batch]:
    """Claim up to `size` texts and yield them with everything that needs no model."""
    chosen = dict(list(pending.to_score.items())[:size])
    granted = store.claim(run_id, list(chosen)) if chosen else set[str]()
    for digest, document in chosen.items():
        del pending.to_score[digest]
        if digest not in granted:
            deferred.setdefault(digest, []).append(document)
    twins, pending.twins = pending.twins, []
    decided, pending.decided = pending.decided, []
    for twin in twins:
        digest = text_sha256(twin.text)
        if digest in granted:
            decided.append(twin)
        elif digest in deferred:
            deferred[digest].append(twin)
        else:
            pending.twins.append(twin)
    bad, pending.bad = pending.bad, []
    to_score = tuple(document for digest, document in chosen.items() if digest in granted)
    if to_score or decided or bad:
        yield Batch(to_score=to_score, decided=tuple(decided), bad=tuple(bad))


def _retry_deferred(
    store: Store,
    run_id: int,
    pending: _Pending,
    deferred: dict[str, list[Document]],
    waited_for: set[str],
) -> None:
    """Wait a moment, then look again at what another run was scoring.

    `waited_for` holds the texts of the last look, so that a wait is told once.
    """
    check()
    if not waited_for.issuperset(deferred):
        count = sum(map(len, deferred.values()))
        logger.info("waiting for %d documents that another run is scoring", count)
    waited_for.clear()
    waited_for.update(deferred)
    time.sleep(WAIT_SECONDS)
    decided = store.decided(run_id, list(deferred))
    for digest, documents in deferred.items():
        for document in documents:
            if digest in decided:
                pending.decided.append(document)
            else:
                pending.add(document, digest)
    deferred.clear()
