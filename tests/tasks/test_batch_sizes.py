"""Batches of about two seconds, whatever a document takes. Computed by hand."""

from weighbridge.tasks.planning import BatchSizer


def test_batch_sizes():
    sizer = BatchSizer()
    assert sizer.size == 2
    # 2 documents took 0.1 s: 40 would fit into 2 s, and the size at most doubles.
    sizer.observe(2, 0.1)
    assert sizer.size == 4
    # 4 documents took 2.7 s, so 2 s hold 4 · 2 / 2.7 = 2.96.
    sizer.observe(4, 2.7)
    assert sizer.size == 3
    # A part of a batch counts by its own size: 5 in 2 s.
    sizer.observe(5, 2.0)
    assert sizer.size == 5
    # One document of 90 s: never less than one.
    sizer.observe(1, 90.0)
    assert sizer.size == 1
    # Nothing was scored, so nothing was learnt.
    sizer.observe(0, 1.0)
    sizer.observe(1, 0.0)
    assert sizer.size == 1
    for _ in range(20):
        sizer.observe(1000, 0.001)
    assert sizer.size == 256


def test_a_fixed_batch_size_stays():
    sizer = BatchSizer(3)
    sizer.observe(3, 100.0)
    assert sizer.size == 3
