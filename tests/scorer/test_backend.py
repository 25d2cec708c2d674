"""One thread for MLX, MKL before it, and processes that end well."""

import contextvars
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from weighbridge.scorer import backend
from weighbridge.scorer.backend import (
    CACHE_LIMIT_BYTES,
    describe_backend,
    measure_gflops,
    on_mlx_thread,
    preload_blas,
)

needs_mkl = pytest.mark.skipif(
    sys.platform != "linux" or backend._mkl_library() is None,
    reason="MKL is not installed; it is for Linux on x86-64",
)
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")


@pytest.mark.mlx
class TestThread:
    def test_all_calls_run_on_one_thread_that_is_not_the_callers(self):
        with ThreadPoolExecutor(8) as pool:
            names = list(pool.map(lambda _: on_mlx_thread(threading.get_ident), range(50)))
        # Streams belong to a thread, so 50 calls from 8 threads must meet on one.
        assert len(set(names)) == 1
        assert names[0] not in {threading.get_ident(), 0}

    def test_arguments_go_in_and_values_come_out(self):
        assert on_mlx_thread(divmod, 17, 5) == (3, 2)
        assert on_mlx_thread(sorted, [1, 3, 2], reverse=True) == [3, 2, 1]

    def test_calls_do_not_overlap(self):
        inside: list[int] = []
        most: list[int] = []

        def work() -> None:
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.002)
            inside.pop()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: on_mlx_thread(work), range(20)))
        # One after the other: nobody ever found another call inside.
        assert most == [1] * 20

    def test_a_call_from_inside_runs_at_once(self):
        # Waiting for its own thread would never end.
        assert on_mlx_thread(lambda: on_mlx_thread(lambda: on_mlx_thread(lambda: 7))) == 7

    @pytest.mark.parametrize("error", [ValueError("it broke"), KeyboardInterrupt(), SystemExit(3)])
    def test_exceptions_come_back_and_the_thread_goes_on(self, error):
        def fail() -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            on_mlx_thread(fail)
        # The very same object, so that its attributes and hint are still there.
        assert caught.value is error
        assert on_mlx_thread(lambda: 1) == 1

    def test_context_goes_along_and_stays_inside(self):
        token = variable.set("caller")
        try:

            def inside() -> str:
                seen = variable.get()
                variable.set("changed inside")
                return seen

            # Prefect finds the run that a log line belongs to this way.
            assert on_mlx_thread(inside) == "caller"
            # A call works on a copy: nothing leaks out, or into the next call.
            assert variable.get() == "caller"
            assert on_mlx_thread(variable.get) == "caller"
        finally:
            variable.reset(token)
        assert on_mlx_thread(variable.get) == "outside"

    def test_the_buffer_cache_is_bounded(self):
        import mlx.core as mx

        def limit() -> int:
            previous = mx.set_cache_limit(CACHE_LIMIT_BYTES)
            mx.set_cache_limit(previous)
            return previous

        # Unbounded, memory climbs for hours with varying lengths.
        assert on_mlx_thread(limit) == CACHE_LIMIT_BYTES

    def test_a_product_has_a_speed(self):
        assert measure_gflops(size=64, repeats=1) > 0


