"""Adapters in the weights: against mlx-lm's own layers, against W + s·BA, against each other."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scorer.adapter_folders import SCALE, Product, draw, write_mlx, write_peft
from tests.scorer.conftest import weight_range

from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.model_weights import load_model, prompt_logits

pytestmark = pytest.mark.mlx

TOKENS = (5, 17, 60, 3, 88, 41)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 97}
KEYS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gpt2": {
        "n_ctx": 64,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
    },
}
BASES = ("llama", "qwen3_5", "gemma3_text")


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory) -> Callable[..., Path]:
    """Make a checkpoint folder of configuration and weights, once for each kind."""
    made: dict[str, Path] = {}

    def make(architecture: str = "llama", **changes: Any) -> Path:
        key = json.dumps([architecture, changes], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(architecture)
            config = {**SIZES, **MORE.get(architecture, {}), **changes}
            if architecture not in MORE:
                config = tiny.config(architecture, **config)
            config["model_type"] = architecture
            (folder / "config.json").write_text(json.dumps(config))
            on_mlx_thread(save, folder, config)
            made[key] = folder
        return made[key]

    return make


def save(folder: Path, config: Mapping[str, Any]) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    architecture = config["model_type"]
    classes = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = classes.Model(classes.ModelArgs.from_dict(dict(config)))
    if architecture == "gemma3_text" and config["tie_word_embeddings"]:
        model.sanitize({})  # ties the head, as a checkpoint without one does
    numbers = np.random.default_rng(0)
    leaves: Any = tree_flatten(model.parameters())
    weights: dict[str, mx.array] = {}
    for name, array in leaves:
        drawn = numbers.normal(*weight_range(name, array.ndim, architecture), array.shape)
        weights[name] = mx.array(drawn.astype(np.float32))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def shapes(folder: Path, ends: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the modules whose paths end so."""

    def look() -> dict[str, tuple[int, ...]]:
        model = load_model(folder, "float32")
        found = {path: each for path, each in model.named_modules() if path.endswith(tuple(ends))}
        return {path: tuple(each.weight.shape) for path, each in sorted(found.items())}

    return on_mlx_thread(look)


def logits(folder: Path, adapter: Path | None = None, dtype: str = "float32", **options: Any):
    read = read_adapter(adapter) if adapter else None
    return on_mlx_thread(
        lambda: prompt_logits(load_model(folder, dtype, adapter=read, **options), TOKENS)
    )


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


def test_peft_on_a_tied_head_leaves_the_embeddings_alone(base, tmp_path):
    folder = base("llama")
    (shape,) = shapes(folder, ["embed_tokens"]).values()
    products = draw({"lm_head": shape})
    found = logits(folder, write_peft(tmp_path, products))
    untied = base("llama", tie_word_embeddings=False)
    a, b = products["lm_head"]

    def expected() -> np.ndarray:
        import mlx.core as mx

        tied = load_model(folder, "float32")
        model = load_model(untied, "float32")
        tree = tied.parameters()
        model.update(tree)
        model.lm_head.weight = tree["model"]["embed_tokens"]["weight"] + SCALE * mx.array(b @ a)
        return prompt_logits(model, TOKENS)

    assert np.abs(found - on_mlx_thread(expected)).max() < 1e-4
    assert np.abs(found - logits(folder)).max() > 0.1


def test_an_architecture_that_cannot_be_untied_says_so(base, tmp_path):
    folder = base("gemma2")  # its head is the embeddings, whatever the configuration says
    products = embedding_products(folder, "embed_tokens")
    adapter = write_peft(tmp_path, products, embeddings=tuple(products))
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


def test_rows_in_another_order_are_refused(base, tmp_path, monkeypatch):
    from mlx_lm.models import llama

    folder = base("llama")
    adapter = write_peft(tmp_path, draw(shapes(folder, ["q_proj"])))
    assert logits(folder, adapter) is not None

    def sanitize(self, weights):
        # As architectures do whose published rotary halves are interleaved.
        return {k: v[::-1] if "0.self_attn.q_proj" in k else v for k, v in weights.items()}

    monkeypatch.setattr(llama.Model, "sanitize", sanitize)
    with pytest.raises(CheckpointError, match=r"rearranges those of \"model.layers.0.self_attn.q"):
        logits(folder, adapter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_zeroed_adapter_is_noticed(base, tmp_path, dtype, tie):
    folder = base("llama", tie_word_embeddings=tie)
    products = {path: (a, np.zeros_like(b)) for path, (a, b) in draw(shapes(folder, KEYS)).items()}
    for adapter in (write_mlx(tmp_path / "m", products), write_peft(tmp_path / "p", products)):
        with pytest.raises(CheckpointError, match="products are all zero"):
            on_mlx_thread(load_on_cpu, folder, adapter, dtype)


def load_on_cpu(folder: Path, adapter: Path, dtype: str) -> Any:
    import mlx.core as mx

    with mx.stream(mx.cpu):
        return load_model(folder, dtype, adapter=read_adapter(adapter))


def test_an_adapter_lost_in_rounding_is_noticed(base, tmp_path):
    folder = tmp_path / "bf16"
    folder.mkdir()

    def save_bf16() -> None:
        import mlx.core as mx

        weights: Any = mx.load(str(base("llama") / "model.safetensors"))
        rounded = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), rounded)

    on_mlx_thread(save_bf16)
    (folder / "config.json").write_text((base("llama") / "config.json").read_text())
    # Weights of 0.2 have steps of some 0.001 in bfloat16, and the product is 100 times smaller.
    adapter = write_mlx(tmp_path / "a", draw(shapes(folder, KEYS), size=0.002))
    with pytest.raises(CheckpointError, match="rounding to bfloat16 keeps") as caught:
        logits(folder, adapter, "bfloat16")
    assert "--dtype float32" in (caught.value.hint or "")
    # In float32 nothing is lost.
    assert np.abs(logits(folder, adapter) - logits(folder)).max() > 0


