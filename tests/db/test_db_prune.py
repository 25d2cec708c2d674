"""Old runs go with what only they needed; everything else stays whole, whatever happens."""

import platform
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import weighbridge.db.prune as module
from weighbridge.db import RunRefused, SchemaRow, Store, StoreUnavailable, results, runs, sqlite_url
from weighbridge.db.prune import plan_prune, prune_runs

NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=100)
CUTOFF = NOW - timedelta(days=90)
TABLES = (
    *("run", "batch", "item", "decision", "document", "answer", "answer_choice"),
    *("answer_probability", "choice_probability", "schema_version", "checkpoint", "scaling"),
)


def rows(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as connection:
        return {
            name: connection.execute(f"select count(*) from {name}").fetchone()[0]
            for name in TABLES
        }


def require_whole(path: Path) -> None:
    """Fail unless foreign keys hold, pages are sound, and every run counts its items."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma foreign_key_check").fetchall() == []
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        wrong = connection.execute(
            "select id from run where documents <> (select count(*) from item where run_id = id)"
        )
        assert wrong.fetchall() == []


class Filled:
    """Runs at times of our choosing."""

    def __init__(self, engine: Engine, make: Any) -> None:
        self.engine = engine
        self.make = make

    def run(self, when: datetime, *items: Any, finish: bool = True, **changes: Any) -> int:
        store = Store(self.engine, clock=lambda: when)
        run_id = store.begin_run(self.make.start(**{"host": platform.node(), **changes})).run_id
        for start in range(0, len(items), 10):
            store.record_batch(run_id, self.make.batch(*items[start : start + 10]))
        if finish:
            store.finish_run(run_id, "completed")
        return run_id


@pytest.fixture
def filled(engine: Engine, make: Any) -> Filled:
    return Filled(engine, make)


def test_an_old_run_goes_with_all_that_only_it_had(filled: Filled, path: Path, make: Any):
    filled.run(LONG_AGO, *(make.scored(i) for i in range(25)), make.rejected(25))
    new = filled.run(NOW, *(make.scored(i, f"new {i}") for i in range(3)), temperature=2.0)
    url = sqlite_url(path)
    before = rows(path)
    planned = plan_prune(url, CUTOFF)
    assert rows(path) == before  # a plan changes nothing

    done = prune_runs(url, CUTOFF)

    # 25 documents of 3 fields; schema and checkpoint are the new run's too, its temperature not.
    assert done == planned == module.Pruned(1, 3, 26, 25, 75, 25, 0, 0, 1)
    require_whole(path)
    after = rows(path)
    assert [run.run_id for run in runs(filled.engine)] == [new]
    assert (after["item"], after["decision"], after["answer"], after["document"]) == (3, 3, 9, 3)
    # 3 + 2 + 3 choices for each of the three documents, at one temperature.
    assert (after["answer_choice"], after["choice_probability"]) == (24, 24)
    assert plan_prune(url, CUTOFF).nothing
    assert prune_runs(url, CUTOFF).nothing


def test_everything_goes_when_nothing_is_newer(filled: Filled, path: Path, make: Any):
    filled.run(LONG_AGO, *(make.scored(i) for i in range(5)))
    planned = plan_prune(sqlite_url(path), NOW)
    assert prune_runs(sqlite_url(path), NOW) == planned
    assert set(rows(path).values()) == {0}
    # The number of a run that is gone is never given to another.
    assert filled.run(NOW, make.scored(0)) == 2


def test_a_decision_that_a_newer_run_uses_stays(filled: Filled, path: Path, make: Any):
    filled.run(LONG_AGO, *(make.scored(i) for i in range(4)))
    new = filled.run(NOW, make.reused(0), make.reused(2))
    answers = results(filled.engine, new)

    done = prune_runs(sqlite_url(path), CUTOFF)

    assert (done.decisions, done.documents) == (2, 2)
    require_whole(path)
    assert results(filled.engine, new) == answers
    with closing(sqlite3.connect(path)) as connection:
        made_by = connection.execute(
            "select run_id, (select run_id from batch where id = batch_id) from decision"
        ).fetchall()
    assert made_by == [(new, new)] * 2  # its maker is gone, so it is filed under its user


def test_probabilities_at_a_temperature_that_is_gone_go_too(filled: Filled, path: Path, make: Any):
    filled.run(LONG_AGO, make.scored(0), temperature=3.0)
    new = filled.run(NOW, make.reused(0))
    answers = results(filled.engine, new)
    assert rows(path)["answer_probability"] == 6
    planned = plan_prune(sqlite_url(path), CUTOFF)
    assert prune_runs(sqlite_url(path), CUTOFF) == planned
    assert planned.temperatures == 1
    assert rows(path)["answer_probability"] == 3
    assert results(filled.engine, new) == answers
    require_whole(path)


def test_a_rejected_item_keeps_its_document(filled: Filled, path: Path, make: Any):
    too_long = make.rejected(1, document=make.document("long"), code="document.too_long")
    filled.run(LONG_AGO, make.scored(0), too_long)
    filled.run(NOW, make.scored(0, "new"), too_long)
    planned = plan_prune(sqlite_url(path), CUTOFF)
    assert prune_runs(sqlite_url(path), CUTOFF) == planned
    assert (planned.items, planned.documents) == (2, 1)
    require_whole(path)


def test_the_view_of_a_schema_goes_with_it(filled: Filled, path: Path, make: Any):
    def views() -> list[str]:
        with closing(sqlite3.connect(path)) as connection:
            sql = "select name from sqlite_schema where type = 'view' and name like 'answers_%'"
            return [name for (name,) in connection.execute(sql)]

    old = SchemaRow("6" * 64, "older", '{"fields":[]}')
    filled.run(LONG_AGO, make.scored(0), schema=old)
    filled.run(NOW, make.scored(0))
    assert len(views()) == 2
    assert prune_runs(sqlite_url(path), CUTOFF).schemas == 1
    assert views() == ["answers_triage"]


def test_a_running_run_and_what_it_may_reuse_are_left(filled: Filled, path: Path, make: Any):
    old = filled.run(LONG_AGO, make.scored(0))
    other_key = filled.run(LONG_AGO, make.scored(0), prompt_version="2")
    # Of another host, where we cannot look whether its process is there.
    live = filled.run(LONG_AGO, make.scored(1), finish=False, host="elsewhere")
    planned = plan_prune(sqlite_url(path), CUTOFF)

    done = prune_runs(sqlite_url(path), CUTOFF)

    assert done == planned
    assert (done.runs, done.left) == (1, (old, live))
    assert other_key not in [run.run_id for run in runs(filled.engine)]
    require_whole(path)
    # It has looked before the prune, and now records what it then wanted to reuse.
    store = Store(filled.engine)
    assert store.record_batch(live, make.batch(make.reused(2, "document 0"))).reused == 1


def test_a_run_whose_process_is_gone_counts_as_finished(
    filled: Filled, path: Path, make: Any, child: Callable[..., "subprocess.Popen[str]"]
):
    process = child("pass")
    process.wait()
    filled.run(NOW - timedelta(days=1), make.scored(0), finish=False, pid=process.pid)
    planned = plan_prune(sqlite_url(path), NOW)
    assert planned.runs == 1
    assert prune_runs(sqlite_url(path), NOW) == planned


def test_a_run_that_begins_while_we_prune_keeps_what_it_needs(
    filled: Filled, path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
):
    old = filled.run(LONG_AGO, *(make.scored(i) for i in range(30)))
    store = Store(filled.engine)
    monkeypatch.setattr(module, "ITEMS", 10)
    begun: list[int] = []

    def begin_in_between(seconds: float) -> None:
        # After the first ten items are gone, a run with the same key begins and looks around.
        if not begun:
            begun.append(store.begin_run(make.start(host=platform.node())).run_id)
            assert (
                len(store.decided(begun[0], [make.sha(f"document {i}") for i in range(30)])) == 30
            )

    monkeypatch.setattr(module.time, "sleep", begin_in_between)
    done = prune_runs(sqlite_url(path), CUTOFF)

    assert (done.runs, done.items, done.decisions, done.left) == (0, 10, 0, (old,))
    require_whole(path)
    outcome = store.record_batch(begun[0], make.batch(*(make.reused(i) for i in range(30))))
    assert outcome.reused == 30


# Killed after so many transactions: among the items, the decisions, the filing, the runs.
@pytest.mark.parametrize("transactions", [1, 3, 4, 6, 7, 8])
def test_a_killed_prune_leaves_a_whole_store(
    transactions: int,
    filled: Filled,
    path: Path,
    make: Any,
    child: Callable[..., "subprocess.Popen[str]"],
):
    filled.run(LONG_AGO, *(make.scored(i) for i in range(30)))
    new = filled.run(NOW, *(make.reused(i) for i in range(5)))
    answers = results(filled.engine, new)
    process = child(
        f"""
        from datetime import datetime, UTC
        import weighbridge.db.prune as module
        module.ITEMS = module.DECISIONS = module.DOCUMENTS = 10
        done = 0
        def kill(seconds):
            global done
            done += 1
            if done == {transactions}:
                os.kill(os.getpid(), signal.SIGKILL)
        module.time.sleep = kill
        module.prune_runs(sqlite_url(path), datetime.fromisoformat({CUTOFF.isoformat()!r}))
        """
    )
    assert process.wait() == -signal.SIGKILL
    require_whole(path)
    assert results(filled.engine, new) == answers
    # The rest goes when it is asked again.
    prune_runs(sqlite_url(path), CUTOFF)
    require_whole(path)
    assert results(filled.engine, new) == answers
    after = rows(path)
    assert (after["run"], after["item"], after["decision"], after["document"]) == (1, 5, 5, 5)


def test_a_worker_goes_on_while_we_prune(
    filled: Filled, path: Path, make: Any, child: Callable[..., "subprocess.Popen[str]"]
):
    filled.run(LONG_AGO, *(make.scored(i) for i in range(2000)))
    worker = child(
        """
        import pathlib, platform, time
        store = Store(open_engine(sqlite_url(path)))
        run = store.begin_run(make.start(host=platform.node(), prompt_version="2")).run_id
        say("ready")
        longest, position, done = 0.0, 0, pathlib.Path(path).with_name("pruned")
        while position < 10 or not done.exists():
            began = time.monotonic()
            store.record_batch(run, make.batch(make.scored(position, f"worker {position}")))
            longest, position = max(longest, time.monotonic() - began), position + 1
        store.finish_run(run, "completed", documents=position)
        say(f"{position} {longest}")
        """
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    done = prune_runs(sqlite_url(path), CUTOFF)
    path.with_name("pruned").touch()
    recorded, longest = worker.stdout.readline().split()
    assert worker.wait() == 0
    assert done.decisions == 2000
    require_whole(path)
    assert rows(path)["decision"] == int(recorded)
    # Each of our transactions is far shorter; the limit is loose for a busy machine, and less
    # than the minute after which a writer would have given up.
    assert float(longest) < 30


def test_pruned_bytes_are_overwritten_and_vacuum_gives_them_back(
    filled: Filled, path: Path, make: Any
):
    filled.run(LONG_AGO, *(make.scored(i, f"SECRET-{i} " * 400) for i in range(50)))
    filled.run(NOW, make.scored(0, "kept"))
    assert b"SECRET-7 " in path.read_bytes() + path.with_name("store.db-wal").read_bytes()
    full = path.stat().st_size
    prune_runs(sqlite_url(path), CUTOFF, vacuum=True)
    assert b"SECRET-7 " not in path.read_bytes()
    assert path.stat().st_size < full / 2 or full < 200_000
    assert path.with_name("store.db-wal").stat().st_size == 0
    require_whole(path)


def test_a_retry_of_a_pruned_run_is_told(filled: Filled, path: Path, make: Any):
    run_id = filled.run(LONG_AGO, make.scored(0))
    prune_runs(sqlite_url(path), CUTOFF)
    with pytest.raises(RunRefused, match="there is no run"):
        Store(filled.engine).record_batch(run_id, make.batch(make.scored(1)))


def test_only_a_file_can_be_pruned():
    with pytest.raises(StoreUnavailable, match="must be a SQLite file for this"):
        plan_prune("postgresql://user@host/name", CUTOFF)
