"""The tokens of a document's prompts, of which the document's own are worked out once.

The prompts of a document differ behind it only, and those of a field nowhere else than in the
document. So what stands before and behind it is encoded when a schema is planned, and the
document, with what it may merge with, once for all fields. A prompt is cut only where a
token is known to end in it (`token_ends`); any other is encoded whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge.scorer.chat import ChatTokenizer

CUT = True
"""Whether prompts are cut at all: for measuring what that brings."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is the same in all prompts of a field, and its tokens.

    Both texts have a character more than their tokens, on the side of the document: a token
    is known to end between two characters, and both are looked up in each prompt.

    Attributes:
        before: What a prompt begins with, and a character more; empty for nothing.
        head: The tokens of `before` without that character.
        behind: A character more, and what a prompt ends with.
        tail: The tokens of `behind` without that character.
    """

    before: str
    head: tuple[int, ...]
    behind: str
    tail: tuple[int, ...]

    def tokens(self, chat: ChatTokenizer, prompt: str) -> tuple[int, ...] | None:
        """Return the tokens of a prompt; None where it is not framed so."""
        start = max(len(self.before) - 1, 0)
        end = len(prompt) - len(self.behind) + 1
        # The template is asked each time: it may do more to a text than to put it somewhere.
        framed = prompt.startswith(self.before) and prompt.endswith(self.behind)
        if not framed or start >= end:
            return None
        return self.head + _tokens_before(chat, prompt[start:end], self.behind[1]) + self.tail


class PromptTokens:
    """Encodes the prompts of a schema's fields.

    Args:
        chat: Tokenizer and chat template of the checkpoint.
        probes: For each of two documents, the prompt of each field.
    """

    def __init__(self, chat: ChatTokenizer, probes: Sequence[Sequence[str]]) -> None:
        self._chat = chat
        of_fields = zip(*probes, strict=True)
        self._frames = [_frame(chat, *prompts) for prompts in of_fields]

    def encode(self, field: int, prompt: str) -> tuple[int, ...]:
        """Return what `ChatTokenizer.encode` does, mostly without encoding all of it.

        Args:
            field: The number of the field.
            prompt: Its prompt.
        """
        frame = self._frames[field] if CUT else None
        tokens = frame.tokens(self._chat, prompt) if frame else None
        return self._chat.encode(prompt) if tokens is None else tokens


def _frame(chat: ChatTokenizer, first: str, second: str) -> _Frame | None:
    """Find what the prompts of two documents have in common and can be cut off."""
    before = common_ending(first[::-1], second[::-1])
    behind = len(first) - common_ending(first, second)
    # Both characters at a cut must be among what is the same.
    places = [found.start() for found in chat.token_ends.finditer(first)]
    starts = [place for place in places if place < before]
    ends = [place for place in places if place > behind]
    if not ends:
        return None
    start, end = starts[-1] if starts else 0, ends[0]
    frame = _Frame(
        before=first[: start + 1] if start else "",
        head=_tokens_before(chat, first[:start], first[start]) if start else (),
        behind=first[end - 1 :],
        tail=chat.encode(first[end:]),
    )
    # What is proved is tried all the same: libraries have faults.
    right = all(frame.tokens(chat, each) == chat.encode(each) for each in (first, second))
    return frame if right else None


def _tokens_before(chat: ChatTokenizer, text: str, character: str) -> tuple[int, ...]:
    """Return the tokens of a text as they are before a character, where a token ends.

    White space at the end of a text may be split in another way than before a letter.
    """
    longer = chat.encode_once(text + character)
    return longer[: len(longer) - len(chat.encode_character(character))]


def common_ending(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many values at their end two rows have in common."""
    ending = 0
    while ending < min(len(first), len(second)) and first[-1 - ending] == second[-1 - ending]:
        ending += 1
    return ending
