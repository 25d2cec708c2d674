"""Prompts that are encoded in parts have the tokens of the whole, whatever the document is.

Tokenizers of which nothing is known, and templates that do more than insert; the published
ones are in `test_tokenizers.py`. The oracle is each whole prompt, encoded by itself.
"""

import json
import string
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.scorer.families import COMBINATIONS, TEXTS, rows_of

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.errors import DocumentError
from weighbridge.scorer.plan import SchemaPlan
from weighbridge.scorer.token_ends import NOWHERE

Planned = tuple[ChatTokenizer, list[SchemaPlan]]


def changed(tokenizer: Any, change: Callable[[dict[str, Any]], Any]) -> ChatTokenizer:
    """Return a tokenizer whose stored form was changed."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    held = json.loads(tokenizer.backend_tokenizer.to_str())
    change(held)
    return ChatTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(held)),
            chat_template=tokenizer.chat_template,
        )
    )


def put(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda held: held.update(parts)


def spanning(held: dict[str, Any]) -> None:
    """Merge over line breaks and spaces, as nothing keeps them apart any more."""
    held["pre_tokenizer"]["use_regex"] = False
    vocabulary = held["model"]["vocab"]
    for left, right in (("Ċ", "T"), ("Ċ", "W"), ("Ċ", "R"), (",", "Ġ"), (".", "Ġ")):
        vocabulary[left + right] = max(vocabulary.values()) + 9
        held["model"]["merges"].insert(0, [left, right])


def bytes_first(held: dict[str, Any]) -> None:
    """Split what is written as bytes: a line break is a letter then."""
    spanning(held)
    written = held["pre_tokenizer"]
    held["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [written, split(QWEN)]}


def split(rule: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}


def marked(**model: str) -> Callable[[dict[str, Any]], None]:
    """Spell all of a text in characters, a mark for spaces, with some of them written otherwise."""

    def change(held: dict[str, Any]) -> None:
        put(
            normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            pre_tokenizer=None,
        )(held)
        characters = ["▁", "\n", *string.printable.split(" ")[0]]
        prefix = model.get("continuing_subword_prefix", "")
        suffix = model.get("end_of_word_suffix", "")
        texts = [
            start + each + end
            for each in characters
            for start in ("", prefix)
            for end in ("", suffix)
        ]
        held["model"]["vocab"] |= {
            text: 1000 + number for number, text in enumerate(dict.fromkeys(texts))
        }
        held["model"] |= {"merges": [], **model}

    return change


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "NFKC": put(normalizer={"type": "NFKC"}),
    "lower case": put(normalizer={"type": "Lowercase"}),
    "a space put first": put(pre_tokenizer={**BYTES, "add_prefix_space": True}),
    "white space alone": put(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, {**BYTES, "use_regex": False}],
        }
    ),
    "an unknown rule": put(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                split(r"\s+\p{L}+|\p{L}+|[^\p{L}]+"),
                {**BYTES, "use_regex": False},
            ],
        }
    ),
    "merges over all": spanning,
    "a rule behind bytes": bytes_first,
    "a greedy added token": lambda held: held["added_tokens"][0].update(lstrip=True),
}


@pytest.mark.parametrize("name", CHANGES)
@given(text=TEXTS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_unknown_tokenizers_are_asked_for_whole_prompts(tiny, changes, name, text):
    chat, plans = changes(name)
    assert chat.token_ends == NOWHERE
    assert_rows_of_whole_prompts(chat, plans, text)


def assert_rows_of_whole_prompts(chat: ChatTokenizer, plans: list[SchemaPlan], text: str) -> None:
    for made in plans:
        try:
            rows = [row.tokens for row in made.rows(text).rows]
        except DocumentError:
            continue
        assert rows == rows_of(made, text, chat.encode)


@pytest.fixture(scope="module")
def changes(tiny) -> Callable[[str], Planned]:
    return planned(tiny, lambda name: changed(tiny.tokenizer(), CHANGES[name]))


def planned(tiny: Any, make: Callable[[str], ChatTokenizer]) -> Callable[[str], Planned]:
    """Return what gives a tokenizer and plans for it, by name; made once."""

    @cache
    def of(name: str) -> Planned:
        chat = make(name)
        return chat, plans_of(chat, tiny)

    return of


def plans_of(chat: ChatTokenizer, tiny: Any) -> list[SchemaPlan]:
    return [
        SchemaPlan(
            chat,
            tiny.schema(),
            layout=layout,
            encoding=encoding,
            system=None,
            max_input_tokens=10**6,
        )
        for layout, encoding in COMBINATIONS
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        marked(),
        put(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [split(QWEN), {**BYTES, "use_regex": False}],
            }
        ),
    ],
)
def test_what_is_known_is_used(tiny, change):
    # The control of the test above: the changes are what makes them unknown.
    assert changed(tiny.tokenizer(), change).token_ends != NOWHERE


@pytest.mark.parametrize(
    "mark", [{"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"}], ids=str
)
def test_characters_spelled_by_their_place_keep_a_text_whole(tiny, mark):
    chat, plain = (changed(tiny.tokenizer(), marked(**each)) for each in (mark, {}))
    # At a place where a plain one may be cut, there are other tokens in two parts.
    for one, whole in ((plain, True), (chat, False)):
        parts = [*one.encode("billing,"), *one.encode(" login")]
        assert (parts == list(one.encode("billing, login"))) is whole
    assert plain.token_ends.search("billing, login")
    assert chat.token_ends == NOWHERE


def test_a_token_of_the_vocabulary_that_spans_a_place_keeps_it_whole(tiny):
    tokenizer = tiny.tokenizer(control=(*tiny.control, "so\nThat", "a, b"))
    # Added tokens count as well: both kinds of places are inside one.
    assert ChatTokenizer(tokenizer).token_ends == NOWHERE


CONTENTS = (
    "message.content | upper",
    "message.content | replace('e', 'ee') | trim",
    "message.content | replace('\\n', ' ')",
    "message.content ~ ' // ' ~ message.content",
    "message.content if message.content | length < 480 else message.content | truncate(480)",
    "message.content if 'W' in message.content[:9] else message.content | title",
    "message.content | reverse",
)


@pytest.mark.parametrize("content", CONTENTS)
@given(text=TEXTS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_templates_may_change_what_they_are_given(tiny, templates, content, text):
    chat, plans = templates(content)
    assert_rows_of_whole_prompts(chat, plans, text)


@pytest.fixture(scope="module")
def templates(tiny) -> Callable[[str], Planned]:
    def inserting(content: str) -> ChatTokenizer:
        asked = f"({content}) if message.role == 'user' else message.content"
        return ChatTokenizer(tiny.tokenizer(tiny.template.replace("message.content", asked)))

    return planned(tiny, inserting)


def test_a_tokenizer_that_encodes_in_its_own_way_is_asked(tiny):
    from transformers import PreTrainedTokenizerFast

    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *arguments: Any, **options: Any) -> Any:
            return super()._encode_plus(text.upper(), *arguments, **options)

    plain = tiny.tokenizer()
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer, chat_template=plain.chat_template)
    # The library behind it would give the tokens of the text as it is.
    assert ChatTokenizer(shouting).encode("a word") == ChatTokenizer(plain).encode("A WORD")
    assert ChatTokenizer(shouting).token_ends == NOWHERE
    # What it keeps between two calls is not known either.
    assert not ChatTokenizer(shouting).for_threads
    assert ChatTokenizer(plain).for_threads


def test_what_a_tokenizer_stores_about_lengths_is_no_matter(tiny):
    tokenizer = tiny.tokenizer()
    whole = tokenizer.encode("a few words", add_special_tokens=False)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    # Nothing is ever cut, and nothing added.
    assert list(ChatTokenizer(tokenizer).encode("a few words")) == whole
