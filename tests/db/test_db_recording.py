from dataclasses import replace

import pytest
from sqlalchemy import text

from weighbridge.db import (
    AnswerRecord,
    BatchOutcome,
    ChoiceRecord,
    RecordRefused,
    batches,
    rejected,
    rejected_codes,
    results,
    run_summary,
)
from weighbridge.db.engine import reading


def rows(engine, sql):
    with reading(engine) as connection:
        return [tuple(row) for row in connection.execute(text(sql))]


def topics(engine, run_id):
    return [row["value"] for row in results(engine, run_id) if row["field"] == "topic"]


def test_scored_reused_and_rejected_close_the_accounting(store, engine, make):
    first = store.begin_run(make.start()).run_id
    outcome = store.record_batch(first, make.batch(make.scored(0), make.rejected(1)))
    assert outcome == BatchOutcome(scored=1, rejected=1)
    store.finish_run(first, "completed", documents=2)

    second = store.begin_run(make.start()).run_id
    sha256s = [make.sha("document 0"), make.sha("document 5")]
    assert list(store.decided(second, sha256s)) == sha256s[:1]
    outcome = store.record_batch(second, make.batch(make.reused(0), make.scored(1, "document 5")))
    assert outcome == BatchOutcome(scored=1, reused=1)
    assert store.finish_run(second, "completed", documents=2).documents == 2
    assert rows(engine, "SELECT count(*) FROM decision") == [(2,)]
    # The reused item answers with the decision that the first run made, and keeps its origin.
    assert rows(
        engine,
        "SELECT d.run_id FROM item i JOIN decision d ON d.id = i.decision_id"
        " WHERE i.run_id = 2 ORDER BY i.position",
    ) == [(1,), (2,)]


def test_a_duplicate_text_in_one_batch_is_one_decision_and_two_items(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    outcome = store.record_batch(run_id, make.batch(make.scored(0, "same"), make.reused(1, "same")))
    assert outcome == BatchOutcome(scored=1, reused=1)
    # A caller that scored both did the second in vain.
    outcome = store.record_batch(run_id, make.batch(make.scored(2, "two"), make.scored(3, "two")))
    assert outcome == BatchOutcome(scored=1, reused=1, wasted=1)
    assert rows(engine, "SELECT count(*), count(DISTINCT document_id) FROM decision") == [(2, 2)]
    assert rows(engine, "SELECT count(DISTINCT decision_id) FROM item") == [(2,)]
    summary = store.finish_run(run_id, "completed", documents=4)
    assert (summary.scored, summary.reused, summary.wasted) == (2, 2, 1)


def test_what_another_run_decided_meanwhile_is_wasted_and_not_recorded_twice(store, engine, make):
    one = store.begin_run(make.start()).run_id
    two = store.begin_run(make.start()).run_id
    store.record_batch(one, make.batch(make.scored(0)))
    other = make.scored(0, answers=make.answers(topic={"billing": 0.0, "login": 9.0}))
    assert store.record_batch(two, make.batch(other)) == BatchOutcome(reused=1, wasted=1)
    assert rows(engine, "SELECT count(*) FROM decision") == [(1,)]
    # Both runs tell the same answer: the one on record.
    assert {topic for run in (one, two) for topic in topics(engine, run)} == {"billing"}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"layout": "context-first"},
        {"encoding": "codes"},
        {"contract": "nimble"},
        {"prompt_version": "2"},
    ],
)
def test_every_part_of_the_key_keeps_decisions_apart(store, make, change):
    first = store.begin_run(make.start()).run_id
    store.record_batch(first, make.batch(make.scored(0)))
    sha256 = make.sha("document 0")
    assert store.decided(store.begin_run(make.start(**change)).run_id, [sha256]) == {}
    same = make.start(temperature=3.0, mode="independent", name="x", backend="metal")
    assert sha256 in store.decided(store.begin_run(same).run_id, [sha256])


