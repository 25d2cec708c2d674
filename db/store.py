"""The writing side: runs, claims and batches, each call one transaction."""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Engine, select

from weighbridge.db import tables
from weighbridge.db.claims import grant
from weighbridge.db.engine import reading, writing
from weighbridge.db.errors import RecordRefused
from weighbridge.db.recording import record
from weighbridge.db.records import (
    BatchOutcome,
    BatchRecord,
    FinalStatus,
    RunHandle,
    RunStart,
    RunSummary,
    require_recordable,
)
from weighbridge.db.run_queries import summarise
from weighbridge.db.run_rows import begin, close, count_items, decisions, open_run, sweep
from weighbridge.db.schema_views import ensure_schema_view

CLAIM_SECONDS: Final = 900.0
_ITEM = tables.table(tables.Item)
_DOCUMENT = tables.table(tables.Document)


def utc_now() -> datetime:
    """Give the present time in UTC."""
    return datetime.now(UTC)


class Store:
    """Writes to a store opened by `open_engine`.

    Several processes may write at once: each call is one transaction, committed before it
    returns. On SQLite it holds the write lock from its start, and waits for it if need be;
    on a database server transactions run side by side, and one that collides with another
    fails whole, as a StoreError. Calls may come from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        claim_seconds: float = CLAIM_SECONDS,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._engine = engine
        self._claim_time = timedelta(seconds=claim_seconds)
        self._clock = clock
        self._begun: dict[int, tuple[str, int]] = {}
        # Runs whose schema is known to have its view.
        self._viewed: set[int] = set()

    def begin_run(self, start: RunStart) -> RunHandle:
        """Begin a run, or continue the one that an earlier attempt of the flow run began.

        Runs of this host whose process is gone are closed as crashed first, and their
        claims given back.

        Raises:
            RecordRefused: The temperature is not finite and above 0.
            RunRefused: The retry differs in schema, checkpoint, way of asking, temperature,
                source or rescoring from what the run began with.
        """
        if not (math.isfinite(start.temperature) and start.temperature > 0):
            raise RecordRefused(
                f"temperature must be finite and above 0, got {start.temperature}",
                hint="1.0 leaves the logits as they are",
            )
        now = self._clock()
        with writing(self._engine) as connection:
            sweep(connection, start.host, now)
            run_id, continued = begin(connection, start, now)
        self._begun[run_id] = (start.host, start.pid)
        return RunHandle(run_id, continued)

    def recorded_positions(self, run_id: int) -> dict[int, str | None]:
        """Give the positions that a run has recorded, for a continued run to leave out.

        Returns:
            By position the hash of the document recorded there, so that a source that has
            changed can be told; None for a record that was rejected before it was one.
        """
        with reading(self._engine) as connection:
            statement = (
                select(_ITEM.c.position, _DOCUMENT.c.sha256)
                .outerjoin(_DOCUMENT, _DOCUMENT.c.id == _ITEM.c.document_id)
                .where(_ITEM.c.run_id == run_id)
            )
            rows = connection.execute(statement)
            return {row.position: row.sha256 for row in rows}

    def decided(self, run_id: int, document_sha256s: Sequence[str]) -> dict[str, int]:
        """Find the decisions that the run may reuse, by document hash.

        They are the newest generation under the run's key. For a run with `rescore` only
        its own count, so it scores every document once and its retry none again.

        Raises:
            RunRefused: The run does not exist or is closed.
        """
        with reading(self._engine) as connection:
            run = open_run(connection, run_id, self._begun.get(run_id))
            return decisions(connection, run, list(dict.fromkeys(document_sha256s)))

    def claim(self, run_id: int, document_sha256s: Sequence[str]) -> set[str]:
        """Claim documents before they are scored; give those that were granted.

        Not granted is what another live run has claimed, and what is decided by now: ask
        `decided` again for those, at once and then from time to time. Expired claims and
        those of dead processes of this host are taken over; own claims are renewed.

        Raises:
            RunRefused: The run does not exist, is closed, or was taken over.
        """
        now = self._clock()
        with writing(self._engine) as connection:
            return grant(
                connection,
                open_run(connection, run_id, self._begun.get(run_id)),
                list(dict.fromkeys(document_sha256s)),
                now=now,
                expires_at=now + self._claim_time,
            )

    def record_batch(self, run_id: int, batch: BatchRecord) -> BatchOutcome:
        """Commit a batch whole, with its probabilities at the run's temperature.

        A scored item whose document is decided by now (by another run, or earlier in the
        batch) becomes a reused one and counts as wasted. Positions the run has already
        are left as they are. The batch's claims are given back.

        Raises:
            RecordRefused: A value breaks what the store promises; nothing is recorded.
            RunRefused: The run does not exist, is closed, or was taken over.
        """
        require_recordable(batch)
        with writing(self._engine) as connection:
            run = open_run(connection, run_id, self._begun.get(run_id))
            outcome = record(connection, run, batch, self._clock())
            answered = bool(outcome.scored or outcome.reused) and run_id not in self._viewed
            if answered:
                ensure_schema_view(connection, run_id)
        if answered:
            self._viewed.add(run_id)
        return outcome

    def finish_run(
        self,
        run_id: int,
        status: FinalStatus,
        *,
        documents: int | None = None,
        message: str | None = None,
    ) -> RunSummary:
        """Close a run and give its claims back.

        Args:
            run_id: The run.
            status: How it ended.
            documents: How many records the source had. A completed run must have recorded
                exactly these; otherwise the number is not looked at.
            message: Why it ended so; no document text.

        Raises:
            RecordRefused: The accounting does not close; the run stays open.
            RunRefused: The run does not exist, is closed, or was taken over.
        """
        now = self._clock()
        with writing(self._engine) as connection:
            open_run(connection, run_id, self._begun.get(run_id))
            close(connection, [run_id], status, message, now)
            summary = summarise(connection, run_id)
            items = count_items(connection, run_id)
            recorded = {name: getattr(summary, name) for name in ("scored", "reused", "rejected")}
            if items != {name: count for name, count in recorded.items() if count}:
                raise RecordRefused(
                    f"run {run_id} must count its items, which are {items}, got {recorded}",
                    hint="rows were changed by hand, or this is our mistake: please report it",
                )
            if status == "completed" and documents is not None and documents != summary.documents:
                changed = summary.documents > documents
                raise RecordRefused(
                    f"a completed run must have recorded every document: {documents} came in,"
                    f" {summary.documents} are recorded",
                    hint="the source has changed since the run began: start a new run"
                    if changed
                    else "run again: what is recorded is not scored twice",
                )
        return summary
