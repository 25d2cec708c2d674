"""Tiny real models, tokenizers and checkpoint folders, and schemas to ask them."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from weighbridge.scorer.engine import Engine, Mode, Row
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


class Tiny:
    """Builds small random llamas, the real class of mlx-lm with a few thousand weights."""

    triage = TRIAGE
    control = CONTROL
    template = TEMPLATE

    def config(self, **changes: Any) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "vocab_size": 97,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            **changes,
        }

    def model(self, *, dtype: str = "float64", seed: int = 0, **changes: Any) -> Any:
        """Make a model on the calling thread; its weights are evaluated."""
        import mlx.core as mx
        from mlx.utils import tree_flatten, tree_unflatten
        from mlx_lm.models import llama

        model = llama.Model(llama.ModelArgs.from_dict(self.config(**changes)))
        draw = np.random.default_rng(seed)
        # Wide enough that every token and position shows in the logits.
        leaves: Any = tree_flatten(model.parameters())
        weights = [
            (name, mx.array(draw.normal(float(array.ndim == 1), 0.2, array.shape), mx.float64))
            for name, array in leaves
        ]
        model.update(tree_unflatten(weights))
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
        return model

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
        self, folder: Path, *, seed: int = 0, tokenizer: Any = None, **changes: Any
    ) -> Path:
        """Write a whole checkpoint folder: configuration, tokenizer, float32 weights."""
        from weighbridge.scorer.backend import on_mlx_thread

        tokenizer = tokenizer or self.tokenizer()
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        config = self.config(**{"vocab_size": len(tokenizer), **changes})
        (folder / "config.json").write_text(json.dumps(config))

        def save() -> None:
            import mlx.core as mx
            from mlx.utils import tree_flatten

            model = self.model(dtype="float32", seed=seed, **config)
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
