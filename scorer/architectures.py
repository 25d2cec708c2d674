"""Which architectures can score: asked of mlx-lm's files, without importing MLX."""

import ast
import importlib.util
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from weighbridge.scorer.errors import quoted, shown

# What these are for is told; any other type that mlx-lm does not know is only unknown.
_KINDS = {
    "reads text but writes none (an encoder)": (
        "albert bert camembert deberta deberta-v2 distilbert electra ernie esm eurobert funnel "
        "longformer luke megatron-bert modernbert mpnet neobert new nomic_bert rembert roberta "
        "roformer xlm-roberta xlm-roberta-xl xlnet xmod gte"
    ),
    "translates one text into another (an encoder and a decoder)": (
        "bart bigbird_pegasus blenderbot led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus "
        "plbart prophetnet switch_transformers t5 t5gemma umt5"
    ),
    "sees images only": (
        "aimv2 align beit chinese_clip clip clip_vision_model clipseg convnext convnextv2 deit "
        "detr dinov2 dinov3_vit depth_anything mobilevit resnet sam sam2 segformer siglip "
        "siglip2 siglip_vision_model swin swinv2 vit vit_mae yolos"
    ),
    "hears or speaks": (
        "audio-spectrogram-transformer bark clap csm data2vec-audio encodec hubert kokoro mimi "
        "moonshine musicgen parakeet seamless_m4t sew speech_to_text speecht5 unispeech vits "
        "voxtral wav2vec2 wav2vec2-bert wavlm whisper"
    ),
}
_TYPES = {kind: what for what, kinds in _KINDS.items() for kind in kinds.split()}
# Where it is missing, mlx-lm ends the whole process at the import of the model.
_NEEDED_PACKAGES = {"olmo": ("hf_olmo", "ai2-olmo")}
# A head over labels of its own, or none at all, in place of the one over the vocabulary.
_OTHER_HEAD = re.compile(
    r".*For(MaskedLM|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice"
    r"|ImageClassification|AudioClassification|CTC|NextSentencePrediction|RewardModel)"
)


def unsupported_architecture(config: Mapping[str, Any]) -> str | None:
    """Say why a configuration cannot score, None when mlx-lm has its model type.

    Args:
        config: The content of config.json.

    Returns:
        A sentence of what must hold and what came.
    """
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    for name in names:
        if isinstance(name, str) and (found := _OTHER_HEAD.fullmatch(name)):
            return (
                "a checkpoint must be a language model that writes the next token, got "
                f"{quoted(name)}, whose head is for {_words(found[1])}"
            )
    if config.get("model_file") is not None:
        return (
            "a checkpoint must be a model that mlx-lm brings, got one that runs code of its own "
            f"(model_file {shown(config['model_file'])} in config.json)"
        )
    return _unknown_type(config)


def _unknown_type(config: Mapping[str, Any]) -> str | None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return f"config.json must name a model_type, got {shown(model_type)}"
    needed = _NEEDED_PACKAGES.get(model_type)
    if needed and importlib.util.find_spec(needed[0]) is None:
        return (
            f"a checkpoint of model type {quoted(model_type)} must find the package {needed[1]}, "
            "which mlx-lm needs for it and is not installed"
        )
    # A model type of somebody's own is known once it is imported.
    own = sys.modules.get(f"mlx_lm.models.{model_type}")
    if model_type in _known_types() or hasattr(own, "ModelArgs"):
        return None
    if what := _TYPES.get(model_type):
        return (
            "a checkpoint must be a language model that writes the next token, got "
            f"{quoted(model_type)}, which {what}"
        )
    seeing = any(key in config for key in ("vision_config", "audio_config"))
    return f"a checkpoint must be of a model type that mlx-lm knows, got {quoted(model_type)}" + (
        " (a model that also sees or hears)" if seeing else ""
    )


@lru_cache
def _known_types() -> frozenset[str]:
    """Return the model types that mlx-lm loads. Importing mlx-lm would import MLX."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    root = Path(package.submodule_search_locations[0])
    # Beside the models lie their parts, such as caches, which have no arguments of a model.
    own = {
        path.stem
        for path in (root / "models").glob("*.py")
        if re.search(r"^class ModelArgs\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    tree = ast.parse((root / "utils.py").read_text(encoding="utf-8"))
    other_names: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "MODEL_REMAPPING"
            for target in node.targets
        ):
            other_names = ast.literal_eval(node.value)
    return frozenset(own | {name for name, module in other_names.items() if module in own})


def _words(name: str) -> str:
    """Write `SequenceClassification` as people say it."""
    special = {"CTC": "speech", "MaskedLM": "masked words"}
    return special.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
