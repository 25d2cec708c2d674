"""The scorer as a library: one checkpoint, many documents, typed answers."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import TypeVar

import numpy as np

from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.checkpoint import inspect_checkpoint
from weighbridge.scorer.checkpoint_temperature import checkpoint_temperature
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import CheckpointError, DocumentError, ScorerError
from weighbridge.scorer.permutations import MAX_PERMUTATIONS, average_orders
from weighbridge.scorer.plan import Prompted, SchemaPlan
from weighbridge.scorer.preparing import Prepared, prepare_all
from weighbridge.scorer.prompts import Layout, prompt_version
from weighbridge.scorer.pydantic_schema import SchemaLike, as_schema
from weighbridge.scorer.resident import resident_checkpoint
from weighbridge.scorer.results import (
    DecisionKey,
    FieldResult,
    Rejection,
    ScoreResult,
    field_result,
)
from weighbridge.scorer.rows import Mode, Scored, Timings
from weighbridge.scorer.schema import Schema
from weighbridge.scorer.temperature import TemperatureKind

_Choice = TypeVar("_Choice", bound=StrEnum)


class ParallelScorer:
    """Scores documents against a schema with one checkpoint.

    Cheap to make: the weights are loaded by the first document that needs them
    and stay in the process for every later scorer of the same checkpoint. May be
    called from any thread; the model runs on one of its own.

    Args:
        checkpoint: A checkpoint folder.
        adapter: A folder with an mlx or PEFT LoRA adapter, fused into the weights at load.
        model_id: Its model id, for the temperature policy.
        revision: Its full revision, likewise.
        temperature: Overrides the policy.
        allow_uncalibrated: Consent to a temperature of 1.0 where the policy
            refuses it.
        accept_prompt: Consent to a system text that is not the one the checkpoint was
            trained with.
        max_input_tokens: Most tokens of a prompt: document, schema and field.
            None takes the checkpoint's own limit, else 4096.
        layout: What stands first in the prompt. None takes the checkpoint's.
        encoding: What the model is asked to say. None takes the checkpoint's.
        permutations: In how many orders of the choices each document is asked, 1 to
            32. The logits are averaged by choice, and each field gets a flip rate.
        dtype: Compute dtype. None takes the backend's; `float64` is for tests of
            exactness and computes on the CPU.
        hash_cache: A file that keeps hashes of weight files.
        loading: Entered in the caller's thread while weights are loaded, with this
            scorer; may wait first, or raise to keep them from being loaded.

    Raises:
        CheckpointError: The folder is no checkpoint, or its trained contract
            forbids the layout or encoding.
        BackendError: There is no such compute dtype.
        ScorerError: A number or name is not one that is allowed.
        TemperatureError: The temperature cannot be used.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        adapter: str | Path | None = None,
        model_id: str | None = None,
        revision: str | None = None,
        temperature: float | None = None,
        allow_uncalibrated: bool = False,
        accept_prompt: bool = False,
        max_input_tokens: int | None = None,
        layout: str | None = None,
        encoding: str | None = None,
        permutations: int = 1,
        dtype: str | None = None,
        hash_cache: Path | None = None,
        loading: "Callable[[ParallelScorer], AbstractContextManager[object]] | None" = None,
    ) -> None:
        self._loading = loading
        self.info = inspect_checkpoint(
            checkpoint,
            adapter=adapter,
            model_id=model_id,
            revision=revision,
            hash_cache=hash_cache,
            accept_prompt=accept_prompt,
        )
        self.layout = _one_of(Layout, layout, "layout") or self.info.layout
        self.encoding = _one_of(Encoding, encoding, "encoding") or self.info.encoding
        self.temperature = checkpoint_temperature(
            self.info,
            temperature=temperature,
            allow_uncalibrated=allow_uncalibrated,
            permutations=permutations,
            layout=self.layout,
            encoding=self.encoding,
        )
        contract = self.info.contract
        if contract and (self.layout, self.encoding) != (self.info.layout, self.info.encoding):
            raise CheckpointError(
                f"a checkpoint trained on {contract.task} must be scored with "
                f"{self.info.layout} and {self.info.encoding}, "
                f"got {self.layout} and {self.encoding}",
                hint="leave out --layout and --encoding",
            )
        self.max_input_tokens = (
            self.info.max_input_tokens if max_input_tokens is None else max_input_tokens
        )
        if self.info.context_tokens and self.max_input_tokens > self.info.context_tokens:
            raise ScorerError(
                f"max_input_tokens must be at most the {self.info.context_tokens} positions of "
                f"{self.info.name}, got {self.max_input_tokens}",
                hint="split longer documents",
            )
        if self.max_input_tokens < 1:
            raise ScorerError(f"max_input_tokens must be at least 1, got {self.max_input_tokens}")
        if type(permutations) is not int or not 1 <= permutations <= MAX_PERMUTATIONS:
            raise ScorerError(
                f"permutations must be a number from 1 to {MAX_PERMUTATIONS}, got {permutations!r}"
            )
        self.permutations = permutations
        self._resident = resident_checkpoint(self.info, hash_cache, dtype)

    @property
    def backend(self) -> str:
        """Device, dtype and BLAS in one line."""
        return self._resident.backend.name

    @property
    def dtype(self) -> str:
        """Compute dtype: part of the key of a decision."""
        return self._resident.backend.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return self._resident.weight_bytes

    @property
    def branching(self) -> bool:
        """Whether rows branch from a shared prefix; False after a failed check at load."""
        return self._resident.branching

    @property
    def model_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._resident.loaded

    @property
    def load_seconds(self) -> float:
        """Seconds that loading and checking the weights took last, 0 before."""
        return self._resident.load_seconds

    def key(self, schema: Schema) -> DecisionKey:
        """Return what this scorer's answers to a schema depend on."""
        return DecisionKey(
            schema_sha256=schema.sha256,
            checkpoint=self.info.fingerprint,
            dtype=self.dtype,
            contract=self.info.contract.task if self.info.contract else None,
            layout=self.layout.value,
            encoding=self.encoding.value,
            prompt_version=prompt_version(self.layout, self.encoding, self.permutations),
        )

    def plan(self, schema: SchemaLike) -> SchemaPlan:
        """Return the schema, in its own order, made ready for this tokenizer; needs no weights.

        Raises:
            SchemaError: The schema does not fit this tokenizer.
            CheckpointError: The tokenizer does not fit the encoding.
        """
        return self._resident.plan(
            as_schema(schema), self.layout, self.encoding, self.max_input_tokens
        )

    def plans(self, schema: SchemaLike) -> tuple[SchemaPlan, ...]:
        """Return the plan of each order of the choices, as `plan` does.

        The first one is the schema's own; orders that are the same share their plan.
        """
        schema, orders = as_schema(schema), self.permutations
        return tuple(self.plan(schema.in_order(order, orders)) for order in range(orders))

    def score(
        self,
        context: str,
        schema: SchemaLike,
        mode: str = "auto",
        field_batch_size: int | None = None,
    ) -> ScoreResult:
        """Score one document.

        Args:
            context: The document.
            schema: The questions: a schema, the object of its JSON file, or a Pydantic
                model, into which `ScoreResult.as_model` turns the answers.
            mode: `auto`, `parallel`, `cached_serial` or `independent`.
            field_batch_size: Prompt rows per branch batch in `parallel`.

        Raises:
            DocumentError: The document cannot be scored.
        """
        (result,) = self.score_batch([context], schema, mode, field_batch_size)
        if isinstance(result, Rejection):
            raise DocumentError(result.message, code=result.code)
        return result

    def score_batch(
        self,
        contexts: Sequence[str],
        schema: SchemaLike,
        mode: str = "auto",
        field_batch_size: int | None = None,
    ) -> list[ScoreResult | Rejection]:
        """Score documents, short ones together where that is faster; a bad one stops no other.

        Args:
            contexts: The documents.
            schema: The questions.
            mode: As in `score`.
            field_batch_size: As in `score`.

        Returns:
            For each document its result, or why it was rejected, in input order.
        """
        return self.score_prepared(self.prepare(contexts, schema), mode, field_batch_size)

    @property
    def prepares_ahead(self) -> bool:
        """Whether documents may be prepared while others are scored, by another thread."""
        return self._resident.chat.for_threads

    def prepare(self, contexts: Sequence[str], schema: SchemaLike) -> Prepared:
        """Make documents ready for `score_prepared`; needs no weights."""
        if isinstance(contexts, str):
            raise ScorerError(
                "contexts must be a sequence of documents, got one text",
                hint="score_batch([text], schema), or score(text, schema)",
            )
        return prepare_all(self.plans(schema), contexts)

    def score_prepared(
        self, prepared: Prepared, mode: str = "auto", field_batch_size: int | None = None
    ) -> list[ScoreResult | Rejection]:
        """Score documents that `prepare` of this scorer, or of one like it, made ready.

        Args:
            prepared: The documents.
            mode: As in `score`.
            field_batch_size: As in `score`.

        Returns:
            As `score_batch`.
        """
        chosen = _one_of(Mode, mode, "mode") or Mode.AUTO
        if field_batch_size is not None and field_batch_size < 1:
            raise ScorerError(f"field_batch_size must be at least 1, got {field_batch_size}")
        plans, orders = prepared.plans, prepared.orders

        def run() -> list[ScoreResult | Rejection]:
            said: list[list[_Said | Rejection]] = [
                [each] if isinstance(each, Rejection) else [] for each in prepared.documents
            ]
            # An order at a time, for its resident prefix to serve all documents before the
            # next order's takes its place.
            for number, plan in enumerate(orders):
                asked = {
                    place: each[number]
                    for place, each in enumerate(prepared.documents)
                    if not isinstance(each, Rejection)
                }
                answers = self._ask(plan, list(asked.values()), chosen, field_batch_size)
                for place, answer in zip(asked, answers, strict=True):
                    said[place].append(answer)
            return [self._result(plans, dict(zip(orders, each, strict=False))) for each in said]

        if not prepared.needs_model:
            return run()
        self.load()
        return on_mlx_thread(run)

    def load(self) -> None:
        """Load the weights and check them, unless they are in memory already."""
        if self.model_loaded:
            return
        with nullcontext() if self._loading is None else self._loading(self):
            on_mlx_thread(self._resident.load)

    def _ask(
        self, plan: SchemaPlan, asked: Sequence[Prompted], mode: Mode, batch_size: int | None
    ) -> "list[_Said | Rejection]":
        """Ask one order of the choices of documents, all of them at once."""
        if not any(prompted.rows for prompted in asked):
            return [self._said(plan, prompted, ([], Timings()), ()) for prompted in asked]
        prior = self._resident.prior(plan)
        scored = self._resident.score(asked, mode, batch_size)
        return [
            self._said(plan, prompted, each, prior)
            for prompted, each in zip(asked, scored, strict=True)
        ]

    def _said(
        self,
        plan: SchemaPlan,
        prompted: Prompted,
        scored: Scored,
        prior: tuple[tuple[float, ...], ...],
    ) -> "_Said | Rejection":
        start = time.perf_counter()
        rows, timings = scored
        logits = plan.choice_logits(rows)
        if prior:
            logits = [
                tuple(float(logit) for logit in np.subtract(said, leaned))
                for said, leaned in zip(logits, prior, strict=True)
            ]
        for field, values in zip(plan.schema.fields, logits, strict=True):
            bad = [
                key for key, value in zip(field.keys, values, strict=True) if not isfinite(value)
            ]
            if bad:
                return Rejection(
                    code="document.not_finite",
                    message=f"the logits of field {field.name!r} must be finite numbers, and "
                    f"{len(bad)} of {len(values)} are not, the first for choice {bad[0]!r}: "
                    "the document overflows the compute dtype, or the weights are damaged",
                )
        model_seconds = timings.prefill_seconds + timings.branch_seconds
        seconds = prompted.seconds + model_seconds + time.perf_counter() - start
        return _Said(
            tuple(
                dict(zip(field.keys, values, strict=True))
                for field, values in zip(plan.schema.fields, logits, strict=True)
            ),
            replace(timings, total_seconds=seconds),
        )

    def _result(
        self, plans: Sequence[SchemaPlan], said: "Mapping[SchemaPlan, _Said | Rejection]"
    ) -> ScoreResult | Rejection:
        """Put together what the orders said of a document; the first rejection counts."""
        own = plans[0]
        answers: dict[SchemaPlan, _Said] = {}
        for plan, each in said.items():
            if isinstance(each, Rejection):
                return each
            answers[plan] = each
        fields: dict[str, FieldResult] = {}
        for number, (field, choices) in enumerate(zip(own.schema.fields, own.choices, strict=True)):
            # An order that came twice counts twice, and was computed once.
            averaged = average_orders([answers[plan].logits[number] for plan in plans])
            fields[field.name] = field_result(
                field, choices, averaged.logits, self.temperature.value, averaged.flip_rate
            )
        return ScoreResult(
            output={name: field.value for name, field in fields.items()},
            fields=fields,
            key=self.key(own.schema),
            temperature=self.temperature.value,
            temperature_kind=self.temperature.kind,
            temperature_fitted=self.temperature.kind is TemperatureKind.FITTED,
            timings=sum((each.timings for each in answers.values()), Timings()),
        )


@dataclass(frozen=True, slots=True)
class _Said:
    """What one order said of a document: for each field the logits by choice key."""

    logits: tuple[dict[str, float], ...]
    timings: Timings


def _one_of(kind: type[_Choice], value: str | None, name: str) -> _Choice | None:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError as error:
        raise ScorerError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from error
