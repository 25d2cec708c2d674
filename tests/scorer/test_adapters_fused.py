"""Adapters in the weights: against mlx-lm's own layers, against W + s·BA, against each other."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scorer.adapted_bases import KEYS, TOKENS, bases, logits, shapes
from tests.scorer.adapter_folders import SCALE, Product, draw, write_mlx, write_peft

from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.model_weights import load_model, prompt_logits

pytestmark = pytest.mark.mlx

BASES = ("llama", "qwen3_5", "gemma3_text")


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory) -> Callable[..., Path]:
    return bases(tiny, tmp_path_factory.mktemp)


def by_hand(folder: Path, products: Mapping[str, Product]) -> np.ndarray:
    """The slow definition: W + s·BA with numpy, then the model itself."""

    def run() -> np.ndarray:
        import mlx.core as mx

        model = load_model(folder, "float32")
        modules: Any = dict(model.named_modules())
        for path, (a, b) in products.items():
            weight = np.array(modules[path].weight, np.float64)
            grown = weight + SCALE * (b.astype(np.float64) @ a.astype(np.float64))
            modules[path].weight = mx.array(grown.astype(np.float32))
        return prompt_logits(model, TOKENS)

    return on_mlx_thread(run)


def by_mlx_lm(folder: Path, adapter: Path) -> np.ndarray:
    """mlx-lm's own LoRA layers, which multiply by A and B one after the other."""

    def run() -> np.ndarray:
        from mlx_lm.utils import load_adapters

        model = load_adapters(load_model(folder, "float32"), str(adapter))
        model.eval()
        return prompt_logits(model, TOKENS)

    return on_mlx_thread(run)


def published(path: str) -> str:
    """Name a module of mlx-lm as Hugging Face's vision-language classes do."""
    return path.replace("language_model.model.", "model.language_model.")


@pytest.mark.parametrize("architecture", BASES)
def test_both_formats_give_what_their_makers_do(base, tmp_path, architecture):
    folder = base(architecture)
    products = draw(shapes(folder, KEYS))
    mlx = write_mlx(tmp_path / "mlx", products, num_layers=-1, lora_parameters={"keys": list(KEYS)})
    peft = write_peft(tmp_path / "peft", {published(p): pair for p, pair in products.items()})
    ours, theirs = logits(folder, mlx), by_mlx_lm(folder, mlx)
    assert len(products) > 4
    assert np.abs(ours - logits(folder, peft)).max() < 1e-5
    assert np.abs(ours - by_hand(folder, products)).max() < 1e-5
    assert np.abs(ours - theirs).max() < 1e-5 * max(1.0, float(np.ptp(theirs)))
    # Negative control: it is no small adapter.
    assert np.abs(ours - logits(folder)).max() > 0.1


def test_a_published_vision_language_layout_takes_the_same_adapter(base, tmp_path):
    from safetensors.numpy import load_file, save_file

    plain = base("qwen3_5")
    folder = tmp_path / "published"
    folder.mkdir()
    weights = load_file(plain / "model.safetensors")
    renamed = {published(name): array for name, array in weights.items()}
    renamed["model.visual.blocks.0.attn.qkv.weight"] = np.ones((4, 4), np.float32)
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "model.safetensors")
    (folder / "config.json").write_text((plain / "config.json").read_text())
    products = draw(shapes(plain, KEYS))
    adapter = write_peft(tmp_path / "a", {published(p): pair for p, pair in products.items()})
    assert np.array_equal(logits(folder, adapter), logits(plain, adapter))


def embedding_products(folder: Path, *names: str) -> dict[str, Product]:
    return draw(shapes(folder, names))


@pytest.mark.parametrize("architecture", BASES)
def test_mlx_on_tied_embeddings_changes_the_head_too(base, tmp_path, architecture):
    folder = base(architecture)
    products = embedding_products(folder, "embed_tokens")
    adapter = write_mlx(tmp_path, products, embeddings=tuple(products), num_layers=0)
    path = next(iter(products))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["lora_parameters"]["keys"] = [path]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    ours, theirs = logits(folder, adapter), by_mlx_lm(folder, adapter)
    assert np.abs(ours - theirs).max() < 1e-5 * max(1.0, float(np.ptp(theirs)))


@pytest.mark.parametrize("architecture", BASES)
def test_peft_on_tied_embeddings_leaves_the_head_alone(base, tmp_path, architecture):
    # PEFT wraps the lookup; the head goes on reading the matrix as it was.
    folder = base(architecture)
    products = embedding_products(folder, "embed_tokens")
    (path, (a, b)) = next(iter(products.items()))
    adapter = write_peft(tmp_path / "a", products, embeddings=(path,))
    tied = write_peft(tmp_path / "b", products, embeddings=(path,), ensure_weight_tying=True)

    def looked_up_only() -> np.ndarray:
        import mlx.core as mx

        model = load_model(folder, "float32")
        embedding = dict(model.named_modules())[path]
        plain, grown = embedding.weight, embedding.weight + SCALE * mx.array(b @ a)
        kind = type(embedding)

        class Apart(kind):
            def __call__(self, x):
                return grown[x]

            def as_linear(self, x):
                return x @ plain.T

        embedding.__class__ = Apart
        return prompt_logits(model, TOKENS)

    expected = on_mlx_thread(looked_up_only)
    assert np.abs(logits(folder, adapter) - expected).max() < 1e-4
    # With the tie kept, it is the other thing; the two must not be taken for each other.
    assert np.abs(logits(folder, tied) - by_hand(folder, products)).max() < 1e-4
    assert np.abs(by_hand(folder, products) - expected).max() > 0.1


