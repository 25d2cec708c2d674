"""The public names of the scorer."""

import inspect

import pytest

from weighbridge import scorer


@pytest.mark.parametrize("name", scorer.__all__)
def test_every_public_name_is_there_and_described(name):
    value = getattr(scorer, name)
    text = inspect.getdoc(value) or ""
    # A dataclass without a docstring gets its signature for one, which says nothing.
    assert text
    assert not text.startswith(f"{name}(")
    # Named where it is defined, so that a reader of a traceback finds it.
    assert value.__module__.startswith("weighbridge.scorer.")


def test_the_list_is_sorted_and_complete():
    # Types are imported for checkers only; what runs is looked up in one table.
    assert scorer.__all__ == sorted(scorer._MODULES)


def test_an_unknown_name_is_an_attribute_error():
    # hasattr() and `from … import` rely on it.
    with pytest.raises(AttributeError, match=r"'weighbridge.scorer' has no attribute 'nothing'"):
        _ = scorer.nothing


def test_the_package_says_what_it_does_not_know():
    # STYLE rule 1.
    assert "Knows no Prefect, no SQL and no terminal" in (scorer.__doc__ or "")