def test_an_adapter_without_effect_is_noticed(base, tmp_path):
    folder = base("llama")
    adapter = write_mlx(tmp_path, draw(shapes(folder, ["0.self_attn.q_proj"]), size=1e-5))
    # float64 keeps all of it, and all of it is next to nothing.
    with pytest.raises(CheckpointError, match="must change the logits"):
        on_mlx_thread(load_on_cpu, folder, adapter, "float64")
    with pytest.raises(CheckpointError, match="rounding to float32 keeps") as caught:
        logits(folder, adapter)
    assert "almost zero" in (caught.value.hint or "")


def test_embeddings_of_few_tokens_are_found(base, tmp_path):
    # Only the tokens seen in training have rows that changed; none of the usual prompt's.
    folder = base("llama", tie_word_embeddings=False)
    (path, (a, b)) = next(iter(embedding_products(folder, "embed_tokens").items()))
    b[:] = np.where(np.arange(len(b))[:, None] == 88, b, 0)
    adapter = write_peft(tmp_path, {path: (a, b)}, embeddings=(path,))
    assert np.abs(logits(folder, adapter) - logits(folder)).max() > 1e-3


def test_numbers_that_are_none(base, tmp_path):
    folder = base("llama")
    products = draw(shapes(folder, ["q_proj"]))
    next(iter(products.values()))[0][0, 0] = np.nan
    with pytest.raises(CheckpointError, match=r"finite numbers, got others in .*lora_a"):
        logits(folder, write_mlx(tmp_path / "a", products))
    products = draw(shapes(folder, ["q_proj"]), size=600)
    with pytest.raises(CheckpointError, match="must be finite in float16"):
        logits(folder, write_mlx(tmp_path / "b", products), "float16")


def test_what_does_not_fit_is_refused_by_name(base, tmp_path):
    folder = base("llama")
    q = "model.layers.0.self_attn.q_proj"
    cases: list[tuple[dict[str, tuple[int, ...]], str]] = [
        ({q: (64, 32)}, rf'"{q}" must make a weight of shape \(64, 64\), got \(64, 32\)'),
        ({"model.layers.7.self_attn.q_proj": (64, 64)}, 'got 1 of 1 without one: "model.layers.7'),
        ({"model.norm": (64, 64)}, "without one"),  # a module, but none of a matrix
    ]
    for number, (wanted, words) in enumerate(cases):
        for write in (write_mlx, write_peft):
            adapter = write(tmp_path / f"{write.__name__}{number}", draw(wanted))
            with pytest.raises(CheckpointError, match=words):
                logits(folder, adapter)
    both = {q: (64, 64), q.removeprefix("model."): (64, 64)}
    with pytest.raises(CheckpointError, match="two products"):
        logits(folder, write_peft(tmp_path / "both", draw(both)))
    # What PEFT's wrappers are called is no part of mlx-lm's names.
    with pytest.raises(CheckpointError, match=r"trained on another model \(org/base\)") as caught:
        raise_hint(folder, write_mlx(tmp_path / "m", draw({q.removeprefix("model."): (64, 64)})))
    assert caught.value.hint is None


def raise_hint(folder: Path, adapter: Path) -> None:
    try:
        logits(folder, adapter)
    except CheckpointError as error:
        raise CheckpointError(error.hint or "") from error


def test_an_mlx_adapter_must_cover_what_it_says(base, tmp_path):
    folder = base("llama")
    products = draw(shapes(folder, ["q_proj"]))
    last = {path: pair for path, pair in products.items() if ".1." in path}
    told = {"num_layers": 1, "lora_parameters": {"keys": ["self_attn.q_proj"]}}
    assert logits(folder, write_mlx(tmp_path / "a", last, **told)) is not None
    with pytest.raises(CheckpointError, match=r'got some for "model.layers.0'):
        logits(folder, write_mlx(tmp_path / "b", products, **told))
    with pytest.raises(CheckpointError, match=r'got none for "model.layers.0'):
        logits(folder, write_mlx(tmp_path / "c", last, **{**told, "num_layers": 2}))
