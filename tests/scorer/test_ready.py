"""READY.json: what is read of it, and what a calibration writes into it."""

import json
import math
import os
import stat
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weighbridge.scorer.errors import CheckpointError, TemperatureError
from weighbridge.scorer.ready import ReadyFile, read_ready, record_temperature
from weighbridge.scorer.ready_notes import ready_notes

SHA = "ab" * 32
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


def write(folder: Path, ready: Any) -> Path:
    text = ready if isinstance(ready, str) else json.dumps(ready)
    (folder / "READY.json").write_text(text, encoding="utf-8")
    return folder


def record(folder: Path, value: Any = 1.7, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "fitted_on": "triage.csv, 120 labels",
        "metrics": {"nll": 0.41},
        "fingerprint": "f" * 64,
        "fitted_at": NOON,
    }
    return record_temperature(folder, value, **{**given, **changes})


def test_everything_that_releases_write(tmp_path: Path):
    ready = {
        "adapter_sha256": SHA.upper(),
        "model": "org/model",
        "revision": "r",
        "base_model": "org/base",
        "base_revision": "b",
        "base_quantization": "4-bit affine, groups of 64",
        "base_adapter_sha256": SHA.upper(),
        "prompt_sha256": SHA,
        "weight_sha256": {"model.safetensors": SHA.upper()},
        "precision": "bfloat16",
        "versions": {"torch": "2.9", "python": [3, 11]},
        "something_newer": {"x": 1},
    }
    assert read_ready(write(tmp_path, ready)) == ReadyFile(
        adapter_sha256=SHA,
        model="org/model",
        revision="r",
        base_model="org/base",
        base_revision="b",
        base_quantization="4-bit affine, groups of 64",
        base_adapter_sha256=SHA,
        prompt_sha256=SHA,
        weight_sha256={"model.safetensors": SHA},
        precision="bfloat16",
        versions={"torch": "2.9", "python": "[3, 11]"},
        unknown=("something_newer",),
    )


def test_no_file_says_nothing(tmp_path: Path):
    assert read_ready(tmp_path) == ReadyFile()


@pytest.mark.parametrize(
    ("ready", "words"),
    [
        ({"prompt_sha256": "ab"}, ["prompt_sha256", "64 hex"]),
        ({"weight_sha256": SHA}, ["weight_sha256", "object of hashes"]),
        ({"weight_sha256": {"a": 5}}, ["weight_sha256", '"a"', "64 hex", "5"]),
        ({"base_model": ""}, ["base_model", "blank"]),
        ({"base_revision": 1}, ["base_revision", "text"]),
        ({"model": "\ud800"}, ["model", "printable", "\\ud800"]),
        ({"model": "m" * 5_000_000}, ["model", "at most 300"]),
        ({"weight_sha256": {"\ud800": SHA}}, ["weight_sha256", "names of files"]),
        ({"weight_sha256": {"w" * 300: SHA}}, ["weight_sha256", "names of files"]),
    ],
)
def test_what_is_damaged_is_named(tmp_path: Path, ready: Any, words: list[str]):
    with pytest.raises(TemperatureError) as caught:
        read_ready(write(tmp_path, ready))
    assert [word for word in ["READY.json", *words] if word not in caught.value.message] == []
    assert len(caught.value.message) < 500
    assert caught.value.hint


def test_a_temperature_is_read_as_it_was_recorded(tmp_path: Path):
    stored = record(tmp_path)
    assert read_ready(tmp_path).temperature == stored
    assert (stored.value, stored.fitted_on, stored.fingerprint) == (
        1.7,
        "triage.csv, 120 labels",
        "f" * 64,
    )
    assert (stored.fitted_at, stored.metrics) == (NOON, {"nll": 0.41})


def test_a_fingerprint_in_capitals_is_the_same(tmp_path: Path):
    assert record(tmp_path, fingerprint="F" * 64).fingerprint == "f" * 64


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"model": "org/m", "merged_at": "x", "precision": "bfloat16", "versions": {}}, []),
        ({"model_id": "org/m"}, ['"model_id" is not a key that is read; did you mean "model"?']),
        ({"temperature": 2}, ['did you mean "weighbridge.temperature"?']),
        ({"Weight-SHA256": {}}, ['did you mean "weight_sha256"?']),
        ({"adapter_sha25": SHA}, ['did you mean "adapter_sha256"?']),
        ({"colour": 1, "\x1b[2J": 2}, ['"colour", "\\u001b[2J" are not keys that are read']),
    ],
)
def test_keys_that_mean_nothing_are_told(tmp_path: Path, data: Any, words: list[str]):
    notes = ready_notes(read_ready(write(tmp_path, data)))
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_all_other_keys_stay(tmp_path: Path):
    before = {"adapter_sha256": SHA, "extra": [1, {"ü": None}], "weighbridge": {"later": 1}}
    record(write(tmp_path, before))
    record(tmp_path, 2.5)
    after = json.loads((tmp_path / "READY.json").read_text(encoding="utf-8"))
    own = after.pop("weighbridge")
    assert own["temperature"]["value"] == 2.5
    assert (own["later"], after) == (1, {"adapter_sha256": SHA, "extra": [1, {"ü": None}]})


