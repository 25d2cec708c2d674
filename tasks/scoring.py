"""The task that scores a batch of texts with the resident checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from prefect import get_run_logger

from weighbridge.scorer.parallel_scorer import ParallelScorer
from weighbridge.scorer.preparing import Prepared
from weighbridge.scorer.results import Rejection, ScoreResult
from weighbridge.scorer.schema import Schema
from weighbridge.tasks.direct import direct_task
from weighbridge.tasks.scorers import ScorerSpec, open_scorer


def _batch_name(arguments: Mapping[str, Any]) -> str:
    count = len(arguments.get("texts", ()))
    return f"score {count} document{'' if count == 1 else 's'}"


@direct_task(_batch_name)
def score_batch(
    texts: Sequence[str],
    schema: Schema,
    scorer: ScorerSpec,
    prepared: Prepared | None = None,
) -> list[ScoreResult | Rejection]:
    """Score a batch of texts in this process.

    The checkpoint is loaded by the first batch that needs it and stays. Call the
    task directly: neither texts nor answers are kept by Prefect.

    Args:
        texts: The documents, at most one batch.
        schema: The questions.
        scorer: Which scorer to use.
        prepared: The same texts made ready by `prepare_ahead`.

    Returns:
        For each text its answers, or why it was rejected, in input order.

    Raises:
        ScorerError: The checkpoint, schema or backend cannot be used.
        AcceleratorBusy: Another process of this host holds a model.
        Stopped: The run was asked to stop while it waited for the accelerator.
    """
    opened = open_scorer(scorer, say=get_run_logger().info)
    ready = prepared or opened.prepare(texts, schema)
    results = opened.score_prepared(ready, scorer.mode, scorer.field_batch_size)
    if not opened.branching:
        get_run_logger().warning(
            "this checkpoint's caches cannot be forked: every field is computed on its own"
        )
    done = [result for result in results if isinstance(result, ScoreResult)]
    get_run_logger().debug(
        "scored %d of %d documents, %.2f s of work, %d prompt tokens",
        len(done),
        len(texts),
        sum(result.timings.total_seconds for result in done),
        sum(result.timings.prefix_tokens + result.timings.suffix_tokens for result in done),
    )
    return results


def prepare_ahead(texts: Sequence[str], schema: Schema, scorer: ParallelScorer) -> Prepared | None:
    """Make texts ready for `score_batch`, in a thread beside the one that scores others.

    Args:
        texts: The documents of a later batch.
        schema: The questions.
        scorer: The scorer of the run; no weights are needed.

    Returns:
        What `score_batch` takes, None where the tokenizer cannot serve two threads.
    """
    return scorer.prepare(texts, schema) if scorer.prepares_ahead else None
