"""The values that go into a store and come out of it, and which of them are refused."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from weighbridge.db.errors import RecordRefused

ItemStatus = Literal["scored", "reused", "rejected"]
FinalStatus = Literal["completed", "failed", "cancelled", "crashed"]


@dataclass(frozen=True)
class SchemaRow:
    """A schema: hash and canonical text make it what it is, the name is what a run calls it."""

    sha256: str
    name: str | None
    canonical: str


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint: the fingerprint makes it what it is, the name is for people."""

    fingerprint: str
    name: str
    model_id: str | None = None
    revision: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    adapter_sha256: str | None = None
    contract: str | None = None


@dataclass(frozen=True)
class RunStart:
    """What a run begins with.

    Schema, checkpoint, `dtype`, `contract`, `layout`, `encoding` and `prompt_version`
    (the version of contract, layout and encoding) are the key its decisions are kept
    under, beside the document. `permutations` is in how many orders of the choices each
    document was asked; `prompt_version` must tell it too where it is more than one.
    `checkpoint_source` and `adapter_source` are folders or hub ids with their commits;
    `accepted_prompt_sha256` the hash of a system text that is not the trained one.
    """

    flow_run_id: str | None
    name: str
    host: str
    pid: int
    schema: SchemaRow
    checkpoint: CheckpointRow
    temperature: float
    temperature_kind: str
    temperature_source: str
    documents_source: str
    mode: str
    layout: str
    encoding: str
    contract: str | None
    dtype: str
    prompt_version: str
    max_input_tokens: int
    backend: str
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    store_text: bool = True
    rescore: bool = False
    permutations: int = 1
    checkpoint_source: str | None = None
    adapter_source: str | None = None
    accepted_prompt_sha256: str | None = None


@dataclass(frozen=True)
class RunHandle:
    """A run that has begun; `continued` tells that an earlier attempt had begun it."""

    run_id: int
    continued: bool


@dataclass(frozen=True)
class DocumentRecord:
    """A document: sha256 of its code points as UTF-8 (hex), its text and length."""

    sha256: str
    text: str | None
    characters: int


@dataclass(frozen=True)
class ChoiceRecord:
    """A choice (booleans as `true` and `false`) and its raw logit, before any temperature."""

    choice: str
    logit: float


@dataclass(frozen=True)
class AnswerRecord:
    """The answer to one field; `selected` is an index into `choices`.

    For the kind `score` the choices are the levels from low to high. `margin` is the
    top logit minus the second, None with a single choice. `flip_rate` is the share of the
    orders of the choices that disagree with the answer, None with a single order.
    """

    field: str
    kind: str
    choices: tuple[ChoiceRecord, ...]
    selected: int
    margin: float | None
    flip_rate: float | None = None


@dataclass(frozen=True)
class ItemRecord:
    """One record of the source: scored with answers, reused by its document, or rejected."""

    position: int
    document: DocumentRecord | None
    status: ItemStatus
    line: int | None = None
    external_id: str | None = None
    metadata: Mapping[str, Any] | None = None
    code: str | None = None
    message: str | None = None
    answers: tuple[AnswerRecord, ...] = ()


@dataclass(frozen=True)
class BatchTimings:
    """What scoring a batch took, in seconds, tokens and bytes.

    `resident_tokens` were taken from prefixes kept in memory, in `resident_hits` takes.
    """

    prefill_seconds: float
    branch_seconds: float
    total_seconds: float
    prefix_tokens: int
    suffix_tokens: int
    prefills: int
    start_bytes: int | None
    peak_bytes: int | None
    resident_tokens: int | None = None
    resident_hits: int | None = None


@dataclass(frozen=True)
class BatchRecord:
    """The items to commit together; `timings` is None when nothing was scored."""

    started_at: datetime
    timings: BatchTimings | None
    mode: str
    backend: str
    items: tuple[ItemRecord, ...]


@dataclass(frozen=True)
class BatchOutcome:
    """How the items of a batch came to stand: documents = scored + reused + rejected.

    `wasted` counts items whose document had been decided by the time the batch was
    recorded, by another run or earlier in the batch; they are among the reused.
    """

    scored: int = 0
    reused: int = 0
    rejected: int = 0
    wasted: int = 0

    @property
    def documents(self) -> int:
        """Number of items recorded."""
        return self.scored + self.reused + self.rejected


