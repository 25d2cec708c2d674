"""Which checkpoint a setting names. A leaf: knows no Prefect."""

from pathlib import Path

from weighbridge.scorer.embedded import embedded_path
from weighbridge.scorer.errors import CheckpointError
from weighbridge.tasks.settings import Settings


def checkpoint_folder(checkpoint: str | None, settings: Settings) -> Path:
    """Return the folder of a checkpoint: as named, as set, else the embedded one.

    Raises:
        CheckpointError: None is named and the embedded one is not built yet.
    """
    named = checkpoint or settings.checkpoint
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError:  # `~name` of nobody here, which is refused as no folder
            return Path(named)
    embedded = embedded_path(settings.cache)
    if embedded is None:
        raise CheckpointError(
            "a checkpoint must be named or the embedded one built, got neither",
            hint="build it once with: weighbridge checkpoint demo",
        )
    return embedded


def hash_cache(settings: Settings) -> Path:
    """Return the file that keeps hashes of weight files."""
    return settings.cache / "hashes.json"
