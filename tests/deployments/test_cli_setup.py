"""doctor and checkpoint demo: what is installed, and where settings come from."""

import json
import os
from pathlib import Path

import pytest

from weighbridge.deployments.cli import main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WEIGHBRIDGE_CHECKPOINT", "WEIGHBRIDGE_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


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
        "adapter": {"value": None, "origin": "default"},
        "cache": {"value": str(cache), "origin": "WEIGHBRIDGE_CACHE"},
        "lease": {"value": os.environ["WEIGHBRIDGE_LEASE"], "origin": "WEIGHBRIDGE_LEASE"},
        "accept_prompt": {"value": False, "origin": "default"},
        "allow_remote_api": {"value": False, "origin": "default"},
    }
    assert err == "hint: WEIGHBRIDGE_TYPO is set, and weighbridge has no such setting\n"
    assert not Path("a.db").exists()


@pytest.mark.mlx
def test_doctor_fails_when_the_model_that_is_set_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Path("empty").mkdir()
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", "empty")
    assert main(["doctor", "--db", "a.db"]) == 1
    assert "a checkpoint must be a folder with files" in capsys.readouterr().err
    monkeypatch.delenv("WEIGHBRIDGE_CHECKPOINT")
    monkeypatch.setenv("WEIGHBRIDGE_ADAPTER", str(Path("empty").absolute()))
    assert main(["doctor", "--db", "a.db"]) == 1
    assert "adapter_config.json" in capsys.readouterr().err


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
