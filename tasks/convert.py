"""Values of the scorer to rows of the store. Pure."""

from collections.abc import Mapping, Sequence

from weighbridge.db.records import (
    AnswerRecord,
    BatchRecord,
    BatchTimings,
    ChoiceRecord,
    DocumentRecord,
    ItemRecord,
    ItemStatus,
)
from weighbridge.scorer.results import Rejection, ScoreResult
from weighbridge.scorer.rows import Timings
from weighbridge.tasks.planning import Batch, text_sha256
from weighbridge.tasks.sources import BadRecord, Document


def batch_record(
    batch: Batch,
    results: Sequence[ScoreResult | Rejection],
    *,
    mode: str,
    backend: str,
    keep: bool = True,
) -> BatchRecord:
    """Turn a scored batch into what the store records in one transaction.

    Args:
        batch: The planned batch.
        results: One per document of `batch.to_score`.
        mode: How rows were to be computed; how they were is recorded where it is known.
        backend: What they were computed with.
        keep: Whether texts and metadata are kept.
    """
    rejected = {
        text_sha256(document.text): result
        for document, result in zip(batch.to_score, results, strict=True)
        if isinstance(result, Rejection)
    }
    scored = [result for result in results if isinstance(result, ScoreResult)]
    return BatchRecord(
        started_at=batch.began_at,
        timings=batch_timings(scored) if scored else None,
        mode=str(scored[0].timings.mode) if scored else mode,
        backend=backend,
        items=(
            *(
                _scored_item(document, result, keep)
                for document, result in zip(batch.to_score, results, strict=True)
            ),
            *(_decided_item(document, rejected, keep) for document in batch.decided),
            *(_bad_item(record) for record in batch.bad),
        ),
    )


def batch_timings(results: Sequence[ScoreResult]) -> BatchTimings:
    """Add up what the documents of a batch took."""
    total = sum((result.timings for result in results), Timings())
    return BatchTimings(
        prefill_seconds=total.prefill_seconds,
        branch_seconds=total.branch_seconds,
        total_seconds=total.total_seconds,
        prefix_tokens=total.prefix_tokens,
        suffix_tokens=total.suffix_tokens,
        prefills=total.prefills,
        start_bytes=total.start_bytes,
        peak_bytes=total.peak_bytes,
        resident_tokens=total.resident_tokens,
        resident_hits=total.resident_hits,
    )


def answer_records(result: ScoreResult) -> tuple[AnswerRecord, ...]:
    """Turn the answers of a document into rows: one per choice, before temperature."""
    return tuple(
        AnswerRecord(
            field=name,
            kind=field.kind.value,
            choices=tuple(
                ChoiceRecord(choice=choice, logit=logit) for choice, logit in field.logits.items()
            ),
            selected=max(range(len(field.logits)), key=list(field.logits.values()).__getitem__),
            margin=field.margin,
            flip_rate=field.flip_rate,
        )
        for name, field in result.fields.items()
    )


def _scored_item(document: Document, result: ScoreResult | Rejection, keep: bool) -> ItemRecord:
    if isinstance(result, Rejection):
        return _item(document, keep, status="rejected", code=result.code, message=result.message)
    return _item(document, keep, status="scored", answers=answer_records(result))


def _decided_item(document: Document, rejected: Mapping[str, Rejection], keep: bool) -> ItemRecord:
    twin = rejected.get(text_sha256(document.text))
    if twin is not None:
        return _item(document, keep, status="rejected", code=twin.code, message=twin.message)
    return _item(document, keep, status="reused")


def _item(
    document: Document,
    keep: bool,
    *,
    status: ItemStatus,
    code: str | None = None,
    message: str | None = None,
    answers: tuple[AnswerRecord, ...] = (),
) -> ItemRecord:
    return ItemRecord(
        position=document.position,
        line=document.line,
        external_id=document.external_id,
        metadata=dict(document.metadata) if keep and document.metadata else None,
        document=DocumentRecord(
            sha256=text_sha256(document.text),
            text=document.text if keep else None,
            characters=len(document.text),
        ),
        status=status,
        code=code,
        message=message,
        answers=answers,
    )


def _bad_item(record: BadRecord) -> ItemRecord:
    return ItemRecord(
        position=record.position,
        line=record.line,
        external_id=record.external_id,
        metadata=None,
        document=None,
        status="rejected",
        code=record.code,
        message=record.message,
        answers=(),
    )
