"""Every way to start a flow: the command line now, workers and schedules beside it.

Knows all other layers, the terminal, and which Prefect API a run reports to. Does not know
how documents are scored or kept: it passes requests on and prints what comes back.

Importing this package loads neither MLX nor tables nor Prefect, as a Prefect server imports
it too; a command imports what it needs when it runs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighbridge.deployments.cli import main
    from weighbridge.deployments.cli.errors import ExitCode
    from weighbridge.deployments.errors import CommandError

_MODULES = {"CommandError": "errors", "ExitCode": "cli.errors", "main": "cli"}

__all__ = ["CommandError", "ExitCode", "main"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
