"""A forgotten document is in no row and in no byte of the store."""

import platform
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from weighbridge.db import RunRefused, Store, results, run_summary, sqlite_url
from weighbridge.db.errors import NoSuchDocument, StoreError
from weighbridge.db.forget import Forgotten, forget_document, plan_forget

SECRET = "Maria Example, born 1990, wrote this. " * 300  # longer than a page of the file
METADATA = {"email": "maria@example.org"}


def everything(path: Path) -> bytes:
    """Read every file of the store."""
    return b"".join(each.read_bytes() for each in sorted(path.parent.glob(f"{path.name}*")))


@pytest.fixture
def secret(make: Any) -> Any:
    return make.scored(0, SECRET, external_id="M-1", metadata=METADATA)


def record(store: Store, make: Any, *items: Any, finish: bool = True, **changes: Any) -> int:
    run_id = store.begin_run(make.start(**{"host": platform.node(), **changes})).run_id
    store.record_batch(run_id, make.batch(*items))
    if finish:
        store.finish_run(run_id, "completed", documents=len(items))
    return run_id


def require_whole(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma foreign_key_check").fetchall() == []
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]


def test_text_metadata_and_answers_are_gone_from_rows_and_bytes(
    store: Store, engine: Engine, path: Path, make: Any, secret: Any
):
    first = record(store, make, secret, make.scored(1), make.scored(2))
    second = record(store, make, make.scored(1), secret, prompt_version="2")
    kept = [row for row in results(engine, first) if row["external_id"] != "M-1"]
    engine.dispose()
    # Negative control: the bytes are there to be found.
    assert b"Maria Example" in everything(path)
    assert b"maria@example.org" in everything(path)
    planned = plan_forget(sqlite_url(path), "M-1")

    done = forget_document(sqlite_url(path), "M-1")

    # One text, decided in two ways, three answers each.
    assert done == planned == Forgotten("M-1", (first, second), 2, 1, 2, 6, 0, 0)
    for trace in (b"Maria Example", b"born 1990", b"maria@example.org", b"M-1"):
        assert trace not in everything(path)
    assert make.sha(SECRET).encode() not in everything(path)
    require_whole(path)
    assert results(engine, first) == kept
    # The counts of a run are those of the items it has.
    assert (run_summary(engine, first).documents, run_summary(engine, first).scored) == (2, 2)
    with pytest.raises(NoSuchDocument, match="no record has the id 'M-1'"):
        forget_document(sqlite_url(path), "M-1")


def test_no_byte_is_left_of_what_was_copied_about_before(
    store: Store, engine: Engine, path: Path, make: Any, secret: Any
):
    record(store, make, secret, *(make.scored(i) for i in range(1, 50)))
    engine.dispose()
    # What a migration leaves behind that rebuilds a table: pages in use no more, not wiped.
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma secure_delete = off")  # some builds have it on by default
        for name in ("document", "item"):
            connection.execute(f"create table old_{name} as select * from {name}")
            connection.execute(f"drop table old_{name}")
    # Deleting the rows alone would not do: a copy of the text stands in free pages.
    assert everything(path).count(b"Maria Example") > 500
    forget_document(sqlite_url(path), "M-1")
    assert b"Maria Example" not in everything(path)
    assert b"maria@example.org" not in everything(path)
    require_whole(path)


def test_a_text_that_others_have_too_stays(
    store: Store, engine: Engine, path: Path, make: Any, secret: Any
):
    other = make.scored(1, SECRET, external_id="X-9")
    nameless = make.scored(2, SECRET, external_id=None)
    run_id = record(store, make, secret, other, nameless)
    done = forget_document(sqlite_url(path), "M-1")
    assert (done.items, done.documents, done.decisions, done.shared, done.others) == (1, 0, 0, 1, 2)
    ids = {row["external_id"] for row in results(engine, run_id)}
    assert ids == {"X-9", None}
    engine.dispose()
    assert b"maria@example.org" not in everything(path)
    require_whole(path)
    # With the last of them the text goes.
    assert forget_document(sqlite_url(path), "X-9").documents == 0


def test_a_rejected_document_is_forgotten_too(store: Store, path: Path, make: Any, engine: Engine):
    too_long = make.rejected(0, document=make.document(SECRET), code="document.too_long")
    run_id = record(store, make, too_long, make.rejected(1), make.scored(2))
    assert forget_document(sqlite_url(path), "T-0").documents == 1
    assert forget_document(sqlite_url(path), "T-1").documents == 0
    assert run_summary(engine, run_id).rejected == 0
    engine.dispose()
    assert b"Maria Example" not in everything(path)


def test_nothing_is_forgotten_while_a_run_may_record_it(
    store: Store, path: Path, make: Any, secret: Any
):
    run_id = record(store, make, secret, finish=False)
    for attempt in (plan_forget, forget_document):
        with pytest.raises(RunRefused, match=f"run {run_id} is"):
            attempt(sqlite_url(path), "M-1")
    store.finish_run(run_id, "cancelled")
    assert forget_document(sqlite_url(path), "M-1").items == 1


def test_a_run_whose_process_is_gone_does_not_stand_in_the_way(
    store: Store,
    path: Path,
    make: Any,
    secret: Any,
    child: Callable[..., "subprocess.Popen[str]"],
):
    process = child("pass")
    process.wait()
    record(store, make, secret, finish=False, pid=process.pid)
    planned = plan_forget(sqlite_url(path), "M-1")
    assert forget_document(sqlite_url(path), "M-1") == planned


def test_a_retry_after_a_forget_closes_its_accounting(
    store: Store, engine: Engine, path: Path, make: Any, secret: Any
):
    flow = {"flow_run_id": "a flow run"}
    run_id = record(store, make, secret, make.scored(1), finish=False, **flow)
    store.finish_run(run_id, "failed")
    forget_document(sqlite_url(path), "M-1")
    assert store.begin_run(make.start(host=platform.node(), **flow)).run_id == run_id
    # The source still has it, so the retry records it again, as its first record.
    assert set(store.recorded_positions(run_id)) == {1}
    store.record_batch(run_id, make.batch(secret))
    assert store.finish_run(run_id, "completed", documents=2).documents == 2


def test_a_reader_that_stays_is_told_of(
    store: Store, path: Path, make: Any, secret: Any, monkeypatch: pytest.MonkeyPatch
):
    record(store, make, secret)
    monkeypatch.setattr("weighbridge.db.engine.BUSY_TIMEOUT_SECONDS", 0.2)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from item").fetchone()
        with pytest.raises(StoreError, match="rows of 'M-1' are removed, but") as caught:
            forget_document(sqlite_url(path), "M-1")
    assert "weighbridge db vacuum" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "external_id", ["", "M-10", "m-1", "M-1 ", "%", "\x00", "\udcff", "x" * 10**6]
)
def test_an_id_is_taken_exactly(external_id: str, store: Store, path: Path, make: Any, secret: Any):
    record(store, make, secret)
    with pytest.raises(NoSuchDocument, match="no record has the id"):
        plan_forget(sqlite_url(path), external_id)


def test_an_id_that_was_kept_in_another_spelling_is_found(store: Store, path: Path, make: Any):
    record(store, make, make.scored(0, external_id="a\x00b\udc80"))
    assert forget_document(sqlite_url(path), "a\x00b\udc80").external_id == "a\\x00b\\udc80"
