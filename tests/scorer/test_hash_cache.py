"""Hashes of weight files: kept by size and time of change, and never believed blindly."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer.checkpoint import inspect_checkpoint

pytestmark = pytest.mark.mlx


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return tiny.checkpoint(tmp_path / "tiny")


def test_hashes_are_kept_and_a_changed_file_is_noticed(folder, tmp_path):
    cache = tmp_path / "new" / "hashes.json"
    first = inspect_checkpoint(folder, hash_cache=cache).fingerprint
    kept = json.loads(cache.read_text())
    # One entry a file: path, size, times of change, inode.
    weights = [key for key in kept if key.startswith(str(folder / "model.safetensors"))]
    assert len(weights) == 1
    kept[weights[0]] = "0" * 64
    cache.write_text(json.dumps(kept))
    # The planted hash is believed, so 10 GB are not read again.
    planted = inspect_checkpoint(folder, hash_cache=cache).fingerprint
    assert planted != first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    # Another time of change: the file is hashed anew, and it is the old one.
    assert inspect_checkpoint(folder, hash_cache=cache).fingerprint == first


def test_a_change_under_the_old_time_is_noticed(folder, tmp_path):
    cache = tmp_path / "hashes.json"
    first = inspect_checkpoint(folder, hash_cache=cache).fingerprint
    path = folder / "model.safetensors"
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    # As copies do that keep times: size, time and inode are those of before.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )
    assert inspect_checkpoint(folder, hash_cache=cache).fingerprint != first


@pytest.mark.parametrize("text", ["", "[]", "{", "\ud800"])
def test_a_damaged_hash_cache_only_costs_time(folder, tmp_path, text):
    cache = tmp_path / "hashes.json"
    cache.write_bytes(text.encode("utf-8", "surrogatepass"))
    expected = inspect_checkpoint(folder).fingerprint
    assert inspect_checkpoint(folder, hash_cache=cache).fingerprint == expected
    # And it is whole again.
    assert len(json.loads(cache.read_text())) >= 4


def test_a_hash_cache_that_cannot_be_written_is_said(folder, tmp_path, caplog):
    # A folder stands where the file should: the work is done, only not kept.
    assert inspect_checkpoint(folder, hash_cache=tmp_path).fingerprint
    assert "hashes of weights could not be kept" in caplog.text
    # Nor does the attempt leave its temporary file beside it.
    assert [path.name for path in tmp_path.parent.iterdir() if path.name.startswith("tmp")] == []


def test_hashes_of_a_replaced_file_are_dropped(folder, tmp_path):
    cache = tmp_path / "hashes.json"
    weights = folder / "model.safetensors"
    for moment in (1, 2, 3):
        os.utime(weights, ns=(moment, moment))
        inspect_checkpoint(folder, hash_cache=cache)
    kept = [key for key in json.loads(cache.read_text()) if key.startswith(f"{weights}|")]
    # Of three states of the file only the last one can ever be asked for again.
    assert len(kept) == 1
    assert kept[0].split("|")[2] == "3"


@pytest.mark.parametrize("planted", ["", "0" * 63, "F" * 64, "0" * 64 + "\n", 7, None, ["0" * 64]])
def test_what_is_no_hash_is_not_believed(folder, tmp_path, planted):
    cache = tmp_path / "hashes.json"
    expected = inspect_checkpoint(folder, hash_cache=cache).fingerprint
    kept = json.loads(cache.read_text())
    cache.write_text(json.dumps(dict.fromkeys(kept, planted)))
    # Believed, it would be part of the fingerprint, and old decisions would not be found.
    assert inspect_checkpoint(folder, hash_cache=cache).fingerprint == expected
    assert json.loads(cache.read_text()) == kept


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(folder, tmp_path, monkeypatch):
    import hashlib

    cache = tmp_path / "hashes.json"
    weights = folder / "model.safetensors"
    before = inspect_checkpoint(folder).fingerprint
    file_digest = hashlib.file_digest

    def slowly(file: Any, name: str) -> Any:
        digest = file_digest(file, name)
        if file.name == str(weights):
            os.utime(weights, ns=(1, 1))  # written to after it was read
        return digest

    monkeypatch.setattr(hashlib, "file_digest", slowly)
    os.utime(weights, ns=(2, 2))
    assert inspect_checkpoint(folder, hash_cache=cache).fingerprint == before
    # Neither state of the file is said to have the hash of the other.
    kept = json.loads(cache.read_text())
    assert kept
    assert not any(key.startswith(f"{weights}|") for key in kept)
