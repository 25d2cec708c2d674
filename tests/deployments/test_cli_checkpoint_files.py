"""checkpoint verify and checkpoint fuse, as they are typed."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.scorer.adapter_folders import draw, write_mlx, write_peft
from tests.scorer.conftest import Tiny

from weighbridge.deployments.cli import main
from weighbridge.scorer import ParallelScorer
from weighbridge.scorer.resident import release_checkpoints

pytestmark = pytest.mark.mlx

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")


def sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and one adapter in both forms."""
    home = tmp_path_factory.mktemp("made")
    base = Tiny().checkpoint(home / "base")
    weights = load_file(base / "model.safetensors")
    products = draw({module: weights[f"{module}.weight"].shape for module in MODULES})
    write_mlx(home / "mlx", products)
    write_peft(home / "peft", products, base_model_name_or_path="org/base")
    return home


@pytest.fixture(autouse=True)
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("WEIGHBRIDGE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["checkpoint", *words])
    out, err = capsys.readouterr()
    return int(code), out, err


def logits(folder: str, **options: Any) -> list[float]:
    result = ParallelScorer(folder, **options).score("It broke.", Tiny().schema("team"))
    return list(result.fields["team"].logits.values())


class TestFuse:
    @pytest.mark.parametrize("adapter", ["mlx", "peft"])
    def test_it_prints_the_folder_that_scores_as_base_and_adapter(
        self, adapter: str, capsys: pytest.CaptureFixture[str], home: Path
    ):
        code, out, err = run(capsys, "fuse", "base", adapter, "merged")
        # The answer alone on stdout: OUT=$(weighbridge checkpoint fuse …).
        assert (code, out) == (0, f"{home / 'merged'}\n")
        assert "fusing" in err
        together = logits("base", adapter=adapter)
        assert np.allclose(logits("merged"), together, atol=1e-5)
        # Negative control: the base alone says something else.
        assert not np.allclose(logits("base"), together, atol=1e-3)

    def test_what_it_wrote_is_verified_and_described(self, capsys: pytest.CaptureFixture[str]):
        assert run(capsys, "fuse", "base", "peft", "merged")[0] == 0
        ready = json.loads(Path("merged/READY.json").read_text())
        adapter_sha256 = sha(Path("peft/adapter_model.safetensors"))
        assert ready["adapter_sha256"] == adapter_sha256
        assert ready["weight_sha256"] == {
            file.name: sha(file) for file in Path("merged").glob("model*.safetensors")
        }
        code, out, err = run(capsys, "verify", "merged", "--adapter", "peft", "--json")
        assert (code, err) == (0, "")
        assert {check["state"] for check in json.loads(out)} == {"same"}
        code, out, _ = run(capsys, "info", "merged", "--json")
        info = json.loads(out)
        # The base itself has no name; the adapter's word for it is no more than that.
        assert (info["adapter_sha256"], info["base_model"]) == (adapter_sha256, None)
        assert (info["adapter_base_model"], ready["adapter_base_model"]) == ("org/base",) * 2
        assert "base_model" not in ready
        assert info["adapter"] is None
        # Merged, it is not to be fused again.
        code, _, err = run(capsys, "info", "merged", "--adapter", "peft")
        assert code == 1
        assert "must be fused once" in err

    def test_a_dtype_of_its_own(self, capsys: pytest.CaptureFixture[str]):
        assert run(capsys, "fuse", "base", "mlx", "half", "--dtype", "float16")[0] == 0
        _, out, _ = run(capsys, "info", "half", "--json")
        assert json.loads(out)["dtype"] == "float16"
        assert run(capsys, "fuse", "base", "mlx", "x", "--dtype", "int4")[0] == 2

    def test_a_folder_that_is_there_is_not_touched(self, capsys: pytest.CaptureFixture[str]):
        Path("merged").mkdir()
        code, out, err = run(capsys, "fuse", "base", "mlx", "merged")
        assert (code, out) == (1, "")
        assert err.startswith("error: the folder of a merged checkpoint must not exist yet")
        assert list(Path("merged").iterdir()) == []

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("nowhere", "mlx", "out"), "a checkpoint must be an existing folder"),
            (("base", "nowhere", "out"), "an adapter must be an existing folder"),
            (("base", "base", "out"), "an adapter must hold adapter_config.json, got a whole"),
            (("base", "mlx/adapters.safetensors", "out"), "an adapter must be a folder"),
            (("base", "mlx", "x" * 300), "a merged checkpoint must be written to"),
            (("base", "mlx", "base/config.json/x"), "a merged checkpoint must be written to"),
            (("base", "mlx", "a\0b"), "a merged checkpoint must be written to"),
        ],
    )
    def test_what_is_no_checkpoint_or_no_adapter(
        self, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ):
        code, out, err = run(capsys, "fuse", *words)
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {message}")
        assert "hint: " in err
        assert "disk with room" not in err
        assert not Path("out").exists()

    def test_a_prompt_of_ones_own_is_copied_without_consent(
        self, capsys: pytest.CaptureFixture[str]
    ):
        config = {"task": "schema_candidate_classification_v1"}
        Path("base/schema_config.json").write_text(json.dumps(config))
        Path("base/system_prompt.txt").write_text("Mine.")
        # Nothing is asked of the model; who scores with it is asked then.
        assert run(capsys, "fuse", "base", "mlx", "merged")[0] == 0
        ready = json.loads(Path("merged/READY.json").read_text())
        assert ready["prompt_sha256"] == hashlib.sha256(b"Mine.").hexdigest()
        assert run(capsys, "info", "merged")[0] == 1
        assert run(capsys, "info", "merged", "--accept-prompt")[0] == 0

    def test_an_adapter_that_lies_beside_its_base(
        self, capsys: pytest.CaptureFixture[str], home: Path
    ):
        for file in ("adapters.safetensors", "adapter_config.json"):
            shutil.copy(f"mlx/{file}", "base")
        assert run(capsys, "fuse", "base", "base", "merged")[0] == 0
        shutil.rmtree("mlx")
        assert np.allclose(logits("merged"), logits("base", adapter="base"), atol=1e-5)
        # Fused into it, with another one: no option of this command is named.
        code, _, err = run(capsys, "fuse", "base", "peft", "other")
        assert code == 1
        assert "ADAPTER" in err
        assert "--adapter" not in err

    def test_what_a_person_should_know_is_said(
        self, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ):
        Path("mlx/chat_template.jinja").write_text("{{ messages }}")
        (note,) = json.loads(run(capsys, "info", "base", "--adapter", "mlx", "--json")[1])[
            "warnings"
        ]
        assert "template" in note
        code, _, err = run(capsys, "fuse", "base", "mlx", "merged")
        assert (code, f"hint: {note}" in err) == (0, True)
        release_checkpoints()  # said when the weights are loaded, and other tests load these
        logits("base", adapter="mlx")
        assert note in caplog.text
        # Negative control: the other one brings none.
        assert (
            json.loads(run(capsys, "info", "base", "--adapter", "peft", "--json")[1])["warnings"]
            == []
        )

    def test_what_was_merged_is_not_merged_again(self, capsys: pytest.CaptureFixture[str]):
        assert run(capsys, "fuse", "base", "mlx", "merged")[0] == 0
        code, _, err = run(capsys, "fuse", "merged", "mlx", "again")
        assert code == 1
        assert "is in the weights already" in err
        assert "hint: use that folder as it is" in err

    def test_a_fused_release_is_transferred_where_it_was_transferred(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        from weighbridge.scorer import temperature

        # The table knows the hash of this adapter as that of the fitted release.
        known = replace(
            temperature._RELEASES[0], adapter_sha256=sha(Path("mlx/adapters.safetensors"))
        )
        monkeypatch.setattr(temperature, "_RELEASES", (known,))
        ready = {"adapter_sha256": "c" * 64}
        for told, kind in ((None, "fitted"), (ready, "transferred")):
            if told:
                Path("base/READY.json").write_text(json.dumps(told))
            before = json.loads(run(capsys, "info", "base", "--adapter", "mlx", "--json")[1])
            assert run(capsys, "fuse", "base", "mlx", f"merged-{kind}")[0] == 0
            after = json.loads(run(capsys, "info", f"merged-{kind}", "--json")[1])
            assert (before["temperature_kind"], after["temperature_kind"]) == (kind, kind)

    def test_one_program_holds_a_model_at_a_time(
        self, capsys: pytest.CaptureFixture[str], home: Path
    ):
        hold = (
            "import sys\nfrom pathlib import Path\n"
            "from weighbridge.tasks.lease import take_lease\n"
            "from weighbridge.tasks.settings import load_settings\n"
            "take_lease(load_settings().lease, 'nimble', say=print)\n"
            "print('has it', flush=True)\nsys.stdin.read()\n"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with other:
            assert other.stdout
            assert other.stdin
            assert other.stdout.readline() == "has it\n"
            code, out, err = run(capsys, "fuse", "base", "mlx", "merged")
            assert (code, out) == (1, "")
            assert "one program of this machine may hold a model" in err
            assert "--wait" in err
            assert not Path("merged").exists()
            assert run(capsys, "fuse", "base", "mlx", "merged", "--anyway", "--wait")[0] == 2
            assert run(capsys, "fuse", "base", "mlx", "merged", "--anyway")[0] == 0
            other.stdin.close()
        assert run(capsys, "fuse", "base", "mlx", "second")[0] == 0

    def test_sigterm_leaves_nothing(self, home: Path):
        command = [sys.executable, "-m", "weighbridge.deployments.cli", "checkpoint", "fuse"]
        fusing = subprocess.Popen(
            [*command, "base", "mlx", "merged"], stderr=subprocess.PIPE, text=True
        )
        with fusing:
            assert fusing.stderr
            line = fusing.stderr.readline()
            assert line.startswith("fusing")
            assert list(home.glob(".merged.*.partial"))
            fusing.send_signal(signal.SIGTERM)
            rest = fusing.stderr.read()
        assert fusing.returncode == 128 + signal.SIGTERM, rest
        assert not list(home.glob(".merged.*"))
        assert not Path("merged").exists()


class TestVerify:
    def test_files_are_read_again_whatever_is_remembered(
        self, capsys: pytest.CaptureFixture[str], home: Path
    ):
        weights = Path("base/model.safetensors")
        Path("base/READY.json").write_text(
            json.dumps({"weight_sha256": {weights.name: sha(weights)}})
        )
        assert run(capsys, "verify", "base")[0] == 0
        # Damaged on the disk: neither size nor time of change tell.
        status = weights.stat()
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        with weights.open("r+b") as file:
            file.write(data)
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert run(capsys, "verify", "base")[0] == 1
        # What was found is remembered for those who do not verify.
        assert sha(weights) in (home / "cache" / "hashes.json").read_text()

    def test_hashes_of_what_is_not_here(self, capsys: pytest.CaptureFixture[str]):
        Path("base/READY.json").write_text(json.dumps({"adapter_sha256": "0" * 64}))
        code, out, err = run(capsys, "verify", "base")
        assert code == 1
        assert "000000000000" in out
        assert "got none" not in err
        assert "got hashes of the adapter alone" in err
        assert "--adapter FOLDER" in err

    def test_weights_that_are_gone_are_missing(self, capsys: pytest.CaptureFixture[str]):
        weights = Path("base/model.safetensors")
        listed = {"weight_sha256": {weights.name: sha(weights)}}
        Path("base/READY.json").write_text(json.dumps(listed))
        weights.unlink()
        code, out, _ = run(capsys, "verify", "base", "--json")
        assert (code, json.loads(out)[0]["state"]) == (1, "missing")

    def test_nothing_to_verify_against(self, capsys: pytest.CaptureFixture[str]):
        code, out, err = run(capsys, "verify", "base")
        assert (code, out) == (1, "")
        assert err.startswith("error: a checkpoint must come with hashes to be verified, got none")
        assert "READY.json" in err
        assert run(capsys, "verify", "base", "--json")[1] == "[]\n"

    def test_what_differs_is_named(self, capsys: pytest.CaptureFixture[str]):
        weights = Path("base/model.safetensors")
        listed = {"model.safetensors": sha(weights), "model-2.safetensors": "0" * 64}
        Path("base/READY.json").write_text(json.dumps({"weight_sha256": listed}))
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        code, out, err = run(capsys, "verify", "base")
        assert code == 1
        rows = [line.split() for line in out.splitlines()]
        assert [row[:2] for row in rows] == [
            ["state", "file"],
            ["missing", "model-2.safetensors"],
            ["differs", "model.safetensors"],
        ]
        assert rows[2][2:4] == [listed["model.safetensors"][:12], sha(weights)[:12]]
        assert "must be what is written down of it: 1 missing, 1 differs, of 2 in " in err
        code, out, _ = run(capsys, "verify", "base", "--json")
        assert code == 1
        assert json.loads(out)[1] == {
            "file": "model.safetensors",
            "expected": listed["model.safetensors"],
            "found": sha(weights),
            "state": "differs",
            "note": "by READY.json",
        }

    def test_the_embedded_one_by_its_manifest(
        self, embedded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(embedded))
        code, out, err = run(capsys, "verify")
        assert (code, err) == (0, "")
        assert len(out.splitlines()) == 5

    def test_a_missing_folder(self, capsys: pytest.CaptureFixture[str]):
        code, _, err = run(capsys, "verify", "nowhere")
        assert code == 1
        assert err.startswith('error: a checkpoint must be an existing folder, got "nowhere"')


def test_a_left_over_adapter_is_told(capsys: pytest.CaptureFixture[str]):
    shutil.copy("mlx/adapters.safetensors", "base")
    shutil.copy("mlx/adapter_config.json", "base")
    code, _, err = run(capsys, "info", "base")
    # Merged or not: nothing tells.
    assert code == 1
    assert "--adapter" in err
    ready = {"adapter_sha256": sha(Path("base/adapters.safetensors"))}
    Path("base/READY.json").write_text(json.dumps(ready))
    code, out, err = run(capsys, "info", "base")
    assert code == 0
    assert "adapter         merged into the weights\n" in out
    # Another one on top of it: what is below is told too.
    shutil.copytree("base", "once")
    for name in ("adapters.safetensors", "adapter_config.json"):
        Path("once", name).unlink()
    code, both, _ = run(capsys, "info", "once", "--adapter", "peft")
    assert code == 0
    assert f"merged before   the adapter {ready['adapter_sha256'][:12]}…\n" in both
    assert "adapter for     org/base\n" in both
    assert err.startswith("hint: adapters.safetensors is merged into the weights already")


def test_info_of_a_base_with_its_adapter(capsys: pytest.CaptureFixture[str], home: Path):
    alone = json.loads(run(capsys, "info", "base", "--json")[1])
    code, out, _ = run(capsys, "info", "base", "--adapter", "peft", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["adapter"].startswith("PEFT LoRA, rank 3")
    assert (told["adapter_folder"], told["base_model"]) == (str(home / "peft"), None)
    assert told["adapter_base_model"] == "org/base"
    assert told["adapter_sha256"] == sha(Path("peft/adapter_model.safetensors"))
    # Other weights are another checkpoint: decisions are not shared.
    assert told["fingerprint"] != alone["fingerprint"]


def test_an_adapter_alone_is_sent_to_its_base(capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "info", "peft")
    assert code == 1
    assert "--adapter" in err
    assert "org/base" in err
