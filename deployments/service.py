"""The files that let launchd or systemd keep a worker, or the Prefect server, running.

Only texts and places: nothing here starts, stops or loads a service.
"""

import os
import plistlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weighbridge.deployments.errors import CommandError

Platform = Literal["launchd", "systemd"]
Role = Literal["worker", "server"]

# A worker ends its batch on SIGTERM. A large model on long documents takes a minute or two.
_DRAIN_SECONDS = {"worker": 300, "server": 30}
# A worker that starts before its server ends at once: this is how often it tries again.
_PAUSE_SECONDS = 10
# Desktop programs go first, on a machine that somebody works on.
_NICE = {"worker": 5, "server": 0}
# launchd's `Background` throttles CPU and disk, and `Standard`, its default, does so lightly:
# a model whose GPU waits for a throttled thread is slow for no gain, and `Nice` yields already.
_PROCESS_TYPE = {"worker": "Interactive", "server": "Standard"}
# Not `caffeinate weighbridge …`: launchd would send SIGTERM to caffeinate, and the batch in
# flight would be lost. Like this the worker is the process that launchd knows, and caffeinate
# goes when the worker goes. Without a caffeinate the worker runs all the same.
_AWAKE = '/usr/bin/caffeinate -i -w $$ & exec "$0" "$@"'

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Service:
    """A program that is to run whenever its user is there.

    Attributes:
        role: What it is.
        name: What distinguishes it from others of its role; empty for the usual one.
        program: Absolute path of the program, and its arguments.
        environment: Variables that are set for it. Without secrets: see `service_settings`.
        folder: Absolute path of the folder it runs in.
        keep_awake: Whether a Mac must not sleep for idleness while it runs.
    """

    role: Role
    name: str
    program: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    keep_awake: bool = True

    def __post_init__(self) -> None:
        texts = [*self.program, *self.environment, *self.environment.values(), self.folder]
        for text in texts:
            if _CONTROL.search(text):
                raise CommandError(
                    "paths and settings of a service must be UTF-8 without control characters, "
                    f"got {text!r:.200}"
                )
        # systemd reads this one path as it stands, and cuts what it takes for blank.
        if self.folder != self.folder.strip() or self.folder.endswith("\\"):
            raise CommandError(
                "the folder of a service must not end in a blank or a backslash, "
                f"got {self.folder!r:.200}"
            )

    @property
    def title(self) -> str:
        """Say in a few words what it is."""
        if self.role == "server":
            return "Prefect server for Weighbridge"
        return f"Weighbridge worker{f' of the pool {self.name}' if self.name else ''}"


