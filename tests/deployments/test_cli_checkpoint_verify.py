"""checkpoint verify: whose fault it is when something differs, and what is no checkpoint."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests.scorer.adapter_folders import draw, write_mlx, write_peft
from tests.scorer.conftest import Tiny

from weighbridge.deployments.cli import main

pytestmark = pytest.mark.mlx

MODULE = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two adapters, and a folder that one of them is merged into."""
    home = tmp_path_factory.mktemp("made")
    base = Tiny().checkpoint(home / "base")
    shape = load_file(base / "model.safetensors")[f"{MODULE}.weight"].shape
    write_mlx(home / "mlx", draw({MODULE: shape}))
    write_peft(home / "peft", draw({MODULE: shape}, seed=8))
    assert main(["checkpoint", "fuse", str(base), str(home / "peft"), str(home / "merged")]) == 0
    return home


@pytest.fixture(autouse=True)
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("WEIGHBRIDGE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["checkpoint", "verify", *words])
    out, err = capsys.readouterr()
    return int(code), out, err


def test_another_adapter_is_no_damage(capsys: pytest.CaptureFixture[str]):
    assert verify(capsys, "merged", "--adapter", "peft")[0] == 0
    code, _, err = verify(capsys, "merged", "--adapter", "mlx")
    assert code == 1
    assert err.startswith("error: the adapter must be the one that was merged into ")
    assert "fetch them again" not in err
    # Negative control: damage beside it is told as such.
    weights = Path("merged/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "fetch them again" in verify(capsys, "merged", "--adapter", "mlx")[2]


@pytest.mark.parametrize(("folder", "words"), [(".", "did you mean"), ("peft", "adapter alone")])
def test_what_is_no_checkpoint_is_told_as_what_it_is(
    folder: str, words: str, capsys: pytest.CaptureFixture[str]
):
    code, out, err = verify(capsys, folder)
    assert (code, out) == (1, "")
    assert words in err
    assert "must come with hashes" not in err


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_model_and_its_adapter_in_each_others_place(
    command: str, capsys: pytest.CaptureFixture[str]
):
    for words in (["peft", "--adapter", "base"], ["base", "--adapter", "merged"]):
        assert main(["checkpoint", command, *words]) == 1
        err = capsys.readouterr().err
        if words[0] == "peft":
            assert "as its adapter" in err
            assert "the model in" in err
        else:
            assert "got a whole model in" in err


def test_on_a_terminal_names_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = verify(capsys, "merged", "--adapter", "peft")
    assert "model.safetensors " in out
    assert "adapter_model.safetensors " in out
    assert max(map(len, out.splitlines())) <= 80
