"""A checkpoint's tokenizer and chat template, with data kept from becoming control."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from weighbridge.scorer import bare
from weighbridge.scorer.bare import bare_tokenizer
from weighbridge.scorer.errors import CheckpointError, DocumentError, quoted
from weighbridge.scorer.token_ends import NOWHERE, known_token_ends

Message = dict[str, str]

CHAT_TEMPLATE_JSON = "chat_template.json"
"""Where older models that also see keep their template, as an object with one key."""

_OPENED = re.compile(
    r"<(?P<tag>[\w:]*(?:think|thought|reason)\w*)>|(?P<square>\[THINK\])|(?P<kimi>◁think▷)"
    r"|(?P<cohere><\|START_THINKING\|>)",
    re.IGNORECASE,
)
_CLOSED = {"square": "[/THINK]", "kimi": "◁/think▷", "cohere": "<|END_THINKING|>"}
_UNKNOWN_THOUGHT = re.compile(
    r"[<\[◁](?![^\s>\]▷]*(?:/|end|no_?think))[^\s>\]▷]*(?:think|thought|reason)[^\s>\]▷]*[>\]▷]\s*\Z",
    re.IGNORECASE,
)

_SPLITS = (
    "It's 1234567 o'CLOCK, they'll say:  (a+b)*2 == c_d; x-y/z\n\n \t«Ça va» e\u0301 क्षि "
    "東京は晴れ Привет שלום مرحبا ﬁ ① \u00a0½ ▁ \U0001f469\u200d\U0001f469 CamelCaseHTML "
    "http://a.b/?c=d&e#f\r\n"
)
"""What the rules of tokenizers differ in: digits, marks, letter case, spaces, contractions."""

_NO_THOUGHT = {"enable_thinking": False, "thinking": False}
"""The switches of templates that know one; the others ignore them."""

_ONE_DAY = {
    **{"%Y": "2026", "%y": "26", "%m": "01", "%B": "January", "%b": "Jan"},
    **{"%d": "01", "%e": "1", "%-d": "1", "%-m": "1", "%j": "001", "%A": "Thursday", "%a": "Thu"},
    **{"%H": "12", "%I": "12", "%M": "00", "%S": "00", "%p": "PM"},
}
_CLOCK = "".join(
    (
        "{%- macro strftime_now(form) -%}{{ form",
        *(f" | replace({each!r}, {text!r})" for each, text in _ONE_DAY.items()),
        " }}{%- endmacro -%}",
    )
)
"""Stands before a template that asks for the time: with the date of today in the prompt, the
same document would be another question tomorrow, and its stored answer would not say so."""


class ChatTokenizer:
    """Renders chats to text and text to tokens. Touches no weights and no MLX.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise no_chat_template()
        self._tokenizer = tokenizer
        self._backend = bare_tokenizer(tokenizer)
        # All fields, and all orders of the choices, ask for the same document in turn.
        self.encode_once = lru_cache(maxsize=1)(self.encode)
        self.encode_character = cache(self.encode)

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """Load the tokenizer of a checkpoint folder.

        Raises:
            CheckpointError: The folder holds no tokenizer that can be read.
        """
        from transformers import AutoTokenizer

        try:
            # Unset, trust would be asked for on stdin, where a "y" may lie.
            tokenizer = _as_stored(
                AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                ),
                folder,
            )
            if not tokenizer.chat_template and (folder / CHAT_TEMPLATE_JSON).is_file():
                # Beside older models that also see; the tokenizer itself does not look for it.
                stored = json.loads((folder / CHAT_TEMPLATE_JSON).read_text(encoding="utf-8"))
                tokenizer.chat_template = stored.get("chat_template")
        except Exception as error:  # the tokenizers library raises bare ones
            raise CheckpointError(
                f"a checkpoint must hold a readable tokenizer, got: {first_line(error)}",
                hint=f"check tokenizer.json and tokenizer_config.json in {folder}",
            ) from error
        return cls(tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a rendered prompt; nothing is added at its ends."""
        if bare.BARE and self._backend is not None:
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            return tuple(encoded.ids)
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
        message. The answer begins right behind it: thinking is switched off where the
        template knows a switch, and what it opens all the same is closed.

        Raises:
            CheckpointError: The template cannot render the chat, or opens a thought
                that nobody knows how to close.
        """
        if not self._system_role and messages[0]["role"] == "system":
            system, user, *rest = messages
            merged = f"{system['content']}\n\n{user['content']}"
            messages = [{"role": "user", "content": merged}, *rest]
        return self._apply(messages, generate=True) + self._answer_opening

    def tail(self, prompt: str) -> str:
        """Return the end of a prompt from its last control token on.

        Text on either side of a control token is tokenized apart, so the tail has
        the same tokens alone as behind the rest of the prompt.
        """
        start = end = 0
        for found in self._control_first.finditer(prompt):
            if found.start() >= end and (length := self._control_length(prompt, found.start())):
                start, end = found.start(), found.start() + length
        return prompt[start:]

    def as_data(self, text: str) -> str:
        r"""Rewrite control tokens inside data so that they stay data.

        The first character of each is written as its JSON escape: `<|im_end|>`
        becomes `\u003c|im_end|>`, and so does one that begins inside another. All other
        text is left as it is.
        """

        def data(found: re.Match[str]) -> str:
            control = self._control_length(text, found.start())
            return f"\\u{ord(found[0]):04x}" if control else found[0]

        return self._control_first.sub(data, text)

    def control_count(self, tokens: Sequence[int]) -> int:
        """Count the control tokens in a prompt."""
        return sum(map(self.control_tokens.__contains__, tokens))

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

    @property
    def for_threads(self) -> bool:
        """Whether several threads may encode at a time: the library knows no state."""
        return self._backend is not None

    @cached_property
    def token_ends(self) -> re.Pattern[str]:
        """What matches the places in a text where a token is known to end."""
        if self._backend is None:
            return NOWHERE
        return known_token_ends(self._backend, self._tokenizer.get_vocab)

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
        # Gemma adds runs of line breaks and of spaces, written as U+2581, as tokens; those
        # are ordinary text.
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        return {text: token for text, token in added.items() if text.replace("\u2581", " ").strip()}

    @cached_property
    def _control_first(self) -> re.Pattern[str]:
        """A character that some control token begins with."""
        firsts = "".join(sorted({text[0] for text in self._control_texts}))
        # A pattern that never matches stands in for "no added tokens".
        return re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    @cached_property
    def _control_lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(text) for text in self._control_texts}, reverse=True))

    def _control_length(self, text: str, at: int) -> int:
        """Return the length of the longest control token that stands in a text, or 0.

        Looked up by length: Gemma has 6,000 of them, and a pattern of that many
        alternatives took half a second for a document of a page.
        """
        for length in self._control_lengths:
            if text[at : at + length] in self._control_texts:
                return length
        return 0

    @cached_property
    def _answer_opening(self) -> str:
        """What a template leaves out between its generation prompt and an answer.

        Without it the next token would not be the answer: a model that is to think first
        closes its thought, and one with channels names the channel.
        """
        question, answer = "question", "answer"
        asked = [{"role": "user", "content": question}]
        generated = self._apply(asked, generate=True)
        with suppress(CheckpointError):
            answered = self._apply(
                [*asked, {"role": "assistant", "content": answer}], generate=False
            )
            shown, _, _ = answered.rpartition(answer)
            left_out = shown.removeprefix(generated)
            if left_out != shown and self.control_count(self.encode(left_out)):
                return left_out
        return _closing(generated.rpartition(question)[2])

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

    @cached_property
    def _template(self) -> str | None:
        """The template with its clock stopped; None for the tokenizer's own one."""
        template: str = self._tokenizer.get_chat_template()
        return _CLOCK + template if "strftime_now" in template else None

    def _apply(self, messages: Sequence[Message], *, generate: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=generate,
                chat_template=self._template,
                **_NO_THOUGHT,
            )
        except Exception as error:  # a template is foreign code
            raise CheckpointError(
                f"a chat template must render a chat, got: {first_line(error)}",
                hint="check the chat template of the checkpoint",
            ) from error


