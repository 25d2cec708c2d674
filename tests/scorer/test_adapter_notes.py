"""What is told of an adapter and its base, and which adapters beside weights are refused."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scorer.adapter_folders import draw, write_mlx, write_peft

from weighbridge.scorer.adapter_notes import adapter_notes
from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.checkpoint import inspect_checkpoint
from weighbridge.scorer.errors import CheckpointError

pytestmark = pytest.mark.mlx

PRODUCTS = draw({"model.layers.0.self_attn.q_proj": (64, 64)})


@pytest.fixture(scope="module")
def pristine(tiny, tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("notes") / "chat")


@pytest.fixture
def base(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "chat")


@pytest.fixture
def lora(tmp_path) -> Path:
    return write_peft(tmp_path / "lora", PRODUCTS, base_model_name_or_path="org/Chat")


def put(folder: Path, name: str, adapter: Path) -> Path:
    return shutil.copyfile(next(adapter.glob("*.safetensors")), folder / name)


# --- an adapter of another base ---


@pytest.mark.parametrize(
    "model_id", ["org/Chat", "org/chat", "copies/Chat", "org/chat@main", "Chat"]
)
def test_the_base_that_it_names_needs_no_word(base, lora, model_id):
    assert inspect_checkpoint(base, adapter=lora, model_id=model_id).notes == ()
    assert inspect_checkpoint(base).notes == ()


def test_a_folder_may_have_its_name(base, lora, tmp_path):
    assert inspect_checkpoint(base, adapter=lora).notes == ()
    other = base.rename(tmp_path / "mine")
    (note,) = inspect_checkpoint(other, adapter=lora).notes
    # Nobody says what it is: that is no reproach.
    assert note == (
        'the adapter says that it was trained on "org/Chat"; whether "mine" is that model, '
        "nothing here tells"
    )
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/a/chat/"}))
    assert inspect_checkpoint(other, adapter=lora).notes == ()


@pytest.mark.parametrize(
    "model_id", ["org/other", "org/Chat-Instruct", "org/Chat-2", "org/My-Chat"]
)
def test_another_base_is_told(base, lora, model_id):
    (note,) = inspect_checkpoint(base, adapter=lora, model_id=model_id).notes
    assert note == (
        f'the adapter says that it was trained on "org/Chat", not on "{model_id}": fused into '
        "another base, it is not what was trained"
    )


@pytest.mark.parametrize(
    "model_id", ["org/Chat-4bit", "mlx/Chat_8bit-g64", "org/Chat-MLX-mxfp4", "org/Chat-bf16"]
)
def test_a_conversion_is_only_mentioned(base, lora, tmp_path, model_id):
    (note,) = inspect_checkpoint(base, adapter=lora, model_id=model_id).notes
    assert note.endswith(f'"{model_id}" is the same model in another packing, by its name')
    # Or the other way round: trained on packed weights.
    write_peft(tmp_path / "lora", PRODUCTS, base_model_name_or_path=model_id)
    (note,) = inspect_checkpoint(base, adapter=lora, model_id="org/Chat").notes
    assert note.endswith('"org/Chat" is the same model in another packing, by its name')


def test_a_commit_in_the_cache_of_the_hub_is_known_by_its_repository(base, lora, tmp_path):
    folder = tmp_path / "hub" / "models--org--chat" / "snapshots" / ("a" * 40)
    shutil.copytree(base, folder)
    assert inspect_checkpoint(folder, adapter=lora).notes == ()
    other = tmp_path / "hub" / "models--org--other" / "snapshots" / ("a" * 40)
    shutil.copytree(base, other)
    assert 'not on "org/other"' in inspect_checkpoint(other, adapter=lora).notes[0]
    # Trained on a cached commit, an adapter names that path.
    write_peft(tmp_path / "lora", PRODUCTS, base_model_name_or_path=str(folder))
    assert inspect_checkpoint(base, adapter=lora, model_id="org/chat").notes == ()


@pytest.mark.parametrize("named", [None, "", 7, ["org/other"]])
def test_an_adapter_that_names_no_base(base, tmp_path, named):
    lora = write_peft(tmp_path / "lora", PRODUCTS, base_model_name_or_path=named)
    assert inspect_checkpoint(base, adapter=lora).notes == ()


# --- a tokenizer beside an adapter ---


def configure(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def notes(base: Path, lora: Path) -> tuple[str, ...]:
    return adapter_notes(base, {}, "org/chat", read_adapter(lora))


def test_the_same_tokenizer_beside_an_adapter(base, lora):
    # As training libraries copy it, whether or not the template is a file of its own.
    (base / "chat_template.jinja").unlink(missing_ok=True)
    configure(base, chat_template="{{ messages }}", bos_token="<s>", pad_token="<pad>")
    configure(lora, bos_token="<s>", pad_token="</s>", clean_up_tokenization_spaces=True)
    (lora / "chat_template.jinja").write_text("{{ messages }}\n")
    assert notes(base, lora) == ()


def test_another_template_beside_an_adapter_is_told(base, lora):
    (base / "chat_template.jinja").write_text("{{ messages }}")
    configure(lora, chat_template="{{ messages }} ")
    assert notes(base, lora) == ()
    configure(lora, chat_template="{{ other }}")
    (note,) = notes(base, lora)
    assert "another chat template than its base, whose own is used" in note
    assert f"copy it from {lora.resolve()} into {base}" in note


def test_other_tokens_beside_an_adapter_are_told(base, lora):
    configure(base, bos_token="<s>", added_tokens_decoder={"1": {"content": "<s>"}})
    configure(lora, bos_token="<b>", added_tokens_decoder={"1": {"content": "<s>"}})
    (note,) = notes(base, lora)
    assert "differs from its base's in \"bos_token\"; the base's is used" in note
    for text in ("[", "[1]", "7"):
        (lora / "tokenizer_config.json").write_text(text)
        assert notes(base, lora) == ()


# --- adapters beside weights ---


@pytest.mark.parametrize(
    "name",
    [
        *("adapters.safetensors", "adapter_model.safetensors"),
        *("adapter_model.bin", "adapter_model.pt", "adapter_model.pth"),
    ],
)
def test_naming_one_adapter_says_nothing_of_another(base, lora, tmp_path, name):
    other = write_mlx(tmp_path / "other", draw({"model.layers.1.mlp.up_proj": (96, 64)}))
    put(base, name, other)
    with pytest.raises(CheckpointError, match=f"got {name} beside the weights") as caught:
        inspect_checkpoint(base, adapter=lora)
    assert f"which is not the one in {lora.resolve()}" in caught.value.message
    assert "move it elsewhere" in (caught.value.hint or "")
    # A copy of the one that is named is that one.
    put(base, name, lora)
    assert inspect_checkpoint(base, adapter=lora).adapter is not None


def test_each_of_two_adapters_beside_weights_must_be_said(base):
    write_peft(base, PRODUCTS)
    assert inspect_checkpoint(base, adapter=base).adapter is not None
    tensors = {"another": np.ones((2, 2), np.float32)}
    config = (base / "adapter_config.json").read_bytes()
    write_mlx(base, {}, tensors=tensors)
    (base / "adapter_config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"got adapters\.safetensors beside the weights"):
        inspect_checkpoint(base, adapter=base)
    # Known to be merged, it is a leftover, and the other one can be fused on top.
    sha256 = hashlib.sha256((base / "adapters.safetensors").read_bytes()).hexdigest()
    (base / "READY.json").write_text(json.dumps({"adapter_sha256": sha256}))
    assert inspect_checkpoint(base, adapter=base).adapter is not None
    with pytest.raises(CheckpointError, match=r"got adapter_model\.safetensors beside"):
        inspect_checkpoint(base)
