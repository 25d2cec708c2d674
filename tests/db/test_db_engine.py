import os
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import PurePosixPath

import pytest
from sqlalchemy import text

from weighbridge.db import (
    NotAStore,
    StoreBusy,
    StoreError,
    StoreOutdated,
    StoreUnavailable,
    display_url,
    open_engine,
    results,
    sqlite_url,
    store_path,
)
from weighbridge.db import filesystems as filesystems_module
from weighbridge.db.engine import reading, translate, writing
from weighbridge.db.filesystems import (
    Mount,
    mount_of,
    parse_mount_command,
    parse_proc_mounts,
    require_local,
)


def mode(path):
    return path.stat().st_mode & 0o777


def test_a_writer_creates_folder_and_file_for_its_owner_only(tmp_path, make):
    from weighbridge.db import Store

    path = tmp_path / "a" / "b" / "store.db"
    before = os.umask(0)
    try:
        engine = open_engine(sqlite_url(path))
        Store(engine).begin_run(make.start())
        files = [path, path.with_name("store.db-wal"), path.with_name("store.db-shm")]
        assert [mode(file) for file in files] == [0o600] * 3
        assert mode(path.parent) == 0o700
        engine.dispose()
        # A file that was opened up is closed again.
        path.chmod(0o644)
        open_engine(sqlite_url(path)).dispose()
        assert mode(path) == 0o600
    finally:
        os.umask(before)


def test_the_pragmas_are_in_force(engine):
    with reading(engine) as connection:
        pragma = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
        }
    # NORMAL is 1.
    assert pragma == {
        "journal_mode": "wal",
        "foreign_keys": 1,
        "busy_timeout": 60_000,
        "synchronous": 1,
    }


def test_foreign_keys_are_enforced(engine):
    row = "INSERT INTO answer (decision_id, field_position, field, kind, selected, value)"
    with pytest.raises(StoreError, match="FOREIGN KEY"), writing(engine) as connection:
        connection.execute(text(f"{row} VALUES (77, 0, 'f', 'enum', 0, 'v')"))


def test_a_reader_creates_nothing(tmp_path):
    path = tmp_path / "none" / "store.db"
    with pytest.raises(StoreUnavailable, match="no store at"):
        open_engine(sqlite_url(path), readonly=True)
    assert not path.parent.exists()
    empty = tmp_path / "empty.db"
    empty.touch()
    with pytest.raises(StoreOutdated, match="is empty"):
        open_engine(sqlite_url(empty), readonly=True)
    assert empty.stat().st_size == 0


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("content", [b"hello", b"id,text\n1,hello\n" * 1000])
def test_another_file_is_refused_and_left_as_it_is(tmp_path, readonly, content):
    path = tmp_path / "tickets.csv"
    path.write_bytes(content)
    with pytest.raises(NotAStore, match="must be a SQLite file"):
        open_engine(sqlite_url(path), readonly=readonly)
    assert path.read_bytes() == content


@pytest.mark.parametrize("readonly", [True, False])
def test_a_folder_is_refused(tmp_path, readonly):
    with pytest.raises(StoreUnavailable, match="must be a file, got the folder"):
        open_engine(sqlite_url(tmp_path), readonly=readonly)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
@pytest.mark.parametrize("readonly", [True, False])
def test_no_permission_is_said_so(path, engine, child, readonly):
    engine.dispose()
    path.chmod(0)
    # Root may open anything: there, the child becomes somebody else who may enter the folders.
    become = "pass"
    if os.geteuid() == 0:
        become = "os.setuid(65534)"
        for folder in list(path.parents)[:-2]:
            folder.chmod(folder.stat().st_mode | 0o111)
    process = child(
        f"""
        {become}
        try:
            open_engine(sqlite_url(path), readonly={readonly})
        except StoreUnavailable as error:
            say(f"{{error}} | {{error.hint}}")
        """
    )
    said = process.communicate(timeout=60)[0]
    assert str(path) in said
    assert "cannot be opened" in said
    assert "must be yours" in said


def test_paths_with_odd_characters_are_paths(tmp_path):
    for name in ("with blank.db", "per%20cent.db", "hash#mark.db", "question?.db", "ümläut.db"):
        path = tmp_path / name
        open_engine(sqlite_url(path)).dispose()
        assert path.exists()
        engine = open_engine(sqlite_url(path), readonly=True)
        engine.dispose()
        assert store_path(sqlite_url(path)) == path


