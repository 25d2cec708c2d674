"""Weights in formats that are not read, told from the names of files."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weighbridge.scorer.errors import quoted

_SAME = "take the safetensors release of the same model"
_NEVER = "Pickles can run code and are never loaded"
# Names at the top of a folder or below it, with what they are and what helps. The first
# rule wins: many folders hold the same model in several formats.
_RULES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("model_index.json",), "a pipeline that makes images", "name a chat model"),
    (
        ("*.gguf", "*.ggml"),
        "GGUF",
        f"{_SAME}: GGUF is for llama.cpp and Ollama, and its weights are not read here",
    ),
    (
        ("adapter_model.bin",),
        "an adapter as a pickle",
        f"save it as safetensors, as PEFT does today. {_NEVER}",
    ),
    (
        ("consolidated*.safetensors",),
        "the layout of Mistral's own tools",
        f"{_SAME} for transformers: config.json and model*.safetensors",
    ),
    (
        ("*.safetensors",),
        "safetensors by another name",
        "only model*.safetensors beside config.json is loaded: name the folder of the model "
        "itself, or rename the file if it is the model",
    ),
    (
        ("pytorch_model*.bin", "model*.bin", "rwkv*.bin", "*.pt", "*.pth", "*.ckpt"),
        "a pickle of PyTorch",
        f"{_SAME}; or, where PyTorch is, save it again: AutoModelForCausalLM.from_pretrained"
        f"(FOLDER).save_pretrained(OUT). {_NEVER}",
    ),
    (("*.onnx", "*.onnx_data"), "ONNX", _SAME),
    (("*.mlpackage", "*.mlmodel", "*.mlmodelc"), "Core ML", _SAME),
    (("saved_model.pb", "tf_model*.h5", "*.keras"), "TensorFlow", _SAME),
    (("*.tflite", "*.litertlm", "*.task"), "TensorFlow Lite", _SAME),
    (("flax_model*.msgpack",), "Flax", _SAME),
    (("weights*.npz", "model*.npz"), "the first layout of MLX", _SAME),
    (("*.engine", "*.plan"), "TensorRT", _SAME),
    (("*.llamafile", "*.exl2"), "the format of another program", _SAME),
)


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """Weights in a format that is not read.

    Attributes:
        what: Such as `GGUF ("model-Q4_K_M.gguf")`.
        remedy: What to do instead.
    """

    what: str
    remedy: str


def foreign_format(names: Iterable[str]) -> ForeignFormat | None:
    """Name the format of weights that are not `model*.safetensors`.

    Args:
        names: Of a folder or a repository, those in subfolders with `/`.

    Returns:
        None when nothing among them looks like weights.
    """
    names = sorted(names)
    for patterns, title, remedy in _RULES:
        for name in names:
            if any(fnmatchcase(name.rsplit("/", 1)[-1], pattern) for pattern in patterns):
                return ForeignFormat(f"{title} ({quoted(name)})", remedy)
    return None
