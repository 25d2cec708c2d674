"""What a run shows in the Prefect UI: progress, a summary, rejected codes, the outcome.

Keys go by schema, so that the UI shows a history for each; what belongs to one run is
found by its flow run. Nothing of a document enters.
"""

import platform
import re
import time
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from weighbridge.db.queries import (
    answer_distribution,
    rejected_codes,
    run_details,
    run_fields,
)
from weighbridge.db.records import RunSummary
from weighbridge.flows.stages import Stages
from weighbridge.flows.summary import Facts, documents, summary_markdown
from weighbridge.tasks.recording import Run

What = Literal["progress", "summary", "rejected", "outcome"]

UPDATE_SECONDS = 1.0
"""Progress is sent so often at most: each time takes the server longer than a small batch."""

OUTCOME_KEYS = (
    *("run_id", "documents", "scored", "reused", "rejected", "wasted"),
    *("seconds", "documents_per_second", "database"),
)
"""Columns of the outcome's only row: numbers of `score --json`, and where the answers are."""

_MAX_SLUG = 60
_NAMELESS = "schema"


def artifact_key(schema: str, what: What) -> str:
    """Return the key under which the UI gathers such artifacts of a schema's runs.

    A key holds a-z, 0-9 and dashes only. Schemas whose names differ in nothing else share
    their keys, and with them the history that the UI shows; each artifact still names its
    run and schema.
    """
    # Accents go, letters stay: `Qualität` becomes `qualitat`.
    letters = unicodedata.normalize("NFKD", schema).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", letters)[:_MAX_SLUG].strip("-")
    return f"weighbridge-{slug or _NAMELESS}-{what}"


class ProgressArtifact:
    """The live progress of a run.

    Args:
        schema: What people call its schema.
        run_id: The run.
        total: Its records in all.
        done: Those recorded already, by an earlier attempt.
    """

    def __init__(self, schema: str, run_id: int, total: int, done: int = 0) -> None:
        self._run_id = run_id
        self._total = total
        self._updated = -UPDATE_SECONDS
        artifact = create_progress_artifact(
            progress=self._percent(done),
            key=artifact_key(schema, "progress"),
            description=self._words(done),
        )
        # Prefect types it for asynchronous flows as well; in a sync flow it is the id.
        self._artifact = cast("UUID", artifact)

    def update(self, done: int) -> None:
        """Show that so many records are recorded; not more often than anybody looks."""
        now = time.monotonic()
        if done < self._total and now - self._updated < UPDATE_SECONDS:
            return
        self._updated = now
        update_progress_artifact(
            self._artifact, progress=self._percent(done), description=self._words(done)
        )

    def _percent(self, done: int) -> float:
        # A source that grows meanwhile fails the run at its end, not its progress.
        return min(100.0 * done / self._total, 100.0) if self._total else 100.0

    def _words(self, done: int) -> str:
        return f"run {self._run_id}: {done:,} of {documents(self._total)}"


def publish_summary(
    run: Run,
    schema: str,
    flip_rate: float | None,
    *,
    stages: Stages,
    store: Path | None = None,
    output: str | None = None,
) -> RunSummary:
    """Publish the summary of a run and, if there are any, its rejected codes.

    Args:
        run: The run.
        schema: What people call its schema.
        flip_rate: Mean over its answers, None for a single order of the choices.
        stages: Where this process's time went.
        store: The store's file, None for another database.
        output: The file that the answers were written to.
    """
    details = run_details(run.engine, run.run_id)
    summary = details.summary
    codes = rejected_codes(run.engine, run.run_id)
    facts = Facts(
        details,
        answer_distribution(run.engine, run.run_id),
        run_fields(run.engine, run.run_id),
        codes,
        flip_rate,
        stages=stages.seconds(),
        hidden=stages.hidden,
        store=None if store is None else str(store),
        output=output,
    )
    run.engine.dispose()
    create_markdown_artifact(
        key=artifact_key(schema, "summary"),
        markdown=summary_markdown(facts),
        description=f"run {summary.run_id}: answers and timings",
    )
    if codes:
        create_table_artifact(
            key=artifact_key(schema, "rejected"),
            table=[{"code": code, "documents": count} for code, count in codes.items()],
            description=f"run {summary.run_id}: why documents were rejected; "
            f"`weighbridge rejected {summary.run_id}` lists them",
        )
    return summary


def publish_outcome(schema: str, outcome: Mapping[str, Any], output: str | None) -> None:
    """Publish what became of the documents, for whoever waits for the run.

    Args:
        schema: What people call the run's schema.
        outcome: What the flow returns.
        output: The file that the answers were written to, None for none.
    """
    place = {"host": platform.node(), "output": output}
    create_table_artifact(
        key=artifact_key(schema, "outcome"),
        table=[{key: outcome[key] for key in OUTCOME_KEYS} | place],
        description=f"run {outcome['run_id']}: what became of the documents",
    )
