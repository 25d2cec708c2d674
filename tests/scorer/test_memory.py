"""How many checkpoints stay in memory: as many as fit, and what leaves takes all with it."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from weighbridge.scorer import ParallelScorer
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.memory import limit_memory, weight_bytes
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
def memory() -> Iterator[Callable[[int], None]]:
    """Limit the memory of models for one test."""
    release_checkpoints()
    yield limit_memory
    limit_memory(None)


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
