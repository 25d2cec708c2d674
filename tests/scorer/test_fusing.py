"""Merged folders: what base and adapter score, whole or not there at all."""

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scorer.adapter_folders import draw, write_mlx, write_peft

from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.checkpoint import inspect_checkpoint
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.fusing import check_not_merged, fuse_checkpoint
from weighbridge.scorer.model_weights import load_model, prompt_logits
from weighbridge.scorer.ready import read_ready, record_temperature

pytestmark = pytest.mark.mlx

TOKENS = (5, 17, 60, 3, 88, 41)
SIZES = {"hidden_size": 64, "intermediate_size": 64}
Q = "model.layers.0.self_attn.q_proj"
PRODUCTS = draw({Q: (64, 64)})
REVISION = "0123456789abcdef0123456789abcdef01234567"
TASK = "schema_candidate_classification_v2"


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("base"), **SIZES)


@pytest.fixture
def base(plain, tmp_path) -> Path:
    """Copy the checkpoint, so that a test may add to it."""
    folder = tmp_path / "base"
    folder.mkdir()
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def logits(folder: Path, adapter: Path | None = None, dtype: str = "float32") -> np.ndarray:
    read = read_adapter(adapter) if adapter else None
    return on_mlx_thread(lambda: prompt_logits(load_model(folder, dtype, adapter=read), TOKENS))


def fuse(base: Path, adapter: Path, out: Path, **options: Any) -> Path:
    info = inspect_checkpoint(
        base, adapter=adapter, model_id="org/base", revision=REVISION, accept_prompt=True
    )
    return fuse_checkpoint(info, out, **options)


def weight_types(folder: Path) -> set[str]:
    from weighbridge.scorer.weight_files import safetensors_header

    found: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        header: Mapping[str, Any] = safetensors_header(file)
        found |= {each["dtype"] for name, each in header.items() if name != "__metadata__"}
    return found


@pytest.mark.parametrize("write", [write_mlx, write_peft])
def test_a_merged_folder_scores_as_base_and_adapter(base, tmp_path, write):
    adapter = write(tmp_path / "adapter", PRODUCTS)
    said: list[str] = []
    out = fuse(base, adapter, tmp_path / "deep" / "merged", progress=said.append)
    assert out == tmp_path / "deep" / "merged"
    assert np.array_equal(logits(out), logits(base, adapter))
    assert np.abs(logits(out) - logits(base)).max() > 1e-2
    assert len(said) == 3
    assert "rank 3" in said[0]
    # Nothing else is left behind.
    assert [path.name for path in out.parent.iterdir()] == ["merged"]


def test_ready_says_what_was_merged(base, tmp_path):
    adapter = write_peft(tmp_path / "adapter", PRODUCTS)
    (base / "system_prompt.txt").write_text("a trained text")
    (base / "notes.py").write_text("code")
    (base / "READY.json").write_text('{"model": "org/older"}')
    record_temperature(base, 1.4, fitted_on="triage.csv", metrics={}, fingerprint="a" * 64)
    out = fuse(base, adapter, tmp_path / "merged")
    ready: Any = json.loads((out / "READY.json").read_text())
    weights = out / "model.safetensors"
    assert ready["adapter_sha256"] == hash_of(adapter / "adapter_model.safetensors")
    assert ready["base_model"] == "org/base"
    assert ready["base_revision"] == REVISION
    assert ready["weight_sha256"] == {"model.safetensors": hash_of(weights)}
    assert ready["prompt_sha256"] == sha256(b"a trained text").hexdigest()
    assert ready["precision"] == "float32"
    assert set(ready["versions"]) == {"weighbridge", "mlx", "mlx-lm"}
    # A temperature was fitted on the weights before.
    assert "weighbridge" not in ready
    assert "model" not in ready
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "system_prompt.txt" in names
    assert "notes.py" not in names
    assert read_ready(out).adapter_sha256 == ready["adapter_sha256"]


