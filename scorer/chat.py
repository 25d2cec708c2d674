"""A checkpoint's tokenizer and chat template, with data kept from becoming control."""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from weighbridge.scorer.errors import CheckpointError, DocumentError

Message = dict[str, str]


class ChatTokenizer:
    """Renders chats to text and text to tokens. Touches no weights and no MLX.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise CheckpointError(
                "a checkpoint must have a chat template, got a tokenizer without one",
                hint="use an instruct model, or put its chat_template.jinja into the folder",
            )
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """Load the tokenizer of a checkpoint folder.

        Raises:
            CheckpointError: The folder holds no tokenizer that can be read.
        """
        from transformers import AutoTokenizer

        try:
            # Unset, trust would be asked for on stdin, where a "y" may lie.
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the tokenizers library raises bare ones
            raise CheckpointError(
                f"a checkpoint must hold a readable tokenizer, got: {first_line(error)}",
                hint=f"check tokenizer.json and tokenizer_config.json in {folder}",
            ) from error
        return cls(tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a rendered prompt; nothing is added at its ends."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode_with_ends(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what `encode` does, and behind which character of the text each token ends.

        Raises:
            CheckpointError: The tokenizer does not keep track of that.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            raise CheckpointError(
                "a tokenizer must know where its tokens stand in a text, and this one does not",
                hint="use a checkpoint with a tokenizer.json",
            )
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return tuple(encoded["input_ids"]), tuple(end for _, end in encoded["offset_mapping"])

    def token_text(self, token: int) -> str:
        """Return the text of one token; of a part of a character, a replacement character."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def render(self, messages: Sequence[Message]) -> str:
        """Render a chat up to and including the generation prompt.

        A template without a system role gets the system text first in the user
        message. Thinking is switched off where the template knows the switch.
        """
        if not self._system_role and messages[0]["role"] == "system":
            system, user, *rest = messages
            merged = f"{system['content']}\n\n{user['content']}"
            messages = [{"role": "user", "content": merged}, *rest]
        return self._apply(messages, generate=True)

    def tail(self, prompt: str) -> str:
        """Return the end of a prompt from its last control token on.

        Text on either side of a control token is tokenized apart, so the tail has
        the same tokens alone as behind the rest of the prompt.
        """
        starts = [found.start() for found in self._control_pattern.finditer(prompt)]
        return prompt[starts[-1] :] if starts else prompt

    def as_data(self, text: str) -> str:
        r"""Rewrite control tokens inside data so that they stay data.

        The first character of each is written as its JSON escape: `<|im_end|>`
        becomes `\u003c|im_end|>`. All other text is left as it is.
        """
        return self._control_pattern.sub(
            lambda found: f"\\u{ord(found[0][0]):04x}{found[0][1:]}", text
        )

    def control_count(self, tokens: Sequence[int]) -> int:
        """Count the control tokens in a prompt."""
        return sum(token in self.control_tokens for token in tokens)

    def check_control_count(self, tokens: Sequence[int], expected: int) -> None:
        """Refuse a prompt in which a document made control tokens of its own.

        Raises:
            DocumentError: `document.control_tokens`.
        """
        count = self.control_count(tokens)
        if count != expected:
            raise DocumentError(
                f"a document must add no control tokens to the prompt, got {count - expected} "
                "from text that this tokenizer normalises into them",
                code="document.control_tokens",
            )

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        """The texts of all tokens, as the tokenizer stores them."""
        return frozenset(self._tokenizer.get_vocab())

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        """Ids of all added tokens that hold more than white space: markers, tags."""
        return frozenset(self._control_texts.values())

    @cached_property
    def end_of_turn(self) -> int:
        """The control token that ends the model's answer."""
        marker = "answer"
        rendered = self._apply(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}],
            generate=False,
        )
        _, found, tail = rendered.rpartition(marker)
        ends = [token for token in self.encode(tail) if token in self.control_tokens]
        if not found or not ends:
            raise CheckpointError(
                "a chat template must show an answer and end it with a control token, got "
                f"{found + tail!r}",
                hint="use an instruct model with its own chat template",
            )
        return ends[0]

    @cached_property
    def _control_texts(self) -> dict[str, int]:
        # Gemma adds runs of line breaks as tokens; those are ordinary text.
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        return {text: token for text, token in added.items() if text.strip()}

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        texts = sorted(self._control_texts, key=len, reverse=True)
        # A pattern that never matches stands in for "no added tokens".
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _system_role(self) -> bool:
        """Whether the template shows a system message at all."""
        probe = "system probe"
        try:
            rendered = self._apply(
                [{"role": "system", "content": probe}, {"role": "user", "content": "question"}],
                generate=True,
            )
        except CheckpointError:
            return False
        return probe in rendered

    def _apply(self, messages: Sequence[Message], *, generate: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=generate,
                enable_thinking=False,
            )
        except Exception as error:  # a template is foreign code
            raise CheckpointError(
                f"a chat template must render a chat, got: {first_line(error)}",
                hint="check the chat template of the checkpoint",
            ) from error


def first_line(error: Exception) -> str:
    """Return the first line of a foreign error's text, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
