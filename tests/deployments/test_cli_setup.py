"""doctor and checkpoint: what is installed, what a folder holds, where settings come from."""

import json
import os
import struct
from pathlib import Path

import pytest

from weighbridge.deployments.cli import main

CHECKPOINT_KEYS = [
    *("fingerprint", "model_id", "revision", "architecture", "dtype", "quantization"),
    *("adapter_sha256", "contract", "layout", "encoding", "max_input_tokens"),
    *("temperature", "temperature_kind"),
]
NIMBLE = ("bespokelabs/Bespoke-Nimble-9B", "93ec5d6ff1a9cd31d6cc0e0c58d312465d36de7c")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WEIGHBRIDGE_CHECKPOINT", "WEIGHBRIDGE_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The smallest folder that is a checkpoint: one float32 weight."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0)
    (path / "model.safetensors").write_bytes(data)
    return path


def test_checkpoint_info_json_has_the_promised_keys(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["checkpoint", "info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == CHECKPOINT_KEYS
    assert (found["architecture"], found["dtype"], found["contract"]) == ("llama", "float32", None)
    assert (found["layout"], found["encoding"]) == ("schema-first", "labels")
    assert (found["temperature"], found["temperature_kind"]) == (1.0, "default")


def test_checkpoint_info_takes_the_setting_and_the_identity(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(folder))
    model_id, revision = NIMBLE
    identity = ["--model-id", model_id, "--revision", revision]
    assert main(["checkpoint", "info", *identity]) == 0
    out = capsys.readouterr().out
    assert f"folder            {folder}\n" in out
    assert "temperature       2.179078721266035\n" in out
    assert "temperature_kind  fitted\n" in out


def test_checkpoint_info_without_any_names_the_next_step(
    cache: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["checkpoint", "info"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: a checkpoint must be named or the embedded one built, got neither",
        "hint: build it once with: weighbridge checkpoint demo",
    ]


def test_checkpoint_info_of_a_missing_folder(capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "info", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("error: a checkpoint must be an existing folder")


@pytest.mark.mlx
def test_checkpoint_demo_needs_a_cache_that_can_be_written(
    cache: Path, capsys: pytest.CaptureFixture[str]
):
    cache.write_text("a file where the folder should be")
    assert main(["checkpoint", "demo"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "must be writable" in err
    assert "WEIGHBRIDGE_CACHE" in err


@pytest.mark.mlx
def test_doctor(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    Path("weighbridge.toml").write_text('checkpoint = "models/tiny"')
    monkeypatch.setenv("WEIGHBRIDGE_TYPO", "1")
    assert main(["doctor", "--db", "a.db", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found) == [
        "backend",
        "blas",
        "gflops_float32",
        "model_held_by",
        "prefect",
        "database",
        "settings",
    ]
    assert found["backend"]["device"] in {"cpu", "metal"}
    assert found["gflops_float32"] > 0
    assert set(found["prefect"]) == {"version", "api"}
    assert found["database"]["exists"] is False
    here = Path.cwd()
    assert found["settings"] == {
        "database_url": {"value": f"sqlite:///{here}/a.db", "origin": "option"},
        "checkpoint": {"value": "models/tiny", "origin": str(here / "weighbridge.toml")},
        "cache": {"value": str(cache), "origin": "WEIGHBRIDGE_CACHE"},
        "lease": {"value": os.environ["WEIGHBRIDGE_LEASE"], "origin": "WEIGHBRIDGE_LEASE"},
        "allow_remote_api": {"value": False, "origin": "default"},
    }
    assert err == "hint: WEIGHBRIDGE_TYPO is set, and weighbridge has no such setting\n"
    assert not Path("a.db").exists()


@pytest.mark.mlx
def test_doctor_fails_when_the_server_is_away(capsys: pytest.CaptureFixture[str]):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert main(["doctor", "--db", "a.db"]) == 1
    err = capsys.readouterr().err
    assert "the Prefect API must answer, and http://127.0.0.1:9/api does not" in err
    assert "prefect server start" in err


@pytest.mark.mlx
def test_doctor_fails_when_the_store_cannot_be_read(capsys: pytest.CaptureFixture[str]):
    Path("a.db").write_text("not a database, but long enough to be told from an empty file")
    assert main(["doctor", "--db", "a.db"]) == 1
    out, err = capsys.readouterr()
    assert "float32      " in out
    assert err.startswith("error: ")
    assert "a.db must be a SQLite file" in err
