"""Folders of models that also see: their language weights score, the rest is left alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer import ParallelScorer
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.checkpoint import inspect_checkpoint
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.memory import weight_bytes
from weighbridge.scorer.weight_files import is_draft, is_vision

pytestmark = pytest.mark.mlx

NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


@pytest.fixture(scope="module")
def text_only(tiny, tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("text") / "tiny", architecture="qwen3_5")


@pytest.fixture(scope="module")
def seeing(text_only, tmp_path_factory) -> Path:
    """Lay the same weights out as Qwen3.5 and Nimble are published."""
    folder = tmp_path_factory.mktemp("seeing") / "tiny"
    shutil.copytree(text_only, folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "qwen3_5_text"
    published = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": config,
        "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 8},
        "image_token_id": 5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(published))
    rewrite(folder, published_layout)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Load the weights of a folder and write back what a function makes of them."""
    path = str(folder / "model.safetensors")

    def run() -> None:
        import mlx.core as mx

        loaded: Any = mx.load(path)
        mx.eval(loaded)
        changed = change(loaded)
        mx.eval(changed)
        mx.save_safetensors(path, changed)

    on_mlx_thread(run)


def published_layout(weights: dict[str, Any]) -> dict[str, Any]:
    """Undo what mlx-lm does when it loads such a folder, and add what it drops."""
    import mlx.core as mx

    made: dict[str, Any] = {}
    for name, array in weights.items():
        # Norms are stored as what is added to one, and the convolution with its width last.
        changed = array - 1 if any(f"{norm}.weight" in name for norm in NORMS) else array
        changed = changed.moveaxis(1, 2) if "conv1d" in name else changed
        inner = name.removeprefix("language_model.").removeprefix("model.")
        made[f"model.language_model.{inner}"] = mx.contiguous(changed)
    for number in range(40):
        made[f"model.visual.blocks.{number}.attn.qkv.weight"] = mx.ones((64, 64), mx.float16)
    made["mtp.layers.0.mlp.up_proj.weight"] = mx.ones((64, 64), mx.float16)
    return made


def logits(folder: Path, tiny: Any) -> list[list[float]]:
    scorer = ParallelScorer(folder, dtype="float32")
    result = scorer.score("I was charged twice!", tiny.schema())
    return [list(field.logits.values()) for field in result.fields.values()]


def test_language_weights_score_as_if_they_were_alone(text_only, seeing, tiny):
    one, other = logits(text_only, tiny), logits(seeing, tiny)
    assert [len(field) for field in one] == [len(field) for field in other] == [2, 4, 3]
    # The same weights, shifted by one and back in float32: rounding, and nothing else.
    assert (
        max(
            abs(a - b)
            for left, right in zip(one, other, strict=True)
            for a, b in zip(left, right, strict=True)
        )
        < 1e-4
    )
    # Negative control: answers do depend on the weights that were moved.
    assert len({round(value, 3) for field in one for value in field}) > 5


def test_what_is_told_is_told_of_the_language_weights(text_only, seeing):
    info = inspect_checkpoint(seeing)
    # Far more tensors of the eyes are float16 here.
    assert (info.architecture, info.dtype) == ("qwen3_5", "float32")
    assert weight_bytes(seeing, "float32") == weight_bytes(text_only, "float32")
    # Other files are another checkpoint, though they answer alike.
    assert info.fingerprint != inspect_checkpoint(text_only).fingerprint


def test_a_folder_that_only_sees_is_refused(seeing, tmp_path):
    folder = shutil.copytree(seeing, tmp_path / "tiny")
    rewrite(folder, lambda weights: {k: v for k, v in weights.items() if ".visual." in k})
    with pytest.raises(CheckpointError, match="only see or hear") as caught:
        inspect_checkpoint(folder)
    assert "whole model" in (caught.value.hint or "")


def test_a_folder_of_another_layout_is_not_loaded_in_part(seeing, tmp_path):
    folder = shutil.copytree(seeing, tmp_path / "tiny")

    def lose(weights: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in weights.items() if "layers.1.mlp.up_proj" not in k}

    rewrite(folder, lose)
    # Its eyes may be missing, none of its language weights may.
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        ParallelScorer(folder).load()


@pytest.mark.parametrize(
    ("name", "vision"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", True),
        ("visual.patch_embed.proj.weight", True),
        ("vision_tower.encoder.layers.0.weight", True),
        ("model.vision_tower.x", True),
        ("multi_modal_projector.linear_1.weight", True),
        ("model.embed_audio.weight", True),
        ("model.language_model.layers.0.mlp.up_proj.weight", False),
        ("language_model.model.layers.0.self_attn.q_proj.weight", False),
        ("model.layers.0.visual.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_which_tensors_see(name, vision):
    assert is_vision(name) is vision


def test_which_tensors_draft():
    assert is_draft("mtp.layers.0.mlp.up_proj.weight")
    assert is_draft("model.mtp_layers.0.weight")
    assert not is_draft("model.layers.0.mlp.weight")
