"""What the scorer gives becomes what the store keeps, and nothing is lost or made up."""

from datetime import UTC, datetime
from hashlib import sha256

import pytest

from weighbridge.db.records import BatchTimings, require_recordable
from weighbridge.scorer.results import DecisionKey, FieldResult, Rejection, ScoreResult
from weighbridge.scorer.rows import Mode, Timings
from weighbridge.scorer.schema import Choice, FieldKind
from weighbridge.scorer.temperature import TemperatureKind
from weighbridge.tasks.convert import answer_records, batch_record, batch_timings
from weighbridge.tasks.planning import Batch, text_sha256
from weighbridge.tasks.sources import BadRecord, Document

TIMINGS = Timings(
    mode=Mode.PARALLEL,
    prefill_seconds=1.0,
    branch_seconds=2.0,
    total_seconds=4.0,
    prefix_tokens=30,
    suffix_tokens=20,
    resident_tokens=10,
    resident_hits=1,
    prefills=1,
    start_bytes=100,
    peak_bytes=300,
)


def field(
    kind: FieldKind,
    value: Choice,
    logits: dict[str, float],
    margin: float | None,
    flip_rate: float | None = None,
) -> FieldResult:
    return FieldResult(
        kind=kind,
        value=value,
        scores=dict.fromkeys(logits, 1 / len(logits)),
        logits=logits,
        margin=margin,
        expected_value=0.5 if kind is FieldKind.SCORE else None,
        code=None,
        flip_rate=flip_rate,
    )


KEY = DecisionKey(
    schema_sha256="5" * 64,
    checkpoint="c" * 64,
    dtype="float32",
    contract=None,
    layout="schema-first",
    encoding="labels",
    prompt_version="1.1",
)


def result(**changes: FieldResult) -> ScoreResult:
    fields = {
        "topic": field(FieldKind.ENUM, "b", {"a": -1.0, "b": 2.0, "c": 1.5}, 0.5),
        "urgent": field(FieldKind.BOOLEAN, True, {"true": 0.25, "false": 0.0}, 0.25),
        "anger": field(FieldKind.SCORE, "calm", {"calm": 3.0, "furious": 3.0}, 0.0),
        **changes,
    }
    return ScoreResult(
        output={name: each.value for name, each in fields.items()},
        fields=fields,
        key=KEY,
        temperature=2.0,
        temperature_kind=TemperatureKind.EXPLICIT,
        temperature_fitted=False,
        timings=TIMINGS,
    )


def document(position: int, text: str) -> Document:
    return Document(position, position + 10, f"id-{position}", text, {"channel": "mail"})


def test_answers_keep_order_logits_and_choice():
    topic, urgent, anger = answer_records(result())
    assert [(c.choice, c.logit) for c in topic.choices] == [("a", -1.0), ("b", 2.0), ("c", 1.5)]
    assert (topic.field, topic.kind, topic.selected, topic.margin) == ("topic", "enum", 1, 0.5)
    # Booleans are kept as text, in the order of the schema.
    assert [c.choice for c in urgent.choices] == ["true", "false"]
    assert (urgent.kind, urgent.selected) == ("boolean", 0)
    # Of equal logits the first one counts, as in the scorer.
    assert (anger.kind, anger.selected, anger.margin) == ("score", 0, 0.0)


def test_a_single_choice_has_no_margin():
    only = field(FieldKind.ENUM, "a", {"a": 5.0}, None)
    (answer,) = [each for each in answer_records(result(only=only)) if each.field == "only"]
    assert (answer.selected, answer.margin, len(answer.choices)) == (0, None, 1)


def test_flip_rates_go_along():
    # 0 says that all orders agreed, None that there was only one.
    told = {"one": 0.25, "two": 0.0, "three": None}
    made = {
        name: field(FieldKind.ENUM, "a", {"a": 1.0, "b": 0.0}, 1.0, rate)
        for name, rate in told.items()
    }
    found = {each.field: each.flip_rate for each in answer_records(result(**made))}
    assert {name: found[name] for name in told} == told


