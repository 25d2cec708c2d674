"""Documents and a checkpoint that are made up, so that a run costs little but itself."""

# ruff: noqa: PLC0415 - what imports MLX is imported where it is needed

import json
import random
import shutil
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def tickets(path: Path, count: int) -> Path:
    """Write distinct tickets, made of the sample ones."""
    lines = (EXAMPLES / "documents" / "tickets.jsonl").read_text(encoding="utf-8").split("\n")
    samples = [json.loads(line) for line in lines if line]
    chance = random.Random(7)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            sample = samples[number % len(samples)]
            text = f"{sample['text']}\n\nOrder {chance.randrange(10**9)}-{number}"
            record = {**sample, "id": f"{sample['id']}-{number}", "text": text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return path


def next_to_no_weights(embedded: Path, folder: Path) -> Path:
    """Make a checkpoint with the embedded one's tokenizer and a model that costs nothing."""
    from weighbridge.scorer.backend import on_mlx_thread

    made = folder / "next-to-nothing"
    made.mkdir()
    for file in embedded.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "READY.json":
            shutil.copy(file, made)
    own = json.loads((embedded / "config.json").read_text(encoding="utf-8"))
    config = {**CONFIG, "vocab_size": own["vocab_size"]}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def save() -> None:
        import mlx.core as mx
        from mlx.utils import tree_flatten
        from mlx_lm.models.llama import Model, ModelArgs

        mx.random.seed(1)
        model = Model(ModelArgs.from_dict(config))
        weights: Any = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(made / "model.safetensors"), weights)

    on_mlx_thread(save)
    return made
