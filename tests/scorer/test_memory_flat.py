"""Memory stays flat over documents of every length; `benchmarks/memory.py` is the long run."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.held import BOUNDS, MIB, SAMPLES, Sample, texts, verdict, watching

from weighbridge.scorer import ParallelScorer, Schema

ROOT = Path(__file__).parents[2]
COUNT = 240
BOUND = MIB  # what leaks here keeps 16 KiB of each document, 3 MiB in all but the first 60
# In a process of its own: what other tests have freed would hide what is kept. The scorer that
# leaks comes last, into pools that are full.
RUNS = """
    import json, sys
    import numpy as np
    sys.path.insert(0, {root!r})
    from benchmarks.held import judged, texts, watched
    from weighbridge.scorer import ParallelScorer, Schema
    from weighbridge.scorer.backend import on_mlx_thread

    scorer, schema = ParallelScorer({folder!r}), Schema.parse({schema!r})
    kept = []

    def score(batch):
        return scorer.score_batch(batch, schema)

    def keeps_logits(batch):
        kept.append(np.ones((len(batch), 4096), np.float32))
        return score(batch)

    def keeps_arrays(batch):
        import mlx.core as mx

        def array():
            made = mx.zeros((len(batch), 4096))
            mx.eval(made)
            return made

        kept.append(on_mlx_thread(array))
        return score(batch)

    found = {{}}
    for way in (score, keeps_logits, keeps_arrays):
        samples = watched(way, texts({count}, 1, 100), {count})
        found[way.__name__] = judged(samples, {bounds!r})
    print(json.dumps(found))
"""


@pytest.mark.mlx
def test_memory_is_flat_and_the_check_sees_what_is_kept(
    tiny: Any, tmp_path: Path, fresh_process: Callable[[str], Any]
):
    folder = tiny.checkpoint(tmp_path / "tiny")
    code = RUNS.format(
        root=str(ROOT),
        folder=str(folder),
        schema=json.dumps({"urgent": tiny.triage["urgent"]}),
        count=COUNT,
        bounds=dict.fromkeys(BOUNDS, BOUND),
    )
    done = fresh_process(code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    flat = {way: {name: each["flat"] for name, each in held.items()} for way, held in found.items()}
    assert flat["score"] == {"rest": True, "active": True}, found
    # Controls: the same check of a scorer that keeps something of every document.
    assert flat["keeps_logits"] == {"rest": False, "active": True}, found
    assert flat["keeps_arrays"]["active"] is False, found


@pytest.mark.mlx
def test_documents_are_counted_and_nothing_else(tiny: Any, tmp_path: Path):
    scorer = ParallelScorer(tiny.checkpoint(tmp_path / "tiny"), encoding="labels")
    schema = Schema.parse(json.dumps({"urgent": tiny.triage["urgent"]}))
    plain = ParallelScorer.score_batch
    with watching(count=6) as samples:
        # Texts of the label prior are scored too, with the first batch; the third one has a
        # document that is rejected.
        for batch in (["one", "two"], [], ["\ud800", "three"], ["four", "five"]):
            scorer.score_batch(batch, schema)
    assert [each.documents for each in samples] == [2, 2, 4, 6]
    assert [each.peak > 0 for each in samples] == [True, False, True, True]
    assert ParallelScorer.score_batch is plain


def run_of(bytes_by_sample: Iterable[int]) -> list[Sample]:
    """Make up samples that differ in what MLX has in use."""
    return [Sample(number, 0, active, 0) for number, active in enumerate(bytes_by_sample)]


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([7] * SAMPLES, True),
        # Warming up is over within the first quarter.
        ([*range(10), *([10] * 30)], True),
        # Up and down again is no growth; a step that stays is, and so is a slow one.
        ([(number % 2) * 100 for number in range(SAMPLES)], True),
        ([*([0] * 30), *([13] * 10)], False),
        ([number / 2 for number in range(SAMPLES)], False),
        # A peak in the middle, and memory that is given back.
        ([*([0] * 18), 500, 500, *([0] * 20)], True),
        ([100 - number for number in range(SAMPLES)], True),
    ],
)
def test_what_is_called_growth(values: list[int], flat: bool):
    assert verdict(run_of(values), "active", 12).flat is flat


def test_growth_is_the_line_through_all_but_the_first_quarter():
    told = verdict(run_of([1000, 1000, *range(2, 8)]), "active", 5)
    assert (told.trend, told.step) == (pytest.approx(5.0), 4.0)
    assert told.flat
    assert not verdict(run_of([1000, 1000, *range(2, 8)]), "active", 4).flat
    with pytest.raises(ValueError, match="at least 8"):
        verdict(run_of(range(7)), "active", 1)


def test_lengths_are_of_every_order():
    words = [len(text.split()) for text in texts(600, 1, 1000)]
    orders = [sum(low <= each < 10 * low for each in words) for low in (1, 10, 100)]
    assert max(words) > 800
    assert min(orders) > 150  # log-uniform: about as many of each
    assert len(set(texts(600, 1, 1000))) == 600
