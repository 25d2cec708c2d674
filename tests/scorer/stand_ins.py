"""Small folders of every form in which people have a checkpoint, in a home folder of their own."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file
from tests.scorer.adapter_folders import draw, write_mlx, write_peft
from tests.scorer.hub_server import Hub

from weighbridge.scorer.backend import on_mlx_thread

# The hash by which the published policy knows Bespoke-Nimble-9B v1.
NIMBLE_ADAPTER = "ba7e28acb97f973e80fa51f3aa6fc6f75ea4081b89632ed45d8e5f3a1d7bfa6b"
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")
TICKETS = [
    {"id": "T-1", "text": "I was charged twice."},
    {"id": "T-2", "text": "The parcel never came."},
]
TRIAGE = {
    "urgent": {"type": "boolean", "description": "Whether somebody must act at once."},
    "topic": {
        "type": "enum",
        "choices": ["billing", "login", "other"],
        "description": "What the message is about.",
    },
}


def furnish(home: Path, hub: Hub, tiny: Any) -> None:
    """Put documents, a schema, checkpoints and adapters into a home folder, and models on a hub."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "tickets.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in TICKETS))
    (home / "triage.json").write_text(json.dumps(TRIAGE))
    models, adapters = home / "models", home / "adapters"
    chat = tiny.checkpoint(models / "chat")
    as_bfloat16(chat)
    _nimble(chat, models / "nimble")
    _nimble(chat, models / "nimble-old")
    (models / "nimble-old" / "system_prompt.txt").rename(home / "text.txt")
    seeing(tiny.checkpoint(models / "seeing", architecture="qwen3_5"))
    weights = load_file(tiny.checkpoint(home / "weights") / "model.safetensors")
    shapes = {module: weights[f"{module}.weight"].shape for module in MODULES}
    products = draw(shapes)
    write_peft(adapters / "peft", products, base_model_name_or_path="org/chat")
    write_mlx(adapters / "mlx", products)
    shutil.rmtree(home / "weights")
    publish(hub, "org/chat", chat)
    for name, mode in (("org/chat-4bit", "affine"), ("org/chat-mxfp4", "mxfp4")):
        packed = home / "packed" / mode
        shutil.copytree(chat, packed)
        pack(packed, mode)
        publish(hub, name, packed)
    shutil.rmtree(home / "packed")


def publish(hub: Hub, name: str, folder: Path) -> str:
    """Commit the files of a folder to a hub."""
    return hub.add(name, {path.name: path.read_bytes() for path in sorted(folder.iterdir())})


def as_bfloat16(folder: Path) -> None:
    """Store the weights of a folder as most checkpoints are published."""
    _rewrite(folder, lambda mx, weights: {k: v.astype(mx.bfloat16) for k, v in weights.items()})


def pack(folder: Path, mode: str) -> None:
    """Pack the weights of a folder into 4 bits, as conversions on hubs are."""
    config = json.loads((folder / "config.json").read_text())

    def packed(mx: Any, weights: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, array in weights.items():
            if array.ndim != 2:
                made[name] = array
                continue
            parts = mx.quantize(array, group_size=32, bits=4, mode=mode)
            stem = name.removesuffix(".weight")
            named = zip(("weight", "scales", "biases"), parts, strict=False)
            made |= {f"{stem}.{part}": value for part, value in named}
        return made

    _rewrite(folder, packed)
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": mode}
    (folder / "config.json").write_text(json.dumps(config))


def seeing(folder: Path) -> None:
    """Lay a text-only folder out as models that also see are published."""
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": config["model_type"], "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": config}))

    def laid_out(mx: Any, weights: dict[str, Any]) -> dict[str, Any]:
        made = {
            f"model.language_model.{name.removeprefix('language_model.model.')}": array
            for name, array in weights.items()
        }
        return {**made, "model.visual.blocks.0.attn.qkv.weight": mx.ones((8, 8), mx.float16)}

    _rewrite(folder, laid_out)


def _nimble(chat: Path, folder: Path) -> None:
    """Copy a folder and add what the merged Nimble folders bring, with a text of our own."""
    shutil.copytree(chat, folder)
    contract = {
        "task": "schema_candidate_classification_v1",
        "model": "org/base",
        "revision": "c" * 40,
        "max_length": 2048,
        "prompt_code_sha256": "0" * 64,
    }
    (folder / "schema_config.json").write_text(json.dumps(contract))
    (folder / "system_prompt.txt").write_text("Answer with one code.")
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    ready = {
        "adapter_sha256": NIMBLE_ADAPTER,
        "base_model": "org/base",
        "base_revision": "c" * 40,
        "weight_sha256": {"model.safetensors": weights},
        "precision": "bfloat16",
    }
    (folder / "READY.json").write_text(json.dumps(ready))


def _rewrite(folder: Path, change: Any) -> None:
    path = str(folder / "model.safetensors")

    def run() -> None:
        import mlx.core as mx

        loaded: Any = mx.load(path)
        mx.eval(loaded)
        changed = change(mx, loaded)
        mx.eval(changed)
        mx.save_safetensors(path, changed)

    on_mlx_thread(run)
