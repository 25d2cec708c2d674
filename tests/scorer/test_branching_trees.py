"""Label trees: rows that go on from others give what whole prompts give."""

from typing import Any

import numpy as np
import pytest

from weighbridge.scorer import branching, trees
from weighbridge.scorer import engine as engine_module
from weighbridge.scorer.caches import arrays
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Row

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

EXACT = 1e-12


def probed(model: Any, **options: Any) -> Engine:
    engine = Engine(model, one_pass=False, **options)
    engine.probe()
    return engine


def labelled(tiny: Any, prefix: int) -> list[Row]:
    """Return rows as three fields of labels make them: a question, and starts of answers."""
    answers = ((), (1,), (2,), (3,), (3, 4), (5, 6, 7))
    return [
        Row(row.tokens + answer, row.candidates)
        for row in tiny.rows(prefix, [3, 18, 9])
        for answer in answers
    ]


@pytest.fixture
def grown(monkeypatch) -> list[int]:
    """Grow trees wherever possible; the fixture lists how many twigs each of them had."""
    made: list[int] = []

    def counted(run: Any, prefix: Any, levels: list[trees.Level]) -> np.ndarray:
        made.append(len(levels[1].rows))
        return trees.run_levels(run, prefix, levels)

    monkeypatch.setattr(trees, "TREE_GAIN", 0)
    monkeypatch.setattr(engine_module, "run_levels", counted)
    return made


@pytest.mark.parametrize("prefix", [1, 14, 15, 16, 17, 40])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "cohere2", "qwen3_5"])
def test_trees_equal_whole_prompts(tiny, grown, architecture, prefix):
    engine = probed(tiny.model(architecture=architecture), chunk=8)
    rows = labelled(tiny, prefix)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    rows = [rows[index] for index in order]
    whole, _ = engine.score(rows, mode=Mode.INDEPENDENT)
    for resident in (0, prefix // 2):
        found, _ = engine.score(rows, resident_tokens=resident)
        # Stems of 3, 9 and 18 tokens, so that twigs stand at unequal positions, and windows
        # of 16 end in the prefix or in the stem.
        assert tiny.apart(whole, found) <= EXACT
    assert grown == [15, 15]


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_5"])
def test_trees_leave_the_prefix_bit_identical(tiny, grown, architecture):
    engine = probed(tiny.model(architecture=architecture), chunk=8)
    rows = labelled(tiny, 40)
    engine.score(rows, resident_tokens=40)
    resident = engine.resident.get(rows[0].tokens[:40])
    assert resident is not None
    before = [np.array(leaf).tobytes() for leaf in arrays(resident.caches)]
    engine.score(rows, resident_tokens=40)
    assert [np.array(leaf).tobytes() for leaf in arrays(resident.caches)] == before
    assert grown == [15, 15]


def test_other_masks_have_no_trees(tiny, grown):
    engine = probed(tiny.model(architecture="gemma2"))
    assert not engine.trees
    assert tiny.worst(engine, labelled(tiny, 20)) <= EXACT
    assert grown == []


def test_trees_are_for_whole_batches_that_gain(tiny):
    question = tuple(range(12))
    suffixes = [(field, *question, *more) for field in range(8) for more in ((), (1,), (2,))]
    levels = trees.as_levels(suffixes, 300)
    assert levels is not None
    stems, twigs = levels
    # Every third row is a question, and the next two go on from it.
    assert stems.places == tuple(range(0, 24, 3))
    owned = [stems.places[owner] for owner in twigs.owners]
    assert owned == [each // 3 * 3 for each in twigs.places if each is not None]
    assert twigs.rows == ((1,), (2,)) * 8
    # Rows apart from each other, one question alone, equal rows: no tree.
    assert trees.as_levels(suffixes[::3], 300) is None
    assert trees.as_levels(suffixes[:3], 300) is None
    assert trees.as_levels(suffixes[::3] * 2, 300) is None
    # 26 + 12 tokens instead of 39: too little for a second pass.
    assert trees.as_levels([(1,), (1, *question), (2, *question)], 300) is None
    # The scores of a prefix as long as this would take too much at once.
    assert trees.as_levels(suffixes, 40_000) is None


def test_control_twigs_of_another_stem_show(tiny, grown, monkeypatch):
    engine = probed(tiny.model())
    rows = labelled(tiny, 20)
    assert tiny.worst(engine, rows) <= EXACT
    start = branching.PackedRows.__init__

    def crossed(self: Any, lengths: Any, stems: Any = None, owners: Any = ()) -> None:
        start(self, lengths, stems, owners)
        self.owners = (self.owners + 1) % 3

    monkeypatch.setattr(branching.PackedRows, "__init__", crossed)
    assert tiny.worst(engine, rows) > 1e-3
    # And the probe would not have let it pass.
    engine.probe()
    assert (engine.packs, engine.trees) == (True, False)


def test_control_twigs_at_shifted_positions_show(tiny, grown, monkeypatch):
    engine = probed(tiny.model())
    start = branching.PackedRows.__init__

    def shifted(self: Any, lengths: Any, stems: Any = None, owners: Any = ()) -> None:
        start(self, lengths, stems, owners)
        self.starts = self.starts * 0 + self.starts.max()

    monkeypatch.setattr(branching.PackedRows, "__init__", shifted)
    # All twigs where those of the longest stem belong.
    assert tiny.worst(engine, labelled(tiny, 20)) > 1e-3
