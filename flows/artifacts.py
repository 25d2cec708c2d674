"""What a run shows in the Prefect UI: progress, a summary, rejected codes. No document text."""

from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from weighbridge.db.queries import (
    FieldValue,
    answer_distribution,
    batches,
    rejected_codes,
    run_summary,
)
from weighbridge.db.records import RunSummary
from weighbridge.scorer.temperature import Temperature
from weighbridge.tasks.recording import Run

_BAR_WIDTH = 20


class ProgressArtifact:
    """The live progress of a run.

    Args:
        run_id: The run.
        total: Its records in all.
    """

    def __init__(self, run_id: int, total: int) -> None:
        self._total = max(total, 1)
        artifact = create_progress_artifact(
            progress=0.0, key=f"run-{run_id}-progress", description=f"{total} documents"
        )
        # Prefect types it for asynchronous flows as well; in a sync flow it is the id.
        self._artifact = cast("UUID", artifact)

    def update(self, done: int) -> None:
        """Show that so many records are recorded."""
        # A source that grows meanwhile fails the run at its end, not its progress.
        update_progress_artifact(self._artifact, progress=min(100.0 * done / self._total, 100.0))


def publish_summary(run: Run, temperature: Temperature, flip_rate: float | None) -> RunSummary:
    """Publish the summary of a finished run and, if there are any, its rejected codes.

    Args:
        run: The run.
        temperature: What its logits were divided by.
        flip_rate: Mean over its answers, None for a single order of the choices.
    """
    summary = run_summary(run.engine, run.run_id)
    answers = answer_distribution(run.engine, run.run_id)
    timings = batches(run.engine, run.run_id)
    codes = rejected_codes(run.engine, run.run_id)
    run.engine.dispose()
    create_markdown_artifact(
        key=f"run-{summary.run_id}-summary",
        markdown=summary_markdown(summary, temperature, flip_rate, answers, timings),
        description=f"run {summary.run_id}: answers, timings, temperature",
    )
    if codes:
        create_table_artifact(
            key=f"run-{summary.run_id}-rejected",
            table=[{"code": code, "documents": count} for code, count in codes.items()],
            description="why documents were rejected; weighbridge rejected lists them",
        )
    return summary


def summary_markdown(
    summary: RunSummary,
    temperature: Temperature,
    flip_rate: float | None,
    answers: Sequence[FieldValue],
    batches: Sequence[Mapping[str, Any]],
) -> str:
    """Write the summary of a run: counts, answers with bars, timings, temperature, flip rate."""
    rate = summary.documents / summary.seconds if summary.seconds else 0.0
    prefill, branch, total = (
        sum(batch[f"{stage}_seconds"] or 0.0 for batch in batches)
        for stage in ("prefill", "branch", "total")
    )
    lines = [
        f"# Run {summary.run_id}: {_cell(summary.schema)}",
        "",
        f"**{summary.documents}** documents: {summary.scored} scored, {summary.reused} reused, "
        f"{summary.rejected} rejected in {summary.seconds:.1f} s ({rate:.1f} documents/s).",
        "",
        f"Checkpoint `{summary.checkpoint}`, {summary.backend}; layout {summary.layout}, "
        f"encoding {summary.encoding}.",
        "",
        f"Temperature **{temperature.value:g}** ({temperature.source})",
        "",
        *([] if flip_rate is None else [_stability(flip_rate, summary.permutations), ""]),
        "## Answers",
        "",
        "| field | answer | documents | share | mean probability |",
        "|---|---|--:|---|--:|",
        *(_answer_row(answer, answers) for answer in answers),
        "",
        "## Seconds",
        "",
        "| prefill | branch | scoring in all | rest of the run |",
        "|--:|--:|--:|--:|",
        f"| {prefill:.2f} | {branch:.2f} | {total:.2f} | {max(summary.seconds - total, 0):.2f} |",
        "",
        f"All answers: `weighbridge results {summary.run_id}`",
    ]
    return "\n".join(lines)


def _stability(flip_rate: float, permutations: int) -> str:
    return (
        f"Flip rate **{flip_rate:.2f}**: of {permutations} orders of the choices, this share "
        "disagreed with the answer. The view `stability` has it for each answer."
    )


def _answer_row(answer: FieldValue, answers: Sequence[FieldValue]) -> str:
    total = sum(other.count for other in answers if other.field == answer.field)
    share = answer.count / total
    bar = "█" * max(round(share * _BAR_WIDTH), 1)
    return (
        f"| {_cell(answer.field)} | {_cell(answer.value)} | {answer.count} "
        f"| {bar} {share:.0%} | {answer.mean_probability:.2f} |"
    )


def _cell(text: str) -> str:
    """Make a name safe inside a table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
