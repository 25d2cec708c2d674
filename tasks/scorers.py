"""Which scorer a task or a command uses, as plain values, and how it is opened."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from weighbridge.scorer.memory import weight_bytes
from weighbridge.scorer.parallel_scorer import ParallelScorer
from weighbridge.tasks.checkpoints import checkpoint_folder, hash_cache
from weighbridge.tasks.lease import take_lease
from weighbridge.tasks.settings import Settings, load_settings

logger = logging.getLogger(__name__)


class ScorerSpec(BaseModel):
    """Which scorer a task uses: names and numbers, never the model itself.

    Attributes:
        checkpoint: A checkpoint folder; None takes the setting, else the
            embedded checkpoint.
        model_id: Its model id, for the temperature policy.
        revision: Its full revision, likewise.
        temperature: Overrides the policy.
        allow_uncalibrated: Consent to 1.0 where the policy refuses it.
        max_input_tokens: Most tokens of a prompt; None takes the checkpoint's.
        layout: `schema-first` or `context-first`; None takes the checkpoint's.
        encoding: `labels` or `codes`; None takes the checkpoint's.
        mode: `auto`, `parallel`, `cached_serial` or `independent`.
        field_batch_size: Prompt rows per branch batch.
        permutations: Orders of the choices that are averaged, 1 to 32.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    checkpoint: str | None = None
    model_id: str | None = None
    revision: str | None = None
    temperature: float | None = None
    allow_uncalibrated: bool = False
    max_input_tokens: int | None = None
    layout: str | None = None
    encoding: str | None = None
    mode: str = "auto"
    field_batch_size: int | None = None
    permutations: int = 1


def open_scorer(
    spec: ScorerSpec,
    settings: Settings | None = None,
    *,
    say: Callable[[str], None] = logger.info,
) -> ParallelScorer:
    """Return the scorer of a spec. Loads no weights, and takes the lease before it does.

    Args:
        spec: Which scorer.
        settings: Of this process; None reads them.
        say: Told in a sentence what is loaded, and if the accelerator has to be waited for.

    Raises:
        CheckpointError: There is no such checkpoint.
        TemperatureError: The temperature cannot be used.
        ScorerError: A number or name of the spec is not one that is allowed.
    """
    settings = settings or load_settings()
    lease = settings.lease
    return ParallelScorer(
        checkpoint_folder(spec.checkpoint, settings),
        model_id=spec.model_id,
        revision=spec.revision,
        temperature=spec.temperature,
        allow_uncalibrated=spec.allow_uncalibrated,
        max_input_tokens=spec.max_input_tokens,
        layout=spec.layout,
        encoding=spec.encoding,
        permutations=spec.permutations,
        hash_cache=hash_cache(settings),
        loading=lambda scorer: _loading(scorer, lease, say),
    )


@contextmanager
def _loading(scorer: ParallelScorer, lease: Path, say: Callable[[str], None]) -> Generator[None]:
    """Take the lease, and tell what was loaded then."""
    take_lease(lease, scorer.info.name, say=say)
    started = time.perf_counter()
    yield
    say(
        f"loaded {scorer.info.name} in {time.perf_counter() - started:.1f} s: "
        f"{weight_bytes(scorer.info.folder, scorer.dtype) / 2**30:.2f} GiB, {scorer.backend}"
    )
