"""Packed weights: their head, their plain counterparts, and adapters on top of them."""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scorer.adapter_folders import draw, write_mlx, write_peft

from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.heads import CandidateHead, HeadCut, relative_difference
from weighbridge.scorer.model_weights import load_model, prompt_logits
from weighbridge.scorer.quantized import packed_modules, plain_module, plain_weight

pytestmark = pytest.mark.mlx

TOKENS = (5, 17, 60, 3, 88, 41)
CANDIDATES = (0, 7, 41, 96)
SIZES = {"hidden_size": 128, "intermediate_size": 128}
FORMATS = [
    *(("affine", bits, 64) for bits in (1, 2, 3, 4, 5, 6, 8)),
    ("affine", 4, 32),
    ("affine", 4, 128),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]
Pack = Callable[..., Path]


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory) -> Callable[..., Path]:
    """Make a folder of plain float32 weights, once for each kind."""
    made: dict[str, Path] = {}
    tokenizer = tiny.tokenizer()

    def make(architecture: str = "llama", **changes: Any) -> Path:
        key = json.dumps([architecture, changes])
        if key not in made:
            folder = tmp_path_factory.mktemp("plain")
            made[key] = tiny.checkpoint(
                folder, architecture=architecture, tokenizer=tokenizer, **{**SIZES, **changes}
            )
        return made[key]

    return make


@pytest.fixture
def pack(tmp_path) -> Pack:
    """Pack a folder with mlx-lm, all of it or each layer as a rule says."""

    def run(source: Path, mode: str, bits: int, group: int, rule: Any, dtype: str) -> Path:
        import mlx.core as mx
        from mlx_lm.utils import quantize_model, save_config, save_model

        model = load_model(source, dtype)
        config = json.loads((source / "config.json").read_text())
        model, config = quantize_model(model, config, group, bits, mode, quant_predicate=rule)
        out = tmp_path / f"{source.name}-{mode}-{bits}-{group}-{dtype}"
        shutil.copytree(source, out)
        (out / "model.safetensors").unlink()
        save_model(out, model)
        save_config(config, out / "config.json")
        mx.eval(model.parameters())
        return out

    def make(
        source: Path, mode: str, bits: int, group: int, rule: Any = None, dtype: str = "float32"
    ) -> Path:
        return on_mlx_thread(run, source, mode, bits, group, rule, dtype)

    return make


def logits(folder: Path, **options: Any) -> np.ndarray:
    return on_mlx_thread(lambda: prompt_logits(load_model(folder, "float32", **options), TOKENS))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_candidates_equal_the_whole_packed_head(plain, pack, mode, bits, group, tied):
    folder = pack(plain(tie_word_embeddings=tied), mode, bits, group)

    def run() -> tuple[HeadCut, float, float]:
        import mlx.core as mx

        model = load_model(folder, "float32")
        whole = prompt_logits(model, TOKENS)[:, list(CANDIDATES)]
        head = CandidateHead(model)
        rows = len(TOKENS)
        tokens = mx.array([TOKENS] * rows)
        own = head.logits(tokens, None, list(range(rows)), CANDIDATES)
        other = head.logits(tokens, None, list(range(rows)), tuple(c ^ 1 for c in CANDIDATES))
        return head.cut, relative_difference(own, whole), relative_difference(other, whole)

    cut, apart, control = on_mlx_thread(run)
    assert cut is HeadCut.COLUMNS
    assert apart < 1e-5
    assert control > 1e-2  # other rows are no accident away


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "gemma3_text"])
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS[1:])
def test_plain_weights_give_the_logits_of_packed_ones(plain, pack, architecture, mode, bits, group):
    # Embeddings packed in these modes come out of mlx in bfloat16, where Gemma scales them.
    coarse = architecture.startswith("gemma") and mode != "affine"
    rule = (lambda path, _: "embed" not in path) if coarse else None
    folder = pack(plain(architecture), mode, bits, group, rule)
    packed = logits(folder)
    assert relative_difference(logits(folder, dequantize=True), packed) < 1e-5
    # Negative control: packing itself changed the logits.
    assert relative_difference(logits(plain(architecture)), packed) > 1e-3


def test_layers_packed_each_in_its_own_way(plain, pack):
    # As mlx-lm's mixed recipes do: some layers in more bits, some in another mode or plain.
    def rule(path: str, module: Any) -> Any:
        if "v_proj" in path:
            return {"bits": 8, "group_size": 32, "mode": "affine"}
        if "down_proj" in path:
            return {"bits": 4, "group_size": 32, "mode": "mxfp4"}
        return "o_proj" not in path

    folder = pack(plain(), "affine", 4, 64, rule)
    kinds = on_mlx_thread(
        lambda: {
            (each.bits, each.group_size, each.mode)
            for _, each in packed_modules(load_model(folder, "float32"))
        }
    )
    assert kinds == {(4, 64, "affine"), (8, 32, "affine"), (4, 32, "mxfp4")}
    assert relative_difference(logits(folder, dequantize=True), logits(folder)) < 1e-5


