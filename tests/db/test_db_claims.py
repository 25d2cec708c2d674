from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from weighbridge.db import Store
from weighbridge.db.engine import reading
from weighbridge.db.tables import Claim, table

ABC = ("a", "b", "c")


@pytest.fixture
def sha256s(make):
    return [make.sha(text) for text in ABC]


def count_claims(engine):
    with reading(engine) as connection:
        return connection.execute(select(func.count()).select_from(table(Claim))).scalar_one()


def test_a_claim_is_held_against_other_runs_and_not_against_its_own(store, make, sha256s):
    one, two = (store.begin_run(make.start()).run_id for _ in range(2))
    assert store.claim(one, sha256s[:2]) == set(sha256s[:2])
    assert store.claim(two, sha256s) == {sha256s[2]}
    assert store.claim(one, sha256s[:2]) == set(sha256s[:2])
    # Another key is another computation.
    other = store.begin_run(make.start(dtype="bfloat16")).run_id
    assert store.claim(other, sha256s) == set(sha256s)


def test_recording_and_finishing_give_claims_back(store, engine, make, sha256s):
    run_id = store.begin_run(make.start()).run_id
    store.claim(run_id, sha256s)
    store.record_batch(run_id, make.batch(make.scored(0, "a"), make.rejected(1)))
    assert count_claims(engine) == 2
    store.finish_run(run_id, "failed")
    assert count_claims(engine) == 0


def test_what_is_decided_is_not_granted(store, make, sha256s):
    one, two = (store.begin_run(make.start()).run_id for _ in range(2))
    store.claim(one, sha256s[:1])
    store.record_batch(one, make.batch(make.scored(0, "a")))
    assert store.claim(two, sha256s) == set(sha256s[1:])
    assert list(store.decided(two, sha256s)) == sha256s[:1]


def test_expired_claims_are_taken_over_and_own_claims_renewed(engine, make, sha256s):
    now = datetime.now(UTC)
    store = Store(engine, claim_seconds=60, clock=lambda: now)
    # Of another host, so that only the expiry can tell.
    one = store.begin_run(make.start(host="other-host")).run_id
    two = store.begin_run(make.start()).run_id
    store.claim(one, sha256s)
    now += timedelta(seconds=50)
    assert store.claim(one, sha256s[:1]) == set(sha256s[:1])
    now += timedelta(seconds=11)
    assert store.claim(two, sha256s) == set(sha256s[1:])
    now += timedelta(seconds=50)
    assert store.claim(two, sha256s) == set(sha256s)


def test_claims_of_dead_processes_are_taken_over_at_once(store, make, sha256s, child):
    run_id = store.begin_run(make.start()).run_id
    # The run begins after ours did, so that no sweep closes it before the claim is tried.
    process = child(
        """
        store = Store(open_engine(sqlite_url(path)))
        run = store.begin_run(make.start()).run_id
        store.claim(run, [make.sha("a"), make.sha("b")])
        say("claimed")
        time.sleep(60)
        """
    )
    assert process.stdout.readline() == "claimed\n"
    assert store.claim(run_id, sha256s) == {sha256s[2]}
    process.kill()
    process.wait()
    assert store.claim(run_id, sha256s) == set(sha256s)


def test_a_continued_run_gives_back_what_its_last_attempt_claimed(store, engine, make, sha256s):
    run_id = store.begin_run(make.start(flow_run_id="f")).run_id
    store.claim(run_id, sha256s)
    assert store.begin_run(make.start(flow_run_id="f")).continued
    assert count_claims(engine) == 0


def test_two_processes_never_get_the_same_claim(engine, make, child):
    # Both go through the same 300 documents in small portions at the same moment.
    body = """
        store = Store(open_engine(sqlite_url(path)))
        run = store.begin_run(make.start()).run_id
        say("ready")
        sys.stdin.readline()
        for start in range(0, 300, 10):
            for sha in store.claim(run, [make.sha(str(i)) for i in range(start, start + 10)]):
                print(sha)
        say("done")
        sys.stdin.readline()  # alive, or its claims could be taken over
    """
    import subprocess

    children = [child(body, stdin=subprocess.PIPE) for _ in range(2)]
    for process in children:
        assert process.stdout.readline() == "ready\n"
    for process in children:
        process.stdin.write("go\n")
        process.stdin.flush()
    granted = [list(iter(process.stdout.readline, "done\n")) for process in children]
    everything = granted[0] + granted[1]
    assert len(everything) == len(set(everything)) == 300
