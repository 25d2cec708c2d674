"""checkpoint info: what a folder holds, and the whole temperature policy through it."""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from weighbridge.deployments.cli import main
from weighbridge.scorer.ready import record_temperature

CASES = json.loads(
    (Path(__file__).parents[1] / "cases" / "temperature_policy.json").read_text(encoding="utf-8")
)
PROMISED = [
    *("fingerprint", "model_id", "revision", "architecture", "dtype", "quantization"),
    *("adapter_sha256", "contract", "layout", "encoding", "max_input_tokens"),
    *("temperature", "temperature_kind"),
]
ADDED = [
    *("temperature_source", "folder", "adapter", "adapter_folder", "base_model", "base_revision"),
    *(
        "adapter_base_model",
        "merged_adapter_sha256",
        "context_tokens",
        "max_choices",
        "accepted_prompt_sha256",
        "warnings",
    ),
]
NIMBLE = ("bespokelabs/Bespoke-Nimble-9B", "93ec5d6ff1a9cd31d6cc0e0c58d312465d36de7c")
V1_ADAPTER = "ba7e28acb97f973e80fa51f3aa6fc6f75ea4081b89632ed45d8e5f3a1d7bfa6b"
FITTED = 2.179078721266035


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("WEIGHBRIDGE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The smallest folder that is a checkpoint: one float32 weight."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 2048}')
    (path / "tokenizer.json").write_text('{"model": {}}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0)
    (path / "model.safetensors").write_bytes(data)
    return path


def ready(folder: Path, **values: Any) -> None:
    (folder / "READY.json").write_text(json.dumps(values), encoding="utf-8")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["checkpoint", "info", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class TestPolicy:
    """Every case of the published policy, as it is typed."""

    @staticmethod
    def words(call: dict[str, Any]) -> list[str]:
        given: list[str] = []
        for name, value in call.items():
            option = "--" + name.replace("_", "-")
            if name == "allow_uncalibrated":
                given += [option] * value
            elif name == "temperature" and isinstance(value, str):
                # Typed, all is text, and 2.1 a number: a text is one in quotes.
                given += [option, json.dumps(value)]
            else:
                given += [option, str(value)]
        return given

    def check(self, case: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        if "ready_text" in case:
            (folder / "READY.json").write_text(case["ready_text"], encoding="utf-8")
        elif "ready" in case:
            ready(folder, **case["ready"])
        arguments = ["checkpoint", "info", str(folder), "--json", *self.words(case["call"])]
        code = main(arguments)
        out, err = capsys.readouterr()
        expect = case["expect"]
        if "error_mentions" in expect:
            assert (code in {1, 2}, out) == (True, "")
            error = next(line for line in err.splitlines() if line.startswith("error: "))
            assert [word for word in expect["error_mentions"] if word not in error] == []
            return
        assert (code, "error" in err) == (0, False)
        found = json.loads(out)
        wanted = (expect["temperature"], expect["kind"])
        assert (found["temperature"], found["temperature_kind"]) == wanted
        for word in expect.get("warning_mentions", []):
            # For programs in the value, for people on stderr.
            assert word in found["warnings"][0]
            assert word in err

    @pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
    def test_case(self, case: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]):
        self.check(case, folder, capsys)

    def test_the_check_can_fail(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        # Negative control: without READY.json the first case is no fitted one.
        with pytest.raises(AssertionError):
            self.check({"call": {}, "expect": CASES[0]["expect"]}, folder, capsys)

    @pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
    def test_only_what_was_measured_claims_to_be(
        self, case: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
    ):
        if "ready" in case:
            ready(folder, **case["ready"])
        for form in ([], ["--json"]):
            main(["checkpoint", "info", str(folder), *form, *self.words(case["call"])])
            said = "".join(capsys.readouterr()).lower().replace("uncalibrated", "")
            assert "calibrated" not in said
            if case["expect"].get("kind") != "fitted":
                claims = said.replace("not fitted", "").replace("unfitted", "")
                assert "fitted" not in claims


def test_json_has_the_promised_keys_and_some_more(folder: Path, capsys: pytest.CaptureFixture[str]):
    found = told(capsys, str(folder))
    assert list(found) == [*PROMISED, *ADDED]
    assert (found["architecture"], found["dtype"], found["contract"]) == ("llama", "float32", None)
    assert (found["layout"], found["encoding"]) == ("schema-first", "labels")
    assert (found["temperature"], found["temperature_kind"]) == (1.0, "default")
    assert (found["max_input_tokens"], found["context_tokens"]) == (2048, 2048)
    assert (found["folder"], found["adapter"], found["warnings"]) == (str(folder), None, [])


def test_the_setting_and_the_identity(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(folder))
    model_id, revision = NIMBLE
    assert main(["checkpoint", "info", "--model-id", model_id, "--revision", revision]) == 0
    out = capsys.readouterr().out
    assert f"folder        {folder}\n" in out
    assert f"temperature   {FITTED} (fitted)\n" in out
    assert "because       fitted on Bespoke-Nimble-9B v1; recognised by its model id" in out


def test_without_any_the_next_step_is_named(capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "info"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: a checkpoint must be named or the embedded one built, got neither",
        "hint: build it once with: weighbridge checkpoint demo",
    ]


def test_a_missing_folder(capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "info", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("error: a checkpoint must be an existing folder")


def test_what_our_calibration_stored(folder: Path, capsys: pytest.CaptureFixture[str]):
    ready(folder, adapter_sha256=V1_ADAPTER, base_model="org/base", base_revision="c" * 40)
    fingerprint = told(capsys, str(folder))["fingerprint"]
    given: dict[str, Any] = {"fitted_on": "triage.csv", "metrics": {"nll": 0.4}}
    record_temperature(folder, 1.4, **given, fingerprint=fingerprint)
    found = told(capsys, str(folder))
    # READY.json is no part of the fingerprint: what is stored there holds.
    assert (found["temperature"], found["temperature_kind"]) == (1.4, "fitted")
    assert "triage.csv" in found["temperature_source"]
    assert (found["base_model"], found["base_revision"]) == ("org/base", "c" * 40)
    explicit = told(capsys, str(folder), "--temperature", "3")
    assert (explicit["temperature"], explicit["temperature_kind"]) == (3.0, "explicit")
    # The weights change, and with them what the temperature is worth.
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4] + struct.pack("<f", 2.0))
    changed = told(capsys, str(folder))
    assert (changed["temperature"], changed["temperature_kind"]) == (FITTED, "fitted")
    assert "other files" in changed["warnings"][0]


def test_packed_weights_have_no_fitted_temperature(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    ready(folder, adapter_sha256=V1_ADAPTER)
    config = {"model_type": "llama", "quantization": {"bits": 4, "group_size": 64}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "w.weight": {"dtype": "U32", "shape": [1, 8], "data_offsets": [0, 32]},
        "w.scales": {"dtype": "F32", "shape": [1, 1], "data_offsets": [32, 36]},
    }
    header = json.dumps(tensors).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(36)
    (folder / "model.safetensors").write_bytes(data)
    found = told(capsys, str(folder))
    assert (found["temperature"], found["temperature_kind"]) == (FITTED, "transferred")
    assert "4-bit" in found["temperature_source"]


def test_a_prompt_of_ones_own_needs_consent(folder: Path, capsys: pytest.CaptureFixture[str]):
    contract = {"task": "schema_candidate_classification_v1", "model": "org/base", "revision": "r"}
    (folder / "schema_config.json").write_text(json.dumps(contract))
    assert main(["checkpoint", "info", str(folder)]) == 1
    assert "hint: put the text it was trained with into" in capsys.readouterr().err
    (folder / "system_prompt.txt").write_text("Mine.")
    assert main(["checkpoint", "info", str(folder)]) == 1
    assert "--accept-prompt" in capsys.readouterr().err
    found = told(capsys, str(folder), "--accept-prompt")
    assert found["accepted_prompt_sha256"] == hashlib.sha256(b"Mine.").hexdigest()
    assert (found["max_choices"], found["base_model"]) == (26, "org/base")
    assert main(["checkpoint", "info", str(folder), "--accept-prompt"]) == 0
    out = capsys.readouterr().out
    assert "system text   not the trained one, accepted\n" in out
    assert f"its sha256    {found['accepted_prompt_sha256']}\n" in out


def test_on_a_terminal_sentences_keep_to_their_column(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    ready(folder, adapter_sha256=V1_ADAPTER)
    assert main(["checkpoint", "info", str(folder), "--model-id", "org/some-model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Hashes stay whole, to be copied; the longest label and one of them just fit.
    assert f"adapter sha256  {V1_ADAPTER}" in lines
    because = next(number for number, line in enumerate(lines) if line.startswith("because"))
    told = " ".join([lines[because].removeprefix("because"), *lines[because + 1 :]]).split()
    assert " ".join(told) == (
        "fitted on Bespoke-Nimble-9B v1; recognised by the adapter hash in READY.json"
    )
    assert all(line.startswith(" " * 16) for line in lines[because + 1 :])
    assert len(lines) > because + 1
    assert max(map(len, lines[because:])) <= 80
