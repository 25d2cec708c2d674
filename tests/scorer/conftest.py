"""Tiny real models, tokenizers and checkpoint folders, and schemas to ask them."""

import copy
import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Row
from weighbridge.scorer.schema import Schema

# On a shared machine a deadline measures the neighbours.
settings.register_profile("weighbridge", deadline=None)
settings.load_profile("weighbridge")

TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
CONTROL = ("<|begin|>", "<|end|>", "[TOOL]")
TRAINED_ON = (
    "billing login outage other calm annoyed furious true false",
    "Read the document and answer the question about it. Choices: negative, positive.",
    "The invoice was charged twice and the customer would like the money back.",
    "AA\nAB\n" * 8,  # capital pairs, as wide codes need them
    "user assistant system Document Requested field context schema name description choices",
)

TRIAGE: dict[str, Any] = {
    "urgent": {"type": "boolean", "description": "Does it need an answer today?"},
    "team": {
        "type": "enum",
        "description": "Who should answer?",
        "choices": ["billing", "login", "login reset", "other"],
        "choice_descriptions": {"billing": "money", "other": "everything else"},
    },
    "mood": {
        "type": "score",
        "description": "How angry is the writer?",
        "levels": ["calm", "annoyed", "furious"],
    },
}


COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# The real classes of mlx-lm, with what makes each one special small enough to be met.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 97,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "qwen2": COMMON,
    "qwen3": COMMON,
    # Layers 1 and 3 are recurrent, 2 and 4 attend.
    "qwen3_5": {
        **COMMON,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    # Layers 1 and 3 see 16 tokens, 2 and 4 all.
    "gemma3_text": {
        **COMMON,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    # tanh caps the logits at 3.
    "gemma2": {**COMMON, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    # Logits are halved; layer 1 sees 16 tokens.
    "cohere2": {
        **COMMON,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.5,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
}


def weight_range(name: str, ndim: int, architecture: str) -> tuple[float, float]:
    """Return mean and spread of random weights.

    Wide enough that every token and position shows in the logits.
    """
    if name.endswith("A_log"):
        # A gated delta state keeps exp(-exp(A_log) * softplus(dt)) of itself per token: some
        # 0.93 here, so that 30 tokens back still show and nothing grows.
        return -2.5, 0.3
    if name.endswith("dt_bias"):
        return 0.0, 0.2
    # Norms multiply by their weight, in Gemma by one more than it.
    return float(ndim == 1 and not architecture.startswith("gemma")), 0.2


class Tiny:
    """Builds small random models, the real classes of mlx-lm with a few thousand weights."""

    triage = TRIAGE
    control = CONTROL
    template = TEMPLATE
    architectures = tuple(ARCHITECTURES)

    def config(self, architecture: str = "llama", **changes: Any) -> dict[str, Any]:
        return copy.deepcopy({"model_type": architecture, **ARCHITECTURES[architecture], **changes})

    def model(
        self,
        *,
        architecture: str = "llama",
        dtype: str = "float64",
        seed: int = 0,
        **changes: Any,
    ) -> Any:
        """Make a model on the calling thread; its weights are evaluated."""
        import mlx.core as mx
        from mlx.utils import tree_flatten, tree_unflatten

        config = self.config(architecture, **changes)
        classes = importlib.import_module(f"mlx_lm.models.{architecture}")
        draw = np.random.default_rng(seed)
        with mx.stream(mx.cpu):  # the only device with float64
            model = classes.Model(classes.ModelArgs.from_dict(config))
            if architecture == "gemma3_text" and config["tie_word_embeddings"]:
                model.sanitize({})  # ties the head, as a checkpoint without one does
            leaves: Any = tree_flatten(model.parameters())
            weights: list[tuple[str, Any]] = []
            for name, array in leaves:
                drawn = draw.normal(*weight_range(name, array.ndim, architecture), array.shape)
                weights.append((name, mx.array(drawn, mx.float64)))
            model.update(tree_unflatten(weights))
            model.set_dtype(getattr(mx, dtype))
            mx.eval(model.parameters())
        return model

    def full(self, model: Any, rows: Sequence[Row]) -> list[np.ndarray]:
        """Compute candidate logits without the engine: each whole prompt, the whole head."""
        import mlx.core as mx

        found: list[np.ndarray] = []
        for row in rows:
            logits = model(mx.array([row.tokens]))[0, -1][mx.array(row.candidates)]
            found.append(
                np.array(logits if logits.dtype == mx.float64 else logits.astype(mx.float32))
            )
        return found

    def rows(
        self, prefix: int, suffixes: Sequence[int], *, candidates: int = 5, seed: int = 1
    ) -> list[Row]:
        """Make random rows that share a prefix and no more, whatever their lengths."""
        draw = np.random.default_rng(seed)
        shared = tuple(draw.integers(0, 97, prefix).tolist())
        rows: list[Row] = []
        for number, length in enumerate(suffixes):
            tokens = draw.integers(0, 97, length).tolist()
            # First suffix tokens that differ end the shared prefix just here.
            tokens[0] = number
            ids = draw.choice(97, candidates, replace=False).tolist()
            rows.append(Row((*shared, *tokens), tuple(ids)))
        return rows

    def tokenizer(self, template: str | None = TEMPLATE, control: Sequence[str] = CONTROL) -> Any:
        """Train a byte-level BPE tokenizer of some 400 tokens; the same every time."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(TRAINED_ON, trainer)
        made.add_special_tokens([AddedToken(text, normalized=False) for text in control])
        return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)

    def checkpoint(
        self,
        folder: Path,
        *,
        architecture: str = "llama",
        seed: int = 0,
        tokenizer: Any = None,
        **changes: Any,
    ) -> Path:
        """Write a whole checkpoint folder: configuration, tokenizer, float32 weights."""
        from weighbridge.scorer.backend import on_mlx_thread

        tokenizer = tokenizer or self.tokenizer()
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        changes = {"vocab_size": len(tokenizer), **changes}
        config = self.config(architecture, **changes)
        (folder / "config.json").write_text(json.dumps(config))

        def save() -> None:
            import mlx.core as mx
            from mlx.utils import tree_flatten

            model = self.model(architecture=architecture, dtype="float32", seed=seed, **changes)
            weights = dict(tree_flatten(model.parameters()))
            mx.save_safetensors(str(folder / "model.safetensors"), weights)

        on_mlx_thread(save)
        return folder

    def schema(self, *names: str) -> Schema:
        """Return the triage schema, or some of its fields."""
        return Schema.parse(json.dumps({name: TRIAGE[name] for name in names or TRIAGE}))

    def modes(
        self, engine: Engine, rows: Sequence[Row], **options: Any
    ) -> dict[str, list[np.ndarray]]:
        """Score rows in each way the engine knows, and in batches of 1 to 3."""
        score = engine.score
        return {
            "independent": score(rows, mode=Mode.INDEPENDENT, **options)[0],
            "cached_serial": score(rows, mode=Mode.CACHED_SERIAL, **options)[0],
            "auto": score(rows, mode=Mode.AUTO, **options)[0],
            **{
                f"parallel {size}": score(rows, mode=Mode.PARALLEL, batch_size=size, **options)[0]
                for size in (None, 1, 2, 3)
            },
        }

    def worst(self, engine: Engine, rows: Sequence[Row], **options: Any) -> float:
        """Return the largest difference between `independent` and any other way."""
        found = self.modes(engine, rows, **options)
        return max(self.apart(found["independent"], other) for other in found.values())

    @staticmethod
    def apart(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
        """Return the largest absolute difference between two lists of logits."""
        pairs = zip(left, right, strict=True)
        return max(float(np.abs(one - other).max()) for one, other in pairs)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="session")
def table() -> ModuleType:
    """Return the script that makes the table of architectures."""
    folder = str(Path(__file__).parents[2] / "docs" / "architectures")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("run")
    finally:
        sys.path.remove(folder)


@pytest.fixture
def cpu() -> Iterator[None]:
    """Compute on the CPU, the only device with float64, also on a Mac."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        yield


@pytest.fixture
def fresh_process() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run Python code in a process of its own, where nothing is imported yet."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    return run
