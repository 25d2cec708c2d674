"""Loads a checkpoint ahead of the documents it will score. Knows no Prefect."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from weighbridge.scorer.resident import release_checkpoints
from weighbridge.tasks.lease import lease_wanted, release_lease, take_lease
from weighbridge.tasks.scorers import ScorerSpec, open_scorer
from weighbridge.tasks.settings import load_settings


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that is in memory.

    Attributes:
        name: What people call it.
        seconds: How long that took; next to nothing if it was in memory.
        bytes: What its weights take.
        backend: What it computes with.
    """

    name: str
    seconds: float
    bytes: int
    backend: str


def load_scorer(spec: ScorerSpec, *, say: Callable[[str], None]) -> Loaded:
    """Take the lease, then load the checkpoint of a spec and check it, unless it is resident.

    Args:
        spec: Which scorer; its first document will find the weights in memory.
        say: Told in a sentence if the accelerator has to be waited for.

    Raises:
        ScorerError: The checkpoint or backend cannot be used.
        TemperatureError: The temperature cannot be used.
        AcceleratorBusy: Another process of this host holds a model.
        Stopped: The run was asked to stop while it waited for the accelerator.
    """
    scorer = open_scorer(spec, say=say)
    started = time.perf_counter()
    scorer.load()
    return Loaded(
        name=scorer.info.name,
        seconds=time.perf_counter() - started,
        bytes=scorer.weight_bytes,
        backend=scorer.backend,
    )


def take_accelerator(checkpoint: str, *, say: Callable[[str], None]) -> None:
    """Take the lease for a checkpoint, by its name, before it is loaded.

    Raises:
        AcceleratorBusy: Another process of this host holds a model.
        Stopped: The run was asked to stop while it waited.
    """
    take_lease(load_settings().lease, checkpoint, say=say)


def hand_over() -> bool:
    """Give all models and the lease back if another program of this machine waits for it.

    Call while nothing is being scored. What is scored next loads its model again.

    Returns:
        Whether they were given back.
    """
    lease = load_settings().lease
    if not lease_wanted(lease):
        return False
    release_checkpoints()
    release_lease(lease)
    return True