def test_schema_and_checkpoint_are_part_of_the_key(store, make):
    start = make.start()
    store.record_batch(store.begin_run(start).run_id, make.batch(make.scored(0)))
    sha256 = make.sha("document 0")
    others = (
        replace(start, schema=replace(start.schema, sha256="6" * 64)),
        replace(start, checkpoint=replace(start.checkpoint, fingerprint="d" * 64)),
    )
    for other in others:
        assert store.decided(store.begin_run(other).run_id, [sha256]) == {}
    renamed = replace(start, schema=replace(start.schema, name="renamed"))
    assert sha256 in store.decided(store.begin_run(renamed).run_id, [sha256])


def test_rescore_adds_a_generation_and_old_runs_keep_theirs(store, engine, make):
    old = store.begin_run(make.start()).run_id
    store.record_batch(old, make.batch(make.scored(0), make.scored(1)))
    new = store.begin_run(make.start(rescore=True, flow_run_id="f")).run_id
    sha256s = [make.sha("document 0"), make.sha("document 1")]
    assert store.decided(new, sha256s) == {}
    assert store.claim(new, sha256s) == set(sha256s)
    answers = make.answers(topic={"billing": 0.0, "login": 5.0})
    store.record_batch(new, make.batch(make.scored(0, answers=answers)))

    # Its retry finds what it made itself, and nothing older.
    assert store.begin_run(make.start(rescore=True, flow_run_id="f")).continued
    assert list(store.decided(new, sha256s)) == sha256s[:1]
    assert store.claim(new, sha256s) == {sha256s[1]}
    outcome = store.record_batch(
        new, make.batch(make.scored(1, answers=answers), make.reused(2, "document 0"))
    )
    assert outcome == BatchOutcome(scored=1, reused=1)

    assert rows(engine, "SELECT generation, count(*) FROM decision GROUP BY 1") == [(0, 2), (1, 2)]
    assert set(topics(engine, old)) == {"billing"}
    assert set(topics(engine, new)) == {"login"}
    # A later run reuses the newest generation.
    later = store.begin_run(make.start()).run_id
    store.record_batch(later, make.batch(make.reused(0)))
    assert topics(engine, later) == ["login"]


def test_recording_again_records_nothing_twice(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    batch = make.batch(make.scored(0), make.rejected(1))
    store.record_batch(run_id, batch)
    assert store.record_batch(run_id, batch) == BatchOutcome()
    assert rows(engine, "SELECT count(*) FROM item") == [(2,)]
    assert len(batches(engine, run_id)) == 1
    # Another document at a recorded position would be lost if it were skipped.
    with pytest.raises(RecordRefused, match="position 0 of run 1"):
        store.record_batch(run_id, make.batch(make.scored(0, "changed"), make.scored(2)))
    assert run_summary(engine, run_id).documents == 2


def test_a_batch_is_all_or_nothing(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    # The second item has no decision to reuse; the first must not stay behind alone.
    with pytest.raises(RecordRefused, match="item 1: a reused item must have a decision"):
        store.record_batch(run_id, make.batch(make.scored(0), make.reused(1, "unknown")))
    counts = rows(
        engine,
        "SELECT (SELECT count(*) FROM item) + (SELECT count(*) FROM decision)"
        " + (SELECT count(*) FROM batch) + (SELECT count(*) FROM document)",
    )
    assert counts == [(0,)]


@pytest.mark.parametrize("logit", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_are_refused(store, engine, make, logit):
    run_id = store.begin_run(make.start()).run_id
    answer = AnswerRecord("topic", "enum", (ChoiceRecord("billing", logit),), 0, None)
    with pytest.raises(RecordRefused, match="logits must be finite"):
        store.record_batch(run_id, make.batch(make.scored(0, answers=(answer,))))
    assert rows(engine, "SELECT count(*) FROM item") == [(0,)]


ONE = (ChoiceRecord("a", 0.0),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position": -1}, "0 or more"),
        ({"document": None}, "must name its document"),
        ({"answers": ()}, "exactly the scored items"),
        ({"status": "reused"}, "exactly the scored items"),
        ({"status": "rejected"}, "must have a code"),
        ({"code": "document.empty"}, "only a rejection"),
        ({"answers": (AnswerRecord("f", "enum", ONE, 1, None),)}, "one of 1 choices, got 1"),
        ({"answers": (AnswerRecord("f", "enum", ONE * 2, 0, None),)}, "choices must be distinct"),
        ({"answers": (AnswerRecord("f", "enum", ONE, 0, None),) * 2}, "fields must be distinct"),
        ({"answers": (AnswerRecord("f", "enum", ONE, 0, float("nan")),)}, "margin must be finite"),
    ],
)
def test_values_that_break_the_promises_are_refused(store, make, change, words):
    run_id = store.begin_run(make.start()).run_id
    with pytest.raises(RecordRefused, match=words) as caught:
        store.record_batch(run_id, make.batch(replace(make.scored(0), **change)))
    assert caught.value.hint
    with pytest.raises(RecordRefused, match="positions of a batch must be distinct"):
        store.record_batch(run_id, make.batch(make.scored(0), make.rejected(0)))


def test_text_is_kept_only_when_allowed(store, engine, make):
    run_id = store.begin_run(make.start(store_text=False)).run_id
    store.record_batch(run_id, make.batch(make.scored(0, "private")))
    assert rows(engine, "SELECT text, characters FROM document") == [(None, 7)]
    # A later run that may keep text fills it in.
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.reused(0, "private")))
    assert rows(engine, "SELECT text, characters FROM document") == [("private", 7)]


