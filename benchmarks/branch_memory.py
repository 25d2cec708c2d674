"""Memory and seconds of branching from one prefix: a copy for every row, or none.

A random llama of 8 layers; both ways take turns in one run, each after the other's arrays
are gone. Peak bytes are those of MLX above what it held before.

    python benchmarks/branch_memory.py --fields 32 --prefix 2000
"""

import argparse
import statistics
import sys
import time

from machine import machine_lines

from weighbridge.scorer.backend import describe_backend, on_mlx_thread, preload_blas

preload_blas()  # before MLX is imported

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models import llama  # noqa: E402

from weighbridge.scorer.caches import Prefix  # noqa: E402
from weighbridge.scorer.engine import Engine  # noqa: E402
from weighbridge.scorer.rows import Mode, Row  # noqa: E402

WAYS = ("forked", "packed")
ALLOWED = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and seconds of branching.")
    parser.add_argument("--fields", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--suffix", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for line in machine_lines():
        print(line)
    peaks, seconds, apart = on_mlx_thread(
        measure, arguments.fields, arguments.prefix, arguments.suffix, arguments.repeats
    )
    print(f"{arguments.fields} rows of {arguments.suffix} behind {arguments.prefix} tokens")
    for way in WAYS:
        cpu = statistics.median(each for each, _ in seconds[way])
        wall = statistics.median(each for _, each in seconds[way])
        print(f"{way}: peak {peaks[way] / 2**20:7.1f} MiB, CPU {cpu:.3f} s, wall {wall:.3f} s")
    memory = peaks["packed"] / peaks["forked"]
    faster = statistics.median(
        one / other for (one, _), (other, _) in zip(*(seconds[way] for way in WAYS), strict=True)
    )
    print(f"packed takes {memory:.1%} of the memory, {faster:.2f}x as fast; {apart:.1e} apart")
    return 0 if memory <= ALLOWED else 1


def measure(
    fields: int, held: int, width: int, repeats: int
) -> tuple[dict[str, int], dict[str, list[tuple[float, float]]], float]:
    """Run both ways in turn; return peak bytes, (CPU, wall) seconds, and how far apart."""
    draw = np.random.default_rng(0)
    shared = tuple(draw.integers(0, 2000, held).tolist())
    rows = [
        Row((*shared, number, *draw.integers(0, 2000, width - 1).tolist()), (1, 2, 3))
        for number in range(fields)
    ]
    backend, model = describe_backend(), _llama()
    engines: dict[str, Engine] = {
        way: Engine(model, chunk=backend.chunk, packed=way == "packed") for way in WAYS
    }
    for engine in engines.values():
        engine.probe()
    if not engines["packed"].packs or engines["forked"].packs:
        raise RuntimeError("a llama must be packed by one of two engines")
    peaks: dict[str, int] = dict.fromkeys(WAYS, 0)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    logits: dict[str, list[np.ndarray]] = {}
    base: dict[str, Prefix] = {way: engine.prefill(shared) for way, engine in engines.items()}
    for _ in range(repeats + 1):
        for way, engine in engines.items():
            engine.resident.put(base[way])
            mx.clear_cache()
            before = mx.get_active_memory()
            wall, cpu = time.perf_counter(), time.process_time()
            logits[way], timings = engine.score(rows, mode=Mode.PARALLEL, resident_tokens=held)
            seconds[way].append((time.process_time() - cpu, time.perf_counter() - wall))
            peaks[way] = max(peaks[way], timings.peak_bytes - before)
    apart = float(np.abs(np.array(logits["packed"]) - np.array(logits["forked"])).max())
    return peaks, {way: each[1:] for way, each in seconds.items()}, apart


def _llama() -> object:
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=512,
            num_hidden_layers=8,
            intermediate_size=1536,
            num_attention_heads=8,
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            vocab_size=2000,
            tie_word_embeddings=True,
        )
    )
    mx.eval(model.parameters())
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