def hash_of(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def test_a_merged_folder_is_a_checkpoint(plain, tmp_path):
    adapter = write_mlx(tmp_path / "adapter", PRODUCTS)
    info = inspect_checkpoint(plain, adapter=adapter, model_id="org/base")
    out = fuse_checkpoint(info, tmp_path / "merged")
    merged = inspect_checkpoint(out)
    assert merged.adapter_sha256 == hash_of(adapter / "adapters.safetensors")
    assert merged.dtype == info.dtype == "float32"
    assert merged.fingerprint != info.fingerprint
    with pytest.raises(CheckpointError, match="is in the weights already"):
        check_not_merged(out, read_adapter(adapter))
    check_not_merged(plain, read_adapter(adapter))
    with pytest.raises(CheckpointError, match="must have an adapter"):
        fuse_checkpoint(merged, tmp_path / "again")


def test_the_prompt_of_the_adapter_beats_that_of_the_base(base, tmp_path):
    adapter = write_peft(tmp_path / "adapter", PRODUCTS)
    (base / "schema_config.json").write_text(json.dumps({"task": TASK, "max_length": 99}))
    (base / "system_prompt.txt").write_text("older")
    newer = {"task": TASK, "wide_system_prompt": "newer"}
    (adapter / "schema_config.json").write_text(json.dumps(newer))
    out = fuse(base, adapter, tmp_path / "merged")
    assert json.loads((out / "schema_config.json").read_text()) == newer
    assert not (out / "system_prompt.txt").exists()
    ready: Any = json.loads((out / "READY.json").read_text())
    assert ready["prompt_sha256"] == sha256(b"newer").hexdigest()


def test_a_packed_base_becomes_plain(base, tmp_path):
    def pack() -> None:
        from mlx_lm.utils import quantize_model, save_config, save_model

        config = json.loads((base / "config.json").read_text())
        model, config = quantize_model(load_model(base, "float32"), config, 32, 8)
        (base / "model.safetensors").unlink()
        save_model(base, model)
        save_config(config, base / "config.json")

    on_mlx_thread(pack)
    adapter = write_mlx(tmp_path / "adapter", PRODUCTS)
    said: list[str] = []
    out = fuse(base, adapter, tmp_path / "merged", progress=said.append)
    assert np.abs(logits(out) - logits(base, adapter)).max() < 1e-4
    config = json.loads((out / "config.json").read_text())
    assert "quantization" not in config
    assert "quantization_config" not in config
    assert weight_types(out) == {"F32"}
    assert "the merged folder holds plain float32" in said[-1]
    ready: Any = json.loads((out / "READY.json").read_text())
    assert ready["base_quantization"] == "8-bit affine, groups of 32"


def test_a_dtype_of_its_own(base, tmp_path):
    adapter = write_mlx(tmp_path / "adapter", PRODUCTS)
    out = fuse(base, adapter, tmp_path / "merged", dtype="bfloat16")
    assert weight_types(out) == {"BF16"}
    # In its own dtype it scores what base and adapter score in that dtype.
    assert np.array_equal(logits(out, dtype="bfloat16"), logits(base, adapter, "bfloat16"))
    with pytest.raises(CheckpointError, match="dtype of weights must be one of"):
        fuse(base, adapter, tmp_path / "other", dtype="int8")


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "gemma3_text"])
def test_an_untied_head_is_written_as_such(tiny, tmp_path, architecture):
    folder = tiny.checkpoint(tmp_path / "base", architecture=architecture)
    config = json.loads((folder / "config.json").read_text())
    module = "model.embed_tokens"
    products = draw({module: (config["vocab_size"], config["hidden_size"])})
    adapter = write_peft(tmp_path / "adapter", products, embeddings=(module,))
    out = fuse(folder, adapter, tmp_path / "merged")
    assert np.array_equal(logits(out), logits(folder, adapter))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_vision_language_base_is_merged_as_its_text_model(tiny, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tiny.checkpoint(tmp_path / "base", architecture="qwen3_5")
    weights = {
        name.replace("language_model.model.", "model.language_model."): array
        for name, array in load_file(folder / "model.safetensors").items()
    }
    weights["model.visual.blocks.0.attn.qkv.weight"] = np.ones((4, 4), np.float32)
    save_file(weights, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    # Layers 1 and 3 attend.
    module = "model.language_model.layers.1.mlp.down_proj"
    adapter = write_peft(tmp_path / "adapter", draw({module: (32, 48)}))
    out = fuse(folder, adapter, tmp_path / "merged")
    assert np.array_equal(logits(out), logits(folder, adapter))
    merged = json.loads((out / "config.json").read_text())
    assert "vision_config" not in merged
    assert merged["text_config"]["hidden_size"] == 32


def test_an_existing_folder_is_refused(base, tmp_path):
    adapter = write_mlx(tmp_path / "adapter", PRODUCTS)
    out = tmp_path / "merged"
    out.mkdir()
    said: list[str] = []
    with pytest.raises(CheckpointError, match="must not exist yet"):
        fuse(base, adapter, out, progress=said.append)
    assert said == []  # before any work
    assert list(out.iterdir()) == []


def test_a_failure_leaves_nothing(base, tmp_path):
    zeroed = {Q: (PRODUCTS[Q][0], np.zeros_like(PRODUCTS[Q][1]))}
    adapter = write_mlx(tmp_path / "adapter", zeroed)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="products are all zero"):
        fuse(base, adapter, tmp_path / "out" / "merged")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="must be written to"):
        fuse(base, write_mlx(tmp_path / "b", PRODUCTS), tmp_path / "file" / "merged")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_was_below_is_told(base, tmp_path):
    first = write_mlx(tmp_path / "first", PRODUCTS)
    second = write_peft(tmp_path / "second", PRODUCTS)
    once = fuse(base, first, tmp_path / "once")
    path = once / "READY.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_quantization": "4-bit"}))
    ready = read_ready(fuse(once, second, tmp_path / "twice"))
    assert ready.adapter_sha256 == hash_of(second / "adapter_model.safetensors")
    assert ready.base_adapter_sha256 == hash_of(first / "adapters.safetensors")
    # The weights of the first base were packed, and so are these no release.
    assert ready.base_quantization == "4-bit"


