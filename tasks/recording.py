"""The task that records a batch, and the run it belongs to."""

import importlib.metadata
import os
import platform
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run, task_run
from sqlalchemy import Engine

from weighbridge.db.engine import open_engine
from weighbridge.db.records import BatchOutcome, CheckpointRow, RunStart, SchemaRow
from weighbridge.db.store import Store
from weighbridge.scorer.parallel_scorer import ParallelScorer
from weighbridge.scorer.results import Rejection, ScoreResult
from weighbridge.scorer.schema import Schema
from weighbridge.scorer.temperature import Temperature
from weighbridge.tasks.convert import batch_record
from weighbridge.tasks.planning import Batch
from weighbridge.tasks.sources import Document

_PACKAGES = ("weighbridge", "mlx", "mlx-lm", "prefect")


@dataclass(frozen=True)
class Run:
    """A run that is being recorded.

    Attributes:
        engine: The store's engine, for reading.
        store: The same store, for writing.
        run_id: Its number.
        continued: Whether an interrupted run goes on.
        mode: How rows are computed, as recorded with each batch.
        backend: What they are computed with, likewise.
        store_text: Whether texts and metadata are kept.
    """

    engine: Engine
    store: Store
    run_id: int
    continued: bool
    mode: str
    backend: str
    store_text: bool


@contextmanager
def recorded_run(
    database_url: str,
    *,
    schema: Schema,
    scorer: ParallelScorer,
    temperature: Temperature,
    documents: str,
    total: int | None = None,
    mode: str = "auto",
    name: str | None = None,
    rescore: bool = False,
    store_text: bool = True,
) -> Generator[Run]:
    """Open a run in the store and close it as completed, failed or cancelled.

    A retry of the same Prefect flow run continues its run; anything else is a
    new run.

    Args:
        database_url: The store.
        schema: The questions.
        scorer: The scorer that answers them.
        temperature: What its logits are divided by.
        documents: Where the documents come from, as shown to people.
        total: How many records there are; a run that recorded fewer fails.
        mode: How rows are computed.
        name: Name of the run; None takes the Prefect flow run's.
        rescore: Decide again what is decided already.
        store_text: Whether texts and metadata are kept.

    Raises:
        StoreError: The store cannot be opened or written.
    """
    engine = open_engine(database_url)
    store = Store(engine)
    handle = store.begin_run(
        RunStart(
            flow_run_id=flow_run.id,
            name=name or flow_run.name or "run",
            host=platform.node(),
            pid=os.getpid(),
            schema=SchemaRow(sha256=schema.sha256, name=schema.name, canonical=schema.canonical),
            checkpoint=CheckpointRow(
                fingerprint=scorer.info.fingerprint,
                name=scorer.info.name,
                model_id=scorer.info.model_id,
                revision=scorer.info.revision,
                architecture=scorer.info.architecture,
                dtype=scorer.info.dtype,
                quantization=scorer.info.quantization,
                adapter_sha256=scorer.info.adapter_sha256,
                contract=scorer.info.contract.task if scorer.info.contract else None,
            ),
            temperature=temperature.value,
            temperature_kind=temperature.kind.value,
            temperature_source=temperature.source,
            documents_source=documents,
            mode=mode,
            layout=scorer.layout.value,
            encoding=scorer.encoding.value,
            contract=scorer.info.contract.task if scorer.info.contract else None,
            dtype=scorer.dtype,
            prompt_version=scorer.prompt_version,
            max_input_tokens=scorer.max_input_tokens,
            backend=scorer.backend,
            versions={package: importlib.metadata.version(package) for package in _PACKAGES},
            store_text=store_text,
            rescore=rescore,
        )
    )
    run = Run(engine, store, handle.run_id, handle.continued, mode, scorer.backend, store_text)
    try:
        yield run
        store.finish_run(run.run_id, "completed", documents=total)
    except BaseException as error:
        status = "failed" if isinstance(error, Exception) else "cancelled"
        store.finish_run(run.run_id, status, message=type(error).__name__)
        raise
    finally:
        engine.dispose()


def _batch_name() -> str:
    parameters: dict[str, Any] = task_run.parameters or {}
    batch = parameters.get("batch")
    return f"record {len(batch) if batch is not None else 0} documents"


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name=_batch_name)
def record_batch(
    run: Run,
    batch: Batch | Sequence[Document],
    results: Sequence[ScoreResult | Rejection],
    started_at: datetime | None = None,
) -> BatchOutcome:
    """Record a batch in one transaction.

    Args:
        run: The run, from `recorded_run`.
        batch: A planned batch, or just the documents that were scored.
        results: One per scored document.
        started_at: When scoring began; None means now.

    Returns:
        How many documents were scored, reused, rejected, and scored in vain.

    Raises:
        StoreError: The store cannot be written.
    """
    planned = batch if isinstance(batch, Batch) else Batch(tuple(batch), (), ())
    outcome = run.store.record_batch(
        run.run_id,
        batch_record(
            planned,
            results,
            started_at=started_at or datetime.now(UTC),
            mode=run.mode,
            backend=run.backend,
            keep=run.store_text,
        ),
    )
    get_run_logger().info(
        "recorded: %d scored, %d reused, %d rejected",
        outcome.scored,
        outcome.reused,
        outcome.rejected,
    )
    return outcome
