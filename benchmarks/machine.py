"""What a figure was measured on."""

import importlib.metadata
import os
import platform

from weighbridge.scorer.backend import describe_backend, on_mlx_thread

PACKAGES = ("weighbridge", "mlx", "mlx-lm", "numpy")


def machine_lines() -> list[str]:
    """Describe machine, backend and versions."""
    backend = on_mlx_thread(describe_backend)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return [
        f"machine: {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {backend.name}",
        f"versions: Python {platform.python_version()}, {versions}",
    ]