def test_relative_and_home_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store_path("sqlite:///sub/x.db") == tmp_path / "sub" / "x.db"
    assert store_path("sqlite:///~/x.db") == tmp_path / "home" / "x.db"
    assert store_path("postgresql://host/db") is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("store.db", "cannot be parsed"),
        ("", "cannot be parsed"),
        ("postgresql://me:secret@host:notaport/db", "cannot be parsed"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///x.db?secret=1", "with parameters"),
        ("sqlite:///file:x.db", "with parameters"),
        ("sqlite+aiosqlite:///x.db", "driver"),
        ("nosuchdb://me:secret@host/db", "nosuchdb"),
        ("mysql+mysqldb://me:secret@host/db?password=secret", "mysql"),
        # The password ends at the first @ for SQLAlchemy: the rest would pass for the host.
        ("postgresql://me:p@secret@host/db", "one @, before the host"),
    ],
)
def test_urls_that_name_no_store(url, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreUnavailable, match=words) as refused:
        open_engine(url)
    error = refused.value
    assert "secret" not in f"{error} {error.hint} {error.__cause__}"
    assert error.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("SQLITE_FULL", StoreUnavailable, "must have room, and it is full"),
        ("SQLITE_CONSTRAINT", StoreError, "must carry out what the store asks, got .*driver says"),
    ],
)
def test_what_the_driver_says_becomes_an_error_with_a_hint(code, kind, words):
    error = sqlite3.OperationalError("driver says")
    error.sqlite_errorname = code
    told = translate(error, "/srv/store.db")
    assert type(told) is kind
    assert re.match(f"(the disk of )?/srv/store.db {words}", told.message)
    assert told.hint


def test_urls_are_shown_without_passwords():
    shown = display_url("postgresql://me:secret@host/db?password=secret")
    assert shown == "postgresql://me:***@host/db"


def test_errors_never_hold_the_parameters(engine, store, make):
    statement = text("INSERT INTO document (sha256, characters, text) VALUES (NULL, 1, :text)")
    with pytest.raises(StoreError) as refused, writing(engine) as connection:
        connection.execute(statement, {"text": "private words"})
    assert "private" not in f"{refused.value} {refused.value.__cause__}"


def test_a_lock_that_is_never_given_back_is_said_so(engine, path, monkeypatch):
    monkeypatch.setattr("weighbridge.db.engine.BUSY_TIMEOUT_SECONDS", 0.2)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        # The pool's connection still has the long timeout.
        engine.dispose()
        with pytest.raises(StoreBusy, match="locked by another process"), writing(engine):
            pass
        # Readers do not wait for writers.
        with reading(engine) as connection:
            assert connection.execute(text("SELECT count(*) FROM run")).scalar_one() == 0


LINUX = r"""/dev/vda / ext4 rw,relatime 0 0
tmpfs /tmp tmpfs rw 0 0
nas:/export /mnt/nas nfs4 rw,vers=4.2 0 0
//nas/share /mnt/my\040share cifs rw 0 0
me@host:/ /home/me/remote fuse.sshfs rw 0 0
/dev/sdb1 /mnt/nas/local ext4 rw 0 0
drvfs /mnt/c 9p rw,aname=drvfs 0 0
"""
MACOS = """/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
devfs on /dev (devfs, local, nobrowse)
/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled, nobrowse, protect)
//me@nas._smb._tcp.local/share on /Volumes/my share (1) (smbfs, nodev, nosuid, mounted by me)
"""


@pytest.mark.parametrize(
    ("path", "kind", "local"),
    [
        ("/home/me/store.db", "ext4", True),
        ("/tmp/store.db", "tmpfs", True),
        ("/mnt/nas/store.db", "nfs4", False),
        ("/mnt/nasty/store.db", "ext4", True),
        ("/mnt/my share/store.db", "cifs", False),
        ("/home/me/remote/a/store.db", "fuse.sshfs", False),
        ("/mnt/nas/local/store.db", "ext4", True),
        ("/mnt/c/store.db", "9p", False),
    ],
)
def test_linux_mounts(path, kind, local):
    mount = mount_of(PurePosixPath(path), parse_proc_mounts(LINUX))
    assert mount is not None
    assert (mount.kind, mount.local) == (kind, local)


@pytest.mark.parametrize(
    ("path", "kind", "local"),
    [
        ("/Users/me/store.db", "apfs", True),
        ("/Volumes/my share (1)/store.db", "smbfs", False),
        ("/Volumes/my share/store.db", "apfs", True),
    ],
)
def test_macos_mounts(path, kind, local):
    mount = mount_of(PurePosixPath(path), parse_mount_command(MACOS))
    assert mount is not None
    assert (mount.kind, mount.local) == (kind, local)


def test_a_store_on_a_network_is_refused(tmp_path, monkeypatch):
    require_local(tmp_path)
    mounts = [Mount("/", "ext4", local=True), Mount(str(tmp_path.resolve()), "nfs4", local=False)]
    monkeypatch.setattr(filesystems_module, "_mounts", lambda: mounts)
    for readonly in (True, False):
        with pytest.raises(StoreUnavailable, match=r"local disk.*nfs4"):
            open_engine(sqlite_url(tmp_path / "store.db"), readonly=readonly)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/mounts")
def test_this_machine_has_mounts(tmp_path):
    from pathlib import Path

    assert parse_proc_mounts(Path("/proc/mounts").read_text(encoding="utf-8"))


def test_engines_work_from_other_threads(engine, store, make):
    from concurrent.futures import ThreadPoolExecutor

    run_id = store.begin_run(make.start()).run_id
    with ThreadPoolExecutor(4) as pool:
        batches = [make.batch(make.scored(position)) for position in range(12)]
        outcomes = list(pool.map(lambda batch: store.record_batch(run_id, batch), batches))
    assert sum(outcome.scored for outcome in outcomes) == 12
    assert len(results(engine)) == 36