def test_no_rejection_is_too_odd_to_keep(store, engine, make):
    # Lone surrogates, NUL and NaN are what the rejected documents are rejected for.
    run_id = store.begin_run(make.start()).run_id
    odd = make.rejected(
        0,
        document=make.document("a\ud800b"),
        external_id="id \ud800\0",
        message="bad \ud800",
        code="document.encoding",
        metadata={"k\ud800": float("nan"), "list": [1, None, True, "é\0"]},
    )
    store.record_batch(run_id, make.batch(odd, make.rejected(1)))
    assert rejected(engine, run_id)[0] == {
        "position": 0,
        "line": 1,
        "external_id": "id \\ud800\\x00",
        "code": "document.encoding",
        "message": "bad \\ud800",
    }
    assert rejected_codes(engine) == {"document.empty": 1, "document.encoding": 1}
    metadata = '{"k\\\\ud800": "nan", "list": [1, null, true, "é\\\\x00"]}'
    assert rows(engine, "SELECT metadata, json_valid(metadata) FROM item WHERE position = 0") == [
        (metadata, 1)
    ]
    assert rows(engine, "SELECT text FROM document") == [(None,)]


def test_large_batches_pass_the_parameter_limit(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    sha256s = [make.sha(f"document {position}") for position in range(1200)]
    assert store.claim(run_id, sha256s) == set(sha256s)
    store.record_batch(run_id, make.batch(*(make.scored(position) for position in range(1200))))
    assert len(store.decided(run_id, sha256s)) == 1200
    again = store.begin_run(make.start(temperature=2.0)).run_id
    store.record_batch(again, make.batch(*(make.reused(position) for position in range(1200))))
    assert len(results(engine, again)) == 3600
    assert rows(engine, "SELECT count(*) FROM claim") == [(0,)]


def test_a_batch_keeps_its_timings(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.scored(0)))
    store.record_batch(run_id, replace(make.batch(make.rejected(1)), timings=None))
    one, two = batches(engine)
    assert (one["prefill_seconds"], one["prefix_tokens"], one["peak_bytes"]) == (0.5, 120, 2000)
    assert (one["start_bytes"], one["resident_tokens"], one["resident_hits"]) == (1000, 80, 3)
    # Nothing was scored, which is not the same as nothing being found resident.
    assert two["total_seconds"] is two["resident_hits"] is None
