"""The engine on every kind of cache that mlx-lm has, each with a model that needs it.

The tiny models are those of the table of architectures; all of them go through it outside
the tests, these few stand for the kinds.
"""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from weighbridge.scorer.backend import PROBE_TOLERANCE
from weighbridge.scorer.caches import empty_prefix
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.heads import HeadCut
from weighbridge.scorer.rows import Mode

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

TOLERANCE = PROBE_TOLERANCE["float32"]

# Recurrent states; states of a convolution; both beside attention; chunks; latent attention;
# several caches in one; windows; layers that reuse what others keep; none of their own.
KINDS = {
    "mamba2": {"ArraysCache"},
    "rwkv7": {"ArraysCache"},
    "lfm2": {"ArraysCache", "KVCache"},
    "jamba": {"ArraysCache", "KVCache"},
    "recurrent_gemma": {"ArraysCache", "RotatingKVCache"},
    "llama4": {"ChunkedKVCache", "KVCache"},
    "deepseek_v3": {"KVCache"},
    "deepseek_v32": {"CacheList"},
    "falcon_h1": {"CacheList"},
    "longcat_flash_ngram": {"ArraysCache", "CacheList"},
    "iquestloopcoder": {"KVCache", "RotatingKVCache"},
    "gemma3n": {"KVCache", "RotatingKVCache"},
    "afm7": {"KVCache"},
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_cache_is_forked(table, name):
    model: Any = table.build(name, {**table.A_TO_L, **table.M_TO_Z}[name])
    assert {type(cache).__name__ for cache in empty_prefix(model).caches} == KINDS[name]
    outcome = table.run(name, {**table.A_TO_L, **table.M_TO_Z}[name])
    # Codes and labels, suffixes of unequal length, a resident prefix made and taken.
    assert outcome.branches, outcome.reason
    assert outcome.worst <= TOLERANCE
    assert outcome.head is HeadCut.COLUMNS


@pytest.mark.parametrize("name", ["lfm2", "llama4", "falcon_h1"])
def test_a_state_that_is_lost_shows(table, name, monkeypatch):
    model: Any = table.build(name, {**table.A_TO_L, **table.M_TO_Z}[name])
    engine = Engine(model, chunk=16)
    rows = table.rows(table.CODES, [3, 9, 5])
    whole, _ = engine.score(rows, mode=Mode.INDEPENDENT)
    prefill = engine.prefill

    def forgetting(tokens: tuple[int, ...], base: Any = None) -> Any:
        prefix = prefill(tokens, base)
        for cache in prefix.caches:
            if type(cache).__name__ != "KVCache":
                cache.state = tree_map(
                    lambda leaf: leaf * 0 if isinstance(leaf, mx.array) and leaf.ndim else leaf,
                    cache.state,
                )
        return prefix

    monkeypatch.setattr(engine, "prefill", forgetting)
    found, _ = engine.score(rows, mode=Mode.PARALLEL)
    # The negative control: branches that begin from zeros are far from the whole prompt.
    apart = max(float(abs(one - other).max()) for one, other in zip(found, whole, strict=True))
    assert apart > 1e-3
