"""Rows as a trie: each shared token once, cut into segments, and what a pass of it costs."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer import trie as trie_module
from weighbridge.scorer.trie import MASK_LIMIT_BYTES, Schedule, cheapest, grow

# Few tokens and short rows, so that rows are often equal, or begin with others.
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), min_size=1)


def beginnings(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the slow definition of a trie: all beginnings of rows, each once, sorted."""
    return sorted({row[:end] for row in rows for end in range(1, len(row) + 1)})


@given(rows=ROWS)
def test_a_trie_is_all_beginnings_of_its_rows(rows):
    trie, nodes = grow(rows), beginnings(rows)
    assert trie.tokens.tolist() == [node[-1] for node in nodes]
    assert trie.depths.tolist() == [len(node) - 1 for node in nodes]
    assert [nodes[read] for read in trie.reads] == rows
    own = np.arange(len(nodes))
    sees = (own <= own[:, None]) & (own[:, None] < trie.ends)
    # A token sees itself and what it goes on from, and nothing else.
    assert sees.tolist() == [[node[: len(other)] == other for other in nodes] for node in nodes]


@given(rows=ROWS, width=st.integers(1, 9))
def test_segments_go_on_from_token_to_token_and_are_read_once(rows, width):
    trie, nodes = grow(rows), beginnings(rows)
    segments = trie.segments(width)
    assert segments.lengths.min() >= 1
    assert segments.lengths.max() <= width
    places = [
        list(range(first, first + length))
        for first, length in zip(segments.firsts, segments.lengths, strict=True)
    ]
    # All tokens once and in order.
    assert list(chain.from_iterable(places)) == list(range(len(nodes)))
    for place, padded in zip(places, segments.nodes.tolist(), strict=True):
        assert all(nodes[each][:-1] == nodes[each - 1] for each in place[1:])
        assert not set(place[:-1]) & set(trie.reads.tolist())
        assert padded == place + [place[-1]] * (len(padded) - len(place))


@given(rows=ROWS, held=st.integers(1, 3))
def test_held_tokens_are_left_out(rows, held):
    trie, longer = grow(rows), grow([(9,) * held + row for row in rows], held)
    for name in ("tokens", "depths", "ends", "stretches", "reads"):
        assert getattr(longer, name).tolist() == getattr(trie, name).tolist()


def test_stretches_run_through_partings_and_end_at_reads():
    # The first row runs on through the parting of the second; the third ends in the second.
    trie = grow([(1, 2, 3, 4), (1, 2, 5, 6, 7), (1, 2, 5)])
    assert trie.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trie.stretches.tolist() == [0, 4, 5]
    assert trie.lengths.tolist() == [4, 1, 2]
    assert trie.reads.tolist() == [3, 6, 4]


@pytest.mark.parametrize("rows", [[], [(1, 2), (1,)], [(1,)]])
def test_rows_without_tokens_are_refused(rows):
    with pytest.raises(ValueError, match="with more than 1 tokens"):
        grow(rows, 1)
    with pytest.raises(ValueError, match="with more than 1 tokens"):
        cheapest(rows, 1, 0, 256)


def apart(lengths: list[int], text: int = 0) -> list[tuple[int, ...]]:
    """Return rows of one document that part behind its text."""
    return [
        (*range(text), *(1000 * (number + 1) + place for place in range(length)))
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("lengths", "width"),
    [
        ([12, 12, 12], 12),  # no padding at all, fewest segments
        ([1, 1, 1], 1),
        ([8, 8, 7], 8),  # one token of padding costs less than twice the segments
        ([40, 1, 1, 1, 1, 1, 1, 1, 1], 1),
    ],
)
def test_width_is_what_pads_little_in_few_segments(lengths, width):
    assert grow(apart(lengths)).width == width


@given(rows=ROWS, held=st.integers(0, 2000), chunk=st.sampled_from([1, 7, 256]))
def test_passes_take_each_row_once(rows, held, chunk):
    found = cheapest([(*range(held), *row) for row in rows], held, 0, chunk)
    taken = sorted(chain.from_iterable(found.passes))
    assert taken in ([], list(range(len(rows))))
    # A pass stands behind something.
    assert found.held in {held, held - held % chunk or held}
    assert found.held or not taken