def test_the_time_is_now_unless_given(tmp_path: Path):
    stored = record(tmp_path, fitted_at=None)
    assert abs(datetime.now(UTC) - stored.fitted_at) < timedelta(minutes=5)
    elsewhere = datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=9)))
    assert record(tmp_path, fitted_at=elsewhere).fitted_at == elsewhere


@pytest.mark.parametrize(
    "value",
    [0.04999, 20.01, 0, -1, math.nan, math.inf, True, "1.7", None, 10**400, np.float32("nan")],
    ids=lambda value: str(value)[:8],
)
def test_a_temperature_out_of_range_is_neither_written_nor_read(tmp_path: Path, value: Any):
    with pytest.raises(TemperatureError, match=r"from 0\.05 to 20"):
        record(tmp_path, value)
    assert list(tmp_path.iterdir()) == []
    # By hand, or by another program: JSON itself has no NaN, Python's reader takes it.
    plain = value if isinstance(value, int | str | None) else float(value)
    record(tmp_path)
    data = json.loads((tmp_path / "READY.json").read_text(encoding="utf-8"))
    data["weighbridge"]["temperature"]["value"] = plain
    with pytest.raises(TemperatureError, match=r"from 0\.05 to 20") as caught:
        read_ready(write(tmp_path, data))
    assert "record it anew" in str(caught.value.hint)


@pytest.mark.parametrize("value", [0.05, 1, 20.0, np.float32(2), np.float64(2)])
def test_the_ends_of_the_range_are_temperatures(tmp_path: Path, value: Any):
    assert record(tmp_path, value).value == float(value)
    assert read_ready(tmp_path).temperature is not None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fitted_on": " "}, "fitted_on"),
        ({"fingerprint": ""}, "fingerprint"),
        ({"metrics": {"nll": math.nan}}, "metrics"),
        ({"metrics": {"nll": "low"}}, "metrics"),
        ({"fitted_at": datetime(2026, 1, 1)}, "fitted_at"),  # noqa: DTZ001 - no zone, on purpose
    ],
)
def test_half_a_provenance_is_refused(tmp_path: Path, changes: Any, word: str):
    write(tmp_path, {"model": "org/model"})
    with pytest.raises(TemperatureError, match=word):
        record(tmp_path, **changes)
    # Nothing was changed, and no half-written file lies there.
    assert json.loads((tmp_path / "READY.json").read_text()) == {"model": "org/model"}
    assert [path.name for path in tmp_path.iterdir()] == ["READY.json"]


@pytest.mark.parametrize("own", [5, {"temperature": []}, {"temperature": {"value": 1}}])
def test_an_entry_that_is_damaged(tmp_path: Path, own: Any):
    write(tmp_path, {"weighbridge": own})
    if not isinstance(own, dict):
        # Not ours to judge: some other use of the name.
        assert read_ready(tmp_path).temperature is None
        return
    with pytest.raises(TemperatureError, match=r"weighbridge\.temperature"):
        read_ready(tmp_path)


def test_what_cannot_be_trusted_is_not_written_over(tmp_path: Path):
    write(tmp_path, "{")
    with pytest.raises(TemperatureError, match="must be JSON"):
        record(tmp_path)
    assert (tmp_path / "READY.json").read_text() == "{"


def test_a_link_into_a_shared_cache_becomes_a_file(tmp_path: Path):
    blob = tmp_path / "blob"
    blob.write_text('{"model": "org/model"}')
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "READY.json").symlink_to(blob)
    record(folder)
    # The blob is named by the hash of its content, and other snapshots share it.
    assert blob.read_text() == '{"model": "org/model"}'
    assert not (folder / "READY.json").is_symlink()
    assert read_ready(folder).model == "org/model"


def test_the_file_can_be_read_by_whoever_reads_the_weights(tmp_path: Path):
    record(tmp_path)
    assert stat.S_IMODE((tmp_path / "READY.json").stat().st_mode) & 0o444 == 0o444


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="must be written"):
        record(tmp_path)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, {"model": "org/model"})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        record(tmp_path)
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["READY.json"]
    assert read_ready(tmp_path) == ReadyFile(model="org/model")


def test_what_a_temperature_was_fitted_on_is_kept(tmp_path: Path):
    told: dict[str, Any] = {"layout": "context-first", "encoding": "codes", "permutations": 4}
    record(tmp_path, **told)
    found = read_ready(tmp_path).temperature
    assert found is not None
    assert {name: getattr(found, name) for name in told} == told
    # Entries that say nothing of it stay readable.
    record(tmp_path)
    entry = json.loads((tmp_path / "READY.json").read_text())["weighbridge"]["temperature"]
    del entry["permutations"]
    found = read_ready(write(tmp_path, {"weighbridge": {"temperature": entry}})).temperature
    assert found is not None
    assert (found.layout, found.encoding, found.permutations) == (None, None, 1)


@pytest.mark.parametrize(
    "changes",
    [{"layout": " "}, {"encoding": 5}, {"permutations": 0}, {"permutations": True}],
)
def test_what_it_was_fitted_on_is_checked(tmp_path: Path, changes: dict[str, Any]):
    record(tmp_path)
    data = json.loads((tmp_path / "READY.json").read_text())
    data["weighbridge"]["temperature"] |= changes
    with pytest.raises(TemperatureError, match=next(iter(changes))):
        read_ready(write(tmp_path, data))
