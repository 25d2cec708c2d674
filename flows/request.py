"""What a flow is asked to score: the parameters that Prefect keeps and its form shows."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from weighbridge.flows.when import check_dates, check_moment, check_zone, refuse_dates
from weighbridge.scorer.permutations import MAX_PERMUTATIONS
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.questions import names_model
from weighbridge.tasks.scorers import ScorerSpec
from weighbridge.tasks.sql_source import is_url, require_no_password

_QUERY_KEPT = 200


def is_schema_file(schema: str) -> bool:
    """Tell the path of a schema from the schema itself and the name of a Pydantic model."""
    return not schema.lstrip().startswith("{") and not names_model(schema)


class ScoreRequest(BaseModel):
    """What to score, with what, and where the answers go.

    Documents and schema are needed, the rest can stay as it is. Names and numbers only: the
    texts stay where they are.
    """

    # In the order of the form: what is set often comes first.
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    documents: str = Field(
        min_length=1,
        description="What holds the documents, on the machine that scores: a JSONL, JSON, CSV, TSV "
        "or Parquet file; a folder or glob of text files; with a query a SQLite file, or a "
        "database URL without a password. tickets-{date-1}.jsonl is yesterday's file.",
    )
    schema_: str = Field(
        alias="schema",
        min_length=1,
        description="Path of a schema file, the schema itself as JSON, or a Pydantic model on the "
        "machine that scores, as module:Class.",
    )
    text_field: str = Field(
        default="text",
        description=r"Column that holds the text, or a template such as {subject}\n\n{body}.",
    )
    id_field: str = Field(default="id", description="Column that holds the document's own id.")
    output: str | None = Field(
        default=None,
        description="A .json, .jsonl, .csv or .parquet file that the answers are written to when "
        "all is scored, on the machine that scores.",
    )
    limit: int | None = Field(
        default=None, ge=0, le=10**12, description="Score only so many documents, from the start."
    )
    rescore: bool = Field(
        default=False,
        description="Ask the model again also where the store has the answer. Older runs keep "
        "theirs.",
    )
    checkpoint: str | None = Field(
        default=None,
        description="Folder of the model, on the machine that scores, or a hub id as org/name or "
        "org/name@revision; None takes that machine's setting, else the embedded model.",
    )
    adapter: str | None = Field(
        default=None,
        description="Folder or hub id of a LoRA adapter, fused into the model when it is loaded; "
        "None takes the setting if the checkpoint does.",
    )
    temperature: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Divides the logits, above 0; None takes the checkpoint's own.",
    )
    permutations: int = Field(
        default=1,
        ge=1,
        le=MAX_PERMUTATIONS,
        description="In how many orders of the choices each document is asked, 1 to 32. The "
        "answers are averaged, and the share of orders that disagree with the average is kept "
        "as the flip rate: 0 is stable. Each order costs about as much as the first.",
    )
    query: str | None = Field(
        default=None,
        description="A SQL statement whose rows are the documents. Its parameter :since is when "
        "the deployment's last completed run began, in UTC.",
    )
    since: str | None = Field(
        default=None,
        description="The query's :since in place of the last run's start: 2026-11-01, "
        "2026-11-01T06:00+01:00 or {date-7}. Such a run does not move that of others.",
    )
    timezone: str | None = Field(
        default=None,
        description="Time zone of dates in paths, such as Europe/Berlin; None takes that of the "
        "deployment's schedule, else of the machine that scores.",
    )
    format: Literal["jsonl", "json", "csv", "tsv", "parquet", "text", "sql"] | None = Field(
        default=None, description="Format of the documents; None goes by name and content."
    )
    source: str | None = Field(
        default=None, description="What people know the documents as, where it is not the path."
    )
    schema_name: str | None = Field(
        default=None,
        description="What people call the schema; None takes the name of its file or class.",
    )
    alert_rejected_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Emit an event, for automations, when more than this share of the documents "
        "is rejected.",
    )
    store_text: bool = Field(
        default=True,
        description="Keep texts and metadata in the store, beside the answers.",
    )
    database: str | None = Field(
        default=None,
        description="Path of the store, on the machine that scores; None takes its setting.",
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Documents scored and committed together; None adapts to two seconds.",
    )
    field_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Prompt rows computed at once, one or more for each field; fewer take less "
        "memory. None takes all.",
    )
    max_input_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Longest prompt in tokens; None takes the checkpoint's.",
    )
    mode: Literal["auto", "parallel", "cached_serial", "independent"] = Field(
        default="auto",
        description="How the fields of a document are computed. All give the same answers, at "
        "different speeds.",
    )
    layout: Literal["schema-first", "context-first"] | None = Field(
        default=None,
        description="Whether the questions or the document stand first in the prompt; None takes "
        "the checkpoint's.",
    )
    encoding: Literal["labels", "codes"] | None = Field(
        default=None,
        description="Whether the model spells out choices or names a letter for each; None takes "
        "the checkpoint's.",
    )
    model_id: str | None = Field(
        default=None,
        description="The checkpoint's model id, which may select a temperature; a hub id brings "
        "its own.",
    )
    revision: str | None = Field(
        default=None, description="Its full revision, likewise; of a hub id what is fetched."
    )
    allow_uncalibrated: bool = Field(
        default=False, description="Consent to temperature 1.0 where the policy refuses it."
    )
    accept_prompt: bool = Field(
        default=False,
        description="Consent to a system text that is not the one the checkpoint was trained "
        "with; the run records its hash.",
    )

    @field_validator("*", mode="before")
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

    @field_validator("checkpoint", "adapter")
    @classmethod
    def _no_address(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            raise ValueError(
                "must be a folder or a hub id as org/name: an address may hold a password, and "
                "parameters of a flow are kept by Prefect"
            )
        return value

    @field_validator("documents", "output")
    @classmethod
    def _dated(cls, value: str | None) -> str | None:
        return None if value is None else check_dates(value)

    @field_validator("schema_")
    @classmethod
    def _dated_file(cls, value: str) -> str:
        return check_dates(value) if is_schema_file(value) else value

    @field_validator("since")
    @classmethod
    def _a_moment(cls, value: str | None) -> str | None:
        return check_moment(value) if value else None

    @field_validator("timezone")
    @classmethod
    def _a_zone(cls, value: str | None) -> str | None:
        return check_zone(value) if value else None

    @field_validator("database")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            raise ValueError(
                "database must be a path: a URL may hold a password and belongs in the setting "
                "WEIGHBRIDGE_DATABASE_URL, as parameters of a flow are kept by Prefect"
            )
        return None if value is None else refuse_dates(value, "database")

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
