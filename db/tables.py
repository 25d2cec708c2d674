"""The tables of a store.

Raw logits are the record: one `answer_choice` row per choice. Everything that a
temperature changes lies in `answer_probability` and `choice_probability`, one set of
rows per distinct `scaling`; both may be dropped and computed again from the logits.

A `decision` is one document under one key (schema, checkpoint, dtype, prompt version,
generation). Runs do not own decisions: an `item` is one document of a run and points
to the decision it was answered by, which an earlier run may have made.

No foreign key cascades: rebuilding a table under a cascade empties its children.
"""

import re
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    JSON,
    CheckConstraint,
    DateTime,
    Dialect,
    ForeignKeyConstraint,
    Index,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import declared_attr, registry
from sqlmodel import Field, SQLModel

# Constraints need names that do not depend on the database, or no migration can drop them.
_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
METADATA: Final = MetaData(naming_convention=_NAMES)
# Narrow rows that are only ever read through their key are kept in the key's own tree.
_CLUSTERED = {"sqlite_with_rowid": False}


def table_name(model_name: str) -> str:
    """Give a model's table name: `SchemaVersion` is kept in `schema_version`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", model_name).lower()


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time, kept in UTC; aware on both sides."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive times rather than guess their zone."""
        del dialect
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time must carry its time zone, got a naive datetime")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give the zone back that SQLite does not keep."""
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class StoreTable(SQLModel, registry=registry(metadata=METADATA)):
    """Base of all tables; a registry of its own keeps them apart from a caller's models."""

    @declared_attr.directive
    def __tablename__(cls) -> str:  # noqa: N805 # pyright: ignore[reportIncompatibleVariableOverride]
        return table_name(cls.__name__)


class Checkpoint(StoreTable, table=True):
    """Weights, tokenizer and adapter, by content."""

    id: int | None = Field(default=None, primary_key=True)
    fingerprint: str = Field(unique=True)
    name: str
    model_id: str | None = None
    revision: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    adapter_sha256: str | None = None
    contract: str | None = None
    created_at: datetime = Field(sa_type=UtcDateTime)


class SchemaVersion(StoreTable, table=True):
    """A schema by content; what a run calls it is kept with the run."""

    id: int | None = Field(default=None, primary_key=True)
    sha256: str = Field(unique=True)
    canonical: str = Field(sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)


class Document(StoreTable, table=True):
    """A document by content; `text` is null unless a run was allowed to keep it."""

    id: int | None = Field(default=None, primary_key=True)
    sha256: str = Field(unique=True)
    characters: int
    text: str | None = Field(default=None, sa_type=Text)


class Scaling(StoreTable, table=True):
    """A temperature that probabilities are kept for; kind and source are of its first use."""

    id: int | None = Field(default=None, primary_key=True)
    temperature: float = Field(unique=True)
    kind: str
    source: str = Field(sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)


class Run(StoreTable, table=True):
    """One run over one source of documents."""

    # A pruned run's number is never given out again.
    __table_args__ = (
        CheckConstraint(
            "status IN ('running', 'completed', 'failed', 'cancelled', 'crashed')", name="status"
        ),
        CheckConstraint("documents = scored + reused + rejected", name="accounting"),
        {"sqlite_autoincrement": True},
    )

    id: int | None = Field(default=None, primary_key=True)
    flow_run_id: str | None = Field(default=None, unique=True)
    name: str
    status: str = Field(index=True)
    message: str | None = Field(default=None, sa_type=Text)
    host: str
    pid: int
    started_at: datetime = Field(sa_type=UtcDateTime)
    resumed_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    finished_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    schema_version_id: int = Field(foreign_key="schema_version.id")
    schema_name: str
    checkpoint_id: int = Field(foreign_key="checkpoint.id")
    scaling_id: int = Field(foreign_key="scaling.id")
    temperature: float
    temperature_kind: str
    temperature_source: str = Field(sa_type=Text)
    documents_source: str = Field(sa_type=Text)
    mode: str
    layout: str
    encoding: str
    contract: str
    dtype: str
    prompt_version: str
    max_input_tokens: int
    backend: str
    versions: dict[str, str] = Field(sa_type=JSON)
    store_text: bool
    rescore: bool
    documents: int = 0
    scored: int = 0
    reused: int = 0
    rejected: int = 0
    wasted: int = 0
    permutations: int = Field(default=1, sa_column_kwargs={"server_default": text("1")})
    checkpoint_source: str | None = Field(default=None, sa_type=Text)
    adapter_source: str | None = Field(default=None, sa_type=Text)
    accepted_prompt_sha256: str | None = None


class Batch(StoreTable, table=True):
    """What was scored and committed together, with its timings."""

    id: int | None = Field(default=None, primary_key=True)
    run_id: int = Field(foreign_key="run.id", index=True)
    started_at: datetime = Field(sa_type=UtcDateTime)
    recorded_at: datetime = Field(sa_type=UtcDateTime)
    mode: str
    backend: str
    scored: int
    reused: int
    rejected: int
    wasted: int
    prefill_seconds: float | None = None
    branch_seconds: float | None = None
    total_seconds: float | None = None
    prefix_tokens: int | None = None
    suffix_tokens: int | None = None
    prefills: int | None = None
    start_bytes: int | None = None
    peak_bytes: int | None = None
    resident_tokens: int | None = None
    resident_hits: int | None = None


