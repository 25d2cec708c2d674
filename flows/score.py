"""The flow that scores documents: read, plan, score, record, report."""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field, field_validator

from weighbridge.db.location import display_url, store_path
from weighbridge.db.queries import mean_flip_rate
from weighbridge.flows.artifacts import ProgressArtifact, publish_summary
from weighbridge.flows.progress import Progress, report
from weighbridge.scorer.permutations import MAX_PERMUTATIONS
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.planning import Batch
from weighbridge.tasks.questions import names_model
from weighbridge.tasks.recording import Run, record_batch, recorded_run
from weighbridge.tasks.schema import validate_schema
from weighbridge.tasks.scorers import ScorerSpec
from weighbridge.tasks.scoring import score_batch
from weighbridge.tasks.settings import load_settings
from weighbridge.tasks.sources import BadRecord, Document, read_documents
from weighbridge.tasks.sql_source import is_url, require_no_password
from weighbridge.tasks.temperature import resolve_temperature

_QUERY_KEPT = 200


class ScoreRequest(BaseModel):
    """What to score, with what, and where the answers go. Small JSON, no document text."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    documents: str = Field(
        description="What holds the documents, on the machine that scores: a JSONL, JSON, CSV, TSV "
        "or Parquet file; a folder or glob of text files; with a query a SQLite file, or a "
        "database URL without a password."
    )
    schema_: str = Field(
        alias="schema",
        description="Path of a schema file, the schema itself as JSON, or a Pydantic model on the "
        "machine that scores, as module:Class.",
    )
    schema_name: str | None = Field(
        default=None,
        description="What people call the schema; empty takes the name of its file or class.",
    )
    checkpoint: str | None = Field(
        default=None, description="Checkpoint folder; empty takes the setting, else the embedded."
    )
    model_id: str | None = Field(default=None, description="Model id, for the temperature policy.")
    revision: str | None = Field(default=None, description="Full revision of the model id.")
    temperature: float | None = Field(
        default=None, description="Overrides the checkpoint's temperature. Finite and above 0."
    )
    allow_uncalibrated: bool = Field(
        default=False, description="Consent to temperature 1.0 where the policy refuses it."
    )
    max_input_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Longest prompt in tokens; empty takes the checkpoint's.",
    )
    layout: Literal["schema-first", "context-first"] | None = Field(
        default=None, description="What stands first in the prompt; empty takes the checkpoint's."
    )
    encoding: Literal["labels", "codes"] | None = Field(
        default=None, description="What the model says; empty takes the checkpoint's."
    )
    mode: Literal["auto", "parallel", "cached_serial", "independent"] = Field(
        default="auto", description="How the fields of a document are computed."
    )
    field_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Prompt rows per branch batch; empty takes all at once.",
    )
    permutations: int = Field(
        default=1,
        ge=1,
        le=MAX_PERMUTATIONS,
        description="In how many orders of the choices each document is asked, 1 to 32. The "
        "answers are averaged, and the share of orders that disagree with the average is kept "
        "as the flip rate: 0 is stable. Each order costs about as much as the first.",
    )
    batch_size: int | None = Field(
        default=None, ge=1, le=1024, description="Documents per batch; empty adapts to two seconds."
    )
    rescore: bool = Field(default=False, description="Decide again what is decided already.")
    limit: int | None = Field(
        default=None, ge=0, le=10**12, description="Score only so many documents."
    )
    store_text: bool = Field(default=True, description="Keep texts and metadata in the store.")
    text_field: str = Field(
        default="text",
        description=r"Column that holds the text, or a template such as {subject}\n\n{body}.",
    )
    id_field: str = Field(default="id", description="Column that holds the document's own id.")
    format: Literal["jsonl", "json", "csv", "tsv", "parquet", "text", "sql"] | None = Field(
        default=None, description="Format of the documents; empty goes by name and content."
    )
    query: str | None = Field(
        default=None, description="A SQL statement whose rows are the documents."
    )
    database: str | None = Field(
        default=None, description="Path of the store; empty takes the setting."
    )
    source: str | None = Field(
        default=None, description="What people know the documents as, where it is not the path."
    )

    @field_validator("*")
    @classmethod
    def _unicode(cls, value: object) -> object:
        if isinstance(value, str) and value.encode(errors="ignore").decode() != value:
            raise ValueError("must be UTF-8 text, as parameters of a flow are JSON")
        return value

    @field_validator("documents")
    @classmethod
    def _no_secret(cls, value: str) -> str:
        if is_url(value):
            try:
                require_no_password(value)
            except SourceError as error:
                raise ValueError(f"{error.message}: {error.hint}") from None
        return value

    @field_validator("database")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            raise ValueError(
                "database must be a path: a URL may hold a password and belongs in the setting "
                "WEIGHBRIDGE_DATABASE_URL, as parameters of a flow are kept by Prefect"
            )
        return value

    def scorer(self) -> ScorerSpec:
        """Return which scorer this request asks for."""
        return ScorerSpec.model_validate(
            {name: getattr(self, name) for name in ScorerSpec.model_fields}
        )

    @property
    def source_label(self) -> str:
        """Return what a run keeps as its source: what people know it as, and the query's start."""
        source = self.source or self.documents
        if self.query is None:
            return source
        # One line, whatever the statement looks like.
        return f"{source}: {' '.join(self.query.split())[:_QUERY_KEPT]}".rstrip()

    @property
    def schema_label(self) -> str:
        """Return the schema's name for run names; that of JSON without a name is `inline`."""
        if self.schema_name is not None:
            return self.schema_name
        if self.schema_.lstrip().startswith("{"):
            return "inline"
        return (
            self.schema_.rpartition(":")[2]
            if names_model(self.schema_)
            else Path(self.schema_).stem
        )


