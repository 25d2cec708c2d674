"""How many checkpoints stay in memory: as many as fit, and what leaves takes all with it."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scorer.adapter_folders import draw, write_mlx, write_peft

from weighbridge.scorer import ParallelScorer
from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.memory import weight_bytes
from weighbridge.scorer.model_weights import load_model
from weighbridge.scorer.resident import release_checkpoints

pytestmark = pytest.mark.mlx

TEXT = "The invoice was charged twice and the customer would like the money back."
SEEDS = itertools.count(5000)


@pytest.fixture
def two_scorers(tiny, tmp_path) -> list[ParallelScorer]:
    """Two checkpoints of some 6 MB each."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    return [
        ParallelScorer(tiny.checkpoint(tmp_path / str(seed), seed=seed, **sizes))
        for seed in (next(SEEDS), next(SEEDS))
    ]


@pytest.fixture
def memory() -> Iterator[Callable[[int], int]]:
    """Limit MLX's memory for one test."""
    import mlx.core as mx

    release_checkpoints()
    before = on_mlx_thread(mx.get_memory_limit)
    yield lambda limit: on_mlx_thread(mx.set_memory_limit, limit)
    on_mlx_thread(mx.set_memory_limit, before)


def test_checkpoints_in_turn_release_what_they_held(two_scorers, tiny, memory):
    import mlx.core as mx

    one = weight_bytes(two_scorers[0].info.folder, two_scorers[0].dtype)
    memory(2 * one)
    held: list[int] = []
    on_mlx_thread(mx.reset_peak_memory)
    peaks: list[int] = []
    for turn in range(6):
        for text in (TEXT, TEXT * 3):
            two_scorers[turn % 2].score(text, tiny.schema())
        held.append(on_mlx_thread(mx.get_active_memory))
        peaks.append(on_mlx_thread(mx.get_peak_memory))
        assert [each.model_loaded for each in two_scorers] == [turn % 2 == 0, turn % 2 == 1]
    # Weights of one, its head rows and its resident prefixes: the same in every turn.
    # One prefix or weight of the other kept would show, in the peak as well.
    assert max(held) - min(held) < 100_000
    assert held[0] > one > 4_000_000
    assert max(peaks) - peaks[0] < one // 2


def test_checkpoints_stay_where_memory_holds_them(two_scorers, tiny, memory):
    one = weight_bytes(two_scorers[0].info.folder, two_scorers[0].dtype)
    memory(4 * one)
    for scorer in (*two_scorers, *two_scorers):
        scorer.score(TEXT, tiny.schema())
        assert scorer.model_loaded
    assert all(each.model_loaded for each in two_scorers)


def test_two_checkpoints_take_turns(tiny, tmp_path, memory):
    scorers = [
        ParallelScorer(tiny.checkpoint(tmp_path / str(seed), seed=seed)) for seed in (11, 12)
    ]
    memory(scorers[0].weight_bytes)  # two would not fit beside each other
    alone = [scorer.score(TEXT, tiny.schema()).fields for scorer in scorers]
    assert [scorer.model_loaded for scorer in scorers] == [False, True]
    again = [scorer.score(TEXT, tiny.schema()).fields for scorer in scorers]
    # Loaded anew, each gives its own answers, and they differ between the two.
    assert again == alone
    assert alone[0] != alone[1]


def test_weights_larger_than_memory_are_refused_before_they_are_loaded(tiny, tmp_path, memory):
    scorer = ParallelScorer(tiny.checkpoint(tmp_path / "large", seed=next(SEEDS)))
    memory(scorer.weight_bytes - 1)
    with pytest.raises(CheckpointError, match="must fit into memory") as caught:
        scorer.score(TEXT, tiny.schema())
    assert caught.value.hint
    assert not scorer.model_loaded
    memory(scorer.weight_bytes)
    assert scorer.score(TEXT, tiny.schema()).fields


def held(folder: Path, dtype: str, **options: Any) -> int:
    """The bytes of the weights once they are loaded."""

    def run() -> int:
        import mlx.core as mx
        from mlx.utils import tree_flatten

        with mx.stream(mx.cpu):
            leaves: Any = tree_flatten(load_model(folder, dtype, **options).parameters())
        return sum(array.nbytes for _, array in leaves)

    return on_mlx_thread(run)