@pytest.mark.parametrize("both", [False, True])
def test_peft_on_a_tied_head_changes_it_apart_from_the_embeddings(base, tmp_path, both):
    folder = base("llama")
    ((path, shape),) = shapes(folder, ["embed_tokens"]).items()
    products = draw({"lm_head": shape, **({path: shape} if both else {})})
    found = logits(folder, write_peft(tmp_path, products, embeddings=(path,)))
    untied = base("llama", tie_word_embeddings=False)
    a, b = products["lm_head"]

    def expected() -> np.ndarray:
        import mlx.core as mx

        tied = load_model(folder, "float32")
        model = load_model(untied, "float32")
        tree = tied.parameters()
        model.update(tree)
        plain = tree["model"]["embed_tokens"]["weight"]
        model.lm_head.weight = plain + SCALE * mx.array(b @ a)
        if both:
            a_in, b_in = products[path]
            model.model.embed_tokens.weight = plain + SCALE * mx.array(b_in @ a_in)
        return prompt_logits(model, TOKENS)

    assert np.abs(found - on_mlx_thread(expected)).max() < 1e-4
    assert np.abs(found - logits(folder)).max() > 0.1


def test_an_architecture_that_cannot_be_untied_says_so(base, tmp_path):
    folder = base("gemma2")  # its head is the embeddings, whatever the configuration says
    products = embedding_products(folder, "embed_tokens")
    adapter = write_peft(tmp_path, products, embeddings=tuple(products))
    with pytest.raises(CheckpointError, match="cannot hold the two apart"):
        logits(folder, adapter)


def test_a_head_that_nobody_asks_is_noticed(base, tmp_path, monkeypatch):
    # An architecture that has the setting, and reads its embeddings backwards all the same.
    from mlx_lm.models import llama

    def call(self: Any, inputs: Any, cache: Any = None, input_embeddings: Any = None) -> Any:
        return self.model.embed_tokens.as_linear(self.model(inputs, cache, input_embeddings))

    folder = base("llama")
    products = embedding_products(folder, "embed_tokens")
    adapter = write_peft(tmp_path, products, embeddings=tuple(products))
    monkeypatch.setattr(llama.Model, "__call__", call)
    with pytest.raises(CheckpointError, match="cannot hold the two apart"):
        logits(folder, adapter)


def test_an_untied_head_and_copies_of_base_weights(base, tmp_path):
    folder = base("llama", tie_word_embeddings=False)
    products = embedding_products(folder, "embed_tokens", "lm_head")
    path = "model.embed_tokens"
    whole = on_mlx_thread(lambda: np.array(load_model(folder, "float32").model.embed_tokens.weight))
    copy = {f"base_model.model.{path}.base_layer.weight": whole}
    adapter = write_peft(tmp_path / "a", products, embeddings=(path,), tensors=copy)
    assert np.abs(logits(folder, adapter) - by_hand(folder, products)).max() < 1e-4
    copy = {name: array + 1 for name, array in copy.items()}
    other = write_peft(tmp_path / "b", products, embeddings=(path,), tensors=copy)
    with pytest.raises(CheckpointError, match="leave whole weights as the base has them"):
        logits(folder, other)


def test_experts(base, tmp_path):
    folder = base("qwen3_moe")
    path = "model.layers.1.mlp.switch_mlp.down_proj"
    (experts, height, width) = shapes(folder, [path])[path]
    numbers = np.random.default_rng(3)
    pair = {
        f"{path}.lora_a": numbers.normal(0, 0.3, (experts, 3, width)).astype(np.float32),
        f"{path}.lora_b": numbers.normal(0, 0.3, (experts, height, 3)).astype(np.float32),
    }
    adapter = write_mlx(
        tmp_path,
        {},
        tensors=pair,
        num_layers=1,
        lora_parameters={"keys": ["mlp.switch_mlp.down_proj"]},
    )
    ours = logits(folder, adapter)
    assert np.abs(ours - by_mlx_lm(folder, adapter)).max() < 1e-4
    assert np.abs(ours - logits(folder)).max() > 1e-2


def test_layers_that_are_stored_transposed(base, tmp_path):
    # GPT-2 as Hugging Face publishes it: Conv1D, (in, out).
    from safetensors.numpy import load_file, save_file

    made = base("gpt2")
    folder = tmp_path / "published"
    folder.mkdir()
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {
        name.removeprefix("model."): np.ascontiguousarray(
            array.T if name.endswith(turned) else array
        )
        for name, array in load_file(made / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((made / "config.json").read_text())
    assert np.array_equal(logits(folder), logits(made))
    products = draw(shapes(made, ["attn.c_attn", "attn.c_proj"]))
    names = {path.replace("model.", "transformer."): pair for path, pair in products.items()}
    adapter = write_peft(tmp_path / "a", names, fan_in_fan_out=True)
    assert np.abs(logits(folder, adapter) - by_hand(made, products)).max() < 1e-4
