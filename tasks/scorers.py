"""Which scorer a task or a command uses, as plain values, and how it is opened."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from weighbridge.scorer.parallel_scorer import ParallelScorer
from weighbridge.tasks.checkpoints import hash_cache, resolve_adapter, resolve_checkpoint
from weighbridge.tasks.lease import take_lease
from weighbridge.tasks.settings import Settings, load_settings

logger = logging.getLogger(__name__)


OF_A_CHECKPOINT = ("adapter", "model_id", "revision")
"""Fields of a spec that tell about its checkpoint, and mean nothing for another."""


class ScorerSpec(BaseModel):
    """Which scorer a task uses: names and numbers, never the model itself.

    Attributes:
        checkpoint: A checkpoint folder, or a hub id as `org/name` or
            `org/name@revision`; None takes the setting, else the embedded checkpoint.
        adapter: A folder or hub id of a LoRA adapter that is fused into the weights at
            load. None takes the setting where `checkpoint` does.
        model_id: Its model id, for the temperature policy; a hub id brings its own.
        revision: Its full revision, likewise; of a hub id it is what is fetched.
        temperature: Overrides the policy.
        allow_uncalibrated: Consent to 1.0 where the policy refuses it.
        accept_prompt: Consent to a system text that is not the one the checkpoint was
            trained with, beside that of the settings; the run records its hash.
        max_input_tokens: Most tokens of a prompt; None takes the checkpoint's.
        layout: `schema-first` or `context-first`; None takes the checkpoint's.
        encoding: `labels` or `codes`; None takes the checkpoint's.
        mode: `auto`, `parallel`, `cached_serial` or `independent`.
        field_batch_size: Prompt rows per branch batch.
        permutations: Orders of the choices that are averaged, 1 to 32.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    checkpoint: str | None = None
    adapter: str | None = None
    model_id: str | None = None
    revision: str | None = None
    temperature: float | None = None
    allow_uncalibrated: bool = False
    accept_prompt: bool = False
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
        say: Told in a sentence what is fetched or loaded, and if the accelerator has to be
            waited for.

    Raises:
        CheckpointError: There is no such checkpoint, or it cannot be fetched.
        TemperatureError: The temperature cannot be used.
        ScorerError: A number or name of the spec is not one that is allowed.
    """
    settings = settings or load_settings()
    lease = settings.lease
    named = resolve_checkpoint(
        spec.checkpoint, settings, model_id=spec.model_id, revision=spec.revision, say=say
    )
    adapter = resolve_adapter(spec.adapter, spec.checkpoint, settings, say=say)
    return ParallelScorer(
        named.folder,
        adapter=adapter and adapter.folder,
        model_id=named.model_id,
        revision=named.revision,
        temperature=spec.temperature,
        allow_uncalibrated=spec.allow_uncalibrated,
        accept_prompt=spec.accept_prompt or settings.accept_prompt,
        max_input_tokens=spec.max_input_tokens,
        layout=spec.layout,
        encoding=spec.encoding,
        permutations=spec.permutations,
        hash_cache=hash_cache(settings),
        loading=lambda scorer: _loading(scorer, lease, say),
    )


def pinned(
    spec: ScorerSpec,
    settings: Settings | None = None,
    *,
    say: Callable[[str], None] = logger.info,
) -> ScorerSpec:
    """Return a spec whose hub ids name commits, fetched if they are not there yet.

    A branch of a hub may move while a run goes on, and is asked for over the network: pin a
    spec once, then use it for all batches. Folders stay as they are.

    Raises:
        CheckpointError: A hub id cannot be fetched.
    """
    settings = settings or load_settings()
    named = resolve_checkpoint(
        spec.checkpoint, settings, model_id=spec.model_id, revision=spec.revision, say=say
    )
    adapter = resolve_adapter(spec.adapter, spec.checkpoint, settings, say=say)
    return spec.model_copy(
        update={
            "checkpoint": named.name,
            "adapter": adapter and adapter.name,
            "model_id": named.model_id,
            "revision": named.revision,
        }
    )


@contextmanager
def _loading(scorer: ParallelScorer, lease: Path, say: Callable[[str], None]) -> Generator[None]:
    """Take the lease, and tell what was loaded then."""
    take_lease(lease, scorer.info.name, say=say)
    started = time.perf_counter()
    yield
    say(
        f"loaded {scorer.info.name} in {time.perf_counter() - started:.1f} s: "
        f"{scorer.weight_bytes / 2**30:.2f} GiB, {scorer.backend}"
    )
