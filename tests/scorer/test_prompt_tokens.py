"""Prompts that are encoded in parts have the tokens of the whole, whatever the document is.

Tokenizers of which nothing is known, and templates that do more than insert; the published
ones are in `test_tokenizers.py`. The oracle is each whole prompt, encoded by itself.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.scorer.families import COMBINATIONS, TEXTS, rows_of

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.errors import DocumentError
from weighbridge.scorer.plan import SchemaPlan
from weighbridge.scorer.token_ends import NOWHERE


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
                {
                    "type": "Split",
                    "pattern": {"Regex": r"\s+\p{L}+|\p{L}+|[^\p{L}]+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {**BYTES, "use_regex": False},
            ],
        }
    ),
    "merges over all": spanning,
    "a greedy added token": lambda held: held["added_tokens"][0].update(lstrip=True),
}


@pytest.mark.parametrize("name", CHANGES)
@given(text=TEXTS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_unknown_tokenizers_are_asked_for_whole_prompts(tiny, changes, name, text):
    chat, plans = changes(name)
    assert chat.token_ends == NOWHERE
    for made in plans:
        try:
            rows = [row.tokens for row in made.rows(text).rows]
        except DocumentError:
            continue
        assert rows == rows_of(made, text, chat.encode)


@pytest.fixture(scope="module")
def changes(tiny) -> Callable[[str], tuple[ChatTokenizer, list[SchemaPlan]]]:
    made: dict[str, tuple[ChatTokenizer, list[SchemaPlan]]] = {}

    def of(name: str) -> tuple[ChatTokenizer, list[SchemaPlan]]:
        if name not in made:
            chat = changed(tiny.tokenizer(), CHANGES[name])
            made[name] = chat, plans_of(chat, tiny)
        return made[name]

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


def test_what_is_known_of_the_unchanged_one_is_used(tiny):
    chat = changed(tiny.tokenizer(), lambda _: None)
    # The control of the test above: the changes are what makes it unknown.
    assert chat.token_ends != NOWHERE


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
    for made in plans:
        try:
            rows = [row.tokens for row in made.rows(text).rows]
        except DocumentError:
            continue
        assert rows == rows_of(made, text, chat.encode)


@pytest.fixture(scope="module")
def templates(tiny) -> Callable[[str], tuple[ChatTokenizer, list[SchemaPlan]]]:
    made: dict[str, tuple[ChatTokenizer, list[SchemaPlan]]] = {}

    def of(content: str) -> tuple[ChatTokenizer, list[SchemaPlan]]:
        if content not in made:
            asked = f"({content}) if message.role == 'user' else message.content"
            template = tiny.template.replace("message.content", asked)
            chat = ChatTokenizer(tiny.tokenizer(template))
            made[content] = chat, plans_of(chat, tiny)
        return made[content]

    return of


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
