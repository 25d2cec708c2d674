"""The command that says what this installation runs on, and what is wrong with it."""

import importlib.metadata
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weighbridge.deployments.cli.db import readable_bytes
from weighbridge.deployments.cli.errors import ExitCode
from weighbridge.deployments.cli.options import DatabaseOption, JsonOption
from weighbridge.deployments.console import print_error, print_hint, print_json, print_pairs
from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from weighbridge.db.errors import StoreError
    from weighbridge.scorer.errors import ScorerError
    from weighbridge.tasks.settings import Settings


def doctor(as_json: JsonOption = False, database: DatabaseOption = None) -> None:
    """Say what runs here, and what is wrong.

    Backend and its speed, Prefect, the store, and where each setting comes
    from. Ends with 1 when something needs mending.

    Example: weighbridge doctor
    """
    from weighbridge.deployments.prefect_api import answers, describe_api
    from weighbridge.tasks.lease import lease_holder
    from weighbridge.tasks.settings import load_settings, unknown_variables

    settings = load_settings(database_url=database)
    holder = lease_holder(settings.lease)
    backend, no_backend = _backend()
    store, no_store = _store(settings.database_url)
    api = describe_api()
    no_api = None
    if api is not None and not answers(api):
        no_api = CommandError(
            f"the Prefect API must answer, and {api} does not",
            hint="start it with: prefect server start, or unset PREFECT_API_URL",
        )
    report = {
        **backend,
        "model_held_by": holder and asdict(holder),
        "prefect": {
            "version": importlib.metadata.version("prefect"),
            "api": api,
        },
        "database": store,
        "settings": settings.described(),
    }
    if as_json:
        print_json(report)
    else:
        print_pairs(_readable(report))
    for name in unknown_variables():
        print_hint(f"{name} is set, and weighbridge has no such setting")
    no_model = _model(settings)
    problems = [problem for problem in (no_backend, no_model, no_api, no_store) if problem]
    for problem in problems:
        print_error(problem.message)
        if problem.hint:
            print_hint(problem.hint)
    if problems:
        raise typer.Exit(ExitCode.FAILED)


def _backend() -> tuple[dict[str, Any], "ScorerError | None"]:
    from weighbridge.scorer.backend import describe_backend, measure_gflops, on_mlx_thread
    from weighbridge.scorer.errors import ScorerError

    try:
        found = on_mlx_thread(describe_backend)
        speed = measure_gflops()
    except ScorerError as error:
        return {"backend": None, "blas": None, "gflops_float32": None}, error
    return {
        "backend": {"device": found.device, "dtype": found.dtype},
        "blas": found.blas,
        "gflops_float32": round(speed, 1),
    }, None


def _model(settings: "Settings") -> "ScorerError | None":
    """Find what is wrong with the model that is set; a hub is not asked."""
    from weighbridge.scorer.adapters import read_adapter
    from weighbridge.scorer.checkpoint_folder import check_folder
    from weighbridge.scorer.errors import ScorerError
    from weighbridge.tasks.checkpoints import on_hub

    try:
        if settings.checkpoint and not on_hub(settings.checkpoint):
            check_folder(Path(settings.checkpoint).expanduser())
        if settings.adapter and not on_hub(settings.adapter):
            read_adapter(Path(settings.adapter))
    except ScorerError as error:
        return error
    return None


def _store(url: str) -> tuple[dict[str, Any], "StoreError | None"]:
    from weighbridge.db import queries
    from weighbridge.db.engine import open_engine
    from weighbridge.db.errors import StoreError
    from weighbridge.db.location import display_url, store_path
    from weighbridge.db.store_size import store_size

    try:
        path = store_path(url)
        store: dict[str, Any] = {
            "url": display_url(url),
            "path": None if path is None else str(path),
            "exists": path is None or _is_there(path),
            "latest_run": None,
            "store": None,
        }
    except StoreError as error:
        nowhere = {"url": None, "path": None, "exists": False, "latest_run": None, "store": None}
        return nowhere, error
    if not store["exists"]:
        return store, None  # the first run creates it
    try:
        engine = open_engine(url, readonly=True)
        try:
            store["latest_run"] = queries.latest_run_id(engine)
            store["store"] = asdict(store_size(engine))
        finally:
            engine.dispose()
    except StoreError as error:
        return store, error
    return store, None


def _is_there(path: Path) -> bool:
    """Tell whether there is something to open, be it a link that leads nowhere."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        pass  # a NUL, a name too long: opening it says what is wrong
    return True


def _held(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "held by no program"
    return f"{holder['checkpoint']}, held by the {holder['what']} with pid {holder['pid']}"


def _shown(name: str, value: object) -> str:
    if value is None:
        return "the embedded model" if name == "checkpoint" else "-"
    return str(value)


def _readable(report: dict[str, Any]) -> list[tuple[str, str]]:
    backend, store = report["backend"], report["database"]
    settings: dict[str, dict[str, Any]] = report["settings"]
    speed = report["gflops_float32"]
    if not store["exists"]:
        state = "not created yet"
    elif store["latest_run"] is None:
        state = "no runs yet"
    else:
        state = f"latest run {store['latest_run']}"
    return [
        ("weighbridge", importlib.metadata.version("weighbridge")),
        ("backend", f"{backend['device']} {backend['dtype']}" if backend else "none"),
        ("blas", str(report["blas"] or "-")),
        ("float32", f"{speed} GFLOP/s" if speed else "-"),
        ("model", _held(report["model_held_by"])),
        (
            "prefect",
            f"{report['prefect']['version']}, "
            f"reports to {report['prefect']['api'] or 'a temporary server for each run'}",
        ),
        ("database", f"{store['path'] or store['url']} ({state})"),
        *_readable_size(store["store"]),
        *(
            (
                name,
                f"{_shown(name, setting['value'])}  [{setting['origin']}]",
            )
            for name, setting in settings.items()
        ),
    ]


def _readable_size(size: dict[str, Any] | None) -> list[tuple[str, str]]:
    if size is None:
        return []
    lines: list[tuple[str, str]] = []
    if size["bytes"] is not None:
        free = size["free_bytes"]
        # Less than a tenth is soon used again.
        often = ", which weighbridge db vacuum gives back" if free * 10 > size["bytes"] else ""
        lines.append(
            ("size", f"{readable_bytes(size['bytes'])}, {readable_bytes(free)} of it free{often}")
        )
    names = ("runs", "documents", "decisions", "answers")
    lines.append(("holds", ", ".join(_number(size[name], name) for name in names)))
    growth = size["growth"]
    if growth is not None:
        lines.append(
            (
                "growth",
                # Not the texts of the line above: a document counts in each run it is in.
                f"{_number(round(growth['documents']), 'documents')} in runs"
                f" ({round(growth['decisions']):,} scored) and about"
                f" {readable_bytes(growth['bytes'])} a day,"
                f" over {_number(round(growth['days']), 'days')}",
            )
        )
    lines += [("copy", f"{path} ({readable_bytes(copied)})") for path, copied in size["backups"]]
    return lines


def _number(count: int, names: str) -> str:
    return f"{count:,} {names[:-1] if count == 1 else names}"
