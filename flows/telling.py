"""What a run tells people while it goes on: tags, log lines, and an event when much is rejected.

Ids, names and counts only: no line, tag or event holds anything of a document.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.runtime import flow_run

from weighbridge.db.errors import StoreError
from weighbridge.db.records import BatchOutcome, RunSummary
from weighbridge.flows.ahead import Scored
from weighbridge.flows.request import ScoreRequest
from weighbridge.flows.stages import Stages
from weighbridge.flows.summary import documents, plain
from weighbridge.flows.when import DateError, resolve_dates, scheduled_time
from weighbridge.scorer.errors import ScorerError
from weighbridge.scorer.results import Rejection, ScoreResult
from weighbridge.tasks.errors import SourceError, TaskError
from weighbridge.tasks.planning import Batch
from weighbridge.tasks.recording import Run

REJECTED_EVENT = "weighbridge.documents.rejected"
"""Emitted when more than the chosen share of a run's documents was rejected."""

_EXPECTED = (TaskError, ScorerError, StoreError)
_LOOK = "weighbridge validate, where the documents are, says what to do about them"
_MAX_TAG = 80


def run_name(request: ScoreRequest) -> str:
    """Name a flow run by its schema and the day it was scheduled for.

    A run that a sleeping machine did late, and a retry after midnight, have the day that
    the dates in their paths have.
    """
    day = scheduled_time(request.timezone)
    label = request.schema_label
    # What is no date in a path is told when the request is resolved, not by a name.
    with suppress(DateError):
        label = resolve_dates(label, day)
    return f"score-{plain(label)}-{day:%Y-%m-%d}"


def tag_run(schema: str, checkpoint: str) -> None:
    """Tag the flow run with its schema and checkpoint, beside the tags it has.

    Args:
        schema: What people call the schema.
        checkpoint: The checkpoint's name.
    """
    run_id = flow_run.id
    if run_id is None:
        return
    ours = [_tag("checkpoint", checkpoint), _tag("schema", schema)]
    with get_client(sync_client=True) as client:
        # Read again: tags may have been added in the UI since the run was made.
        tags = client.read_flow_run(UUID(run_id)).tags
        if missing := [tag for tag in ours if tag not in tags]:
            client.update_flow_run(UUID(run_id), tags=[*tags, *missing])


def _tag(name: str, value: str) -> str:
    return f"{name}:{plain(value, _MAX_TAG - len(name) - 1)}"


@contextmanager
def errors_told() -> Generator[None]:
    """Log what went wrong and what to do about it, before Prefect logs the traceback.

    Only for errors that a person can mend; all errors go on as they are.
    """
    try:
        yield
    except _EXPECTED as error:
        # The hint about a source may quote its columns, and with them, where a header is
        # missing, a document.
        hint = _LOOK if isinstance(error, SourceError) else error.hint
        get_run_logger().error("%s%s", error.message, f"\nhint: {hint}" if hint else "")
        raise


@dataclass
class RunTold:
    """The log of a run.

    Attributes:
        run: The run.
        total: Its records in all.
        done: Those that are recorded.
        stages: Where its time goes.
    """

    run: Run
    total: int
    done: int = 0
    stages: Stages = field(default_factory=Stages)
    _batches: int = 0
    _resident: bool = field(init=False)

    def __post_init__(self) -> None:
        self._resident = self.run.scorer.model_loaded

    def begin(self, schema: str) -> None:
        """Tell which run this is, and what it will do."""
        goes_on = f", {self.done:,} of them recorded already" if self.run.continued else ""
        get_run_logger().info(
            "run %d%s: %s%s, schema %s, checkpoint %s",
            self.run.run_id,
            " continues" if self.run.continued else "",
            documents(self.total),
            goes_on,
            plain(schema),
            plain(self.run.scorer.info.name),
        )
        if self._resident:
            get_run_logger().info("the model is in memory already: %s", self.run.scorer.backend)

    def scored(self, scored: Scored) -> None:
        """Take note of when a batch was scored, before it is recorded."""
        if not scored.ended:
            return
        loading = 0.0
        if not self._resident and self.run.scorer.model_loaded:
            self._resident = True
            loading = self.run.scorer.load_seconds
        self.stages.scored(scored.began, scored.ended, scored.results, loading)

    def batch(
        self, batch: Batch, results: Sequence[ScoreResult | Rejection], outcome: BatchOutcome
    ) -> None:
        """Tell of a recorded batch, in a line, and warn of what it rejected."""
        self._batches += 1
        self.done += outcome.documents
        logger = get_run_logger()
        parts: list[str] = []
        if outcome.scored:
            parts.append(_scored(outcome.scored, results))
        parts += [
            f"{count:,} {word}"
            for count, word in ((outcome.reused, "reused"), (outcome.rejected, "rejected"))
            if count
        ]
        logger.info(
            "batch %d: %s; %s of %s done",
            self._batches,
            ", ".join(parts),
            f"{self.done:,}",
            documents(self.total),
        )
        if outcome.rejected:
            codes = {record.code for record in batch.bad} | {
                result.code for result in results if isinstance(result, Rejection)
            }
            logger.warning(
                "%s rejected (%s); to see which: weighbridge rejected %d",
                documents(outcome.rejected),
                ", ".join(sorted(codes)),
                self.run.run_id,
            )

    def end(self, summary: RunSummary) -> None:
        """Tell how the run ended."""
        rate = summary.documents / summary.seconds if summary.seconds else 0.0
        get_run_logger().info(
            "run %d is %s: %s, %s scored, %s reused, %s rejected in %s s (%s documents/s)",
            summary.run_id,
            summary.status,
            documents(summary.documents),
            *(f"{count:,}" for count in (summary.scored, summary.reused, summary.rejected)),
            f"{summary.seconds:,.1f}",
            f"{rate:,.1f}",
        )
        get_run_logger().info("where the time went: %s", self.stages)


def emit_rejected(summary: RunSummary, alert_share: float) -> bool:
    """Emit an event if more than this share of a run's documents was rejected.

    Args:
        summary: The finished run.
        alert_share: 0 to 1; a run that rejected exactly so much is no reason.

    Returns:
        Whether the event was emitted.
    """
    if not summary.documents or summary.rejected / summary.documents <= alert_share:
        return False
    share = summary.rejected / summary.documents
    emit_event(
        REJECTED_EVENT,
        resource={
            "prefect.resource.id": f"weighbridge.run.{flow_run.id}",
            "prefect.resource.name": str(flow_run.name),
        },
        payload={
            "run_id": summary.run_id,
            "documents": summary.documents,
            "rejected": summary.rejected,
            "share": round(share, 4),
            "alert_share": alert_share,
        },
    )
    get_run_logger().warning(
        "%s of the documents were rejected, more than the %s that raise an alert",
        f"{share:.0%}",
        f"{alert_share:.0%}",
    )
    return True


def _scored(count: int, results: Sequence[ScoreResult | Rejection]) -> str:
    seconds = _scoring_seconds(results)
    timings = [result.timings for result in results if isinstance(result, ScoreResult)]
    tokens = sum(timing.prefix_tokens + timing.suffix_tokens for timing in timings)
    rate = f"{len(timings) / seconds:,.1f} documents/s, " if seconds else ""
    return f"{count:,} scored in {seconds:,.2f} s ({rate}{tokens:,} prompt tokens)"


def _scoring_seconds(results: Sequence[ScoreResult | Rejection]) -> float:
    return sum(each.timings.total_seconds for each in results if isinstance(each, ScoreResult))
