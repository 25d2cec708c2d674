"""The five published scenarios in all modes: seconds, labels, differences of probability.

A scenario is a number of fields and the number of tokens that their prompts share. Modes
take turns, so that a slow minute of a shared machine hits all of them, and CPU seconds of
the process stand beside wall seconds. Random models are narrow; off Metal the recurrence
of qwen3_5 is a Python loop over tokens, so its figures say little about a Mac.

    python benchmarks/scenarios.py --model llama --repeats 3
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine_lines

from weighbridge.scorer.backend import describe_backend, on_mlx_thread
from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.engine import Engine, Mode, Row
from weighbridge.scorer.model_weights import load_model
from weighbridge.scorer.resident import PROBE_TOLERANCE
from weighbridge.tasks.checkpoints import resolve_checkpoint
from weighbridge.tasks.settings import load_settings

SCENARIOS = ((1, 239), (3, 433), (8, 950), (3, 1436), (8, 1953))
SUFFIXES = (9, 14, 4, 11, 2, 7, 20, 5)
CHOICES = 5
MODES = (Mode.INDEPENDENT, Mode.CACHED_SERIAL, Mode.PARALLEL, Mode.AUTO)
TICKETS = Path(__file__).parent.parent / "examples" / "documents" / "tickets.jsonl"

COMMON: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8192,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {**COMMON, "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768},
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "head_dim": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "intermediate_size": 768,
            "query_pre_attn_scalar": 64,
            "sliding_window": 512,
            "sliding_window_pattern": 4,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One mode on one scenario.

    Attributes:
        model: Name of the model.
        fields: Rows.
        shared: Tokens that the rows share.
        mode: How they were computed.
        cpu_seconds: Median over the repeats.
        wall_seconds: Likewise.
        ratio: CPU seconds of `independent` over these.
        labels_agree: Whether the best choices are those of `independent`, near ties apart.
        max_dp: Largest difference of a probability from `independent`.
    """

    model: str
    fields: int
    shared: int
    mode: str
    cpu_seconds: float
    wall_seconds: float
    ratio: float
    labels_agree: bool
    max_dp: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds of each mode on five scenarios.")
    parser.add_argument(
        "--model",
        choices=(*RANDOM, "embedded"),
        action="append",
        help="may be repeated; by default the random ones",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    measured: list[Measured] = []
    if not arguments.json:
        print("\n".join(machine_lines()))
        print(
            f"repeats: {arguments.repeats}, medians; ratio: CPU seconds of independent over these"
        )
    for name in arguments.model or RANDOM:
        show = ignore if arguments.json else show_line
        measured += on_mlx_thread(measure, name, arguments.repeats, show)
    if arguments.json:
        print(
            json.dumps(
                {"machine": machine_lines(), "measured": [asdict(each) for each in measured]},
                indent=2,
            )
        )
    return 0 if all(each.labels_agree for each in measured) else 1


def show_line(line: str) -> None:
    print(line, flush=True)


def ignore(line: str) -> None:
    """Show nothing: JSON stands alone."""


def table_line(each: Measured) -> str:
    return (
        f"{each.fields:>6}{each.shared:>8}  {each.mode:<14}{each.cpu_seconds:>8.3f}"
        f"{each.wall_seconds:>8.3f}{each.ratio:>7.2f}x"
        f"  {'agree' if each.labels_agree else 'DIFFER':<6}  {each.max_dp:.1e}"
    )


def measure(name: str, repeats: int, show: Callable[[str], None]) -> list[Measured]:
    """Measure all scenarios on one model. Call on the MLX thread.

    Args:
        name: One of RANDOM, or `embedded`.
        repeats: How often each mode has its turn.
        show: Takes each line of the table as soon as it is known.
    """
    backend = describe_backend()
    if name == "embedded":
        folder = resolve_checkpoint(None, load_settings()).folder
        model = load_model(folder, backend.dtype)
        texts = [json.loads(line)["text"] for line in TICKETS.read_text("utf-8").splitlines()]
        source = ChatTokenizer.load(folder).encode("\n".join(texts))
        description = f"embedded: {folder.name}, the sample tickets' tokens"
    else:
        model, config = random_model(name, backend.dtype)
        source = tuple(np.random.default_rng(0).integers(0, config["vocab_size"], 4096).tolist())
        description = (
            f"{name}: random weights, {config['num_hidden_layers']} layers, "
            f"width {config['hidden_size']}"
        )
    show(f"\n{description}, {backend.dtype}")
    show(
        f"{'fields':>6}{'shared':>8}  {'mode':<14}{'CPU s':>8}{'wall s':>8}{'ratio':>8}"
        "  labels  max |dp|"
    )
    engine = Engine(model, chunk=backend.chunk)
    tolerance = PROBE_TOLERANCE[backend.dtype]
    cut, apart = engine.check_head(tolerance), engine.probe()
    show(f"head cut to {cut}; fork and recompute {apart:.1e} apart")
    measured: list[Measured] = []
    for fields, shared in SCENARIOS:
        found = compare(engine, name, scenario(source, fields, shared), shared, repeats, tolerance)
        for each in found:
            show(table_line(each))
        measured += found
    return measured


def random_model(name: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """Make a model of mlx-lm with its own random initialisation."""
    import mlx.core as mx  # noqa: PLC0415 - behind weighbridge, which loads the BLAS

    model_type, config = RANDOM[name]
    classes = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(0)
    model = classes.Model(classes.ModelArgs.from_dict({"model_type": model_type, **config}))
    if model_type == "gemma3_text":
        model.sanitize({})  # ties the head
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model, config


def scenario(source: tuple[int, ...], fields: int, shared: int) -> list[Row]:
    """Cut rows from a text: one shared beginning, and a suffix from another place for each."""
    prefix = tuple(source[index % len(source)] for index in range(shared))
    rest = source[shared % len(source) :] + source[: shared % len(source)]
    starts: dict[int, int] = {}
    for index, token in enumerate(rest[: -max(SUFFIXES)]):
        starts.setdefault(token, index)  # suffixes must part at their first token
    begins = list(starts.values())[:fields]
    return [
        Row((*prefix, *rest[start : start + length]), tuple(starts)[:CHOICES])
        for start, length in zip(begins, SUFFIXES[:fields], strict=True)
    ]


def compare(
    engine: Engine, name: str, rows: list[Row], shared: int, repeats: int, tolerance: float
) -> list[Measured]:
    """Measure all modes on the rows of one scenario."""
    seconds: dict[Mode, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    probabilities: dict[Mode, np.ndarray] = {}
    engine.score(rows[:1], mode=Mode.PARALLEL)  # warms up
    for _ in range(repeats):
        for mode in MODES:
            wall, cpu = time.perf_counter(), time.process_time()
            logits, _ = engine.score(rows, mode=mode)
            seconds[mode].append((time.process_time() - cpu, time.perf_counter() - wall))
            exact = np.array(logits, np.float64)
            weights = np.exp(exact - exact.max(axis=1, keepdims=True))
            probabilities[mode] = weights / weights.sum(axis=1, keepdims=True)
    reference = probabilities[Mode.INDEPENDENT]
    base = statistics.median(cpu for cpu, _ in seconds[Mode.INDEPENDENT])
    found: list[Measured] = []
    for mode in MODES:
        cpu = statistics.median(each for each, _ in seconds[mode])
        chosen = probabilities[mode].argmax(axis=1)
        lost = reference.max(axis=1) - reference[np.arange(len(rows)), chosen]
        found.append(
            Measured(
                model=name,
                fields=len(rows),
                shared=shared,
                mode=mode.value,
                cpu_seconds=cpu,
                wall_seconds=statistics.median(each for _, each in seconds[mode]),
                ratio=base / cpu,
                labels_agree=bool((lost <= tolerance).all()),
                max_dp=float(np.abs(probabilities[mode] - reference).max()),
            )
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
