"""The task that records a batch, and the run it belongs to."""

import importlib.metadata
import os
import platform
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from sqlalchemy import Engine

from weighbridge.db.engine import open_engine
from weighbridge.db.errors import StoreError
from weighbridge.db.queries import run_sources
from weighbridge.db.records import BatchOutcome, CheckpointRow, RunStart, SchemaRow
from weighbridge.db.store import Store
from weighbridge.scorer.checkpoint import CheckpointInfo
from weighbridge.scorer.errors import (
    BackendError,
    CheckpointError,
    SchemaError,
    TemperatureError,
)
from weighbridge.scorer.parallel_scorer import ParallelScorer
from weighbridge.scorer.results import DecisionKey, Rejection, ScoreResult
from weighbridge.scorer.schema import Schema
from weighbridge.scorer.temperature import Temperature
from weighbridge.tasks.convert import batch_record
from weighbridge.tasks.direct import direct_task
from weighbridge.tasks.errors import ResultRefused
from weighbridge.tasks.planning import Batch, BatchSizer, plan_batches
from weighbridge.tasks.scorers import ScorerSpec, open_scorer, pinned
from weighbridge.tasks.settings import load_settings
from weighbridge.tasks.sources import BadRecord, Document
from weighbridge.tasks.stopping import Stopped

_left_open: dict[str, list[int]] = {}
"""Runs by their store that could not be closed, such as on a full disk."""

_TELLABLE = (BackendError, CheckpointError, SchemaError, TemperatureError)
"""What tells of models and questions, and never quotes a document."""

_PACKAGES = ("weighbridge", "mlx", "mlx-lm", "prefect")


@dataclass(frozen=True)
class Run:
    """A run that is being recorded.

    Attributes:
        engine: The store's engine, for reading.
        store: The same store, for writing.
        run_id: Its number.
        continued: Whether an interrupted run goes on.
        scorer: The scorer that answers; has loaded no weights by itself.
        key: What its answers depend on: the key its decisions are kept under.
        mode: How rows are computed, as recorded with each batch.
        store_text: Whether texts and metadata are kept.
    """

    engine: Engine
    store: Store
    run_id: int
    continued: bool
    scorer: ParallelScorer
    key: DecisionKey
    mode: str
    store_text: bool

    def batches(
        self, records: Iterable[Document | BadRecord], size: int | None = None
    ) -> Iterator[Batch]:
        """Cut records into batches, and leave out of `texts` what is decided already.

        Record each batch before asking for the next: `plan_batches` says the rest.

        Args:
            records: From `read_documents`, or made by the caller.
            size: Texts to score per batch; None adapts to about two seconds.
        """
        return plan_batches(self.store, self.run_id, records, BatchSizer(size))

    def batches_ahead(
        self, records: Iterable[Document | BadRecord], sizer: BatchSizer
    ) -> Iterator[Batch]:
        """Cut records into batches of which one is scored while the one before is recorded.

        Args:
            records: As for `batches`.
            sizer: Is to be told how long each batch took.
        """
        return plan_batches(self.store, self.run_id, records, sizer, ahead=True)


def as_begun(scorer: ScorerSpec, database_url: str) -> ScorerSpec:
    """Return a spec with the files that an earlier attempt of this flow run began with.

    A branch of a hub may have moved since, and a run has one checkpoint.

    Args:
        scorer: As it was asked for.
        database_url: The store.
    """
    if flow_run.id is None or (flow_run.run_count or 0) < 2:
        return scorer
    try:
        engine = open_engine(database_url, readonly=True)
        try:
            begun = run_sources(engine, flow_run.id)
        finally:
            engine.dispose()
    except StoreError:
        return scorer  # such as one that the first attempt did not get to make
    checkpoint, adapter = begun or (None, None)
    if checkpoint is None:
        return scorer
    told = {"checkpoint": checkpoint, "adapter": adapter}
    # The commit is in the name now; what was asked for may be the branch.
    own = scorer.model_id is None or checkpoint.startswith(f"{scorer.model_id}@")
    return scorer.model_copy(update={**told, "revision": None} if own else told)