@pytest.fixture
def packed(tiny, tmp_path) -> Path:
    """A checkpoint whose layers are packed in three ways, one of them in 3 bits."""
    folder = tiny.checkpoint(tmp_path / "packed", hidden_size=128, intermediate_size=128)

    def rule(path: str, module: Any) -> Any:
        if "v_proj" in path:
            return {"bits": 8, "group_size": 32}
        if "down_proj" in path:
            return {"bits": 4, "group_size": 32, "mode": "mxfp4"}
        return "o_proj" not in path

    pack(folder, rule)
    return folder


def pack(folder: Path, rule: Callable[[str, Any], Any]) -> None:
    def run() -> None:
        from mlx_lm.utils import quantize_model, save_config, save_model

        config = json.loads((folder / "config.json").read_text())
        model, config = quantize_model(
            load_model(folder, "float32"), config, 64, 3, quant_predicate=rule
        )
        save_model(folder, model)
        save_config(config, folder / "config.json")

    on_mlx_thread(run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_weights_are_told_from_headers_to_the_byte(packed, dtype, dequantize):
    told = weight_bytes(packed, dtype, dequantize=dequantize)
    assert told == held(packed, dtype, dequantize=dequantize)


def test_float64_is_never_packed(packed):
    assert weight_bytes(packed, "float64") == held(packed, "float64")


def test_an_adapter_unpacks_what_it_changes(packed, tmp_path):
    path = "model.layers.1.mlp.up_proj"
    adapter = read_adapter(write_mlx(tmp_path / "adapter", draw({path: (128, 128)})))
    with_it = weight_bytes(packed, "float32", adapter=adapter)
    assert with_it == held(packed, "float32", adapter=adapter)
    assert with_it > weight_bytes(packed, "float32")


def test_what_mlx_lm_drops_takes_no_memory(tiny, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tiny.checkpoint(tmp_path / "base", architecture="qwen3_5")
    plain = weight_bytes(folder, "float32")
    assert plain == held(folder, "float32")
    weights = load_file(folder / "model.safetensors")
    for name in ("model.visual.patch_embed.proj.weight", "mtp.fc.weight"):
        weights[name] = np.ones((64, 64), np.float32)
    save_file(weights, folder / "model.safetensors")
    assert weight_bytes(folder, "float32") == plain == held(folder, "float32")


@pytest.mark.parametrize("dequantize", [False, True])
def test_packings_of_others(tmp_path, dequantize):
    from safetensors.numpy import save_file

    # AWQ: 64 x 32 weights of 4 bits in groups of 32; a plain norm of 64.
    tensors = {
        "a.qweight": np.zeros((64, 4), np.int32),
        "a.qzeros": np.zeros((2, 4), np.int32),
        "a.scales": np.zeros((2, 32), np.float16),
        "norm.weight": np.zeros(64, np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    packed = 64 * 4 * 4 + 2 * 4 * 4 + 2 * 32 * 4
    plain = 64 * 32 * 4
    assert weight_bytes(tmp_path, "float32", dequantize=dequantize) == 64 * 4 + (
        plain if dequantize else packed
    )


@pytest.mark.parametrize("products", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_head_that_an_adapter_parts_from_its_embeddings_counts(
    tiny, tmp_path, products, ties, is_packed
):
    folder = tiny.checkpoint(tmp_path / "tied", tie_word_embeddings=True, hidden_size=128)
    if is_packed:
        pack(folder, lambda _path, _module: True)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    names = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
    drawn = draw({names[each]: (vocabulary, 128) for each in products})
    written = write_peft(
        tmp_path / "adapter",
        drawn,
        embeddings=["model.embed_tokens"],
        ensure_weight_tying=ties,
    )
    adapter = read_adapter(written)
    told = weight_bytes(folder, "float32", adapter=adapter)
    assert told == held(folder, "float32", adapter=adapter)
    if (len(products) == 2 or not ties) and not is_packed:
        assert told == weight_bytes(folder, "float32") + vocabulary * 128 * 4