def test_passes_are_few_and_of_little_waste():
    resident = tuple(range(212))
    rows = [(*resident, *row) for row in apart([9, 11, 8], 35)]
    # 35 + 28 tokens in one pass: 40 + 63 * (1 + 275 / 350) = 152. With the document on its own
    # 40 + 0.875 * 35 * (1 + 247 / 350) + 40 + 28 * (1 + 275 / 350) = 182.
    found = cheapest(rows, 247, 212, 256)
    assert (found.held, [len(each) for each in found.passes]) == (212, [3])
    # 320 tokens in one pass: 40 + 320 * (1 + 820 / 350) = 1110. In three of 110, 110 and 100
    # tokens: 3 * 40 + 220 * (1 + 610 / 350) + 100 * (1 + 600 / 350) = 995, in two 1003. Copies
    # would be 40 + 320 * (1 + 510 / 350) + 32 * 500 * 0.028 = 1274.
    long = tuple(range(500))
    found = cheapest([(*long, *row) for row in apart([10] * 32)], 500, 500, 256)
    assert [len(each) for each in found.passes] == [11, 11, 10]


def test_documents_share_a_pass_where_they_are_tiny():
    resident = tuple(range(212))
    documents = [
        tuple(row + 10_000 * number for row in each)
        for number in range(4)
        for each in apart([2, 3, 1], 5)
    ]
    found = cheapest([(*resident, *row) for row in documents], 212, 212, 256)
    # 4 * 11 tokens in one pass: 40 + 44 * (1 + 256 / 350) = 116, in four 4 * (40 + 18).
    assert [len(each) for each in found.passes] == [12]


def test_copies_are_cheaper_behind_short_prefixes():
    # 64 rows of 10 tokens alone attend to 10 keys, in passes to those of others as well.
    assert cheapest([(7, *row) for row in apart([10] * 64)], 1, 0, 256) == Schedule(1, ())


def test_masks_are_bounded():
    held = (0,) * 100_000
    found = cheapest([(*held, *row) for row in apart([40] * 10)], 100_000, 100_000, 256)
    # 40 tokens take 4.0 MB; 80 would pass the bound.
    assert [len(each) for each in found.passes] == [1] * 10
    assert 40 * 100_040 < MASK_LIMIT_BYTES < 80 * 100_080


def test_padding_of_masks_is_counted():
    held = 100_000
    rows = [(*range(held), *row) for row in apart([21, 20])]
    # 41 tokens are two segments of 21, one place of which is padding.
    assert 41 * (held + 41) < MASK_LIMIT_BYTES < 42 * (held + 41)
    assert len(cheapest(rows, held, held, 256).passes) == 2


@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=9))
def test_masks_are_bounded_as_they_are_made(lengths):
    held, places = 2000, sum(lengths)  # room for all rows in one pass, and for no padding
    rows = [(*range(held), *row) for row in apart(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_module, "MASK_LIMIT_BYTES", limit := places * (held + places))
        found = cheapest(rows, held, held, 256)
    for each in found.passes:
        trie = grow([rows[place] for place in each], held)
        padded = trie.segments(trie.width).nodes.size
        assert padded * (held + len(trie.tokens)) <= limit


@pytest.mark.parametrize(
    ("text", "lengths", "held"),
    [
        (35, [9, 11, 8], 0),
        # 35 tokens would compute 35 * 500 scores nobody needs, or be computed several times.
        (35, [10] * 50, 35),
        (800, [9, 11, 8], 768),  # 3 chunks of 256, and 32 of a fourth
        (1005, [9, 11, 8], 1005),  # 237 tokens would run through the last layer, too
        (512, [9, 11, 8], 512),  # whole chunks
    ],
)
def test_a_last_chunk_may_join_what_is_behind_it(text, lengths, held):
    resident = (3,) * 200
    rows = [(*resident, *row) for row in apart(lengths, text)]
    found = cheapest(rows, 200 + text, 200, 256)
    assert found.held == 200 + held
    assert found.passes


def test_rows_must_part_behind_what_they_share():
    with pytest.raises(ValueError, match="with more than 3 tokens"):
        cheapest([(1, 2, 3), (1, 2, 3, 4)], 3, 0, 256)
