"""Files against the hashes written beside them: every way to differ is named."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer import contract
from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.errors import CheckpointError, TemperatureError
from weighbridge.scorer.verify import FileCheck, verify_checkpoint

V1, V2 = "schema_candidate_classification_v1", "schema_candidate_classification_v2"
NARROW = "Say one one-letter code."
WIDE = "Say one short code."
ZERO = "0" * 64


def sha(content: bytes | str) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()


def tensors(**shapes: list[int]) -> bytes:
    """Write float32 zeros as a safetensors file does."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "merged"
    path.mkdir()
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        (path / name).write_bytes(tensors(w=[number]))
    return path


def ready(folder: Path, **changes: Any) -> None:
    weights = {file.name: sha(file.read_bytes()) for file in folder.glob("model*.safetensors")}
    data = {"weight_sha256": weights, **changes}
    (folder / "READY.json").write_text(json.dumps(data), encoding="utf-8")


def lora(folder: Path) -> Path:
    """The smallest adapter that mlx-lm would write."""
    folder.mkdir(exist_ok=True)
    config = {
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": {"rank": 1, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    module = "model.layers.0.self_attn.q_proj"
    pair = {f"{module}.lora_a": [4, 1], f"{module}.lora_b": [1, 4]}
    (folder / "adapters.safetensors").write_bytes(tensors(**pair))
    return folder


def states(checks: tuple[FileCheck, ...]) -> dict[str, str]:
    assert len({check.file for check in checks}) == len(checks)
    return {check.file: check.state for check in checks}


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def test_nothing_written_down_is_nothing_checked(folder: Path):
    assert verify_checkpoint(folder) == ()
    # An identity tells who it is, not what is in it.
    (folder / "READY.json").write_text('{"model": "org/model", "base_model": "org/base"}')
    assert verify_checkpoint(folder) == ()


def test_whole_weights(folder: Path):
    ready(folder)
    checks = verify_checkpoint(folder)
    assert states(checks) == {FIRST: "same", SECOND: "same"}
    assert all(check.ok and check.expected == check.found for check in checks)


def test_one_bit_in_one_shard_is_named(folder: Path):
    ready(folder)
    data = bytearray((folder / SECOND).read_bytes())
    expected = sha(bytes(data))
    data[-1] ^= 1
    (folder / SECOND).write_bytes(data)
    (bad,) = [check for check in verify_checkpoint(folder) if not check.ok]
    assert (bad.file, bad.state) == (SECOND, "differs")
    assert (bad.expected, bad.found) == (expected, sha(bytes(data)))


def test_missing_and_unlisted_weights(folder: Path):
    ready(folder)
    (folder / FIRST).rename(folder / "model-extra.safetensors")
    found = states(verify_checkpoint(folder))
    # mlx-lm loads whatever is called model*.safetensors.
    assert found == {FIRST: "missing", SECOND: "same", "model-extra.safetensors": "unlisted"}


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", ""])
def test_a_list_never_leads_out_of_the_folder(folder: Path, name: str):
    (folder.parent / "secret").write_text("x")
    ready(folder, weight_sha256={name: sha("x")})
    (check,) = [check for check in verify_checkpoint(folder) if check.file == name]
    assert (check.state, check.found) == ("missing", None)


class TestAdapter:
    def test_merged_and_gone_cannot_be_checked(self, folder: Path):
        ready(folder, adapter_sha256=ZERO)
        check = verify_checkpoint(folder)[-1]
        assert (check.file, check.state, check.expected) == ("adapter", "unchecked", ZERO)
        assert "--adapter" in check.note

    def test_one_that_lies_beside_the_weights(self, folder: Path):
        lora(folder)
        found = sha((folder / "adapters.safetensors").read_bytes())
        ready(folder, adapter_sha256=found)
        assert states(verify_checkpoint(folder))["adapters.safetensors"] == "same"
        ready(folder, adapter_sha256=ZERO)
        assert states(verify_checkpoint(folder))["adapters.safetensors"] == "differs"

    def test_one_that_is_named(self, folder: Path, tmp_path: Path):
        adapter = read_adapter(lora(tmp_path / "lora"))
        ready(folder, adapter_sha256=sha(adapter.weights.read_bytes()))
        assert states(verify_checkpoint(folder, adapter))[str(adapter.weights)] == "same"
        ready(folder, adapter_sha256=ZERO)
        assert states(verify_checkpoint(folder, adapter))[str(adapter.weights)] == "differs"

    def test_what_lies_beside_the_adapter_is_about_it(self, folder: Path, tmp_path: Path):
        adapter = read_adapter(lora(tmp_path / "lora"))
        ready(folder, adapter_sha256=ZERO)  # of another, merged before
        (adapter.folder / "READY.json").write_text(
            json.dumps({"adapter_sha256": sha(adapter.weights.read_bytes())})
        )
        check = verify_checkpoint(folder, adapter)[-1]
        assert (check.file, check.state) == (str(adapter.weights), "same")
        assert check.note == f"by {adapter.folder / 'READY.json'}"

    def test_one_that_nothing_tells_of(self, folder: Path, tmp_path: Path):
        adapter = read_adapter(lora(tmp_path / "lora"))
        (check,) = verify_checkpoint(folder, adapter)
        assert (check.state, check.found) == ("unchecked", sha(adapter.weights.read_bytes()))


class TestPrompt:
    @pytest.fixture(autouse=True)
    def trained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("weighbridge.scorer.verify.NARROW_SHA256", sha(NARROW))
        monkeypatch.setattr("weighbridge.scorer.verify.WIDE_SHA256", sha(WIDE))

    def contract(self, folder: Path, task: str, text: str) -> None:
        config = {"task": task, "prompt_code_sha256": "c" * 64}
        if task == V2:
            config |= {"wide_system_prompt": text}
        else:
            (folder / "system_prompt.txt").write_bytes(text.encode())
        (folder / "schema_config.json").write_text(json.dumps(config), encoding="utf-8")

    @pytest.mark.parametrize(
        ("task", "text", "file"),
        [
            (V1, NARROW, "system_prompt.txt"),
            (V2, WIDE, "wide_system_prompt in schema_config.json"),
        ],
    )
    def test_the_trained_text(self, folder: Path, task: str, text: str, file: str):
        self.contract(folder, task, text)
        # Both forms are the text: a release may have written either.
        ready(folder, prompt_sha256=sha(NARROW))
        found = states(verify_checkpoint(folder))
        assert (found[file], found["prompt_sha256"]) == ("same", "same")
        # That of a program that is not here.
        assert found["prompt code"] == "unchecked"

    def test_another_text_differs_and_is_told_by_its_hash(self, folder: Path):
        self.contract(folder, V1, "Mine.")
        ready(folder, prompt_sha256=sha(NARROW))
        bad = {check.file: check for check in verify_checkpoint(folder) if not check.ok}
        assert set(bad) == {"system_prompt.txt", "prompt_sha256"}
        assert {check.found for check in bad.values()} == {sha("Mine.")}

    def test_a_text_that_is_not_here(self, folder: Path):
        ready(folder, prompt_sha256=ZERO)
        check = verify_checkpoint(folder)[-1]
        assert (check.file, check.state) == ("prompt_sha256", "unchecked")

    def test_a_prompt_that_the_adapter_brings(self, folder: Path, tmp_path: Path):
        adapter = read_adapter(lora(tmp_path / "lora"))
        self.contract(adapter.folder, V1, NARROW)
        found = states(verify_checkpoint(folder, adapter))
        assert found[f"system_prompt.txt ({adapter.folder})"] == "same"

    def test_a_damaged_contract_is_an_error(self, folder: Path):
        (folder / "schema_config.json").write_text("{")
        with pytest.raises(CheckpointError, match="readable JSON"):
            verify_checkpoint(folder)


def test_a_ready_file_that_cannot_be_trusted_is_an_error(folder: Path):
    (folder / "READY.json").write_text("{")
    with pytest.raises(TemperatureError, match=r"READY\.json"):
        verify_checkpoint(folder)


def test_a_damaged_manifest_of_the_embedded_one(folder: Path):
    (folder / "weighbridge.json").write_text('{"files": []}')
    with pytest.raises(CheckpointError, match="must list files") as caught:
        verify_checkpoint(folder)
    assert "checkpoint demo" in str(caught.value.hint)


def test_hashes_are_kept_between_calls(folder: Path, tmp_path: Path):
    ready(folder)
    kept = tmp_path / "hashes.json"
    verify_checkpoint(folder, hash_cache=kept)
    assert len(json.loads(kept.read_text())) == 2


def test_hashes_of_texts_are_those_of_the_contract():
    assert contract.sha256_of(NARROW) == sha(NARROW)
