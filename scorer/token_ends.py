r"""Where a token is known to end, whatever stands around.

Proved, not tried: a document may begin and end with anything. A tokenizer of which nothing is
known is asked for whole prompts.

Two kinds of places are looked at: behind a line break and before an ASCII letter, and behind
one of `.,:?` and before a space. The proof, for such a place `p`:

- No added token spans `p`, and none looks at its neighbours.
- The normalizer joins nothing over `p`: neither character composes with one before it.
- Every rule of splitting is one of those below. None of their matches spans `p`: letters
  follow letters, marks or one character that is no line break; line breaks are followed by
  white space alone; a space begins a match or follows white space. So one match ends at `p`
  and another begins. From there on a rule sees only what is behind `p`, as none looks back;
  up to there it looks at most one character beyond (`\s+(?!\S)`), so the character behind `p`
  is all of the context that counts.
- Rules see the text itself: bytes are written as letters behind the first that parts all of it.
- Without such a rule byte pairs are merged over all of a text. What is merged is in the
  vocabulary, and if nothing there holds the two characters, no merge spans `p`; those on one
  side of it do not depend on the other.
"""

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

_LINE = r"(?<=\n)(?=[A-Za-z])"
_SPACE = r"(?<=[.,:?])(?= )"
NOWHERE = re.compile(r"(?!)")
"""Matches nothing."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WHOLE = frozenset(
    {
        # Qwen 2 and 3
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|{_SPACES}",
        # Qwen 3.5
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # Llama 3, as cl100k
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # DeepSeek 3, with its line breaks as they are
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    }
)
"""Rules that part all of a text, letters from what is before them among it."""
_PARTLY = frozenset({r"\p{N}", r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})
"""Rules whose matches hold neither line breaks nor ASCII letters."""

_COMPOSED = {"type": "NFC"}
_MARK = "\u2581"
_MARKED = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
_AT_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
"""Of Gemma: splits nothing, as spaces are marked before."""


def known_token_ends(tokenizer: Any, vocabulary: Callable[[], Iterable[str]]) -> re.Pattern[str]:
    """Return what matches, without a character, places of a text where a token ends.

    A match has a character on either side. Nothing matches where nothing is known.

    Args:
        tokenizer: One of the tokenizers library.
        vocabulary: Gives the texts of its tokens, as it stores them; called only if need be.
    """
    texts: list[str] | None = None
    with suppress(Exception):  # parts written in Python have no state to read
        texts = _token_texts(tokenizer, vocabulary)
    if texts is None:
        return NOWHERE
    # Between two of them stands what is in no place.
    together = "\0".join(texts).replace(_MARK, " ")
    places = [place for place in (_LINE, _SPACE) if not re.search(place, together)]
    return re.compile("|".join(places)) if places else NOWHERE


def _token_texts(tokenizer: Any, vocabulary: Callable[[], Iterable[str]]) -> list[str] | None:
    """Return the texts of all tokens that might span a place; None where others might."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    model = tokenizer.model
    if any(each.lstrip or each.rstrip or each.single_word for each in added):
        return None
    if type(model).__name__ != "BPE" or model.dropout:
        return None
    texts = [each.content for each in added]
    normalizers = _parts(tokenizer.normalizer, "normalizers")
    splits = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    whole = [_splits_whole(each) for each in splits]
    if any(whole):
        first = whole.index(True)
        # Bytes are written as letters, line breaks too, which a rule behind would not part.
        known = all(map(_splits_partly, splits[:first])) and all(
            _splits_whole(each) or _splits_partly(each) or _writes_bytes(each)
            for each in splits[first:]
        )
        return texts if known and all(each == _COMPOSED for each in normalizers) else None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None  # a character is spelled by where in a text it stands
    tokens = frozenset(vocabulary())
    merges = normalizers == [_MARKED] and splits in ([], [_AT_SPACES]) and not model.ignore_merges
    # A character without a token of its own is spelled in bytes, which are written otherwise.
    spelled = tokens.issuperset(f"\n.,:?{_MARK}{string.ascii_letters}")
    return [*texts, *tokens] if merges and spelled else None


def _parts(component: Any, name: str) -> list[Mapping[str, Any]]:
    """Return what a sequence consists of, or what is none by itself."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state[name]) if state["type"] == "Sequence" else [state]


def _splits_whole(rule: Mapping[str, Any]) -> bool:
    if rule["type"] == "ByteLevel":  # with the rule of GPT-2: letters behind one space at most
        return rule["use_regex"] and not rule["add_prefix_space"]
    return _pattern(rule) in _WHOLE


def _splits_partly(rule: Mapping[str, Any]) -> bool:
    return rule["type"] == "Digits" or _pattern(rule) in _PARTLY


def _writes_bytes(rule: Mapping[str, Any]) -> bool:
    return rule["type"] == "ByteLevel" and not rule["add_prefix_space"]


def _pattern(rule: Mapping[str, Any]) -> str | None:
    """Return the expression of a rule whose matches and gaps all become parts."""
    if rule["type"] != "Split" or rule["behavior"] != "Isolated" or rule["invert"]:
        return None
    return rule["pattern"].get("Regex")
