"""The same documents under two checkpoints in one command, with real models."""

import json
import shutil
from pathlib import Path

import pytest

from weighbridge.deployments.cli import main

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]
SCHEMA = '{"mood": {"type": "enum", "choices": ["bad", "good"], "description": "The mood."}}'


@pytest.fixture
def other(tmp_path: Path, embedded: Path) -> Path:
    """The embedded checkpoint with another epsilon, which makes it another checkpoint."""
    folder = tmp_path / "other"
    shutil.copytree(embedded, folder, symlinks=False)
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 0.01
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_two_runs_and_what_differs(
    tmp_path: Path,
    embedded: Path,
    other: Path,
    prefect_server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{tmp_path}/store.db")
    Path("two.csv").write_text("id,text\na,It broke again.\nb,Thank you!\n")
    score = ["score", "two.csv", "--schema", SCHEMA, "--checkpoint", str(embedded)]
    assert main([*score, "--against", str(other), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["first", "second", "diff"]
    assert (told["first"]["run_id"], told["second"]["run_id"]) == (1, 2)
    assert told["second"]["scored"] == 2
    assert [row["name"] for row in told["diff"]["differences"]] == ["checkpoint"]
    (mood,) = told["diff"]["fields"]
    assert mood["paired"] == 2
    # Another epsilon is another model: its probabilities are not the same.
    assert mood["mean_probability_change"] > 0
    # Both are decided now; --output is for one run.
    assert main([*score, "--against", str(other)]) == 0
    out, err = capsys.readouterr()
    assert "0 scored, 2 reused" in err
    assert out.startswith("differs")
    assert main([*score, "--against", str(other), "--output", "a.csv"]) == 2
    assert "--output is for one run" in capsys.readouterr().err


def test_the_file_of_one_run_may_be_parquet(
    tmp_path: Path, embedded: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
):
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{tmp_path}/store.db")
    score = ["score", "--text", "Thank you!", "--schema", SCHEMA, "--checkpoint", str(embedded)]
    assert main([*score, "--output", "a.parquet"]) == 0
    (row,) = pyarrow.parquet.read_table("a.parquet").to_pylist()
    assert (row["field"], row["kind"]) == ("mood", "enum")
