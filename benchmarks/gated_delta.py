"""What the chunked gated delta rule brings: one layer, and a whole model of many such layers.

Both forms take turns on the same inputs in one process, so that a slow minute hits both;
medians, process CPU seconds beside wall seconds, since machines are shared. Gates are drawn
as the layers start training with them, from heads that keep nearly all to heads that forget
within a token, and a loop does not depend on them.

    python benchmarks/gated_delta.py --repeats 7 --json
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from machine import machine_lines

from weighbridge.scorer.backend import on_mlx_thread, preload_blas

preload_blas()  # before MLX is imported

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models import gated_delta as stock  # noqa: E402
from mlx_lm.models import qwen3_5  # noqa: E402

from weighbridge.scorer import gated_delta  # noqa: E402
from weighbridge.scorer.engine import Engine  # noqa: E402
from weighbridge.scorer.rows import Mode, Row  # noqa: E402

CHUNK = 256  # of a prefill on a CPU


@dataclass(frozen=True)
class Shape:
    """One call of a layer: rows, tokens, key heads, value heads, width of a head."""

    rows: int
    tokens: int
    key_heads: int
    heads: int
    width: int


# Prefill chunks and suffixes of the 9B and of the 0.8B model, then of what tests use.
SHAPES = (
    Shape(1, 256, 16, 32, 128),
    Shape(1, 161, 16, 32, 128),
    Shape(8, 8, 16, 32, 128),
    Shape(8, 20, 16, 32, 128),
    Shape(1, 256, 16, 16, 128),
    Shape(8, 8, 16, 16, 128),
    Shape(8, 20, 16, 16, 128),
    Shape(1, 1, 16, 16, 128),
    Shape(1, 4, 16, 16, 128),
    Shape(1, 256, 1, 2, 8),
    Shape(8, 6, 1, 2, 8),
)
MODEL = {
    "model_type": "qwen3_5",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="The chunked gated delta rule and the loop.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=600, help="prefix of the whole model")
    parser.add_argument("--rows", type=int, default=8, help="fields of the whole model")
    parser.add_argument("--chunks", action="store_true", help="compare lengths of chunks, too")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    arguments = parser.parse_args()
    if mx.metal.is_available():
        print("Metal has kernels for the gated delta rule: nothing to compare")
        return 0
    found = on_mlx_thread(measure, arguments)
    if arguments.json:
        print(json.dumps({"machine": machine_lines(), "repeats": arguments.repeats, **found}))
        return 0
    print("\n".join(machine_lines()))
    print(f"{'':<34}{'loop CPU':>10}{'chunked':>10}{'ratio':>7}{'wall':>7}   apart")
    for row in found["layers"] + found["model"]:
        print(
            f"{row['what']:<34}{row['loop_cpu'] * 1e3:>7.1f} ms{row['cpu'] * 1e3:>7.1f} ms"
            f"{row['ratio']:>6.1f}x{row['wall_ratio']:>6.1f}x   {row['apart']:.1e}"
        )
    for row in found["chunks"]:
        print(f"{row['what']:<34}" + "".join(f"  {c}: {s * 1e3:.1f} ms" for c, s in row["cpu"]))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measure all shapes and the whole model. Call on the MLX thread."""
    return {
        "layers": [layer(shape, arguments.repeats) for shape in SHAPES],
        "model": whole(arguments.tokens, arguments.rows, max(arguments.repeats // 2, 1)),
        "chunks": [chunks(each, arguments.repeats) for each in SHAPES if each.tokens > 100]
        if arguments.chunks
        else [],
    }


def drawn(shape: Shape) -> list[mx.array]:
    """Draw q, k, v, g, beta and state of one call."""
    draw = np.random.default_rng(0)
    keys = (shape.rows, shape.tokens, shape.key_heads, shape.width)
    per_head = (shape.rows, shape.tokens, shape.heads)
    q, k = (mx.array(draw.normal(size=keys), dtype=mx.float32) for _ in range(2))
    q, k = stock.normalize_qk(q, k, inv_scale=shape.width**-0.5, eps=1e-6)
    v, state = (
        mx.array(draw.normal(size=each), dtype=mx.float32)
        for each in ((*per_head, shape.width), (shape.rows, shape.heads, shape.width, shape.width))
    )
    a_log = mx.log(mx.array(draw.uniform(0, 16, shape.heads), dtype=mx.float32))
    g = stock.compute_g(
        a_log, mx.array(draw.normal(size=per_head), dtype=mx.float32), mx.array(1.0)
    )
    beta = mx.array(draw.uniform(size=per_head), dtype=mx.float32)
    given = [q, k, v, g, beta, state]
    mx.eval(given)
    return given


def turns(forms: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, tuple[float, float]]:
    """Run all forms in turn, after once that does not count; return median CPU and wall."""
    seconds: dict[Any, list[tuple[float, float]]] = {name: [] for name in forms}
    for repeat in range(repeats + 1):
        for name, form in forms.items():
            wall, cpu = time.perf_counter(), time.process_time()
            mx.eval(form())
            taken = (time.process_time() - cpu, time.perf_counter() - wall)
            if repeat:
                seconds[name].append(taken)
    return {
        name: (statistics.median(cpu for cpu, _ in taken), statistics.median(w for _, w in taken))
        for name, taken in seconds.items()
    }


def compared(what: str, taken: dict[Any, tuple[float, float]], apart: float) -> dict[str, Any]:
    (loop_cpu, loop_wall), (cpu, wall) = taken["loop"], taken["chunked"]
    return {
        "what": what,
        "loop_cpu": loop_cpu,
        "cpu": cpu,
        "ratio": loop_cpu / cpu,
        "wall_ratio": loop_wall / wall,
        "apart": apart,
    }


def layer(shape: Shape, repeats: int) -> dict[str, Any]:
    """Compare one call, in what `install` makes of it: a call that does not suit has ratio 1."""
    given = drawn(shape)
    loop = stock.gated_delta_ops
    used = gated_delta.suits(*given)
    form = gated_delta.chunked if used else loop
    apart = max(float(mx.abs(a - b).max()) for a, b in zip(form(*given), loop(*given), strict=True))
    name = f"B={shape.rows} T={shape.tokens} {shape.key_heads}/{shape.heads} heads of {shape.width}"
    taken = turns({"loop": lambda: loop(*given), "chunked": lambda: form(*given)}, repeats)
    return compared(name if used else f"{name} (loop)", taken, apart)


def chunks(shape: Shape, repeats: int) -> dict[str, Any]:
    """Compare lengths of chunks."""
    given = drawn(shape)

    def form(size: int) -> Callable[[], Any]:
        return lambda: gated_delta.chunked(*given, chunk=size)

    taken = turns({size: form(size) for size in (16, 24, 32, 48, 64, 96)}, repeats)
    name = f"B={shape.rows} T={shape.tokens} {shape.key_heads}/{shape.heads} of {shape.width}"
    return {"what": name, "cpu": [(size, cpu) for size, (cpu, _) in taken.items()]}


def whole(tokens: int, count: int, repeats: int) -> list[dict[str, Any]]:
    """Compare one document with `count` fields on a random model, prefill and branches."""
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(MODEL))
    mx.eval(model.parameters())
    engine = Engine(model, chunk=CHUNK)
    draw = np.random.default_rng(1)
    prefix = draw.integers(0, 32000, tokens).tolist()
    rows = [
        Row((*prefix, field, *draw.integers(0, 32000, 7 + field).tolist()), (1, 2, 3))
        for field in range(count)
    ]

    def scored(form: str) -> list[np.ndarray]:
        gated_delta.uninstall()
        if form == "chunked":
            gated_delta.install()
        try:
            logits, timings = engine.score(rows, mode=Mode.PARALLEL)
        finally:
            gated_delta.uninstall()
        parts[form].append((timings.prefill_seconds, timings.branch_seconds))
        return logits

    parts: dict[str, list[tuple[float, float]]] = {"loop": [], "chunked": []}
    apart = max(
        float(np.abs(a - b).max()) for a, b in zip(scored("loop"), scored("chunked"), strict=True)
    )
    taken = turns({form: lambda form=form: (scored(form), [])[1] for form in parts}, repeats)
    found = [compared(f"8 layers, {tokens} tokens, {count} fields", taken, apart)]
    for index, part in enumerate(("prefill", "branches")):
        medians: dict[Any, tuple[float, float]] = {}
        for form, seconds in parts.items():
            wall = statistics.median(each[index] for each in seconds[2:])  # those that count
            medians[form] = (wall, wall)
        found.append(compared(f"  {part} (wall only)", medians, apart))
    return found


if __name__ == "__main__":
    sys.exit(main())