def test_16_bit_scales_are_widened_before_they_multiply(plain, pack):
    # In bfloat16 each product would be rounded to 8 bits.
    folder = pack(plain(), "affine", 4, 64, dtype="bfloat16")
    assert relative_difference(logits(folder, dequantize=True), logits(folder)) < 1e-5


def test_nothing_stays_packed_and_one_sentence_says_so(plain, pack, caplog):
    folder = pack(plain(), "affine", 4, 64)

    def run(**options: Any) -> tuple[int, int]:
        from mlx.utils import tree_flatten

        model = load_model(folder, "float32", **options)
        leaves: Any = tree_flatten(model.parameters())
        return len(list(packed_modules(model))), sum(array.nbytes for _, array in leaves)

    with caplog.at_level(logging.INFO, logger="weighbridge"):
        packed, held = on_mlx_thread(run)
        assert packed > 10
        assert not caplog.records
        count, plain_held = on_mlx_thread(lambda: run(dequantize=True))
    assert count == 0
    assert plain_held > 4 * held
    (record,) = caplog.records
    assert record.name == "weighbridge.scorer.model_weights"
    assert "packed weights of 0.00 GiB are held as float32, 0.00 GiB" in record.getMessage()


def test_float64_has_no_packed_weights(plain, pack):
    folder = pack(plain(), "affine", 8, 64)

    def run() -> Any:
        import mlx.core as mx

        with mx.stream(mx.cpu):
            return prompt_logits(load_model(folder, "float64"), TOKENS)

    found = on_mlx_thread(run)
    assert found.dtype == np.float64
    assert relative_difference(found, logits(folder)) < 1e-5


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
def test_experts_and_heads_of_their_own_kind(mode):
    size = {"group_size": 64 if mode == "affine" else 16, "bits": 4, "mode": mode}

    def run() -> dict[str, Any]:
        import mlx.core as mx
        from mlx_lm.models.mla import MultiLinear
        from mlx_lm.models.switch_layers import SwitchLinear

        mx.random.seed(3)
        expert = SwitchLinear(64, 32, 3)
        expert.bias = mx.random.normal((3, 32))
        x, chosen = mx.random.normal((5, 1, 1, 64)), mx.array([[0], [2], [1], [2], [0]])
        packed = expert.to_quantized(**size)
        plain = plain_module(packed, plain_weight(packed))
        assert type(plain) is SwitchLinear
        heads = MultiLinear(64, 32, 4).to_quantized(**size)
        y = mx.random.normal((1, 4, 5, 64))
        plain_heads = plain_module(heads, plain_weight(heads))
        assert type(plain_heads) is MultiLinear
        return {
            "experts": mx.abs(plain(x, chosen) - packed(x, chosen)).max().item(),
            "heads": mx.abs(plain_heads(y) - heads(y)).max().item(),
        }

    assert max(on_mlx_thread(run).values()) < 1e-5


def test_experts_with_one_more_factor_each():
    def run() -> tuple[Any, Any]:
        import mlx.core as mx
        from mlx_lm.models.switch_layers import SwitchLinear

        mx.random.seed(3)
        expert = SwitchLinear(64, 32, 3, bias=False)
        expert.weight = expert.weight * mx.array([1.0, 40.0, 0.01])[:, None, None]
        packed: Any = expert.to_quantized(16, 4, "nvfp4", global_scale=True)
        # The kernel for these runs on Metal alone; mlx unpacks each by itself everywhere.
        one_by_one = [
            mx.dequantize(
                packed.weight[number],
                packed.scales[number],
                group_size=16,
                bits=4,
                mode="nvfp4",
                global_scale=packed.global_scale[number],
                dtype=mx.float32,
            )
            for number in range(3)
        ]
        expected = mx.stack(one_by_one)
        apart = mx.abs(plain_weight(packed) - expected).max(axis=(1, 2))
        size = mx.abs(expected).max(axis=(1, 2))
        return (apart / size).max().item(), (size[1] / size[2]).item()

    apart, spread = on_mlx_thread(run)
    assert apart < 1e-6
    assert spread > 1000


def test_some_rows_are_those_of_all():
    def run() -> bool:
        import mlx.core as mx
        from mlx import nn

        for module in (nn.Embedding(20, 64), nn.Linear(64, 20)):
            module.set_dtype(mx.bfloat16)
            packed: Any = module.to_quantized(64, 4)
            rows = mx.array([3, 17, 3])
            if not mx.array_equal(plain_weight(packed, rows), plain_weight(packed)[rows]).item():
                return False
        return True

    assert on_mlx_thread(run)


