import signal
import subprocess

from sqlalchemy import text

from weighbridge.db import results, run_summary
from weighbridge.db.engine import reading

# Records batches of five until it is told to stop, or killed; the rerun leaves out what is there.
WRITER = """
    last = LAST
    store = Store(open_engine(sqlite_url(path)))
    handle = store.begin_run(make.start(flow_run_id="f-1"))
    run = handle.run_id
    done = store.recorded_positions(run)
    todo = [n for n in range(60) if n not in done]
    say(f"{handle.continued} {len(done)}")
    for start in range(0, len(todo), 5):
        part = todo[start : start + 5]
        known = store.decided(run, [make.sha(f"document {n % 50}") for n in part])
        granted = store.claim(run, [make.sha(f"document {n % 50}") for n in part])
        items = []
        for n in part:
            if n % 10 == 9:
                items.append(make.rejected(n))
            elif make.sha(f"document {n % 50}") in known:
                items.append(make.reused(n, f"document {n % 50}"))
            else:
                assert make.sha(f"document {n % 50}") in granted
                items.append(make.scored(n, f"document {n % 50}"))
        store.record_batch(run, make.batch(*items))
        say(f"batch {start // 5}")
        time.sleep(600 if start // 5 == last else 0)
    say(str(store.finish_run(run, "completed", documents=60).documents))
"""


def scalar(engine, sql):
    with reading(engine) as connection:
        return connection.execute(text(sql)).scalar_one()


def test_killed_between_batches_the_rerun_closes_the_accounting(engine, child):
    reached: list[int] = []
    for kill_after in (2, 3):
        # It waits behind its last batch for the signal, however fast it was.
        process = child(WRITER.replace("LAST", str(kill_after - 1)))
        reached.append(int(process.stdout.readline().split()[1]))
        for _ in range(kill_after):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    # The second attempt saw at least the batches that the first had committed.
    assert reached[0] == 0
    assert reached[1] >= 10
    process = child(WRITER.replace("LAST", "None"))
    said = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 0
    assert said[0].startswith("True ")
    assert said[-1] == "60"

    # By hand: 6 of 60 are rejected; positions 50 to 58 repeat documents 0 to 8; 45 are new.
    summary = run_summary(engine, 1)
    assert (summary.status, summary.documents) == ("completed", 60)
    assert (summary.scored, summary.reused, summary.rejected) == (45, 9, 6)
    assert scalar(engine, "SELECT count(*) FROM run") == 1
    assert scalar(engine, "SELECT count(*) FROM decision") == 45
    assert scalar(engine, "SELECT count(DISTINCT document_id) FROM decision") == 45
    assert scalar(engine, "SELECT count(*) FROM claim") == 0
    assert len(results(engine, 1)) == 54 * 3


def test_a_batch_that_is_being_written_is_lost_whole(engine, child):
    # Killed inside the transaction, after every row but before the commit.
    process = child(
        """
        from weighbridge.db import store as store_module
        store = Store(open_engine(sqlite_url(path)))
        run = store.begin_run(make.start(flow_run_id="f-1")).run_id
        store.record_batch(run, make.batch(make.scored(0)))
        write = store_module.record
        def record(*args):
            write(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        store_module.record = record
        store.record_batch(run, make.batch(make.scored(1), make.scored(2)))
        """
    )
    assert process.wait(60) == -signal.SIGKILL
    assert scalar(engine, "SELECT count(*) FROM item") == 1
    assert scalar(engine, "SELECT count(*) FROM decision") == 1
    assert scalar(engine, "SELECT documents FROM run") == 1


def test_processes_that_write_at_once_wait_for_each_other(path, child):
    # Four processes open a store that is not there yet, record the same documents and finish.
    # None may see a locked database, and no key may be recorded twice.
    body = """
        say("ready")
        sys.stdin.readline()
        store = Store(open_engine(sqlite_url(path)))
        run = store.begin_run(make.start()).run_id
        for start in range(0, 40, 4):
            items = [make.scored(n) for n in range(start, start + 4)]
            store.claim(run, [item.document.sha256 for item in items])
            store.record_batch(run, make.batch(*items))
        summary = store.finish_run(run, "completed", documents=40)
        say(f"{summary.scored} {summary.reused} {summary.wasted}")
    """
    children = [child(body, stdin=subprocess.PIPE) for _ in range(4)]
    for process in children:
        assert process.stdout.readline() == "ready\n"
    for process in children:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=240)[0].split() for process in children]
    assert [process.returncode for process in children] == [0] * 4
    scored, reused, wasted = (sum(int(line[i]) for line in said) for i in range(3))
    # 160 items of 40 documents: 40 are scored once, the rest was work done in vain.
    assert (scored, reused, wasted) == (40, 120, 120)
