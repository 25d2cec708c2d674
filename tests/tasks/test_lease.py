"""One process of a host holds a model at a time; who waits gets it, who dies leaves it."""

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weighbridge.tasks import lease
from weighbridge.tasks.errors import TaskError
from weighbridge.tasks.lease import (
    AcceleratorBusy,
    LeasePolicy,
    lease_holder,
    lease_wanted,
    release_lease,
    set_policy,
    take_lease,
)
from weighbridge.tasks.stopping import Stopped, ask_to_stop, clear_stop

# Takes the lease, says so, and keeps it until its input ends.
HOLD = """
import sys
from pathlib import Path
from weighbridge.tasks.lease import LeasePolicy, set_policy, take_lease

set_policy(LeasePolicy(sys.argv[2]), what="worker")
take_lease(Path(sys.argv[1]), "nimble", say=lambda text: print(text, flush=True))
print("has it", flush=True)
sys.stdin.read()
"""
Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "cache" / "accelerator.lock"
    yield path
    release_lease(path)
    set_policy(LeasePolicy.WAIT, what="program")
    clear_stop()


@pytest.fixture
def hold(path: Path) -> Iterator[Hold]:
    """Start another process that takes the lease."""
    started: list[subprocess.Popen[str]] = []

    def start(policy: str = "wait") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path), policy],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_it_is_taken_once_and_says_by_whom(path: Path):
    assert lease_holder(path) is None
    said: list[str] = []
    set_policy(LeasePolicy.REFUSE, what="weighbridge score")
    take_lease(path, "first", say=said.append)
    take_lease(path, "second", say=said.append)  # another checkpoint of the same process
    holder = lease_holder(path)
    assert holder is not None
    assert (holder.what, holder.checkpoint) == ("weighbridge score", "second")
    assert said == []
    release_lease(path)
    assert lease_holder(path) is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_process_is_refused_and_told_who_has_it(path: Path, hold: Hold):
    other = hold()
    assert line(other) == "has it"
    set_policy(LeasePolicy.REFUSE)
    with pytest.raises(AcceleratorBusy) as refused:
        take_lease(path, "mine", say=print)
    assert f"and the worker with pid {other.pid} (nimble) does" in refused.value.message
    assert all(way in (refused.value.hint or "") for way in ("WAIT", "SHARE"))
    holder = lease_holder(path)
    assert holder is not None
    assert holder.pid == other.pid


def test_a_killed_holder_leaves_it_free(path: Path, hold: Hold):
    other = hold()
    assert line(other) == "has it"
    other.kill()
    other.wait()
    assert lease_holder(path) is None
    set_policy(LeasePolicy.REFUSE)
    take_lease(path, "mine", say=print)
    holder = lease_holder(path)
    assert holder is not None
    assert holder.checkpoint == "mine"


def test_who_waits_is_seen_and_gets_it(path: Path, hold: Hold):
    take_lease(path, "mine", say=print)
    assert not lease_wanted(path)
    other = hold()
    assert line(other).startswith("waiting for the model: the program with pid")
    assert lease_wanted(path)
    release_lease(path)
    assert line(other) == "has it"
    assert not lease_wanted(path)


def test_a_second_model_is_loaded_only_if_asked_for(path: Path, hold: Hold):
    take_lease(path, "mine", say=print)
    other = hold("share")
    assert line(other).startswith("loading a second model beside the program with pid")
    assert line(other) == "has it"
    # It took nothing from the one that holds it.
    holder = lease_holder(path)
    assert holder is not None
    assert holder.checkpoint == "mine"


def test_a_wait_ends_when_the_process_is_asked_to_stop(path: Path, hold: Hold):
    assert line(hold()) == "has it"
    said = threading.Event()
    ended: list[str] = []

    def wait() -> None:
        try:
            take_lease(path, "mine", say=lambda _: said.set())
        except Stopped as stopped:
            ended.append(stopped.message)

    thread = threading.Thread(target=wait)
    thread.start()
    assert said.wait(300)
    ask_to_stop("the worker ends")
    thread.join(300)
    assert ended == ["the worker ends"]
    assert not lease_wanted(path)


@pytest.mark.parametrize("content", ["", "{", json.dumps({"pid": 1}), json.dumps([1]), "[" * 9999])
def test_an_unreadable_note_names_nobody(path: Path, hold: Hold, content: str):
    assert line(hold()) == "has it"
    path.write_text(content)
    set_policy(LeasePolicy.REFUSE)
    with pytest.raises(AcceleratorBusy, match="and another program does"):
        take_lease(path, "mine", say=print)


def test_a_deleted_file_is_locked_anew(path: Path, hold: Hold):
    take_lease(path, "mine", say=print)
    path.unlink()
    other = hold()
    assert line(other) == "has it"  # which nobody can keep it from
    holder = lease_holder(path)
    assert holder is not None
    assert holder.pid == other.pid
    set_policy(LeasePolicy.REFUSE)
    with pytest.raises(AcceleratorBusy, match=str(other.pid)):
        take_lease(path, "mine", say=print)


def test_a_place_without_a_file_is_refused(tmp_path: Path):
    with pytest.raises(TaskError, match="must be a file that can be locked") as refused:
        take_lease(tmp_path, "mine", say=print)
    assert "WEIGHBRIDGE_LEASE" in (refused.value.hint or "")


def test_a_look_never_refuses_who_takes_it(path: Path, monkeypatch: pytest.MonkeyPatch):
    path.parent.mkdir()
    set_policy(LeasePolicy.REFUSE)
    with path.open("wb") as look:
        # As `lease_holder` of another process has the lock, for a moment.
        fcntl.flock(look, fcntl.LOCK_EX)
        moments: list[float] = []

        def let_go(seconds: float) -> None:
            moments.append(seconds)
            fcntl.flock(look, fcntl.LOCK_UN)

        monkeypatch.setattr(lease.time, "sleep", let_go)
        take_lease(path, "mine", say=print)
    assert len(moments) == 1
    holder = lease_holder(path)
    assert holder is not None
    assert holder.checkpoint == "mine"


def test_a_look_leaves_it_free(path: Path):
    path.parent.mkdir()
    path.touch()
    set_policy(LeasePolicy.REFUSE)
    for _ in range(20):
        assert lease_holder(path) is None
        take_lease(path, "mine", say=print)
        release_lease(path)
