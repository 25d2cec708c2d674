"""All modes give the same logits: the engine on random llamas in float64."""

from typing import Any

import numpy as np
import pytest

from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Row, Timings

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

EXACT = 1e-12


@pytest.fixture
def engine(tiny) -> Engine:
    return Engine(tiny.model(), chunk=64)


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257])
def test_modes_agree_for_prefixes_around_chunk_and_buffer_ends(engine, tiny, prefix):
    rows = tiny.rows(prefix, [3, 1, 7, 2])
    # Chunks end at 64, 128, ..., and mlx-lm's buffers grow at 256; suffixes of unequal
    # length are padded to the longest. The whole prompt computed at once is the oracle.
    assert tiny.worst(engine, rows) <= EXACT
    # Agreement would mean nothing if all logits were nearly the same, or in float32.
    logits = np.array(engine.score(rows)[0])
    assert logits.std() > 0.3
    assert logits.dtype == np.float64


@pytest.mark.parametrize("chunk", [1, 16, 17, 512])
def test_the_prefill_chunk_does_not_show(tiny, chunk):
    rows = tiny.rows(33, [3, 1, 7, 2])
    # 512 prefills at once, 1 token by token, 17 leaves a chunk of 16.
    assert tiny.worst(Engine(tiny.model(), chunk=chunk), rows) <= EXACT


def test_one_row(engine, tiny):
    rows = tiny.rows(20, [4])
    # A row alone shares all but its last token with itself; there is no padding.
    assert tiny.worst(engine, rows) <= EXACT
    # One row and nothing resident: recomputing is one pass, a prefill would make it two.
    assert engine.score(rows, mode=Mode.AUTO)[1].prefills == 0


def test_row_of_one_token(engine, tiny):
    rows = [Row((5,), (1, 2)), Row((6,), (1, 2))]
    # Nothing is shared: the branch starts from empty caches.
    assert tiny.worst(engine, rows) <= EXACT


def test_no_rows(engine):
    # A field of one choice needs no row at all.
    assert engine.score([]) == ([], Timings())


def test_duplicated_rows_get_the_same_logits(engine, tiny):
    first, second = tiny.rows(20, [4, 6])
    rows = [first, second, first, first]
    found = tiny.modes(engine, rows)["parallel None"]
    # A row's place in the batch must not matter: equal rows, equal logits.
    assert tiny.apart([found[0]] * 2, found[2:]) <= EXACT
    assert tiny.worst(engine, rows) <= EXACT


def test_permuted_rows_keep_their_own_logits(engine, tiny):
    rows = tiny.rows(20, [4, 6, 1, 9])
    order = [2, 0, 3, 1]
    straight, _ = engine.score(rows)
    permuted, _ = engine.score([rows[index] for index in order])
    # Row i of the permuted call is row order[i] of the straight one.
    assert tiny.apart(permuted, [straight[index] for index in order]) <= EXACT


def test_candidates_differ_by_row_and_keep_their_order(engine, tiny):
    (row,) = tiny.rows(20, [4], candidates=6)
    reverse = Row(row.tokens, row.candidates[::-1])
    some = Row(row.tokens, row.candidates[1:3])
    (full, backwards, part), _ = engine.score([row, reverse, some])
    # One hidden state: the same candidate has the same logit wherever it stands.
    assert tiny.apart([full[::-1], full[1:3]], [backwards, part]) <= EXACT


def test_padding_is_never_read(engine, tiny):
    short, long = tiny.rows(20, [2, 30])
    alone, _ = engine.score([short], mode=Mode.PARALLEL)
    padded, _ = engine.score([short, long], mode=Mode.PARALLEL)
    # 28 padding tokens behind the short row lie after its last position.
    assert tiny.apart(alone, padded[:1]) <= EXACT


@pytest.mark.parametrize("resident", [1, 16, 40, 64, 100])
def test_resident_prefix_changes_nothing(engine, tiny, resident):
    rows = tiny.rows(64, [3, 5, 1])
    found = [tiny.modes(engine, rows, resident_tokens=resident) for _ in range(2)]
    reference = tiny.modes(Engine(tiny.model()), rows)["independent"]
    # The first round makes the resident prefix, the second one takes it; 100 is more than
    # the rows share and is cut to what they do.
    assert max(tiny.apart(reference, one) for each in found for one in each.values()) <= EXACT


def test_documents_interleaved_from_one_resident_prefix(engine, tiny):
    schema = tuple(range(30))
    documents = [
        [Row(schema + (number,) * 9 + row.tokens, row.candidates) for row in tiny.rows(0, [2, 4])]
        for number in (40, 41)
    ]
    reference = [engine.score(rows, mode=Mode.INDEPENDENT)[0] for rows in documents]
    for turn in (0, 1, 0, 1, 1, 0):
        found, timings = engine.score(documents[turn], resident_tokens=len(schema))
        # Whatever the other document appended to the resident prefix is gone.
        assert tiny.apart(reference[turn], found) <= EXACT
    # 30 tokens resident; 9 of the document are the rest of what its rows share.
    assert (timings.resident_tokens, timings.prefix_tokens, timings.prefills) == (30, 9, 1)
    assert len(engine.resident) == 1


def test_sliding_window_layers_agree_past_the_window(tiny):
    layers = ["sliding_attention", "full_attention"]
    model = tiny.model(layer_types=layers, sliding_window=16)
    # 40 tokens are more than two windows: the rotating cache has dropped its first ones.
    assert tiny.worst(Engine(model, chunk=8), tiny.rows(40, [3, 1, 7, 2])) <= EXACT


