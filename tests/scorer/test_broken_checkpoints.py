"""Folders that people name as a checkpoint and that are none: each is refused with what helps."""

import json
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer.checkpoint_folder import check_folder
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.foreign_formats import foreign_format
from weighbridge.scorer.weight_files import ADAPTER_FILES, safetensors_header, stored_dtype

Change = Callable[[Path], Any]
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U32": 4, "U8": 1, "F8_E4M3": 1}
LANGUAGE = {"model.embed_tokens.weight": "BF16", "model.norm.weight": "F32"}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 99\n"


def safetensors(tensors: Mapping[str, str]) -> bytes:
    """Make a whole file of tensors of two zeros, by name and type."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype in tensors.items():
        start, end = end, end + 2 * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": [2], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder that is as whole as names and headers can tell."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(safetensors(LANGUAGE))
    return folder


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        check_folder(folder)
    assert caught.value.hint
    return caught.value


def only(*names: str) -> Change:
    """Leave nothing but files by these names; those in folders of theirs."""

    def change(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{}")

    return change


def write(name: str, content: bytes | str) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def unlink(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def instead(name: str, *others: str) -> Change:
    """Put files by other names in the place of one."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        for other in others:
            (folder / other).write_bytes(b"{}")

    return change


def test_a_whole_folder_passes(folder):
    # Without it, a check that refuses everything would pass below.
    check_folder(folder)
    check_folder(folder / ".." / "model")
    (folder / "model-2.gguf").write_bytes(b"GGUF")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "onnx").mkdir()
    # Other formats beside the one that is read do no harm.
    check_folder(folder)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (only(), "must be a folder with files, got an empty one", "copy or fetch"),
        (only("notes.txt"), "must hold config.json, got none in", "name the folder that holds"),
        (only("a/config.json"), "must hold config.json, got none in", "did you mean .*/model/a?"),
        (only("x-Q4_K_M.gguf"), r'config.json, got GGUF \("x-Q4_K_M.gguf"\)', "llama.cpp"),
        (only("pytorch_model.bin"), "got a pickle of PyTorch", "never loaded"),
        (only("params.json", "consolidated.00.pth"), "got a pickle of PyTorch", "safetensors"),
        (
            only("params.json", "consolidated.safetensors"),
            "layout of Mistral's own",
            "transformers",
        ),
        (only("model.safetensors"), "got weights alone", "fetch config.json and the tokenizer"),
        (only("model.onnx", "tokenizer.json"), "got ONNX", "safetensors release"),
        (only("Llama.mlpackage/Manifest.json"), "got Core ML", "safetensors release"),
        (only("saved_model.pb"), "got TensorFlow", "safetensors release"),
        (only("weights.00.npz"), "got the first layout of MLX", "safetensors release"),
        (only("model_index.json", "unet/config.json"), "got a pipeline that makes images", "chat"),
        # With a configuration, but without weights that are read.
        (instead("model.safetensors"), "must hold .* weights, got none in", "fetch the weights"),
        (instead("model.safetensors", "pytorch_model.bin"), "weights, got a pickle", "save it"),
        (instead("model.safetensors", "a.gguf"), r"weights, got GGUF \(\"a.gguf\"\)", "Ollama"),
        (instead("model.safetensors", "tf_model.h5"), "weights, got TensorFlow", "safetensors"),
        (instead("model.safetensors", "weights.safetensors"), "by another name", "rename"),
        # Adapters without their base.
        (only("adapter_config.json"), "a whole model, got an adapter alone", "trained on as the"),
        *(
            (only(name), "a whole model, got an adapter alone", "--adapter .*/model$")
            for name in ADAPTER_FILES
        ),
        *(
            (
                instead("model.safetensors", name, "README.md"),
                "a whole model, got an adapter alone",
                "--adapter .*/model$",
            )
            for name in ("adapter_config.json", *ADAPTER_FILES)
        ),
    ],
)
def test_what_a_folder_is_instead(folder, change, message, hint):
    change(folder)
    error = refused(folder)
    assert re.search(message, error.message)
    assert re.search(hint, error.hint or "")
    # Whoever reads it knows which folder is meant.
    assert str(folder) in error.message


