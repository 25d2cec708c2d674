"""Adapters that change nothing, too little, or do not fit: noticed when they are loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scorer.adapted_bases import KEYS, bases, load_on_cpu, logits, shapes
from tests.scorer.adapter_folders import draw, write_mlx, write_peft

from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.errors import CheckpointError

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory) -> Callable[..., Path]:
    return bases(tiny, tmp_path_factory.mktemp)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_zeroed_adapter_is_noticed(base, tmp_path, dtype, tie):
    folder = base("llama", tie_word_embeddings=tie)
    products = {path: (a, np.zeros_like(b)) for path, (a, b) in draw(shapes(folder, KEYS)).items()}
    for adapter in (write_mlx(tmp_path / "m", products), write_peft(tmp_path / "p", products)):
        with pytest.raises(CheckpointError, match="products are all zero"):
            on_mlx_thread(load_on_cpu, folder, adapter, dtype)


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


def test_an_adapter_lost_in_rounding_is_noticed(base, tmp_path, caplog):
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
    # Twice as large, it is lost in part.
    for size, warned in ((0.02, True), (0.2, False)):
        caplog.clear()
        logits(
            folder,
            write_mlx(tmp_path / str(size), draw(shapes(folder, KEYS), size=size)),
            "bfloat16",
        )
        assert ("of the adapter's change" in caplog.text) is warned
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
    (path, (a, b)) = next(iter(draw(shapes(folder, ["embed_tokens"])).items()))
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