def test_timings_count_tokens_and_passes(engine, tiny):
    rows = tiny.rows(20, [4, 6, 1])
    _, parallel = engine.score(rows, mode=Mode.PARALLEL)
    _, whole = engine.score(rows, mode=Mode.INDEPENDENT)
    # Shared once: 20 and 4 + 6 + 1. Whole: three prompts of 24, 26 and 21 tokens.
    assert (parallel.prefix_tokens, parallel.suffix_tokens, parallel.prefills) == (20, 11, 1)
    assert (whole.prefix_tokens, whole.suffix_tokens, whole.prefills) == (0, 71, 0)
    # The weights are there before, and work needs memory on top.
    assert 0 < parallel.start_bytes < parallel.peak_bytes


def test_timings_of_a_batch():
    serial, parallel = Mode.CACHED_SERIAL, Mode.PARALLEL
    one = Timings(serial, 1.0, 2.0, 4.0, 10, 20, 30, 1, 1, start_bytes=100, peak_bytes=300)
    two = Timings(parallel, 0.5, 0.5, 1.0, 1, 2, 3, 1, 2, start_bytes=200, peak_bytes=250)
    # Sums, but the first mode and start and the highest peak; an empty start is no start.
    assert one + two == Timings(
        serial, 1.5, 2.5, 5.0, 11, 22, 33, 2, 3, start_bytes=100, peak_bytes=300
    )
    assert (Timings() + one).start_bytes == 100
    assert (Timings() + one).mode is serial


# --- Negative controls: each planted fault must be larger than what the tests allow. ---


class OffByOne(Engine):
    """Reads the hidden state one position too late."""

    def _branch(self, prefix: Any, suffixes: Any, union: Any) -> np.ndarray:
        return super()._branch(prefix, [(*suffix, 0) for suffix in suffixes], union)


def test_control_position_off_by_one_shows(tiny):
    worst = tiny.worst(OffByOne(tiny.model()), tiny.rows(20, [4, 6, 1]))
    # A neighbouring position is another prediction altogether.
    assert worst > 1e-3


def test_control_row_leak_shows(tiny):
    import mlx.core as mx
    from mlx_lm.models.llama import LlamaModel

    class LeakyLlama(LlamaModel):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            hidden = super().__call__(*args, **kwargs)
            return hidden + 1e-9 * mx.roll(hidden, 1, 0)

    model = tiny.model()
    model.model.__class__ = LeakyLlama
    # A billionth of the row above leaks in: small, and still a thousand times too much.
    assert EXACT * 1000 < tiny.worst(Engine(model), tiny.rows(20, [4, 6, 1])) < 1e-6


def test_control_padding_before_the_row_shows(tiny):
    class LeftPadded(Engine):
        def _branch(self, prefix: Any, suffixes: Any, union: Any) -> np.ndarray:
            width = max(map(len, suffixes))
            rows = [(0,) * (width - len(suffix)) + suffix for suffix in suffixes]
            return super()._branch(prefix, rows, union)

    # Padding on the left shifts positions and is attended to.
    assert tiny.worst(LeftPadded(tiny.model()), tiny.rows(20, [4, 6, 1])) > 1e-3


# --- models that mean something else without caches ---


def shifted(tiny: Any) -> Any:
    """Return a tiny llama that reads other tokens when it has caches.

    As the last layers of Gemma 3n take other keys then.
    """
    model = tiny.model()
    plain = type(model)

    def call(self: Any, inputs: Any, cache: Any = None) -> Any:
        return plain.__call__(self, inputs if cache is None else (inputs + 1) % 97, cache)

    model.__class__ = type("Shifted", (plain,), {"__call__": call})
    return model


def test_whole_prompts_are_computed_as_the_model_is_meant(tiny):
    engine = Engine(shifted(tiny))
    rows = tiny.rows(20, [4, 6, 1, 3])
    # Without caches it is another model: falling back to that would give other answers.
    assert tiny.worst(engine, rows) > 1e-3
    assert engine.probe() <= EXACT
    assert tiny.worst(engine, rows) <= EXACT
    meant = [Row(tuple((token + 1) % 97 for token in row.tokens), row.candidates) for row in rows]
    # The right ones are those that mlx-lm would generate from.
    alone, _ = engine.score(rows, mode=Mode.INDEPENDENT)
    assert tiny.apart(alone, tiny.full(tiny.model(), meant)) <= EXACT


def test_whole_prompts_of_a_plain_model_have_no_caches(tiny):
    engine = Engine(tiny.model())
    engine.probe()
    rows = tiny.rows(20, [4, 6])
    # The plainest way there is stays the one that the others are compared with.
    assert tiny.apart(
        engine.score(rows, mode=Mode.INDEPENDENT)[0], tiny.full(tiny.model(), rows)
    ) == pytest.approx(0.0, abs=1e-15)


def test_caches_that_cannot_be_filled_leave_whole_prompts(tiny):
    model = tiny.model()
    model.__class__ = type("Bare", (type(model),), {"make_cache": lambda *_: [None] * 7})
    engine = Engine(model)
    # Nothing to fork, as with Gear: each prompt by itself, and right.
    assert engine.probe() == float("inf")
    rows = tiny.rows(20, [4, 6])
    found, _ = engine.score(rows, mode=Mode.INDEPENDENT)
    assert tiny.apart(found, tiny.full(tiny.model(), rows)) <= EXACT
