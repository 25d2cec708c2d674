import copy
import json
import pickle

import pytest

from weighbridge.scorer.errors import (
    BackendError,
    CheckpointError,
    DocumentError,
    SchemaError,
    ScorerError,
    TemperatureError,
    listed,
    quoted,
    shown,
    suggestion,
)


@pytest.mark.parametrize(
    "kind", [SchemaError, TemperatureError, CheckpointError, BackendError, DocumentError]
)
def test_every_error_is_a_scorer_error(kind):
    # A caller that catches the root must catch all of them.
    assert issubclass(kind, ScorerError)


def test_text_of_an_error_is_its_message_alone():
    error = SchemaError("what must hold", hint="what to do")
    # The terminal prints the hint on a line of its own, so str() must not repeat it.
    assert (str(error), error.message, error.hint) == (
        "what must hold",
        "what must hold",
        "what to do",
    )


@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.deepcopy])
def test_document_error_survives_a_process_boundary(again):
    error = again(DocumentError("too long", code="document.too_long", hint="cut it"))
    # Exceptions are rebuilt from positional arguments; the code is not one of them.
    assert (str(error), error.code, error.hint) == ("too long", "document.too_long", "cut it")


@pytest.mark.parametrize("hostile", ["\x1b[31m", "\x7f", "\x9b", "\ud800", "\u202e", "\U000e0001"])
def test_quoted_never_prints_what_a_terminal_would_act_on(hostile):
    text = quoted(f"a{hostile}b")
    # Printable and encodable is exactly what a terminal needs.
    assert text.isprintable()
    assert text.encode("utf-8")


@pytest.mark.parametrize("hostile", ["\n", "\x7f", "\ud800", '"', "\\", "é"])
def test_quoted_text_can_be_read_back(hostile):
    # Below U+10000 every escape is a JSON escape, so nothing is lost.
    assert json.loads(quoted(hostile)) == hostile


def test_quoted_shortens():
    # 4 characters shown at most: 3 of the text and the ellipsis.
    assert quoted("abcdef", limit=4) == '"abc…"'
    assert quoted("abcd", limit=4) == '"abcd"'


@pytest.mark.parametrize(
    ("value", "text"),
    [("a", '"a"'), (2, "2"), (True, "true"), (None, "null"), ([1], "a list"), ({}, "an object")],
)
def test_shown_uses_the_words_of_json(value, text):
    # The reader looks at a JSON file, where Python's True and None do not occur.
    assert shown(value) == text


def test_listed_counts_what_it_leaves_out():
    # 12 texts: ten are shown and two are counted.
    assert listed(map(str, range(12))).endswith('"9" and 2 more')
    assert listed(["a", "b"]) == '"a", "b"'


def test_suggestion_names_a_close_text_only():
    # One transposition is close; a text with no letter in common is not.
    assert (
        suggestion("chioces", ["choices"], "known:") == 'did you mean "choices"? known: "choices"'
    )
    assert suggestion("zzz", ["choices"], "known:") == 'known: "choices"'