def service_id(service: Service, platform: Platform) -> str:
    """Return the label that launchd, or the name that systemd, knows a service by."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", service.name)
    parts = ["weighbridge", service.role, *([name] if name else [])]
    return ".".join(parts) if platform == "launchd" else f"{'-'.join(parts)}.service"


def service_file(service: Service, platform: Platform, home: Path) -> Path:
    """Return where the file of a service belongs."""
    name = service_id(service, platform)
    if platform == "launchd":
        return home / "Library" / "LaunchAgents" / f"{name}.plist"
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    config = named if named.is_absolute() else home / ".config"
    return config / "systemd" / "user" / name


def log_file(service: Service, home: Path) -> Path:
    """Return where launchd writes what a service prints; systemd has its journal."""
    name = service_id(service, "launchd").removeprefix("weighbridge.")
    return home / "Library" / "Logs" / "weighbridge" / f"{name}.log"


def service_text(service: Service, platform: Platform, home: Path) -> str:
    """Return the file of a service."""
    return launchd_plist(service, home) if platform == "launchd" else systemd_unit(service)


def launchd_plist(service: Service, home: Path) -> str:
    """Return the property list of a LaunchAgent, as `man launchd.plist` describes it."""
    log = str(log_file(service, home))
    program = list(service.program)
    if service.role == "worker" and service.keep_awake:
        program = ["/bin/sh", "-c", _AWAKE, *program]
    values = {
        "Label": service_id(service, "launchd"),
        "ProgramArguments": program,
        "EnvironmentVariables": dict(service.environment),
        "WorkingDirectory": service.folder,
        "RunAtLoad": True,
        # Also after an exit with 0: a worker ends by itself when it was upgraded.
        "KeepAlive": True,
        "ThrottleInterval": _PAUSE_SECONDS,
        "ExitTimeOut": _DRAIN_SECONDS[service.role],
        "ProcessType": _PROCESS_TYPE[service.role],
        "Nice": _NICE[service.role],
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(values, sort_keys=False).decode("utf-8")


def systemd_unit(service: Service) -> str:
    """Return a user unit, as systemd.service(5) and systemd.exec(5) describe it."""
    program, *arguments = service.program
    if set(program) & set("\"'\\"):  # which systemd refuses in a program's path, however quoted
        program, arguments = "/bin/sh", ["-c", 'exec "$0" "$@"', *service.program]
    # The program itself is no place for variables, so a `$` in its path stays single.
    command = [systemd_quoted(program), *(systemd_quoted(each, dollar=True) for each in arguments)]
    lines = [
        "[Unit]",
        f"Description={service.title.replace('%', '%%')}",
        # A worker comes up without its server again and again: it is never given up.
        "StartLimitIntervalSec=0",
        *(["After=weighbridge-server.service"] if service.role == "worker" else []),
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(command)}",
        f"WorkingDirectory={service.folder.replace('%', '%%')}",
        *(
            f"Environment={systemd_quoted(f'{name}={value}')}"
            for name, value in service.environment.items()
        ),
        # Also after an exit with 0: a worker ends by itself when it was upgraded.
        "Restart=always",
        f"RestartSec={_PAUSE_SECONDS}",
        # SIGTERM goes to the main process only; what is left when the time is up is killed.
        "KillSignal=SIGTERM",
        "KillMode=mixed",
        f"TimeoutStopSec={_DRAIN_SECONDS[service.role]}",
        f"Nice={_NICE[service.role]}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def systemd_quoted(word: str, *, dollar: bool = False) -> str:
    r"""Quote a word for systemd: `"…"` with `\` and `"` escaped, `%` doubled.

    Args:
        word: Any text without control characters.
        dollar: Whether variables are replaced there, as in arguments of `ExecStart`.
    """
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{word.replace("$", "$$") if dollar else word}"'


def loading_commands(
    service: Service, platform: Platform, file: Path, home: Path
) -> dict[str, tuple[str, ...]]:
    """Return the shell commands that load, replace, watch and remove a service."""
    name = service_id(service, platform)
    place = shlex.quote(str(file))
    if platform == "launchd":
        log = log_file(service, home)
        load = f"launchctl bootstrap gui/$(id -u) {place}"
        unload = f"launchctl bootout gui/$(id -u)/{name}"
        return {
            # launchd makes no folder for a log.
            "load": (f"mkdir -p {shlex.quote(str(log.parent))}", load),
            "replace": (unload, load),
            "watch": (f"tail -f {shlex.quote(str(log))}",),
            "remove": (unload, f"rm {place}"),
        }
    return {
        "load": (
            "systemctl --user daemon-reload",
            f"systemctl --user enable --now {name}",
            # Without it the user's services end with the last session and start with the first.
            "loginctl enable-linger",
        ),
        "replace": ("systemctl --user daemon-reload", f"systemctl --user restart {name}"),
        "watch": (f"journalctl --user -u {name} -f",),
        "remove": (f"systemctl --user disable --now {name}", f"rm {place}"),
    }


def write_service(file: Path, text: str, folders: Sequence[Path], *, replace: bool) -> bool:
    """Write a service's file, readable only for its owner.

    Args:
        file: Where it belongs.
        text: What it holds.
        folders: Further folders that must be there, such as that of the log.
        replace: Whether a file that holds something else may be replaced.

    Returns:
        Whether a file was replaced.

    Raises:
        CommandError: Another file is there, or it cannot be written.
    """
    try:
        for folder in (file.parent, *folders):
            folder.mkdir(parents=True, exist_ok=True)
        present = file.read_bytes() if file.exists() else None
        if present is not None and present != text.encode() and not replace:
            raise CommandError(
                f"{file} is there already and says something else",
                hint="look at both with --print; replace it with --force",
            )
        # Never half written, and never readable for others.
        new = file.with_name(f".{file.name}.{os.getpid()}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(text.encode())
        new.replace(file)
    except OSError as error:
        raise CommandError(
            f"{file} must be a file that can be written, got: {error.strerror}",
            hint="--print writes it to the terminal instead",
        ) from error
    return present is not None and present != text.encode()
