"""Adapters that loading would refuse, told from headers alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.scorer.adapter_folders import draw, write_mlx, write_peft

from weighbridge.scorer.adapter_fit import check_fits
from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.errors import CheckpointError

Q, DOWN = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"
SHAPES = {
    "model.embed_tokens": (20, 8),
    **{Q.format(layer): (16, 8) for layer in range(3)},
    **{DOWN.format(layer): (8, 12) for layer in range(3)},
}


def base(folder: Path, shapes: Mapping[str, Sequence[int]] = SHAPES, **config: Any) -> Path:
    folder.mkdir()
    told = {"model_type": "llama", "num_hidden_layers": 3, **config}
    (folder / "config.json").write_text(json.dumps(told))
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def refused(folder: Path, adapter: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        check_fits(folder, read_adapter(adapter))
    assert caught.value.hint


@pytest.mark.parametrize("write", [write_mlx, write_peft])
def test_what_fits_passes(tmp_path, write):
    products = draw({Q.format(0): (16, 8), DOWN.format(2): (8, 12), "model.embed_tokens": (20, 8)})
    adapter = write(tmp_path / "a", products, embeddings=("model.embed_tokens",))
    check_fits(base(tmp_path / "b"), read_adapter(adapter))


@pytest.mark.parametrize("kind", ["llama", "some_new_one"])
@pytest.mark.parametrize("write", [write_mlx, write_peft])
def test_a_layer_that_is_not_there(tmp_path, write, kind):
    adapter = write(tmp_path / "a", draw({Q.format(0): (16, 8), Q.format(40): (16, 8)}))
    folder = base(tmp_path / "b", model_type=kind)
    refused(folder, adapter, r'got 1 of 2 without one: "model.layers.40')


@pytest.mark.parametrize("write", [write_mlx, write_peft])
def test_another_shape(tmp_path, write):
    adapter = write(tmp_path / "a", draw({Q.format(0): (16, 9)}))
    refused(base(tmp_path / "b"), adapter, r"weight of shape \(16, 8\), got \(16, 9\)")


def test_names_that_only_some_types_keep(tmp_path):
    adapter = write_peft(tmp_path / "a", draw({"model.layers.0.self_attn.qkv": (16, 8)}))
    refused(base(tmp_path / "llama"), adapter, "without one")
    # mlx-lm may join or split modules of others: loading tells.
    check_fits(base(tmp_path / "other", model_type="some_new_one"), read_adapter(adapter))


def test_names_of_a_folder_that_also_sees(tmp_path):
    shapes = {
        name.replace("model.", "model.language_model.", 1): shape for name, shape in SHAPES.items()
    }
    shapes["model.visual.layers.40.self_attn.q_proj"] = (16, 8)
    folder = base(tmp_path / "b", shapes, model_type="qwen3_5")
    inner = "model.language_model.layers.{}.self_attn.q_proj"
    own = "language_model.model.layers.{}.self_attn.q_proj"
    for number, (write, name) in enumerate(((write_peft, inner), (write_mlx, own))):
        fits = write(tmp_path / f"f{number}", draw({name.format(1): (16, 8)}))
        check_fits(folder, read_adapter(fits))
        wrong = write(tmp_path / f"w{number}", draw({name.format(40): (16, 8)}))
        refused(folder, wrong, "layers.40")


def test_the_width_of_packed_weights(tmp_path):
    folder = base(tmp_path / "b", quantization={"bits": 3, "group_size": 64})
    name = Q.format(0)
    packed = {
        f"{name}.weight": np.zeros((16, 12), np.uint32),
        f"{name}.scales": np.zeros((16, 2), np.float32),
    }
    save_file(packed, folder / "model.safetensors")
    check_fits(folder, read_adapter(write_mlx(tmp_path / "a", draw({name: (16, 128)}))))
    wrong = write_mlx(tmp_path / "w", draw({name: (16, 12)}))
    refused(folder, wrong, r"shape \(16, 128\), got \(16, 12\)")


def test_a_head_that_is_the_embeddings_is_left_to_loading(tmp_path):
    adapter = write_peft(tmp_path / "a", draw({"lm_head": (20, 8)}))
    check_fits(base(tmp_path / "b"), read_adapter(adapter))


def test_layers_that_the_configuration_names(tmp_path):
    told = {"num_layers": 2, "lora_parameters": {"keys": ["self_attn.q_proj"]}}
    folder = base(tmp_path / "b")
    whole = write_mlx(tmp_path / "a", draw({Q.format(n): (16, 8) for n in (1, 2)}), **told)
    check_fits(folder, read_adapter(whole))
    half = write_mlx(tmp_path / "h", draw({Q.format(2): (16, 8)}), **told)
    refused(folder, half, r'got none for "layers\.1')