def test_an_adapter_beside_its_base(base, tmp_path):
    adapter = write_mlx(tmp_path / "adapter", PRODUCTS)
    for file in adapter.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    out = fuse(base, base, tmp_path / "merged")
    assert np.array_equal(logits(out), logits(base, adapter))
    # It does not go along: the merged folder is a checkpoint that needs no adapter.
    assert not (out / "adapters.safetensors").exists()
    assert inspect_checkpoint(out).adapter_sha256 == hash_of(adapter / "adapters.safetensors")


def test_weights_larger_than_memory_are_refused_before_any_work(base, tmp_path):
    import mlx.core as mx

    adapter = write_mlx(tmp_path / "adapter", PRODUCTS)
    out = tmp_path / "merged"
    before = on_mlx_thread(mx.set_memory_limit, 10_000)
    said: list[str] = []
    try:
        with pytest.raises(CheckpointError, match="must fit into memory") as caught:
            fuse(base, adapter, out, progress=said.append)
    finally:
        on_mlx_thread(mx.set_memory_limit, before)
    assert "4-bit" not in str(caught.value.hint)  # they would be unpacked
    assert said == []
    assert fuse(base, adapter, out).is_dir()


def run_until(base: Path, adapter: Path, out: Path, sentence: str, then: str) -> Any:
    """Fuse in a process of its own that does something at a step."""
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from weighbridge.scorer.checkpoint import inspect_checkpoint
        from weighbridge.scorer.fusing import fuse_checkpoint

        def say(said):
            if said == {sentence!r}:
                {then}

        info = inspect_checkpoint({str(base)!r}, adapter={str(adapter)!r})
        fuse_checkpoint(info, Path({str(out)!r}), progress=say)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".merged.*.partial")]


def test_a_kill_leaves_nothing_of_that_name_and_the_next_one_cleans_up(base, tmp_path):
    adapter = write_mlx(tmp_path / "adapter", PRODUCTS)
    out = tmp_path / "merged"
    # Killed by itself at the last step before the name is given.
    killed = run_until(base, adapter, out, "hashing", "os.kill(os.getpid(), signal.SIGKILL)")
    _, err = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, err
    assert not out.exists()
    (partial,) = left(tmp_path)
    assert (tmp_path / partial / "model.safetensors").is_file()
    # What is called otherwise is somebody's own.
    for name in (
        ".merged.notes.partial",
        ".merged.0123abcd.partial.old",
        ".other.0123abcd.partial",
    ):
        (tmp_path / name).mkdir()
    said: list[str] = []
    assert fuse(base, adapter, out, progress=said.append).is_dir()
    assert said[0].startswith(f"removed {tmp_path / partial}")
    assert left(tmp_path) == [".merged.notes.partial"]
    assert (tmp_path / ".other.0123abcd.partial").is_dir()


def test_what_another_process_is_writing_is_left_alone(base, tmp_path):
    adapter = write_mlx(tmp_path / "adapter", PRODUCTS)
    out = tmp_path / "merged"
    waits = "print('here', flush=True); sys.stdin.readline()"
    other = run_until(base, adapter, out, "hashing", waits)
    try:
        assert other.stdout.readline() == "here\n"
        (partial,) = left(tmp_path)
        said: list[str] = []
        assert fuse(base, adapter, out, progress=said.append).is_dir()
        assert len(said) == 3
        assert left(tmp_path) == [partial]
    finally:
        _, err = other.communicate("\n", timeout=120)
    # It was the second, and takes what it wrote with it.
    assert other.returncode == 1
    assert "must not exist yet" in err
    assert left(tmp_path) == []