def _as_stored(tokenizer: Any, folder: Path) -> Any:
    """Return a tokenizer that splits a text as its tokenizer.json says.

    transformers 5 writes the rules anew for the class that a configuration names: a
    tokenizer of Qwen3.5 that calls itself `Qwen2Tokenizer` then splits as Qwen2 did, and the
    model sees other tokens than it was trained on.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = folder / "tokenizer.json"
    if not file.is_file():
        return tokenizer
    stored = Tokenizer.from_file(str(file))
    stored.no_truncation()
    if stored.encode(_SPLITS, add_special_tokens=False).ids == tokenizer.encode(
        _SPLITS, add_special_tokens=False
    ):
        return tokenizer
    named = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: getattr(tokenizer, name, None) for name in named}
    return PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, **{name: text for name, text in tokens.items() if text}
    )


def _closing(opening: str) -> str:
    """Return what closes the thought that a generation prompt leaves open; mostly nothing.

    Raises:
        CheckpointError: It ends with something like a thought, of unknown form.
    """
    found = [*_OPENED.finditer(opening)]
    if found:
        last = found[-1]
        close = _CLOSED.get(last.lastgroup or "") or f"</{last['tag']}>"
        behind = opening[last.end() :]
        if close.lower() in behind.lower():
            return ""
        # In the form that templates with a switch use: an empty thought.
        return f"\n{close}\n\n" if "\n" in behind else close
    if unknown := _UNKNOWN_THOUGHT.search(opening):
        raise CheckpointError(
            "an answer must not begin inside a thought, got a chat template that opens one with "
            f"{unknown[0].strip()!r}, and how that is closed is not known",
            hint="use a chat template with a switch enable_thinking, or one without thinking",
        )
    return ""


def no_chat_template(folder: Path | None = None) -> CheckpointError:
    """Describe a checkpoint without a chat template, mostly the base of an instruct model."""
    where = f" in {folder}" if folder else ""
    return CheckpointError(
        f"a checkpoint must have a chat template, got a tokenizer without one{where}",
        hint="use an instruct model, or put its chat_template.jinja into the folder",
    )


def first_line(error: Exception) -> str:
    """Return the first line of a foreign error's text, at most 300 characters, or its type."""
    if isinstance(error, KeyError) and error.args:
        return f"a file without the key {quoted(str(error.args[0]))}"
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    return line if len(line) <= 300 else f"{line[:299]}…"
