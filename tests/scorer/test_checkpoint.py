"""Checkpoint folders: who they are, and every way they can be broken."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer import ParallelScorer
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.checkpoint import (
    DEFAULT_MAX_INPUT_TOKENS,
    inspect_checkpoint,
)
from weighbridge.scorer.errors import CheckpointError, ScorerError
from weighbridge.scorer.model_weights import load_model
from weighbridge.scorer.weight_files import safetensors_header

pytestmark = pytest.mark.mlx

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def pristine(tiny, tmp_path_factory) -> Path:
    return tiny.checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "tiny", tie_word_embeddings=False
    )


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "tiny")


def edit_config(**changes: Any) -> Change:
    """Change keys of config.json; None removes one."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def write(name: str, data: str | bytes) -> Change:
    data = data.encode() if isinstance(data, str) else data
    return lambda folder: (folder / name).write_bytes(data)


def append(name: str, data: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + data)


def cut(name: str, keep: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def rewrite_tensors(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Load the weights, change them as a dict of NumPy arrays, and write them back."""

    def rewrite(folder: Path) -> None:
        import mlx.core as mx
        import numpy as np

        path = str(folder / "model.safetensors")

        def run() -> None:
            loaded: Any = mx.load(path)
            arrays = {name: np.array(array) for name, array in loaded.items()}
            change(arrays)
            mx.save_safetensors(path, {name: mx.array(array) for name, array in arrays.items()})

        on_mlx_thread(run)

    return rewrite


def test_description(folder):
    info = inspect_checkpoint(folder, model_id="org/tiny", revision="abc")
    # All from config.json and the header of the weights, which are never loaded.
    assert (info.architecture, info.dtype, info.quantization) == ("llama", "float32", None)
    assert (info.model_id, info.revision, info.name) == ("org/tiny", "abc", "org/tiny")
    assert (info.contract, info.adapter_sha256) == (None, None)
    # Nameless, it is called by its folder, whichever way the path is written.
    assert inspect_checkpoint(f"{folder}/../tiny/").name == "tiny"
    assert inspect_checkpoint(f"{folder}/../tiny/").folder == folder.resolve()


def test_ready_json_names_what_the_caller_does_not(folder):
    ready = {"model": "org/ready", "revision": "r1", "adapter_sha256": "AB" * 32}
    (folder / "READY.json").write_text(json.dumps(ready))
    info = inspect_checkpoint(folder)
    assert (info.model_id, info.revision, info.adapter_sha256) == ("org/ready", "r1", "ab" * 32)


def test_architecture_of_a_nested_configuration(folder):
    # A vision-language folder names its language model beside it; mlx-lm goes by the outer.
    edit_config(model_type="qwen3_5", text_config={"model_type": "inner"})(folder)
    assert inspect_checkpoint(folder).architecture == "qwen3_5"
    edit_config(model_type=None)(folder)
    with pytest.raises(CheckpointError, match="must name a model_type, got null"):
        inspect_checkpoint(folder)


# --- the fingerprint ---


@pytest.mark.parametrize(
    "change",
    [
        edit_config(rms_norm_eps=1e-6),
        append("tokenizer.json", b"\n"),
        write("chat_template.jinja", "{{ messages }}"),
        write("special_tokens_map.json", "{}"),
        write("system_prompt.txt", "Judge."),
        *(
            write(name, "{}")
            for name in (
                *("tekken.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
                *("qwen.tiktoken", "added_tokens.json", "tokenizer.model.v3", "tokenizer.4.json"),
                *("chat_template_own.jinja", "chat_template.json", "hf_quant_config.json"),
            )
        ),
        rewrite_tensors(lambda arrays: arrays["model.norm.weight"].__setitem__(0, 2.0)),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
        lambda folder: (folder / "model.safetensors").rename(folder / "model-1.safetensors"),
    ],
)
def test_fingerprint_changes_with_what_a_decision_depends_on(folder, change):
    before = inspect_checkpoint(folder).fingerprint
    change(folder)
    # Otherwise answers of another model would be taken from the store.
    assert inspect_checkpoint(folder).fingerprint != before


@pytest.mark.parametrize(
    "change",
    [
        write("READY.json", '{"model": "org/ready"}'),
        write("README.md", "# A model"),
        write("generation_config.json", "{}"),
        write("tokenizer.py", "code that is never run"),
        write("training_args.bin", "a pickle"),
        lambda folder: os.utime(folder / "model.safetensors", (1, 1)),
        lambda folder: (folder / "logs").mkdir(),
    ],
)
def test_fingerprint_stays_with_what_it_does_not(folder, change):
    before = inspect_checkpoint(folder).fingerprint
    change(folder)
    # A temperature is applied to a decision later, and the rest is never read.
    assert inspect_checkpoint(folder).fingerprint == before


def test_fingerprint_is_that_of_the_files_and_not_of_their_place(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "elsewhere")
    # Two people with the same files share their decisions.
    assert inspect_checkpoint(other).fingerprint == inspect_checkpoint(folder).fingerprint


# --- broken folders ---


@pytest.mark.parametrize("name", ["", "gone", "~nobody-by-this-name/x", "a\0b"])
def test_a_folder_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = name or str(tmp_path / "file")
    (tmp_path / "file").write_text("no folder")
    # Nothing there, a file, a home of nobody, and what no path can be.
    with pytest.raises(CheckpointError, match="must be an existing folder") as caught:
        inspect_checkpoint(given)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "must be an existing folder"),
        (
            lambda folder: (folder / "config.json").unlink(),
            "must hold config.json, got weights alone",
        ),
        (write("config.json", "{"), "config.json must be readable JSON"),
        (write("config.json", b"\xff\xfe"), "config.json must be readable JSON"),
        (write("config.json", "[" * 100_000), "config.json must be readable JSON"),
        (write("config.json", "[1]"), "config.json must be a JSON object, got list"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"must hold model\*.safetensors"),
        (cut("model.safetensors", 0), "whole safetensors file, got 0 bytes"),
        (cut("model.safetensors", 7), "whole safetensors file, got 7 bytes"),
        (cut("model.safetensors", 100), "whole safetensors file, got 100 bytes"),
        (cut("model.safetensors", -1), "whole safetensors file"),
        (append("model.safetensors", b"\0"), "whole safetensors file"),
        (write("model.safetensors", b"GGUF" + bytes(100)), "whole safetensors file"),
        (write("model.safetensors", safetensors([])), "whole safetensors file"),
        (write("model.safetensors", safetensors(b"[" * 100_000)), "whole safetensors file"),
        (write("model.safetensors", safetensors({"a": 1})), "whole safetensors file"),
        (
            write("model.safetensors", safetensors({"a": {"data_offsets": [0, 0]}})),
            "whole safetensors file",
        ),
        (
            write("model.safetensors", safetensors({"a": {"dtype": [], "data_offsets": [0, 0]}})),
            "whole safetensors file",
        ),
        (
            lambda folder: (folder / "model-a.safetensors").mkdir(),
            "model-a.safetensors must be a readable file",
        ),
        (
            lambda folder: (folder / "model-a.safetensors").symlink_to(folder / "gone"),
            "model-a.safetensors must be a readable file, got: No such file",
        ),
        # Loaded without it, the base would answer under the adapter's name.
        (write("adapters.safetensors", safetensors({})), "must be merged or name its adapter"),
        (write("adapter_model.safetensors", safetensors({})), "must be merged or name its"),
        (write("adapter_model.bin", b""), "must be merged or name its adapter"),
        (edit_config(quantization="4bit"), "packed weights must be of a kind that is read"),
        (edit_config(quantization={}), "got None bits"),
        (write("READY.json", "{"), "READY.json must be JSON"),
        (write("schema_config.json", "{}"), "must name a known task"),
    ],
)
def test_a_broken_folder_is_refused_before_loading(folder, change, message):
    change(folder)
    # A ScorerError with a hint, never the error of a library.
    with pytest.raises(ScorerError, match=message) as caught:
        inspect_checkpoint(folder)
    assert caught.value.hint


def delete(name: str) -> Change:
    return rewrite_tensors(lambda arrays: arrays.pop(name))


def shorten(name: str) -> Change:
    return rewrite_tensors(lambda arrays: arrays.__setitem__(name, arrays[name][:-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            delete("model.layers.1.mlp.up_proj.weight"),
            "Missing 1 parameters: model.layers.1.mlp.up_proj.weight",
        ),
        (delete("lm_head.weight"), "Missing 1 parameters: lm_head.weight"),
        (shorten("model.norm.weight"), "Expected shape"),
        (shorten("lm_head.weight"), "Expected shape"),
        (rewrite_tensors(lambda arrays: arrays.update(extra=arrays["lm_head.weight"])), "extra"),
        (edit_config(model_type="no_such_model"), "no_such_model not supported"),
        (edit_config(model_type="cache"), "must load with mlx-lm"),
        (edit_config(model_type="base"), "must load with mlx-lm"),
        (edit_config(model_type="../evil"), "not supported"),
        (edit_config(model_type=["llama"]), "unhashable"),
        (edit_config(model_type=None), "KeyError: 'model_type'"),
        (edit_config(model_file="evil.py"), "custom module"),
        (edit_config(hidden_size=None), "hidden_size"),
        (edit_config(hidden_size="64"), "must load with mlx-lm"),
        (edit_config(num_attention_heads=0), "must load with mlx-lm"),
        (edit_config(vocab_size=0), "must load with mlx-lm"),
        (edit_config(num_hidden_layers=0), "must load with mlx-lm"),
        (edit_config(rope_scaling={"rope_type": "unheard of"}), "must load with mlx-lm"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
            "No safetensors found",
        ),
    ],
)
def test_a_broken_folder_is_refused_at_loading(folder, change, message):
    change(folder)
    (folder / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')")
    # Whatever mlx-lm makes of it, the caller hears of the checkpoint, and what to do.
    with pytest.raises(CheckpointError, match=message) as caught:
        on_mlx_thread(load_model, folder, "float32")
    assert "must load with mlx-lm, got " in caught.value.message
    assert caught.value.hint


def test_a_missing_shard_is_refused(folder):
    import mlx.core as mx

    def split() -> None:
        loaded: Any = mx.load(str(folder / "model.safetensors"))
        names = sorted(loaded)
        for number, part in enumerate((names[::2], names[1::2]), start=1):
            path = folder / f"model-0000{number}-of-00002.safetensors"
            mx.save_safetensors(str(path), {name: loaded[name] for name in part})

    on_mlx_thread(split)
    (folder / "model.safetensors").unlink()
    assert on_mlx_thread(lambda: type(load_model(folder, "float32")).__name__) == "Model"
    (folder / "model-00002-of-00002.safetensors").unlink()
    # Half of the weights would load without a word if nobody compared.
    with pytest.raises(CheckpointError, match=r"Missing .* parameters"):
        on_mlx_thread(load_model, folder, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_held_in_the_compute_dtype(folder, dtype):
    def dtypes() -> set[str]:
        from mlx.utils import tree_flatten

        leaves: Any = tree_flatten(load_model(folder, dtype).parameters())
        return {str(array.dtype) for _, array in leaves}

    # On CPU only float32 is fast; on Metal bfloat16 halves the memory.
    assert on_mlx_thread(dtypes) == {f"mlx.core.{dtype}"}


def test_header_of_a_whole_file(folder):
    header = safetensors_header(folder / "model.safetensors")
    # The untied head of the tiny model: a row of 64 for each token.
    assert header["lm_head.weight"]["dtype"] == "F32"
    assert header["lm_head.weight"]["shape"][1] == 64


def test_the_limit_stays_within_the_context(folder):
    edit_config(max_position_embeddings=512)(folder)
    # Beyond its positions a model answers without a word of warning.
    assert inspect_checkpoint(folder).max_input_tokens == 512
    with pytest.raises(ScorerError, match=r"at most the 512 positions of .*, got 513"):
        ParallelScorer(folder, max_input_tokens=513)
    assert ParallelScorer(folder, max_input_tokens=100).max_input_tokens == 100
    edit_config(max_position_embeddings=10**6)(folder)
    assert inspect_checkpoint(folder).max_input_tokens == DEFAULT_MAX_INPUT_TOKENS
