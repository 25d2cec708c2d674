"""What identifies a checkpoint beside its weights, and how its configuration is read."""

import hashlib
import json
from pathlib import Path

import pytest

from weighbridge.scorer.checkpoint import fingerprint, identity_files, inspect_checkpoint
from weighbridge.scorer.config_file import config_or_empty, read_config
from weighbridge.scorer.errors import CheckpointError

pytestmark = pytest.mark.mlx


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return tiny.checkpoint(tmp_path / "tiny")


def test_the_fingerprint_of_a_plain_folder_stays_the_same(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "schema_config.json").write_text("{}")
    names = [path.name for path in identity_files(folder)]
    # In this order it was always made: answers and temperatures are kept by it.
    assert names == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "schema_config.json",
    ]
    hashes = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    lines = zip((*names, "model.safetensors"), (*hashes, weights), strict=True)
    text = "".join(f"{name}\0{sha256}\n" for name, sha256 in lines)
    assert fingerprint(folder) == hashlib.sha256(text.encode()).hexdigest()


MODELOPT = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}


def test_how_weights_are_packed_may_be_told_beside_the_configuration(folder):
    config = read_config(folder)
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps(MODELOPT))
    assert read_config(folder)["quantization_config"] == MODELOPT
    assert inspect_checkpoint(folder).quantization == "modelopt"
    # mlx-lm reads it too, and would misread what is refused here.
    path.write_text(json.dumps({**MODELOPT, "quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(CheckpointError, match="got modelopt with"):
        inspect_checkpoint(folder)
    path.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(CheckpointError, match="without a quant_method"):
        inspect_checkpoint(folder)
    path.write_text("[")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json must be readable JSON"):
        inspect_checkpoint(folder)
    assert config_or_empty(folder) == {}
    # What config.json says itself beats it, in its text part too.
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64}
    for change in ({"quantization_config": awq}, {"text_config": {"quantization_config": awq}}):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert inspect_checkpoint(folder).quantization == "4-bit awq, groups of 64"


def test_a_file_that_git_lfs_stands_for(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "config.json").write_text(pointer)
    with pytest.raises(CheckpointError, match="by which Git LFS stands for it") as caught:
        inspect_checkpoint(folder)
    assert "lfs pull" in (caught.value.hint or "")
