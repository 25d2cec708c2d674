"""A checkpoint that stays: tokenizer, plans and weights kept across documents and runs.

Weights are loaded on first need, on the MLX thread. Another checkpoint takes the place
of those used longest ago where memory does not hold all of them.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

from weighbridge.scorer import gated_delta
from weighbridge.scorer.backend import (
    PROBE_TOLERANCE,
    Backend,
    describe_backend,
    on_mlx_thread,
)
from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.checkpoint import CheckpointInfo, fingerprint
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.heads import HeadCut
from weighbridge.scorer.memory import require_room, weight_bytes
from weighbridge.scorer.model_weights import load_model
from weighbridge.scorer.permutations import MAX_PERMUTATIONS
from weighbridge.scorer.plan import SchemaPlan
from weighbridge.scorer.prior import label_prior
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.rows import Asked, Mode, Scored
from weighbridge.scorer.schema import Schema

logger = logging.getLogger(__name__)

PLAN_LIMIT = 2 * MAX_PERMUTATIONS
"""Plans kept: all orders of the choices of one schema, and as many again."""

_WORK = 1.25
"""Memory of a checkpoint at work, with caches and activations, as a multiple of its weights."""

LOADED_LIMIT = 4
"""Checkpoints that hold weights at a time, however much memory there is."""


class ResidentCheckpoint:
    """One checkpoint in this process. Use `resident_checkpoint` to get it.

    Args:
        info: The checkpoint.
        backend: What to compute with.
        hash_cache: A file that keeps hashes of weight files.
    """

    def __init__(self, info: CheckpointInfo, backend: Backend, hash_cache: Path | None) -> None:
        self.info = info
        self.backend = backend
        self._hash_cache = hash_cache
        self.branching = True
        self._engine: Engine | None = None
        self.used = 0.0
        self.load_seconds = 0.0
        self._plans: OrderedDict[tuple[object, ...], SchemaPlan] = OrderedDict()
        self._priors: WeakKeyDictionary[SchemaPlan, tuple[tuple[float, ...], ...]] = (
            WeakKeyDictionary()
        )

    @property
    def loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._engine is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return weight_bytes(
            self.info.folder,
            self.backend.dtype,
            dequantize=self._dequantize,
            adapter=self.info.adapter,
        )

    @property
    def _dequantize(self) -> bool:
        """Packed products take some 80 times longer than plain ones without Metal."""
        return self.backend.device == "cpu"

    @cached_property
    def chat(self) -> ChatTokenizer:
        """Tokenizer and chat template; needs no weights."""
        return ChatTokenizer.load(self.info.folder)

    def plan(
        self, schema: Schema, layout: Layout, encoding: Encoding, max_input_tokens: int
    ) -> SchemaPlan:
        """Return the plan of a schema, made once and kept."""
        key = (schema.sha256, layout, encoding, max_input_tokens)
        plan = self._plans.pop(key, None)
        if plan is None:
            widest = max(len(field.choices) for field in schema.fields)
            contract = self.info.contract
            plan = SchemaPlan(
                self.chat,
                schema,
                layout=layout,
                encoding=encoding,
                system=contract.system(widest) if contract else None,
                max_input_tokens=max_input_tokens,
            )
            if contract:
                for choices in plan.choices:
                    (branching,) = choices.branchings
                    contract.check_codes(
                        dict(zip(choices.codes, branching.candidates, strict=True))
                    )
        self._plans[key] = plan
        if len(self._plans) > PLAN_LIMIT:
            self._plans.popitem(last=False)
        return plan

    def score(self, documents: Sequence[Asked], mode: Mode, batch_size: int | None) -> list[Scored]:
        """Score the rows of documents as `Engine.score_documents`; load weights on first need.

        Call on the MLX thread.
        """
        with self._device():
            engine = self.load()
            if not self.branching:
                mode = Mode.INDEPENDENT
            return engine.score_documents(documents, mode=mode, batch_size=batch_size)

    def prior(self, plan: SchemaPlan) -> tuple[tuple[float, ...], ...]:
        """Return the label prior of a plan, measured once; empty where there is none.

        Call on the MLX thread.
        """
        if plan not in self._priors:
            start = time.perf_counter()
            references = plan.reference_rows()
            prior = label_prior(
                [
                    plan.choice_logits(rows)
                    for rows, _ in (self.score(references, Mode.AUTO, None) if references else ())
                ]
            )
            for field, means in zip(plan.schema.fields, prior, strict=bool(prior)):
                if not all(map(math.isfinite, means)):
                    raise CheckpointError(
                        f"the label prior of field {field.name!r} must be finite numbers, got "
                        "some that are not: a text of the schema itself has no finite logits",
                        hint="the weights are damaged, or too large for the compute dtype",
                    )
            self._priors[plan] = prior
            if references:
                logger.info(
                    "label prior from %d reference texts in %.1f s",
                    len(references),
                    time.perf_counter() - start,
                )
        return self._priors[plan]

    def load(self) -> Engine:
        """Return the engine, with the weights loaded and checked on first need.

        Call on the MLX thread.
        """
        self.used = time.monotonic()
        if self._engine is None:
            with self._device():
                self._engine = self._load()
        return self._engine

    def release(self) -> None:
        """Give the weights and all caches back."""
        self._engine = None
        on_mlx_thread(_clear_buffers)

    def _device(self) -> AbstractContextManager[object]:
        """Compute on the backend's device, which for float64 is not a Mac's default one."""
        import mlx.core as mx

        return mx.stream(mx.cpu if self.backend.device == "cpu" else mx.gpu)

    def _load(self) -> Engine:
        _make_room(self)
        start = time.perf_counter()
        logger.debug("loading %s", self.info.name)
        for note in self.info.notes:
            logger.warning("%s: %s", self.info.name, note)
        model = load_model(
            self.info.folder,
            self.backend.dtype,
            adapter=self.info.adapter,
            dequantize=self._dequantize,
        )
        # Weights load long after their hash was taken, and stand for it in every decision.
        now = fingerprint(self.info.folder, self._hash_cache, self.info.adapter)
        if now != self.info.fingerprint:
            raise CheckpointError(
                f"a checkpoint must stay as it is while it is in use, and {self.info.folder} "
                "has changed",
                hint="start again: what is recorded is kept",
            )
        gated_delta.install()  # where Metal has no kernel for it
        engine = Engine(model, chunk=self.backend.chunk, pass_tokens=self.backend.pass_tokens)
        tolerance = PROBE_TOLERANCE[self.backend.dtype]
        cut = engine.check_head(tolerance)
        if cut in {HeadCut.POSITIONS, HeadCut.NONE}:
            logger.warning(
                "%s: its head cannot be cut down to the choices, so all of the vocabulary is "
                "computed%s, which is slower",
                self.info.name,
                " at every position" if cut is HeadCut.NONE else "",
            )
        difference = engine.probe()
        self.branching = difference <= tolerance
        if not self.branching:
            logger.warning(
                "%s: a forked cache differs from recomputing by %.2g (relative), so every field "
                "is computed on its own, which is slower",
                self.info.name,
                difference,
            )
        self.load_seconds = time.perf_counter() - start
        logger.debug(
            "loaded %s in %.1f s, %.2f GiB on %s",
            self.info.name,
            self.load_seconds,
            _active_bytes() / 2**30,
            self.backend.name,
        )
        return engine


_residents: dict[tuple[str, str], ResidentCheckpoint] = {}
_residents_lock = threading.Lock()


def resident_checkpoint(
    info: CheckpointInfo, hash_cache: Path | None = None, dtype: str | None = None
) -> ResidentCheckpoint:
    """Return this process's copy of a checkpoint, without loading its weights yet.

    Args:
        info: The checkpoint.
        hash_cache: A file that keeps hashes of weight files.
        dtype: Compute dtype; None takes the backend's own.

    Raises:
        BackendError: There is no such compute dtype.
    """
    backend = describe_backend(dtype)
    with _residents_lock:
        resident = _residents.setdefault(
            (info.fingerprint, backend.dtype), ResidentCheckpoint(info, backend, hash_cache)
        )
        if not resident.loaded:
            # The same files in another folder: the first one may be gone by now.
            resident.info = info
        return resident


def _make_room(wanted: ResidentCheckpoint) -> None:
    """Release what was used longest ago until a checkpoint fits beside the rest.

    Raises:
        CheckpointError: Its weights alone are larger than the memory there is.
    """
    weights = wanted.weight_bytes
    on_cpu = wanted.backend.device == "cpu"
    budget = require_room(
        wanted.info.name,
        weights,
        wanted.backend,
        unpacked=on_cpu and wanted.info.quantization is not None,
        hint="use a smaller checkpoint"
        + (": a CPU unpacks packed ones" if on_cpu else ", or a 4-bit conversion of this one"),
    )
    needed = weights * _WORK
    with _residents_lock:
        others = [each for each in _residents.values() if each is not wanted and each.loaded]
    others.sort(key=lambda each: each.used)
    while others and (len(others) >= LOADED_LIMIT or _active_bytes() + needed > budget):
        oldest = others.pop(0)
        logger.info("releasing %s to make room for %s", oldest.info.name, wanted.info.name)
        oldest.release()


def release_checkpoints() -> None:
    """Give the weights and caches of all checkpoints of this process back."""
    for each in list(_residents.values()):
        each.release()


def _clear_buffers() -> None:
    import mlx.core as mx

    mx.clear_cache()


def _active_bytes() -> int:
    import mlx.core as mx

    return mx.get_active_memory()