def test_timings_add_up():
    later = Timings(
        prefill_seconds=0.5, total_seconds=1.0, resident_tokens=7, prefills=1, start_bytes=900
    )
    second = result().model_copy(update={"timings": later})
    # 1 + 0.5, 2 + 0, 4 + 1 seconds; the first start and the highest peak; 10 + 7 tokens.
    assert batch_timings([result(), second]) == BatchTimings(
        *(1.5, 2.0, 5.0), *(30, 20, 2), *(100, 300), resident_tokens=17, resident_hits=1
    )


def test_each_record_of_a_batch_becomes_one_item():
    began = datetime(2026, 1, 2, tzinfo=UTC)
    batch = Batch(
        to_score=(document(0, "scored"), document(2, "too long")),
        decided=(document(1, "scored"), document(3, "too long"), document(5, "from before")),
        bad=(BadRecord(4, 14, "id-4", "document.empty", "must not be blank"),),
        began_at=began,
    )
    rejection = Rejection(code="document.too_long", message="at most 5 tokens, got 7")
    recorded = batch_record(batch, [result(), rejection], mode="auto", backend="cpu")
    require_recordable(recorded)
    # The mode as it was, not as it was asked for.
    assert (recorded.started_at, recorded.mode, recorded.backend) == (began, "parallel", "cpu")
    items = {item.position: item for item in recorded.items}
    # The twin of a rejected text is rejected too: nothing of it was decided.
    assert {position: item.status for position, item in items.items()} == {
        0: "scored",
        1: "reused",
        2: "rejected",
        3: "rejected",
        4: "rejected",
        5: "reused",
    }
    assert [items[i].code for i in (2, 3, 4)] == [
        "document.too_long",
        "document.too_long",
        "document.empty",
    ]
    assert items[3].message == rejection.message
    assert [items[i].line for i in range(6)] == [10, 11, 12, 13, 14, 15]
    assert [items[i].external_id for i in range(6)] == [f"id-{i}" for i in range(6)]
    assert items[2].metadata == {"channel": "mail"}
    assert items[4].document is None
    assert items[4].metadata is None
    known = items[0].document
    assert known is not None
    assert (known.sha256, known.text, known.characters) == (
        sha256(b"scored").hexdigest(),
        "scored",
        6,
    )


def test_without_keeping_neither_text_nor_metadata_goes_on():
    batch = Batch((document(0, "secret"),), (document(1, "secret"),))
    recorded = batch_record(batch, [result()], mode="auto", backend="cpu", keep=False)
    assert [item.metadata for item in recorded.items] == [None, None]
    kept = [item.document for item in recorded.items if item.document]
    assert [(each.text, each.characters) for each in kept] == [(None, 6), (None, 6)]
    assert "secret" not in repr(recorded)


def test_a_batch_without_scoring_has_no_timings():
    recorded = batch_record(Batch((), (document(0, "a"),)), [], mode="auto", backend="cpu")
    assert recorded.timings is None
    rejection = Rejection(code="document.encoding", message="must be text")
    recorded = batch_record(Batch((document(0, "a"),)), [rejection], mode="auto", backend="cpu")
    assert recorded.timings is None


def test_results_must_match_the_batch():
    with pytest.raises(ValueError, match="zip"):
        batch_record(Batch((document(0, "a"),)), [], mode="auto", backend="cpu")


def test_a_text_is_known_by_its_exact_code_points():
    # é as one code point and as e + accent look the same and are two documents.
    assert text_sha256("caf\u00e9") != text_sha256("cafe\u0301")
    assert text_sha256("a") == sha256(b"a").hexdigest()
    # A caller's own document may hold what a file cannot; it is refused when it is scored.
    assert len(text_sha256("\udbc0")) == 64


def test_a_document_is_never_shown_by_repr():
    # Prefect's logs and pytest's reports show values by repr.
    assert "secret" not in repr(Batch((document(0, "secret"),)))
