"""The arithmetic MLX runs on: BLAS, device, compute dtype, memory, and the one thread.

MLX is imported lazily, so that the cheap modules of this layer stay cheap.
"""

import atexit
import contextvars
import ctypes
import importlib.metadata
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from weighbridge.scorer.errors import BackendError

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Compute dtypes, by MLX's names."""

PROBE_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest difference of logits that must be equal, relative to their spread, by dtype."""

CACHE_LIMIT_BYTES = 512 * 2**20
"""Bound of MLX's buffer cache: buffers of many sizes otherwise pile up for hours.

Measured on a CPU, 64 MiB are as fast with short documents, and none at all too; behind 1,953
tokens they cost 3 % of a prefill in chunks and 9 % of one in a piece.
"""


@dataclass(frozen=True, slots=True)
class Backend:
    """What a scorer of this process computes with.

    Attributes:
        device: `metal` or `cpu`.
        dtype: Compute dtype of the weights, by MLX's name.
        blas: The matrix library behind CPU products.
        chunk: Prefill chunk in tokens.
        pass_tokens: Most tokens of documents that are computed in one pass together, 0 for
            one document each.
    """

    device: str
    dtype: str
    blas: str
    chunk: int
    pass_tokens: int = 0

    @property
    def name(self) -> str:
        """Device, dtype and BLAS in one line."""
        return f"{self.device} {self.dtype} ({self.blas})"


def preload_blas() -> str:
    """Load Intel MKL globally before `mlx.core`, where it is installed.

    The Linux CPU wheel of MLX links the reference BLAS (about 3 GFLOP/s); a
    global MKL takes over its symbols, but only if it is loaded first.

    Returns:
        The name of the BLAS that MLX will use.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    library = _mkl_library()
    if library is None:
        return "reference BLAS, slow: install the extra weighbridge[cpu]"
    if not _is_loaded("libmkl_rt"):
        if "mlx.core" in sys.modules:
            return "reference BLAS, slow: import weighbridge before mlx"
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            return f"reference BLAS, slow: MKL does not load ({error})"
    return f"MKL {importlib.metadata.version('mkl')}"


def _mkl_library() -> str | None:
    try:
        files = importlib.metadata.distribution("mkl").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [file for file in files if file.name.startswith("libmkl_rt.so")]
    return str(found[0].locate()) if found else None


def _is_loaded(name: str) -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and name in maps.read_text(encoding="utf-8", errors="replace")


def describe_backend(dtype: str | None = None) -> Backend:
    """Return the backend of this process: Metal in bfloat16, else CPU in float32.

    On CPU only float32 products reach the BLAS; 16-bit ones run some eighty
    times slower (measured, FIELD notes of the project), so weights are held in
    float32 there.

    Args:
        dtype: Another compute dtype. `float64`, which only the CPU knows, makes
            all modes agree to the last digits: for tests of exactness.

    Raises:
        BackendError: There is no such compute dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise BackendError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    blas = preload_blas()
    import mlx.core as mx

    if mx.metal.is_available() and dtype != "float64":
        # Fewer passes should gain more there than on a CPU. `pass_tokens` was never measured
        # on a Mac; benchmarks/modes.py shows it.
        return Backend(
            device="metal",
            dtype=dtype or "bfloat16",
            blas=blas,
            chunk=2048,
            pass_tokens=512,
        )
    return Backend(device="cpu", dtype=dtype or "float32", blas=blas, chunk=256)


def measure_gflops(size: int = 1024, repeats: int = 5) -> float:
    """Measure a float32 product of two (size, size) matrices.

    Returns:
        Median GFLOP/s on the default device.
    """

    def run() -> float:
        import mlx.core as mx

        left = mx.random.normal((size, size))
        mx.eval(left @ left)
        seconds: list[float] = []
        for _ in range(repeats):
            start = time.perf_counter()
            mx.eval(left @ left)
            seconds.append(time.perf_counter() - start)
        return 2 * size**3 / statistics.median(seconds) / 1e9

    return on_mlx_thread(run)


class _MlxThread(threading.Thread):
    """A daemon thread that runs one call after the other.

    Not an executor of the standard library: MLX aborts the process ("terminate
    called without an active exception") when a thread that used it ends without
    clearing its streams, and an executor's threads end before any exit handler
    could see to it. Seen with mlx 0.32.4 on Linux.
    """

    def __init__(self) -> None:
        super().__init__(name="weighbridge-mlx", daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )

    def call(self, function: Callable[[], R]) -> R:
        future: Future[R] = Future()
        self._calls.put((function, future))
        return future.result()

    def end(self) -> None:
        """Finish the call at hand and end."""
        self._calls.put(None)
        self.join()

    def run(self) -> None:
        mx = None
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                mx = mx or _prepared_mlx()
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
                future.set_exception(error)
        if mx is not None:
            mx.clear_streams()


def _prepared_mlx() -> Any:
    preload_blas()
    try:
        import mlx.core as mx
    except ImportError as error:
        raise BackendError(
            f"MLX must be importable, got: {error}",
            hint="on Linux install the CPU build: pip install 'weighbridge[cpu]'",
        ) from error
    mx.set_cache_limit(CACHE_LIMIT_BYTES)
    return mx


_thread: _MlxThread | None = None
_thread_lock = threading.Lock()


def on_mlx_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function on the one thread that owns MLX and wait for its value.

    Streams of MLX belong to the thread that made them (since 0.31.2), so an
    array that is not evaluated cannot cross threads. Whatever loads, evaluates
    or scores goes through here, and only plain Python values come back.

    Raises:
        BackendError: MLX cannot be imported on this machine, or its thread has ended.
    """
    if threading.current_thread() is _thread:
        return function(*args, **kwargs)
    # The caller's context goes along, so that log lines reach the run they belong to.
    context = contextvars.copy_context()
    return _running_thread().call(lambda: context.run(function, *args, **kwargs))


def _running_thread() -> _MlxThread:
    global _thread  # noqa: PLW0603
    with _thread_lock:
        if _thread is None:
            _thread = _MlxThread()
            _thread.start()
            atexit.register(_thread.end)
        if not _thread.is_alive():
            raise BackendError(
                "the thread that owns MLX must be alive, got one that has ended: this process "
                "was forked after MLX was used, or is exiting",
                hint='start processes with multiprocessing.get_context("spawn")',
            )
        return _thread