@dataclass(frozen=True)
class RunSummary:
    """A run as it stands: documents = scored + reused + rejected."""

    run_id: int
    flow_run_id: str | None
    name: str
    status: str
    message: str | None
    host: str
    pid: int
    started_at: datetime
    finished_at: datetime | None
    seconds: float
    documents: int
    scored: int
    reused: int
    rejected: int
    wasted: int
    schema: str
    checkpoint: str
    temperature: float
    temperature_kind: str
    temperature_source: str
    documents_source: str
    mode: str
    layout: str
    encoding: str
    contract: str
    dtype: str
    backend: str
    rescore: bool
    permutations: int
    checkpoint_source: str | None
    adapter_source: str | None
    accepted_prompt_sha256: str | None


def require_recordable(batch: BatchRecord) -> None:
    """Check a batch before any of it is written.

    Raises:
        RecordRefused: A value breaks what the store promises; the text names position,
            field and choice, never document text.
    """
    if batch.started_at.tzinfo is None:
        raise RecordRefused(
            "started_at must carry its time zone, got a naive datetime",
            hint="use datetime.now(UTC)",
        )
    _require_distinct(
        (item.position for item in batch.items),
        "positions of a batch",
        hint="a position names one record of the source",
    )
    for item in batch.items:
        _require_item(item)


def _require_item(item: ItemRecord) -> None:
    where = f"item {item.position}"
    if item.position < 0:
        raise RecordRefused(
            f"positions must be 0 or more, got {item.position}",
            hint="count the records of the source from 0",
        )
    if item.status == "rejected":
        if item.code is None or item.message is None or item.answers:
            raise RecordRefused(
                f"{where}: a rejection must have a code, a message and no answers,"
                f" got {_got(item)}",
                hint="give the code and message of the refusal, or another status",
            )
        return
    if item.code is not None:
        raise RecordRefused(
            f"{where}: only a rejection must have a code, got {item.code} for a {item.status} item",
            hint="leave out the code, or give the status rejected",
        )
    if item.document is None:
        raise RecordRefused(
            f"{where}: a {item.status} item must name its document, got none",
            hint="only a rejected item may have no document",
        )
    if (item.status == "scored") != bool(item.answers):
        raise RecordRefused(
            f"{where}: exactly the scored items must have answers, got {_got(item)}",
            hint="give the answers of a scored item, and none for a reused one",
        )
    _require_distinct(
        (answer.field for answer in item.answers),
        f"{where}: fields",
        hint="give one answer for each field of the schema",
    )
    for answer in item.answers:
        _require_answer(answer, f"{where}, field {answer.field!r}")


def _require_answer(answer: AnswerRecord, where: str) -> None:
    if not 0 <= answer.selected < len(answer.choices):
        raise RecordRefused(
            f"{where}: selected must be one of {len(answer.choices)} choices,"
            f" got {answer.selected}",
            hint="selected is the index of the chosen one, from 0",
        )
    _require_distinct(
        (choice.choice for choice in answer.choices),
        f"{where}: choices",
        hint="give one logit for each choice of the field",
    )
    for choice in answer.choices:
        if not math.isfinite(choice.logit):
            raise RecordRefused(
                f"{where}, choice {choice.choice!r}: logits must be finite, got {choice.logit}",
                hint="reject the document as document.not_finite",
            )
    if answer.margin is not None and not math.isfinite(answer.margin):
        raise RecordRefused(
            f"{where}: the margin must be finite, got {answer.margin}",
            hint="give the top logit minus the second, None with a single choice",
        )
    if answer.flip_rate is not None and not 0 <= answer.flip_rate <= 1:
        raise RecordRefused(
            f"{where}: the flip rate must be from 0 to 1, got {answer.flip_rate}",
            hint="give a share of the orders, None with a single order",
        )


def _got(item: ItemRecord) -> str:
    """Say which parts of an item are there, never what they hold."""
    parts = {"code": item.code, "message": item.message}
    there = [name for name, value in parts.items() if value is not None]
    return ", ".join([f"status {item.status}", *there, f"{len(item.answers)} answers"])


def _require_distinct(values: Iterable[object], what: str, *, hint: str) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise RecordRefused(f"{what} must be distinct, got {twice[0]!r} more than once", hint=hint)
