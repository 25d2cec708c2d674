import os
import signal

import pytest
from sqlalchemy import text

from weighbridge.db import RecordRefused, RunRefused, latest_run_id, run_summary, runs
from weighbridge.db.engine import reading


def scalar(engine, sql):
    with reading(engine) as connection:
        return connection.execute(text(sql)).scalar_one()


def test_run_ids_count_from_one_and_are_not_given_out_again(store, engine, make):
    assert latest_run_id(engine) is None
    assert [store.begin_run(make.start()).run_id for _ in range(2)] == [1, 2]
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM run WHERE id = 2"))
    assert store.begin_run(make.start()).run_id == 3
    assert [run.run_id for run in runs(engine)] == [3, 1]
    assert [run.run_id for run in runs(engine, 1)] == [3]
    assert latest_run_id(engine) == 3


def test_a_run_keeps_what_it_began_with(store, engine, make):
    run_id = store.begin_run(
        make.start(
            temperature=2.0, temperature_kind="explicit", temperature_source="--temperature 2"
        )
    ).run_id
    summary = run_summary(engine, run_id)
    assert (summary.temperature, summary.temperature_kind) == (2.0, "explicit")
    assert summary.temperature_source == "--temperature 2"
    assert (summary.schema, summary.checkpoint) == ("triage", "smollm2-135m")
    assert (summary.status, summary.finished_at) == ("running", None)
    assert summary.started_at.utcoffset() is not None


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_must_divide(store, make, temperature):
    with pytest.raises(RecordRefused, match="finite and above 0"):
        store.begin_run(make.start(temperature=temperature))


@pytest.mark.parametrize("ended", [None, "failed", "crashed", "cancelled", "completed"])
def test_the_same_flow_run_continues_its_run(store, engine, make, ended):
    first = store.begin_run(make.start(flow_run_id="f-1"))
    assert not first.continued
    store.record_batch(first.run_id, make.batch(make.scored(0), make.rejected(1)))
    if ended:
        store.finish_run(first.run_id, ended)
    again = store.begin_run(make.start(flow_run_id="f-1"))
    assert (again.run_id, again.continued) == (first.run_id, True)
    # A record that was rejected before it was a document has none.
    assert store.recorded_positions(again.run_id) == {0: make.sha("document 0"), 1: None}
    store.record_batch(again.run_id, make.batch(make.scored(2)))
    summary = store.finish_run(again.run_id, "completed", documents=3)
    assert (summary.documents, summary.scored, summary.rejected) == (3, 2, 1)
    assert scalar(engine, "SELECT count(*) FROM run") == 1


def test_a_new_flow_run_is_a_new_run(store, make):
    first = store.begin_run(make.start(flow_run_id="f-1"))
    assert store.begin_run(make.start(flow_run_id="f-2")).run_id != first.run_id


@pytest.mark.parametrize(
    "change",
    [{"temperature": 2.0}, {"dtype": "bfloat16"}, {"encoding": "codes"}, {"rescore": True}],
)
def test_a_retry_cannot_change_what_its_run_began_with(store, make, change):
    store.begin_run(make.start(flow_run_id="f-1"))
    with pytest.raises(RunRefused, match="retry"):
        store.begin_run(make.start(flow_run_id="f-1", **change))


def test_a_process_whose_run_was_taken_over_cannot_write(store, engine, make):
    from weighbridge.db import Store

    run_id = store.begin_run(make.start(flow_run_id="f-1")).run_id
    Store(engine).begin_run(make.start(flow_run_id="f-1", pid=1))
    with pytest.raises(RunRefused, match="taken over by process 1"):
        store.record_batch(run_id, make.batch(make.scored(0)))


def test_a_closed_run_takes_nothing(store, make):
    run_id = store.begin_run(make.start()).run_id
    store.finish_run(run_id, "cancelled", message="cancelled in the UI")
    with pytest.raises(RunRefused, match="cancelled"):
        store.record_batch(run_id, make.batch(make.scored(0)))
    with pytest.raises(RunRefused, match="no run 99"):
        store.claim(99, [make.sha("a")])


def test_runs_of_dead_processes_are_closed_and_their_claims_dropped(store, engine, make, child):
    # The child dies without a word; its run is of this host, so the next run closes it.
    body = """
        store = Store(open_engine(sqlite_url(path)))
        run = store.begin_run(make.start(name="doomed")).run_id
        store.claim(run, [make.sha("a")])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = child(body)
    assert process.wait(60) == -signal.SIGKILL
    other_host = store.begin_run(make.start(host="other-host", pid=process.pid))
    store.begin_run(make.start())
    assert run_summary(engine, 1).status == "crashed"
    assert scalar(engine, "SELECT count(*) FROM claim") == 0
    # Nothing is known of processes elsewhere, and our own live.
    assert [run.status for run in runs(engine)] == ["running", "running", "crashed"]
    assert run_summary(engine, other_host.run_id).status == "running"


def test_a_number_given_to_a_new_process_is_not_the_old_process():
    from datetime import UTC, datetime, timedelta

    from weighbridge.db.processes import parse_elapsed, process_is_alive

    now = datetime.now(UTC)
    assert process_is_alive(os.getpid(), now)
    # This test process did not exist a week ago: whoever had its number then is dead.
    assert not process_is_alive(os.getpid(), now - timedelta(days=7))
    assert not process_is_alive(0, now)
    assert parse_elapsed("01-02:03:04") == timedelta(days=1, hours=2, minutes=3, seconds=4)
    assert parse_elapsed("03:04") == timedelta(minutes=3, seconds=4)
    with pytest.raises(ValueError, match="elapsed"):
        parse_elapsed("soon")


def test_accounting_must_close(store, engine, make):
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.scored(0), make.reused(1, "document 0")))
    # Three records came in, two are recorded.
    with pytest.raises(RecordRefused, match="3 came in, 2 are recorded") as caught:
        store.finish_run(run_id, "completed", documents=3)
    assert "run again" in (caught.value.hint or "")
    # More than came in: the source was shorter at the retry, and another try will not help.
    with pytest.raises(RecordRefused, match="1 came in, 2 are recorded") as caught:
        store.finish_run(run_id, "completed", documents=1)
    assert "new run" in (caught.value.hint or "")
    assert run_summary(engine, run_id).status == "running"
    assert store.finish_run(run_id, "failed", documents=3).documents == 2