def test_an_adapter_alone_names_the_command_with_its_base(folder):
    only("adapter_config.json", "adapter_model.safetensors")(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    error = refused(folder)
    assert 'made for "org/base"' in error.message
    assert error.hint == f"name org/base as the checkpoint, and add --adapter {folder}"
    # What an adapter says is text from outside, and never a command by itself.
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x; rm -rf ~"}')
    assert (refused(folder).hint or "").startswith("name 'x; rm -rf ~' as the checkpoint, and")
    (folder / "adapter_config.json").write_text("[")
    assert (refused(folder).hint or "").startswith("name the model that it was trained on as")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("gone", "must be an existing folder, got", "check the path; .*checkpoint demo"),
        ("modle", "must be an existing folder, got", "did you mean .*/model?"),
        ("loop", "is a link that leads back to itself", "folder itself"),
        ("model/config.json", 'config.json" is a file', "name its folder: .*model"),
        ("model/model.safetensors", "is a file", "name its folder"),
        ("model/x.gguf", "is a file: GGUF", "llama.cpp"),
        ("link", "is a link to .*nowhere, where nothing is", "restore"),
        ("a\0b", "must be an existing folder", "demo"),
        ("n" * 300, "must be an existing folder", "demo"),
        ("https:/huggingface.co/org/name", "must be an existing folder", "it as org/name$"),
    ],
)
def test_a_name_that_is_no_folder(folder, tmp_path, name, message, hint):
    (folder / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    error = refused(tmp_path / name)
    assert re.search(message, error.message)
    assert re.search(hint, error.hint or "")


def test_the_cache_of_the_hub_points_to_its_snapshots(tmp_path):
    cache = tmp_path / "hub"
    storage = cache / "models--org--name"
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        (storage / "snapshots" / commit).mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(commits[1])
    error = refused(storage)
    assert 'the hub\'s cache of "org/name", whose 2 snapshots hold it' in error.message
    # The one that the branch is at, not the first.
    assert error.hint == f"name org/name instead, or the snapshot {storage}/snapshots/{commits[1]}"
    assert 'name one of its repositories: "org/name"' in (refused(cache).hint or "")


# --- weights ---


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (write("model.safetensors", b""), "got 0 bytes that do not fit", "fetch .* again"),
        (
            write("model.safetensors", safetensors(LANGUAGE)[:-1]),
            r"got (\d+) bytes that do not fit its header, should be \d+$",
            "fetch .* again",
        ),
        (
            write("model.safetensors", safetensors(LANGUAGE)[:50]),
            r"got 50 bytes that do not fit its header, should be over \d+$",
            "fetch .* again",
        ),
        (write("model.safetensors", LFS), "by which Git LFS stands for it", "lfs pull"),
        (write("tokenizer.json", LFS), "the text by which Git LFS stands for it", "lfs pull"),
        (write("model.safetensors", safetensors({})), "got no tensors", "again"),
        (
            write("model.safetensors", safetensors({"a": "U8", "b": "U32"})),
            "must have float tensors .* got U32, U8",
            "again",
        ),
        (
            write("model.safetensors", safetensors({"a": "F8_E4M3"})),
            "must have float tensors .* got F8_E4M3",
            "again",
        ),
        (
            write("model.safetensors", safetensors({"visual.a": "F32", "mtp.b": "F32"})),
            "only see or hear",
            "whole model",
        ),
        (
            write("model-copy.safetensors", safetensors(LANGUAGE)),
            '"model.embed_tokens.weight" in model-copy.safetensors and in model.safetensors',
            "of one model only",
        ),
        (
            write("model.safetensors.index.json", "[]"),
            "must be a JSON object with a weight_map",
            "fetch .* again",
        ),
        (
            write("model.safetensors.index.json", "{"),
            "must be a JSON object with a weight_map",
            "again",
        ),
        (unlink("tokenizer.json"), "must hold a tokenizer", "fetch tokenizer.json"),
    ],
)
def test_damaged_weights(folder, change, message, hint):
    change(folder)
    error = refused(folder)
    assert re.search(message, error.message)
    assert re.search(hint, error.hint or "")


def test_a_truncated_file_tells_both_sizes(folder):
    whole = (folder / "model.safetensors").stat().st_size
    (folder / "model.safetensors").write_bytes(safetensors(LANGUAGE)[:-3])
    assert f"got {whole - 3} bytes that do not fit its header, should be {whole}" in str(
        refused(folder)
    )


