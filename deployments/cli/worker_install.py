"""The command that writes the file by which launchd or systemd keeps a worker running."""

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from weighbridge.deployments.cli.options import DatabaseOption, JsonOption
from weighbridge.deployments.console import print_answer, print_hint, print_json, print_note
from weighbridge.deployments.deployments_file import NAME, POOL
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.prefect_api import (
    CONSENT_HINT,
    LOCAL_API,
    is_loopback,
    quiet_prefect,
)

if TYPE_CHECKING:
    from weighbridge.deployments.service import Platform, Service
    from weighbridge.tasks.settings import Settings


class Manager(StrEnum):
    """What keeps programs running."""

    LAUNCHD = "launchd"
    SYSTEMD = "systemd"


def install(
    print_file: Annotated[
        bool, typer.Option("--print", help="Print the file instead of writing it.")
    ] = False,
    server: Annotated[
        bool,
        typer.Option("--server", help="For the Prefect server instead of a worker."),
    ] = False,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool",
            metavar="POOL",
            help=f"The work pool of the worker; {POOL} if left out.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="MODEL",
            help="The model of runs that name none, loaded ahead; the setting if left out.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter", metavar="FOLDER", help="A LoRA adapter of that model.", show_default=False
        ),
    ] = None,
    platform: Annotated[
        Manager | None,
        typer.Option(
            metavar="NAME",
            help="launchd or systemd; by this machine if left out.",
            show_default=False,
        ),
    ] = None,
    let_sleep: Annotated[
        bool,
        typer.Option("--let-sleep", help="Let the Mac sleep when idle, also amid a run."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that says something else.")
    ] = False,
    allow_remote_api: Annotated[
        bool, typer.Option("--allow-remote-api", help="Consent to a Prefect API elsewhere.")
    ] = False,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Write the file that keeps a worker running: after a crash, an upgrade, a restart.

    A LaunchAgent on a Mac, a systemd user unit elsewhere. It starts the worker in
    this folder with the settings of this shell. Nothing is loaded: it tells how.

    Example: weighbridge worker install --server

    Example: weighbridge worker install --checkpoint ~/models/nimble --db ~/answers.db

    Example: weighbridge worker install --print --platform systemd
    """
    if server and (pool or checkpoint or adapter or database or let_sleep):
        raise typer.BadParameter(
            "takes no --pool, --checkpoint, --adapter, --db or --let-sleep: these are a worker's",
            param_hint="--server",
        )
    if pool is not None and not NAME.fullmatch(pool):
        raise typer.BadParameter(
            f"must be letters, digits, dots, dashes and spaces, got {pool!r:.80}",
            param_hint="--pool",
        )
    from weighbridge.tasks.settings import load_settings

    before = dict(os.environ)  # what follows sets variables of its own
    settings = load_settings(database_url=database, allow_remote_api=allow_remote_api or None)
    quiet_prefect()
    from prefect.settings import PREFECT_API_URL

    api = PREFECT_API_URL.value() or LOCAL_API
    manager: Platform = "launchd" if sys.platform == "darwin" else "systemd"
    if platform is not None:
        manager = platform.value
    if server:
        service, left_out = _server(before, api)
    else:
        service, left_out = _worker(
            before, settings, api, pool or POOL, checkpoint, adapter, database, awake=not let_sleep
        )
    _write(service, manager, left_out, print_file=print_file, force=force, as_json=as_json)
    if not server and is_loopback(api):
        print_hint("weighbridge worker install --server does the same for the Prefect server")


def _worker(
    before: Mapping[str, str],
    settings: "Settings",
    api: str,
    pool: str,
    checkpoint: str | None,
    adapter: str | None,
    database: str | None,
    *,
    awake: bool,
) -> "tuple[Service, list[str]]":
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY

    from weighbridge.deployments.service import Service
    from weighbridge.deployments.service_settings import (
        has_password,
        password_error,
        prefect_variables,
        worker_variables,
    )

    if not is_loopback(api) and not settings.allow_remote_api:
        raise CommandError(
            "flow runs must be reported to this machine, and Prefect is set to "
            f"{urlsplit(api).hostname}",
            hint=CONSENT_HINT,
        )
    arguments = ["--pool", pool]
    if checkpoint is not None:
        arguments += ["--checkpoint", _files(checkpoint, "checkpoint")]
    if adapter is not None:
        arguments += ["--adapter", _files(adapter, "adapter")]
    if database is not None:
        if has_password(settings.database_url):
            raise password_error("--db")
        arguments += ["--db", _store(settings.database_url)]
    variables, left_out = prefect_variables(before)
    heartbeat = PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value()
    if checkpoint is not None and adapter is None:
        before = {name: value for name, value in before.items() if name != "WEIGHBRIDGE_ADAPTER"}
    variables |= worker_variables(before, settings, api, heartbeat)
    if database is not None:
        variables.pop("WEIGHBRIDGE_DATABASE_URL", None)  # the option wins
    program = (_script("weighbridge"), "worker", "start", *arguments)
    name = "" if pool == POOL else pool
    return Service("worker", name, program, variables, str(Path.cwd()), awake), left_out


def _server(before: Mapping[str, str], api: str) -> "tuple[Service, list[str]]":
    from prefect.settings import PREFECT_SERVER_API_HOST

    from weighbridge.deployments.service import Service
    from weighbridge.deployments.service_settings import prefect_variables

    # Prefect's default host is loopback too; said, so that it can be seen in the file.
    host = PREFECT_SERVER_API_HOST.value()
    parts = urlsplit(api)
    if not is_loopback(api) and parts.hostname != host:
        raise CommandError(
            f"the server must be the one of this machine, and Prefect is set to {parts.hostname}",
            hint="run this where the server is, or unset PREFECT_API_URL",
        )
    variables, left_out = prefect_variables(before)
    if not is_loopback(f"http://{host}"):
        print_note(
            f"the server will listen on {host}: whoever reaches it can start runs, unless "
            "PREFECT_SERVER_API_AUTH_STRING is set for it"
        )
    port = str(parts.port or 4200)
    program = (_script("prefect"), "server", "start", "--host", host, "--port", port)
    return Service("server", "", program, variables, str(Path.home())), left_out


def _write(
    service: "Service",
    manager: "Platform",
    left_out: Sequence[str],
    *,
    print_file: bool,
    force: bool,
    as_json: bool,
) -> None:
    from weighbridge.deployments import service as services

    home = Path.home()
    text = services.service_text(service, manager, home)
    file = services.service_file(service, manager, home)
    commands = services.loading_commands(service, manager, file, home)
    replaced = False
    if not print_file:
        logs = [services.log_file(service, home).parent] if manager == "launchd" else []
        replaced = services.write_service(file, text, logs, replace=force)
    if as_json:
        values: dict[str, Any] = {"path": str(file), "written": not print_file}
        values |= {"replaced": replaced, "text": text, "commands": commands}
        print_json({**values, "left_out": list(left_out)})
    elif print_file:
        typer.echo(text, nl=False)
    else:
        print_answer(str(file))
    if print_file:
        print_note(f"its place is {file}, readable for you alone")
    if service.role == "worker":
        print_note(f"it runs in {service.folder}: a weighbridge.toml there counts")
    _secrets(left_out)
    for name in ("replace" if replaced else "load", "watch"):
        for command in commands[name]:
            print_hint(command)


def _secrets(left_out: Sequence[str]) -> None:
    if not left_out:
        return
    print_note(f"left out, as they may be secret: {', '.join(left_out)}")
    for name in left_out:
        print_hint(f'prefect config set {name}="${name}" keeps it in your profile')


def _files(name: str, what: str) -> str:
    from weighbridge.tasks.checkpoints import on_hub

    if on_hub(name):
        print_note(f"there is no folder {name}: it is taken for a model of a hub")
        return name
    folder = _checked(Path(name))
    if not folder.is_dir():
        raise CommandError(
            f"the {what} must be a folder, and {str(folder)!r:.200} is none",
            hint="name the folder with its config.json, or a model of a hub as org/name",
        )
    return str(folder)


def _store(url: str) -> str:
    from weighbridge.db.location import store_path

    path = store_path(url)
    if path is None:
        return url
    if _checked(path).is_dir():
        raise CommandError(f"the store must be a file, and {str(path)!r:.200} is a folder")
    return str(path)


def _checked(path: Path) -> Path:
    try:
        path = path.expanduser().absolute()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"{str(path)!r:.200} must be a path, got: {reason}") from error
    return path


def _script(name: str) -> str:
    folders = (sysconfig.get_path("scripts"), Path(sys.executable).parent)
    for folder in folders:
        script = Path(folder).absolute() / name
        if script.is_file():
            return str(script)
    raise CommandError(
        f"the program {name} must be installed, and it is not in {folders[0]}",
        hint="install weighbridge with pip, pipx or uv",
    )
