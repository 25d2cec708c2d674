"""An upgrade is seen, whatever it leaves the same; what was not replaced is not."""

import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import IO

import pytest

from weighbridge.deployments.host_locks import take_name, try_lock
from weighbridge.deployments.installed import PACKAGES, look, missing, replaced

NAME = "wb-upgraded"


class Site:
    """A folder on the path with one package in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(self, version: str) -> Path:
        self.remove()
        made = self.folder / f"wb_upgraded-{version}.dist-info"
        made.mkdir()
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n")
        (made / "RECORD").write_text("")
        return made

    def remove(self) -> None:
        for each in self.folder.iterdir():
            shutil.rmtree(each)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(made.folder), *sys.path])
    return made


def test_another_version(site: Site):
    site.install("1.0")
    before = look([NAME])
    assert replaced(before, look([NAME])) is None
    site.install("1.1")
    assert replaced(before, look([NAME])) == f"{NAME} 1.0 was replaced by 1.1"


def test_the_same_version_again(site: Site):
    record = site.install("1.0") / "RECORD"
    before = look([NAME])
    os.utime(record, ns=(1, 1))
    assert replaced(before, look([NAME])) == f"{NAME} 1.0 was installed again"


def test_amid_an_upgrade_it_is_missing_and_not_yet_replaced(site: Site):
    site.install("1.0")
    before = look([NAME])
    site.remove()
    now = look([NAME])
    assert (replaced(before, now), missing(before, now)) == (None, [NAME])
    site.install("2.0")
    now = look([NAME])
    assert (replaced(before, now), missing(before, now)) == (
        f"{NAME} 1.0 was replaced by 2.0",
        [],
    )


def test_what_is_installed_here_is_found():
    found = look()
    assert set(found) == set(PACKAGES)
    assert all(each is not None and each.written_at > 0 for each in found.values())
    assert replaced(found, look()) is None


def test_names_are_the_hosts_and_no_two_are_alike(tmp_path: Path):
    first, held = take_name(tmp_path, "mac.local", "pool")
    second, other = take_name(tmp_path, "mac.local", "pool")
    elsewhere, third = take_name(tmp_path, "mac.local", "pool two")
    assert (first, second, elsewhere) == ("mac.local", "mac.local-2", "mac.local")
    held.close()
    again, fourth = take_name(tmp_path, "mac.local", "pool")
    assert again == "mac.local"
    for each in (other, third, fourth):
        each.close()
    name, last = take_name(tmp_path, "a/b%c", "pool")
    assert name == "a-b-c"
    last.close()


def test_a_lock_is_held_by_one(tmp_path: Path):
    path = tmp_path / "made" / "lock"
    first = try_lock(path)
    assert first is not None
    assert try_lock(path) is None
    first.close()
    second = try_lock(path)
    assert second is not None
    second.close()


def test_a_lock_that_cannot_be_had_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[IO[bytes]] = []

    def flock(file: IO[bytes], operation: int) -> None:
        asked.append(file)
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)  # as on a network file system without locks
    with pytest.raises(OSError, match="no locks available"):
        try_lock(tmp_path / "lock")
    assert [file.closed for file in asked] == [True]
