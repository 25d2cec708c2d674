"""The command that measures speed against the reference algorithm, in one run."""

import importlib.metadata
import json
import math
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.errors import ExitCode
from weighbridge.deployments.cli.options import JsonOption
from weighbridge.deployments.console import (
    Column,
    print_error,
    print_json,
    print_note,
    print_pairs,
    print_table,
)
from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from weighbridge.deployments.bench_contests import Bench
    from weighbridge.scorer.backend import Backend

RANDOM = ("llama", "qwen3_5")
ROUNDS = 3
ENOUGH_SECONDS = 30.0
"""Of rounds that decide on no target: a checkpoint's may take minutes each."""

PACKAGES = ("weighbridge", "mlx", "mlx-lm", "numpy", "mkl")
THREADS = ("MKL_NUM_THREADS", "MKL_THREADING_LAYER", "OMP_NUM_THREADS")
"""Variables that change how fast a CPU is; part of what a figure was measured on."""

_COLUMNS = (
    Column("name"),
    Column("seconds", "right", significant=3),
    Column("wall_seconds", "right", significant=3),
    Column("ratio", "right", digits=2),
    Column("baseline"),
    Column("peak_mib", "right", digits=0),
    Column("labels_match"),
    Column("max_probability_difference", "right", significant=2),
)


def bench(
    as_json: JsonOption = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="llama, qwen3_5, gemma3 (random weights, 8 layers), embedded, or a "
            "checkpoint. May be repeated; llama and qwen3_5 if left out.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="FOLDER",
            help="A LoRA adapter (mlx or PEFT) that is fused into the checkpoint of --model.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            min=1,
            help=f"Rounds in which everyone has a turn; {ROUNDS} if left out, and fewer where they "
            "take over half a minute and no target is decided.",
            show_default=False,
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            metavar="NAME",
            help="One of them only, such as 8x1953 (fields x shared tokens), documents-8x30, "
            "switches, switches-documents, labels or memory. May be repeated.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Also write the JSON to a file."),
    ] = None,
) -> None:
    """Measure the speed of scoring against the reference algorithm.

    Everyone takes turns on the same weights. Seconds are medians of process CPU
    seconds for one document, with wall seconds beside them; a ratio is the
    baseline's seconds over these. Ends with 1 when a label differs from the
    reference's, or a probability by more than 1e-4 (0.03 in 16 bits).

    Example: weighbridge bench --json --output bench.json
    Example: weighbridge bench --model llama --scenario 8x1953
    """
    from weighbridge.deployments.bench import LIMITS, passes
    from weighbridge.deployments.bench_contests import scenario_names
    from weighbridge.scorer.backend import describe_backend, on_mlx_thread
    from weighbridge.scorer.random_models import RANDOM_MODELS

    names = scenario_names()
    for each in scenario or ():
        if each not in names:
            message = f"scenario must be one of {', '.join(names)}, got {each!r:.80}"
            raise typer.BadParameter(message, param_hint="'--scenario'")
    models = list(dict.fromkeys(model or RANDOM))
    if adapter is not None and (len(models) > 1 or models[0] in RANDOM_MODELS):
        message = f"an adapter needs one --model that is a checkpoint, got {', '.join(models)}"
        raise typer.BadParameter(message, param_hint="'--adapter'")
    if output is not None and not output.parent.is_dir():
        raise CommandError(
            f"the folder of --output must exist, and {output.parent} does not",
            hint=f"make it with: mkdir -p {output.parent}",
        )
    backend = on_mlx_thread(describe_backend)
    limit = LIMITS[backend.dtype]
    report: dict[str, Any] = {
        "machine": _machine(backend),
        "versions": _versions(),
        "limit": limit,
        "rows": [],
    }
    if not as_json:
        print_pairs((key, str(value)) for key, value in report["machine"].items())
    for each in models:
        report["rows"] += on_mlx_thread(
            _measure, each, adapter, scenario or names, repeats, backend
        )
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(report)
    else:
        print_table(
            _COLUMNS, [{**row, "peak_mib": row["peak_bytes"] / 2**20} for row in report["rows"]]
        )
    wrong = [row for row in report["rows"] if not passes(row, limit)]
    for name in dict.fromkeys(f"{row['name']!r} (like {row['like']!r})" for row in wrong):
        print_error(f"answers must be the same within {limit:g}, and those of {name} are not")
    if wrong:
        raise typer.Exit(ExitCode.FAILED)


def _measure(
    model: str, adapter: str | None, wanted: list[str], repeats: int | None, backend: "Backend"
) -> list[dict[str, Any]]:
    from weighbridge.deployments.bench import LIMITS, measure
    from weighbridge.deployments.bench_contests import contests
    from weighbridge.deployments.bench_targets import has_target

    opened = _open(model, adapter, backend)
    # Where a checkpoint lies says more about a machine than about a measurement.
    name = " + ".join(Path(each).name for each in (model, adapter) if each)
    rows: list[dict[str, Any]] = []
    for contest in contests(opened, wanted):
        print_note(f"{name}: {contest.name}")
        all_of_them = repeats is not None or has_target(name, contest.name)
        rows += measure(
            contest,
            model=name,
            repeats=repeats or ROUNDS,
            limit=LIMITS[backend.dtype],
            seconds=math.inf if all_of_them else ENOUGH_SECONDS,
        )
    return rows


def _open(model: str, adapter: str | None, backend: "Backend") -> "Bench":
    from weighbridge.deployments.bench_contests import open_checkpoint, open_random
    from weighbridge.scorer import inspect_checkpoint
    from weighbridge.scorer.backend import PROBE_TOLERANCE
    from weighbridge.scorer.embedded import embedded_path
    from weighbridge.scorer.errors import CheckpointError
    from weighbridge.scorer.random_models import RANDOM_MODELS
    from weighbridge.tasks.checkpoints import hash_cache, resolve_adapter, resolve_checkpoint
    from weighbridge.tasks.settings import load_settings

    tolerance = PROBE_TOLERANCE[backend.dtype]
    if model in RANDOM_MODELS:
        return open_random(model, backend, tolerance)
    settings = load_settings()
    # Not the setting: what stands beside random models is the same everywhere.
    embedded = embedded_path(settings.cache) if model == "embedded" else None
    if model == "embedded" and embedded is None:
        raise CheckpointError(
            "the embedded checkpoint must be built first, and it is not there",
            hint="build it once with: weighbridge checkpoint demo",
        )
    found = embedded or resolve_checkpoint(model, settings, say=print_note).folder
    # Nor the setting's adapter, which is one for the setting's checkpoint.
    fused = resolve_adapter(adapter, model, settings, say=print_note)
    info = inspect_checkpoint(
        found, adapter=fused.folder if fused else None, hash_cache=hash_cache(settings)
    )
    return open_checkpoint(info, backend, tolerance)


def _machine(backend: "Backend") -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "device": backend.device,
        "dtype": backend.dtype,
        "blas": backend.blas,
        "prefill_chunk": backend.chunk,
        "threads": {name: os.environ[name] for name in THREADS if name in os.environ},
        # Of the last minute: above the number of CPUs others were at work, too.
        "load": round(os.getloadavg()[0], 1),
    }


def _processor() -> str:
    """Return the model of the CPU, as far as the system says it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # MKL, on a Mac
    return found