def test_a_link_that_leads_nowhere(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")
    error = refused(folder)
    # As in a cache of the hub whose blobs were removed.
    assert "model.safetensors must be a readable file, got: No such file" in error.message
    assert "points to ../blobs/gone, where nothing is" in (error.hint or "")


def shards(folder: Path, count: int, *, index: bool, named: str = "model-{:05}-of-{:05}") -> None:
    """Put shards of one tensor each in the place of the one file."""
    (folder / "model.safetensors").unlink()
    names = [named.format(number, count) + ".safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(safetensors({f"layers.{number}.weight": "BF16"}))
    if index:
        weight_map = {f"layers.{number}.weight": name for number, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("named", ["model-{:05}-of-{:05}", "model.safetensors-{:05}-of-{:05}"])
def test_missing_shards_are_named_and_counted(folder, index, named):
    shards(folder, 4, index=index, named=named)
    check_folder(folder)
    for number in (2, 4):
        (folder / (named.format(number, 4) + ".safetensors")).unlink()
    error = refused(folder)
    # With an index by its list, without one by the numbers in the names.
    assert "lacks 2 of 4 weight files" in error.message
    assert named.format(2, 4) in error.message
    assert named.format(4, 4) in error.message
    assert named.format(1, 4) not in error.message


def test_all_shards_missing_are_told_by_the_index(folder):
    shards(folder, 3, index=True)
    for path in folder.glob("model-*.safetensors"):
        path.unlink()
    assert "lacks 3 of 3 weight files" in refused(folder).message


def test_what_no_index_lists(folder):
    shards(folder, 2, index=True)
    (folder / "model-old.safetensors").write_bytes(safetensors({"other.weight": "F32"}))
    error = refused(folder)
    # mlx-lm loads whatever is called model*.safetensors.
    assert '.index.json must list every weight file, got "model-old.safetensors"' in error.message
    assert "move away" in (error.hint or "")


def test_an_index_of_other_weights(folder):
    shards(folder, 2, index=True)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(safetensors({"other.weight": "F32"}))
    assert 'they lack "layers.1.weight"' in refused(folder).message


def test_an_index_left_from_before_a_conversion_does_no_harm(folder):
    weight_map = dict.fromkeys(LANGUAGE, "model-00001-of-00007.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    # All that it lists is there, in another file: converted folders keep such an index.
    check_folder(folder)
    weight_map = {"renamed.weight": "model-00001-of-00007.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    # By other names nobody can tell, but the person may know.
    assert "or remove model.safetensors.index.json, if" in (refused(folder).hint or "")


@contextmanager
def nobody() -> Iterator[Path]:
    """Give a folder, and be a user without rights, also where tests run as root."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "model").mkdir()
        yield Path(name) / "model"


@contextmanager
def without_rights() -> Iterator[None]:
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_files_that_may_not_be_read(folder):
    with nobody() as shared:
        for path in folder.iterdir():
            (shared / path.name).write_bytes(path.read_bytes())
        (shared / "model.safetensors").chmod(0)
        with without_rights():
            error = refused(shared)
        assert "model.safetensors must be a readable file, got: Permission denied" in error.message
        assert f"chmod u+r {shared}" in (error.hint or "")
        (shared / "model.safetensors").chmod(0o644)
        with without_rights():
            check_folder(shared)
        shared.chmod(0)
        with without_rights():
            error = refused(shared)
        assert "that you may read, got no permission" in error.message
        shared.chmod(0o755)


# --- what is told ---


def test_the_stored_type_is_that_of_the_language_weights(folder):
    seeing = {f"model.visual.blocks.{number}.weight": "F32" for number in range(9)}
    path = folder / "model.safetensors"
    path.write_bytes(safetensors({**seeing, "model.embed_tokens.weight": "BF16"}))
    assert stored_dtype([path]) == "bfloat16"
    assert len(safetensors_header(path)) == 10


def test_formats_are_told_in_an_order_that_helps():
    # Of several, the one whose remedy fits the whole folder.
    names = ["unet/diffusion_pytorch_model.bin", "model_index.json", "x.gguf"]
    assert "images" in getattr(foreign_format(names), "what", "")
    assert foreign_format(["README.md", "config.json", "training_args.bin"]) is None
