"""Runs and records for tests of planning, on a real store."""

import itertools
import os
import platform
from collections.abc import Sequence

from weighbridge.db import (
    AnswerRecord,
    BatchRecord,
    CheckpointRow,
    ChoiceRecord,
    DocumentRecord,
    ItemRecord,
    RunStart,
    SchemaRow,
    Store,
)
from weighbridge.tasks.planning import Batch, text_sha256
from weighbridge.tasks.sources import BadRecord, Document

ANSWER = AnswerRecord("q", "enum", (ChoiceRecord("a", 1.0), ChoiceRecord("b", 0.0)), 0, 1.0)
_numbers = itertools.count()


def a_key() -> str:
    """Return a schema hash of its own, so that examples share no decisions."""
    return f"{next(_numbers):064x}"


def begin(store: Store, key: str, flow_run_id: str | None = None) -> int:
    start = RunStart(
        flow_run_id=flow_run_id,
        name="test",
        host=platform.node(),
        pid=os.getpid(),
        schema=SchemaRow(key, "test", "{}"),
        checkpoint=CheckpointRow("c" * 64, "tiny"),
        temperature=1.0,
        temperature_kind="default",
        temperature_source="default",
        documents_source="memory",
        mode="auto",
        layout="schema-first",
        encoding="labels",
        contract=None,
        dtype="float32",
        prompt_version="1",
        max_input_tokens=4096,
        backend="cpu",
    )
    return store.begin_run(start).run_id


def document(position: int, text: str) -> Document:
    return Document(position, position + 1, f"id-{position}", text, {})


def bad(position: int) -> BadRecord:
    return BadRecord(position, position + 1, None, "document.empty", "must not be blank")


def record(store: Store, run_id: int, batch: Batch) -> None:
    def item(of: Document | BadRecord, status: str) -> ItemRecord:
        text = of.text if isinstance(of, Document) else None
        return ItemRecord(
            position=of.position,
            document=DocumentRecord(text_sha256(text), text, len(text)) if text else None,
            status=status,  # type: ignore[arg-type]
            code=of.code if isinstance(of, BadRecord) else None,
            message=of.message if isinstance(of, BadRecord) else None,
            answers=(ANSWER,) if status == "scored" else (),
        )

    items = (
        *(item(each, "scored") for each in batch.to_score),
        *(item(each, "reused") for each in batch.decided),
        *(item(each, "rejected") for each in batch.bad),
    )
    store.record_batch(run_id, BatchRecord(batch.began_at, None, "auto", "cpu", items))


def decide(store: Store, key: str, texts: Sequence[str]) -> None:
    """Let an earlier run decide some texts."""
    run_id = begin(store, key)
    if texts:
        record(store, run_id, Batch(tuple(document(i, text) for i, text in enumerate(texts))))
    store.finish_run(run_id, "completed")


def as_records(texts: Sequence[str | None]) -> list[Document | BadRecord]:
    return [bad(i) if text is None else document(i, text) for i, text in enumerate(texts)]


def positions(batches: Sequence[Batch]) -> list[int]:
    return [
        record.position
        for batch in batches
        for record in (*batch.to_score, *batch.decided, *batch.bad)
    ]