def _run_name() -> str:
    parameters: dict[str, Any] = flow_run.parameters or {}
    request = parameters.get("request")
    name = request.schema_label if isinstance(request, ScoreRequest) else "documents"
    return f"score-{name}-{datetime.now().astimezone():%Y-%m-%d}"


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
    """
    logger = get_run_logger()
    started = datetime.now(UTC)
    settings = load_settings(database_url=request.database)
    report(Progress("checking the schema"))
    spec = request.scorer()
    schema = validate_schema(request.schema_, request.schema_name)
    temperature = resolve_temperature(spec)
    report(Progress("counting documents"))
    total = sum(1 for _ in _records(request))
    with recorded_run(
        schema,
        spec,
        temperature,
        documents=request.source_label,
        database_url=settings.database_url,
        total=total,
        rescore=request.rescore,
        store_text=request.store_text,
    ) as run:
        logger.info("run %d%s", run.run_id, " continues" if run.continued else "")
        done = len(run.store.recorded_positions(run.run_id))
        progress = ProgressArtifact(run.run_id, total)
        for batch in run.batches(_records(request), request.batch_size):
            report(Progress(_stage(run, batch), done, total))
            results = score_batch(batch.texts, schema, spec) if batch.texts else []
            record_batch(run, batch, results)
            done += len(batch)
            progress.update(done)
            report(Progress("scoring", done, total))
    # A single order has none to look for, and a large run has many answers to look through.
    flip_rate = mean_flip_rate(run.engine, run.run_id) if request.permutations > 1 else None
    summary = publish_summary(run, temperature, flip_rate)
    seconds = (datetime.now(UTC) - started).total_seconds()
    return {
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


def _stage(run: Run, batch: Batch) -> str:
    if not batch.texts:
        return "recording"
    return "scoring" if run.scorer.model_loaded else "loading the model"


def _records(request: ScoreRequest) -> Iterator[Document | BadRecord]:
    records = read_documents(
        request.documents,
        text_field=request.text_field,
        id_field=request.id_field,
        format=request.format,
        query=request.query,
    )
    return islice(records, request.limit)
