"""The task that scores a batch of texts with the resident checkpoint."""

from collections.abc import Sequence
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from pydantic import BaseModel, ConfigDict

from weighbridge.scorer.parallel_scorer import ParallelScorer
from weighbridge.scorer.results import Rejection, ScoreResult
from weighbridge.scorer.schema import Schema
from weighbridge.tasks.checkpoints import checkpoint_folder, hash_cache
from weighbridge.tasks.settings import Settings, load_settings


class ScorerSpec(BaseModel):
    """Which scorer a task uses: names and numbers, never the model itself.

    Attributes:
        checkpoint: A checkpoint folder; None takes the setting, else the
            embedded checkpoint.
        model_id: Its model id, for the temperature policy.
        revision: Its full revision, likewise.
        temperature: Overrides the policy.
        allow_uncalibrated: Consent to 1.0 where the policy refuses it.
        max_input_tokens: Most tokens of a prompt; None takes the checkpoint's.
        layout: `schema-first` or `context-first`; None takes the checkpoint's.
        encoding: `labels` or `codes`; None takes the checkpoint's.
        mode: `auto`, `parallel`, `cached_serial` or `independent`.
        field_batch_size: Prompt rows per branch batch.
        permutations: Orders of the choices that are averaged, 1 to 32.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    checkpoint: str | None = None
    model_id: str | None = None
    revision: str | None = None
    temperature: float | None = None
    allow_uncalibrated: bool = False
    max_input_tokens: int | None = None
    layout: str | None = None
    encoding: str | None = None
    mode: str = "auto"
    field_batch_size: int | None = None
    permutations: int = 1


def open_scorer(spec: ScorerSpec, settings: Settings | None = None) -> ParallelScorer:
    """Return the scorer of a spec. Loads no weights.

    Raises:
        CheckpointError: There is no such checkpoint.
        TemperatureError: The temperature cannot be used.
        ScorerError: A number or name of the spec is not one that is allowed.
    """
    settings = settings or load_settings()
    return ParallelScorer(
        checkpoint_folder(spec.checkpoint, settings),
        model_id=spec.model_id,
        revision=spec.revision,
        temperature=spec.temperature,
        allow_uncalibrated=spec.allow_uncalibrated,
        max_input_tokens=spec.max_input_tokens,
        layout=spec.layout,
        encoding=spec.encoding,
        permutations=spec.permutations,
        hash_cache=hash_cache(settings),
    )


def _batch_name() -> str:
    parameters: dict[str, Any] = task_run.parameters or {}
    return f"score {len(parameters.get('texts', ()))} documents"


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name=_batch_name)
def score_batch(
    texts: Sequence[str], schema: Schema, scorer: ScorerSpec
) -> list[ScoreResult | Rejection]:
    """Score a batch of texts in this process.

    The checkpoint is loaded by the first batch that needs it and stays. Call the
    task directly: neither texts nor answers are kept by Prefect.

    Args:
        texts: The documents, at most one batch.
        schema: The questions.
        scorer: Which scorer to use.

    Returns:
        For each text its answers, or why it was rejected, in input order.

    Raises:
        ScorerError: The checkpoint, schema or backend cannot be used.
    """
    opened = open_scorer(scorer)
    results = opened.score_batch(texts, schema, scorer.mode, scorer.field_batch_size)
    if not opened.branching:
        get_run_logger().warning(
            "this checkpoint's caches cannot be forked: every field is computed on its own"
        )
    done = [result for result in results if isinstance(result, ScoreResult)]
    get_run_logger().info(
        "scored %d of %d documents in %.2f s, %d prompt tokens",
        len(done),
        len(texts),
        sum(result.timings.total_seconds for result in done),
        sum(result.timings.prefix_tokens + result.timings.suffix_tokens for result in done),
    )
    return results