@pytest.mark.mlx
@pytest.mark.parametrize("time_again", range(5))
def test_a_process_that_used_the_thread_ends_well(fresh_process, time_again):
    done = fresh_process(
        """
        from weighbridge.scorer.backend import on_mlx_thread
        def work():
            import mlx.core as mx
            x = mx.random.normal((64, 64))
            return float((x @ x).sum()) is not None
        print(on_mlx_thread(work))
        """
    )
    # MLX aborts when a thread with streams just ends: "terminate called without ...".
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.mlx
def test_a_process_that_fails_on_the_thread_still_ends_well(fresh_process):
    done = fresh_process(
        """
        from weighbridge.scorer.backend import on_mlx_thread
        def work():
            import mlx.core as mx
            mx.eval(mx.ones(3))
            raise SystemExit(3)
        on_mlx_thread(work)
        """
    )
    # The exit code asked for, not the 134 of an abort.
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.mlx
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_told_and_does_not_hang(fresh_process):
    done = fresh_process(
        """
        import os, warnings
        warnings.simplefilter("ignore")  # newer Pythons warn of just this
        from weighbridge.scorer.backend import on_mlx_thread
        from weighbridge.scorer.errors import BackendError
        on_mlx_thread(lambda: 1)
        child = os.fork()
        if child == 0:
            try:
                on_mlx_thread(lambda: 1)
            except BackendError as error:
                os._exit(7 if "spawn" in error.hint else 8)
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    # The thread does not exist in the child; waiting for it would never end.
    assert (done.stdout, done.returncode) == ("7\n", 0)


@pytest.mark.mlx
def test_a_call_after_the_end_is_refused(fresh_process):
    done = fresh_process(
        """
        import atexit
        from weighbridge.scorer.backend import on_mlx_thread
        from weighbridge.scorer.errors import BackendError
        def late():
            try:
                on_mlx_thread(lambda: 1)
            except BackendError:
                print("refused")
        atexit.register(late)  # runs last, after the thread was ended
        on_mlx_thread(lambda: 1)
        """
    )
    # Queued for a thread that has ended, the call would wait for ever.
    assert (done.stdout, done.returncode) == ("refused\n", 0)


def test_without_mlx_the_way_out_is_named(fresh_process):
    done = fresh_process(
        """
        import sys
        sys.modules["mlx.core"] = None  # what a failed import looks like
        from weighbridge.scorer.backend import on_mlx_thread
        from weighbridge.scorer.errors import BackendError
        try:
            on_mlx_thread(lambda: 1)
        except BackendError as error:
            print(error.message, "|", error.hint)
        """
    )
    assert "MLX must be importable" in done.stdout
    # A Mac needs nothing more, Linux needs the extra.
    assert "pip install 'weighbridge[cpu]'" in done.stdout


def test_importing_the_package_imports_no_mlx(fresh_process):
    done = fresh_process(
        """
        import sys
        import weighbridge.scorer
        from weighbridge.scorer import ScorerError, TemperatureKind
        print([name for name in sys.modules if name.split(".")[0] in {"mlx", "transformers"}])
        """
    )
    # A command line that only reads results stays quick.
    assert done.stdout == "[]\n"


@needs_mkl
def test_importing_the_package_first_gives_mkl(fresh_process):
    done = fresh_process(
        """
        import weighbridge.scorer
        from weighbridge.scorer.backend import describe_backend, on_mlx_thread
        def multiply():
            import mlx.core as mx
            mx.eval(mx.random.normal((256, 256)) @ mx.random.normal((256, 256)))
        on_mlx_thread(multiply)
        print(describe_backend().name)
        # MKL loads its kernels for this processor with the first product it computes.
        print("libmkl_core" in open("/proc/self/maps").read())
        """
    )
    # 250 instead of 3 GFLOP/s, and it says so.
    assert done.stdout.startswith("cpu float32 (MKL 2")
    assert done.stdout.endswith("\nTrue\n")


@needs_mkl
def test_mlx_first_is_too_late_and_said(fresh_process):
    done = fresh_process(
        """
        import mlx.core as mx
        import weighbridge.scorer
        from weighbridge.scorer.backend import describe_backend
        mx.eval(mx.random.normal((256, 256)) @ mx.random.normal((256, 256)))
        print(describe_backend().blas)
        print("libmkl_core" in open("/proc/self/maps").read())
        """
    )
    # The negative control of the test above: no MKL, and not silently.
    assert done.stdout == "reference BLAS, slow: import weighbridge before mlx\nFalse\n"


@needs_mkl
def test_this_process_has_mkl_and_says_so_each_time():
    # conftest imports weighbridge before anything imports mlx.
    assert preload_blas().startswith("MKL ")
    assert preload_blas() == preload_blas()


@pytest.mark.mlx
def test_the_backend_fits_its_device():
    found = describe_backend()
    # Elsewhere than on Metal only float32 products reach the BLAS.
    assert (found.device, found.dtype) in {("metal", "bfloat16"), ("cpu", "float32")}
    assert found.name == f"{found.device} {found.dtype} ({found.blas})"
    assert found.chunk > 0