class Decision(StoreTable, table=True):
    """A document answered under one key; run and batch are where it was made."""

    __table_args__ = (
        UniqueConstraint(
            "document_id",
            "schema_version_id",
            "checkpoint_id",
            "dtype",
            "prompt_version",
            "generation",
            name="uq_decision_key",
        ),
    )

    id: int | None = Field(default=None, primary_key=True)
    document_id: int = Field(foreign_key="document.id")
    schema_version_id: int = Field(foreign_key="schema_version.id")
    checkpoint_id: int = Field(foreign_key="checkpoint.id")
    dtype: str
    prompt_version: str
    generation: int
    run_id: int = Field(foreign_key="run.id")
    batch_id: int = Field(foreign_key="batch.id")


class Item(StoreTable, table=True):
    """One document of a run: position from 0 over records, source line from 1."""

    __table_args__ = (
        CheckConstraint("status IN ('scored', 'reused', 'rejected')", name="status"),
        CheckConstraint("(status = 'rejected') = (decision_id IS NULL)", name="decision"),
        CheckConstraint("(status = 'rejected') = (code IS NOT NULL)", name="code"),
        _CLUSTERED,
    )

    run_id: int = Field(foreign_key="run.id", primary_key=True)
    position: int = Field(primary_key=True)
    batch_id: int = Field(foreign_key="batch.id")
    line: int | None = None
    external_id: str | None = Field(default=None, index=True)
    # `metadata` is taken by the class itself, not by the table.
    columns: dict[str, Any] | None = Field(
        default=None, sa_type=JSON(none_as_null=True), sa_column_kwargs={"name": "metadata"}
    )
    document_id: int | None = Field(default=None, foreign_key="document.id", index=True)
    status: str
    wasted: bool = False
    code: str | None = None
    message: str | None = Field(default=None, sa_type=Text)
    decision_id: int | None = Field(default=None, foreign_key="decision.id", index=True)


class Claim(StoreTable, table=True):
    """A document that a live run is about to score under one key."""

    document_sha256: str = Field(primary_key=True)
    schema_version_id: int = Field(foreign_key="schema_version.id", primary_key=True)
    checkpoint_id: int = Field(foreign_key="checkpoint.id", primary_key=True)
    dtype: str = Field(primary_key=True)
    prompt_version: str = Field(primary_key=True)
    run_id: int = Field(foreign_key="run.id", index=True)
    host: str
    pid: int
    claimed_at: datetime = Field(sa_type=UtcDateTime)
    expires_at: datetime = Field(sa_type=UtcDateTime)


class Answer(StoreTable, table=True):
    """A decision's answer to one field; margin is the top logit minus the second.

    The flip rate is the share of the orders of the choices that disagree with the answer.
    """

    __table_args__ = (_CLUSTERED,)

    decision_id: int = Field(foreign_key="decision.id", primary_key=True)
    field_position: int = Field(primary_key=True)
    field: str
    kind: str
    selected: int
    value: str
    margin: float | None = None
    flip_rate: float | None = None


class AnswerChoice(StoreTable, table=True):
    """The raw logit of one choice."""

    __table_args__ = (
        ForeignKeyConstraint(
            ["decision_id", "field_position"], ["answer.decision_id", "answer.field_position"]
        ),
        _CLUSTERED,
    )

    decision_id: int = Field(primary_key=True)
    field_position: int = Field(primary_key=True)
    choice_position: int = Field(primary_key=True)
    choice: str
    logit: float


class AnswerProbability(StoreTable, table=True):
    """The probability of the selected choice at one scaling."""

    __table_args__ = (
        ForeignKeyConstraint(
            ["decision_id", "field_position"], ["answer.decision_id", "answer.field_position"]
        ),
        Index("ix_answer_probability_field", "scaling_id", "field", "probability"),
        _CLUSTERED,
    )

    scaling_id: int = Field(foreign_key="scaling.id", primary_key=True)
    decision_id: int = Field(primary_key=True)
    field_position: int = Field(primary_key=True)
    field: str
    probability: float
    expected_value: float | None = None


class ChoiceProbability(StoreTable, table=True):
    """The probability of one choice at one scaling."""

    __table_args__ = (
        ForeignKeyConstraint(
            ["decision_id", "field_position", "choice_position"],
            [
                "answer_choice.decision_id",
                "answer_choice.field_position",
                "answer_choice.choice_position",
            ],
        ),
        _CLUSTERED,
    )

    scaling_id: int = Field(foreign_key="scaling.id", primary_key=True)
    decision_id: int = Field(primary_key=True)
    field_position: int = Field(primary_key=True)
    choice_position: int = Field(primary_key=True)
    probability: float


def table(model: type[StoreTable]) -> Table:
    """Give the table behind a model, for statements that need no objects."""
    return METADATA.tables[table_name(model.__name__)]
