"""The flow that scores documents: read, plan, score, record, report."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import httpx
from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from weighbridge.db.location import display_url, store_path
from weighbridge.db.queries import mean_flip_rate
from weighbridge.flows.ahead import Results, Scored, score_ahead
from weighbridge.flows.artifacts import ProgressArtifact, publish_outcome, publish_summary
from weighbridge.flows.delivering import check_output, deliver
from weighbridge.flows.progress import Progress, report
from weighbridge.flows.request import ScoreRequest
from weighbridge.flows.resolving import Resolved, resolve_request
from weighbridge.flows.stages import READ_TOGETHER, Stages
from weighbridge.flows.stopping import Stopped, Watch, ended_state, put_back
from weighbridge.flows.telling import RunTold, emit_rejected, errors_told, run_name, tag_run
from weighbridge.scorer.preparing import Prepared
from weighbridge.scorer.schema import Schema
from weighbridge.tasks.loading import take_accelerator
from weighbridge.tasks.planning import Batch, BatchSizer
from weighbridge.tasks.recording import Run, as_begun, record_batch, recorded_run
from weighbridge.tasks.schema import validate_schema
from weighbridge.tasks.scorers import ScorerSpec, pinned
from weighbridge.tasks.scoring import prepare_ahead, score_batch
from weighbridge.tasks.settings import load_settings
from weighbridge.tasks.sources import count_records, read_documents
from weighbridge.tasks.stopping import watched
from weighbridge.tasks.temperature import resolve_temperature

_LOADING = "loading the model"


def _run_name() -> str:
    parameters: dict[str, Any] = flow_run.parameters or {}
    request = parameters.get("request")
    return run_name(request) if isinstance(request, ScoreRequest) else "score-documents"


@flow(name="score-documents", flow_run_name=_run_name, persist_result=False)
def score_documents(request: ScoreRequest) -> dict[str, Any]:
    """Score documents against a schema and record the answers.

    Returns:
        The keys of `score --json`: run_id, documents, scored, reused, rejected,
        wasted, seconds, documents_per_second, temperature, temperature_kind,
        permutations, flip_rate (None for a single order), model_loaded, database.

    Raises:
        SchemaError: The schema does not hold what it must.
        TemperatureError: The temperature is refused.
        CheckpointError: The checkpoint cannot be used.
        SourceError: The documents cannot be read at all.
        StoreError: The store cannot be opened or written.
        AcceleratorBusy: Another process of this machine holds a model.
        CancelledRun: It was cancelled, or this process asked to stop: see `stopping`.
    """
    watch = Watch()
    try:
        with errors_told(), watched(watch.look):
            resolved = resolve_request(request)
            outcome = _score(resolved, watch)
            watch.check_end()
    except Stopped as stopped:
        get_run_logger().warning("%s", stopped.message)
        # What a flow returns as a state is the state it ends in.
        return ended_state(stopped)  # pyright: ignore[reportReturnType]
    except httpx.TransportError as error:
        if (state := put_back(error)) is None:
            raise
        return state  # pyright: ignore[reportReturnType]
    return outcome


def _score(resolved: Resolved, watch: Watch) -> dict[str, Any]:
    started = datetime.now(UTC)
    stages = Stages()
    request = resolved.request
    settings = load_settings(database_url=request.database)
    check_output(request, settings.database_url)
    report(Progress("checking the schema"))
    # A branch of a hub may move while the run goes on.
    asked = as_begun(request.scorer(), settings.database_url)
    spec = pinned(asked, settings, say=get_run_logger().info)
    schema = validate_schema(request.schema_, request.schema_name)
    temperature = resolve_temperature(spec)
    report(Progress("counting documents"))
    with stages.at("reading"):
        total = count_records(**_source(resolved), limit=request.limit)
    with recorded_run(
        schema,
        spec,
        temperature,
        documents=resolved.label,
        database_url=settings.database_url,
        total=total,
        rescore=request.rescore,
        store_text=request.store_text,
    ) as run:
        told = RunTold(run, total, len(run.store.recorded_positions(run.run_id)), stages)
        told.begin(request.schema_label)
        tag_run(request.schema_label, run.scorer.info.name)
        _score_all(run, resolved, schema, spec, told, watch)
        stages.enter("finishing")
    # A single order has none to look for, and a large run has many answers to look through.
    flip_rate = mean_flip_rate(run.engine, run.run_id) if request.permutations > 1 else None
    written = None
    try:
        if request.output is not None:
            deliver(run, request.output)
            written = request.output
    finally:  # a file that cannot be written leaves the answers as they are
        summary = publish_summary(
            run,
            request.schema_label,
            flip_rate,
            stages=stages,
            store=store_path(settings.database_url),
            output=written,
        )
        told.end(summary)
    emit_rejected(summary, request.alert_rejected_share)
    seconds = (datetime.now(UTC) - started).total_seconds()
    outcome: dict[str, Any] = {
        "run_id": summary.run_id,
        "documents": summary.documents,
        "scored": summary.scored,
        "reused": summary.reused,
        "rejected": summary.rejected,
        "wasted": summary.wasted,
        "seconds": round(seconds, 3),
        "documents_per_second": round(summary.documents / seconds, 3),
        "temperature": temperature.value,
        "temperature_kind": temperature.kind.value,
        "permutations": summary.permutations,
        "flip_rate": flip_rate,
        "model_loaded": run.scorer.model_loaded,
        "database": str(store_path(settings.database_url) or display_url(settings.database_url)),
    }
    publish_outcome(request.schema_label, outcome, written)
    return outcome


def _score_all(
    run: Run, resolved: Resolved, schema: Schema, spec: ScorerSpec, told: RunTold, watch: Watch
) -> None:
    """Score and record all documents of a run, and tell how far it is."""
    request, stages = resolved.request, told.stages
    progress = ProgressArtifact(request.schema_label, run.run_id, told.total, told.done)
    sizer = BatchSizer(request.batch_size)

    def planned() -> Iterator[Batch]:
        records = islice(read_documents(**_source(resolved)), request.limit)
        read = stages.each("reading", records, READ_TOGETHER)
        batches = stages.each("planning", run.batches_ahead(read, sizer))
        for batch in watch.each(batches):
            if batch.texts and not run.scorer.model_loaded:
                with stages.at("loading"):
                    _wait_for_turn(run, told.done, told.total)
            yield batch

    def prepare(batch: Batch) -> Prepared | None:
        return prepare_ahead(batch.texts, schema, run.scorer)

    def score(batch: Batch, prepared: Prepared | None) -> Results:
        return score_batch(batch.texts, schema, spec, prepared)

    def record(batch: Batch, coming: Callable[[], Scored]) -> None:
        stage = _stage(run, batch)
        report(Progress(stage, told.done, told.total))
        with stages.at("other scoring"):
            scored = coming()
        if stage == _LOADING:  # there is something to finish now
            report(Progress("recording", told.done, told.total))
        told.scored(scored)
        sizer.observe(len(batch.to_score), scored.ended - scored.began)
        with stages.at("recording"):
            recorded = record_batch(run, batch, scored.results)
        told.batch(batch, scored.results, recorded)
        progress.update(told.done)
        report(Progress("scoring", told.done, told.total))

    with stages.at("telling"):
        score_ahead(planned(), prepare, score, record)


def _wait_for_turn(run: Run, done: int, total: int) -> None:
    def say(text: str) -> None:
        get_run_logger().info(text)
        report(Progress(text, done, total))

    take_accelerator(run.scorer.info.name, say=say)


def _stage(run: Run, batch: Batch) -> str:
    if not batch.texts:
        return "recording"
    return "scoring" if run.scorer.model_loaded else _LOADING


def _source(resolved: Resolved) -> dict[str, Any]:
    request = resolved.request
    return {
        "source": request.documents,
        "text_field": request.text_field,
        "id_field": request.id_field,
        "format": request.format,
        "query": request.query,
        "parameters": resolved.parameters,
    }
