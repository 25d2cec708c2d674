"""Rows that go on from others on architectures with recurrent layers, as mlx-lm has them.

Some keep the state at the end of a padded row, some do not: only the loaded model tells.
"""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from weighbridge.scorer.engine import Engine
from weighbridge.scorer.heads import relative_difference
from weighbridge.scorer.trees import Level, run_levels

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

KEEP_ENDS = ("mamba2", "lfm2", "kimi_linear", "granitemoehybrid", "qwen3_next")
LOSE_ENDS = ("mamba", "jamba", "nemotron_h", "olmo_hybrid", "recurrent_gemma", "rwkv7")
CANDIDATES = (12, 15, 13, 14, 50, 60)


def made(table: Any, name: str) -> Any:
    return table.build(name, {**table.A_TO_L, **table.M_TO_Z}[name])


def probed(table: Any, name: str, dtype: str) -> Engine:
    model = made(table, name)
    model.set_dtype(getattr(mx, dtype))
    engine = Engine(model)
    engine.probe()
    return engine


@pytest.mark.parametrize("name", LOSE_ENDS)
def test_a_state_behind_the_padding_is_found_out(table, name):
    engine = Engine(made(table, name))
    # Forks are right; rows that go on from padded ones would not be.
    assert engine.probe() <= table.TOLERANCE
    assert not engine.trees


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["nemotron_h", "olmo_hybrid", "recurrent_gemma"])
def test_a_lost_state_is_found_out_in_16_bits_too(table, name, dtype):
    engine = probed(table, name, dtype)
    # In the logits of this Nemotron a lost state is 0.05, as much as bfloat16 is allowed.
    assert (engine.packs, engine.trees) == (True, False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_5"])
def test_kept_states_are_right_in_16_bits(table, name, dtype):
    assert probed(table, name, dtype).trees


@pytest.mark.parametrize("lengths", [(256, 257, 1, 600), (1, 1, 1, 1), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", KEEP_ENDS)
def test_states_at_the_end_of_padded_rows(table, name, lengths):
    model = made(table, name)
    engine = Engine(model, chunk=64)
    engine.probe()
    assert engine.trees
    draw = np.random.default_rng(0)
    prefix, *rows = (
        tuple(draw.integers(1, 97, length).tolist()) for length in (20, *lengths, 1, 3, 2, 1, 5)
    )
    stems, twigs, owners = rows[:4], rows[4:], (3, 0, 1, 2, 0)
    levels = [
        Level(tuple(stems), (), (None,) * 4),
        Level(tuple(twigs), owners, tuple(range(5))),
    ]
    # Rows end just where the 256 tokens of a step of mamba2 do, before and behind it.
    found = run_levels(partial(engine._run, union=CANDIDATES), engine.prefill(prefix), levels)
    whole = [
        np.array(model(mx.array([[*prefix, *stems[owner], *twig]]))[0, -1][mx.array(CANDIDATES)])
        for owner, twig in zip(owners, twigs, strict=True)
    ]
    assert relative_difference(found, np.array(whole)) <= table.TOLERANCE