@contextmanager
def recorded_run(
    schema: Schema,
    scorer: ScorerSpec,
    temperature: Temperature,
    *,
    documents: str,
    database_url: str | None = None,
    total: int | None = None,
    name: str | None = None,
    rescore: bool = False,
    store_text: bool = True,
) -> Generator[Run]:
    """Open a run in the store and close it as completed, failed or cancelled.

    A retry of the same Prefect flow run continues its run; anything else is a
    new run. A flow run has one run in a store: what should have two is two
    flows, or two calls of `score_documents`.

    Args:
        schema: The questions.
        scorer: The scorer that answers them.
        temperature: What its logits are divided by.
        documents: Where the documents come from, as shown to people.
        database_url: The store; None takes the setting.
        total: How many records there are; a run that recorded fewer fails.
        name: Name of the run; None takes the Prefect flow run's.
        rescore: Decide again what is decided already.
        store_text: Whether texts and metadata are kept.

    Raises:
        CheckpointError: There is no such checkpoint.
        SchemaError: The schema does not fit its tokenizer.
        StoreError: The store cannot be opened or written.
    """
    files = pinned(scorer)
    opened = open_scorer(files)
    opened.plans(schema)  # what does not fit is told before there is a run
    key = opened.key(schema)
    url = database_url or load_settings().database_url
    engine = open_engine(url)
    try:
        store = Store(engine)
        for left in _left_open.pop(url, []):
            with suppress(StoreError):
                store.finish_run(left, "failed", message="its end could not be recorded")
        handle = store.begin_run(
            RunStart(
                flow_run_id=flow_run.id,
                name=name or flow_run.name or "run",
                host=platform.node(),
                pid=os.getpid(),
                schema=SchemaRow(schema.sha256, schema.name, schema.canonical),
                checkpoint=_checkpoint_row(opened.info),
                temperature=temperature.value,
                temperature_kind=temperature.kind.value,
                temperature_source=temperature.source,
                documents_source=documents,
                mode=scorer.mode,
                layout=key.layout,
                encoding=key.encoding,
                contract=key.contract,
                dtype=key.dtype,
                prompt_version=key.prompt_version,
                max_input_tokens=opened.max_input_tokens,
                backend=opened.backend,
                versions={package: importlib.metadata.version(package) for package in _PACKAGES},
                store_text=store_text,
                rescore=rescore,
                permutations=opened.permutations,
                checkpoint_source=files.checkpoint,
                adapter_source=files.adapter,
                accepted_prompt_sha256=_accepted_prompt(opened.info),
            )
        )
        run = Run(
            engine=engine,
            store=store,
            run_id=handle.run_id,
            continued=handle.continued,
            scorer=opened,
            key=key,
            mode=scorer.mode,
            store_text=store_text,
        )
        try:
            yield run
            store.finish_run(run.run_id, "completed", documents=total)
        except BaseException as error:
            stopped = isinstance(error, Stopped) or not isinstance(error, Exception)
            status = "cancelled" if stopped else "failed"
            message = type(error).__name__
            if isinstance(error, _TELLABLE):
                message = f"{message}: {error.message}"
            elif isinstance(error, Stopped):
                message = error.message
            elif isinstance(error, Pause):
                message = "suspended through Prefect"
            try:
                store.finish_run(run.run_id, status, message=message)
            except StoreError:
                # What went wrong first matters. A later run of this process closes this one,
                # or any later run once this process is gone.
                _left_open.setdefault(url, []).append(run.run_id)
            raise
    finally:
        engine.dispose()


def _checkpoint_row(info: CheckpointInfo) -> CheckpointRow:
    return CheckpointRow(
        fingerprint=info.fingerprint,
        name=info.name,
        model_id=info.model_id,
        revision=info.revision,
        architecture=info.architecture,
        dtype=info.dtype,
        quantization=info.quantization,
        adapter_sha256=info.adapter_sha256,
        contract=_contract(info),
    )


def _contract(info: CheckpointInfo) -> str | None:
    return info.contract.task if info.contract else None


def _accepted_prompt(info: CheckpointInfo) -> str | None:
    return info.contract.accepted_sha256 if info.contract else None


def _batch_name(arguments: Mapping[str, Any]) -> str:
    batch = arguments.get("batch")
    count = len(batch) if batch is not None else 0
    return f"record {count} document{'' if count == 1 else 's'}"


@direct_task(_batch_name)
def record_batch(
    run: Run,
    batch: Batch | Sequence[Document],
    results: Sequence[ScoreResult | Rejection],
) -> BatchOutcome:
    """Record a batch in one transaction.

    Args:
        run: The run, from `recorded_run`.
        batch: A planned batch, or just the documents that were scored.
        results: One per scored document.

    Returns:
        How many documents were scored, reused, rejected, and scored in vain.

    Raises:
        ResultRefused: A result answers another schema or comes from another checkpoint.
        StoreError: The store cannot be written.
    """
    for result in results:
        if isinstance(result, ScoreResult) and result.key != run.key:
            differs = [name for name, value in run.key if getattr(result.key, name) != value]
            raise ResultRefused(
                "results must answer the run's schema with the run's checkpoint, got another "
                f"{', '.join(differs)}",
                hint="score with what recorded_run was given; a checkpoint that was replaced "
                "meanwhile needs a new run",
            )
    planned = batch if isinstance(batch, Batch) else Batch(tuple(batch))
    outcome = run.store.record_batch(
        run.run_id,
        batch_record(
            planned, results, mode=run.mode, backend=run.scorer.backend, keep=run.store_text
        ),
    )
    get_run_logger().debug(
        "recorded: %d scored, %d reused, %d rejected",
        outcome.scored,
        outcome.reused,
        outcome.rejected,
    )
    return outcome
