"""Which model types score: told from config.json alone, without MLX."""

import importlib.util
import json
import re

import pytest

from weighbridge.scorer import architectures
from weighbridge.scorer.architectures import unsupported_architecture
from weighbridge.scorer.checkpoint_folder import check_folder
from weighbridge.scorer.errors import CheckpointError


@pytest.fixture
def refuse(tmp_path):
    """Return what is said of a folder whose weights nobody has to look at."""

    def refuse(content: dict[str, object], *others: str) -> CheckpointError:
        (tmp_path / "model.safetensors").write_bytes(b"never read")
        (tmp_path / "config.json").write_text(json.dumps(content))
        for name in others:
            (tmp_path / name).write_text("{}")
        with pytest.raises(CheckpointError) as caught:
            check_folder(tmp_path)
        assert caught.value.hint
        return caught.value

    return refuse


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
        {"model_type": "mistral"},  # by another name in mlx-lm
        {"model_type": "lfm2-vl", "vision_config": {}},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "qwen3", "architectures": None, "auto_map": {"AutoModel": "x.Y"}},
    ],
)
def test_architectures_that_score(content):
    assert unsupported_architecture(content) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "bert"}, '"bert", which reads text but writes none'),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            '"BertForMaskedLM", whose head is for masked words',
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "whose head is for sequence classification",
        ),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, "is for speech"),
        ({"model_type": "t5"}, "translates one text into another"),
        ({"model_type": "siglip"}, "sees images only"),
        ({"model_type": "clip"}, "sees images only"),
        ({"model_type": "whisper"}, "hears or speaks"),
        (
            {"model_type": "internvl_chat", "vision_config": {}},
            r'mlx-lm knows, got "internvl_chat" \(a model that also sees or hears\)',
        ),
        ({"model_type": "no_such_model"}, 'mlx-lm knows, got "no_such_model"$'),
        # Parts of mlx-lm that lie among its models.
        ({"model_type": "cache"}, 'mlx-lm knows, got "cache"'),
        ({"model_type": "../evil"}, "mlx-lm knows"),
        ({"model_type": "llama", "model_file": "own.py"}, "runs code of its own"),
        ({}, "must name a model_type, got null"),
        ({"model_type": ["llama"]}, "must name a model_type, got a list"),
    ],
)
def test_architectures_that_do_not(refuse, content, message):
    reason = unsupported_architecture(content)
    assert reason is not None
    assert re.search(message, reason)
    # Before the weights are opened, let alone hashed.
    assert refuse(content).message == reason


@pytest.mark.skipif(importlib.util.find_spec("hf_olmo") is not None, reason="it is installed")
def test_a_model_whose_import_would_end_the_process(refuse):
    # mlx-lm exits when the package is missing; the command would end without an error.
    assert "must find the package ai2-olmo" in refuse({"model_type": "olmo"}).message


def test_an_embedding_model_of_a_known_type(refuse):
    error = refuse({"model_type": "qwen3"}, "config_sentence_transformers.json")
    # It loads as a chat model, and its answers would be noise.
    assert "got an embedding model (sentence-transformers)" in error.message


@pytest.mark.mlx
def test_the_types_are_those_that_mlx_lm_loads():
    from mlx_lm.utils import MODEL_REMAPPING, _get_classes

    known = architectures._known_types()
    assert set(MODEL_REMAPPING) <= known
    # Every single one can be imported, but for the one that ends the process.
    for model_type in sorted(known - {"olmo"}):
        assert _get_classes({"model_type": model_type})[1].__name__ == "ModelArgs"
    assert len(known) > 120
    # None of those that are told apart is one that scores.
    assert known.isdisjoint(architectures._TYPES)


def test_types_are_told_without_mlx(fresh_process):
    code = """
    import sys
    from weighbridge.scorer.architectures import unsupported_architecture
    assert unsupported_architecture({"model_type": "llama"}) is None
    print({"mlx", "mlx_lm", "transformers"} & set(sys.modules))
    """
    # `checkpoint info` and `validate` answer at once.
    done = fresh_process(code)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