def effect(folder: Path, adapter: Path, **options: Any) -> np.ndarray:
    """What an adapter changes in the logits."""
    with_it = logits(folder, adapter=read_adapter(adapter), **options)
    return with_it - logits(folder, **options)


def alike(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine between two changes of logits."""
    return float((one * other).sum() / np.sqrt((one * one).sum() * (other * other).sum()))


def by_mlx_lm(folder: Path, adapter: Path) -> np.ndarray:
    """What an adapter changes beside packed weights, by mlx-lm's own layers, unfused."""

    def run() -> np.ndarray:
        from mlx_lm.utils import load_adapters

        model: Any = load_adapters(load_model(folder, "float32"), str(adapter))
        model.eval()
        return prompt_logits(model, TOKENS)

    return on_mlx_thread(run) - logits(folder)


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS[1:])
def test_an_adapter_on_packed_weights_keeps_its_effect(plain, pack, tmp_path, mode, bits, group):
    folder = pack(plain(), mode, bits, group)
    keys = [f"self_attn.{name}_proj" for name in "qo"]
    shapes = {f"model.layers.{layer}.{key}": (128, 128) for layer in (0, 1) for key in keys}
    products = draw(shapes, size=0.05)
    told = {"num_layers": 2, "lora_parameters": {"keys": keys}}
    mlx = write_mlx(tmp_path / "mlx", products, **told)
    peft = write_peft(tmp_path / "peft", products)
    expected = by_mlx_lm(folder, mlx)
    assert np.abs(expected).max() > 1e-2
    for adapter in (mlx, peft):
        # Where nothing but the adapted layers is unpacked, and where all is.
        for options in ({}, {"dequantize": True}):
            assert np.abs(effect(folder, adapter, **options) - expected).max() < 1e-4


def test_on_8_bits_the_effect_is_that_on_the_plain_base(plain, pack, tmp_path):
    shapes = {f"model.layers.{n}.self_attn.{k}_proj": (128, 128) for n in (0, 1) for k in "qo"}
    adapter = write_peft(tmp_path / "adapter", draw(shapes, size=0.05))
    other = write_peft(tmp_path / "other", draw(shapes, size=0.05, seed=8))
    intended, packed = effect(plain(), adapter), pack(plain(), "affine", 8, 64)
    # Random weights spread every difference; measured 0.988.
    assert alike(effect(packed, adapter), intended) > 0.98
    assert alike(effect(packed, other), intended) < 0.5


def test_only_adapted_modules_are_unpacked(plain, pack, tmp_path):
    folder = pack(plain(), "affine", 4, 64)
    path = "model.layers.1.mlp.up_proj"
    adapter = read_adapter(write_mlx(tmp_path / "adapter", draw({path: (128, 128)})))

    def run() -> tuple[set[str], set[str]]:
        before = {path for path, _ in packed_modules(load_model(folder, "float32"))}
        fused = load_model(folder, "float32", adapter=adapter)
        return before, {path for path, _ in packed_modules(fused)}

    before, after = on_mlx_thread(run)
    assert before - after == {path}


def test_packing_again_would_lose_the_adapter(plain, pack, tmp_path):
    # Negative control: what mlx-lm's own fuse does on a packed base.
    folder = pack(plain(), "affine", 2, 64)
    shapes = {f"model.layers.{n}.self_attn.o_proj": (128, 128) for n in (0, 1)}
    adapter = write_mlx(
        tmp_path / "adapter",
        draw(shapes, size=0.02),
        num_layers=2,
        lora_parameters={"keys": ["self_attn.o_proj"]},
    )

    def again() -> np.ndarray:
        from mlx.utils import tree_unflatten
        from mlx_lm.utils import load_adapters

        model: Any = load_adapters(load_model(folder, "float32"), str(adapter))
        fused = [(path, each.fuse()) for path, each in model.named_modules() if "fuse" in dir(each)]
        model.update_modules(tree_unflatten(fused))
        return prompt_logits(model, TOKENS)

    expected = by_mlx_lm(folder, adapter)
    assert alike(effect(folder, adapter), expected) > 0.999
    assert alike(on_mlx_thread(again) - logits(folder), expected) < 0.5


def test_a_packed_tied_head_is_untied_for_peft(plain, pack, tmp_path):
    folder = pack(plain(), "affine", 8, 64)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    products: Mapping[str, Any] = draw({"model.embed_tokens": (rows, 128)})
    adapter = write_peft(tmp_path / "adapter", products, embeddings=("model.embed_tokens",))
    found = effect(folder, adapter)
    assert alike(found, effect(plain(), adapter)) > 0.99
    assert np.abs(found - effect(folder, adapter, dequantize=True)).max() < 1e-3
