"""What `weighbridge bench` measures: models, prompts, and who scores them in which way."""

import importlib.resources
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weighbridge.deployments.bench import Contender, Contest, Document, Score
from weighbridge.deployments.bench_prompts import (
    CONTEXT_FIRST,
    SCHEMA_FIRST,
    SUFFIXES,
    branchings,
    documents_around,
    prompts,
)

if TYPE_CHECKING:
    from weighbridge.scorer.backend import Backend
    from weighbridge.scorer.checkpoint import CheckpointInfo
    from weighbridge.scorer.engine import Engine
    from weighbridge.scorer.reference import ReferenceScorer
    from weighbridge.scorer.rows import Timings

PUBLISHED = ((1, 239), (3, 433), (8, 950), (3, 1436), (8, 1953))
"""Fields and tokens of the shared prefix, as published for the reference."""

DOCUMENTS = ((3, 30), (8, 30), (8, 1000))
"""Fields, and tokens of a document."""

SWITCHED = (8, 1953)
SWITCHED_DOCUMENTS = (3, 30)
BRANCHED = (32, 2048)
LABELLED = (8, 950)
WHOLE = 2**20
"""A prefill chunk that no prefix is longer than."""

REFERENCE = "reference-parallel"
INDEPENDENT = "reference-independent"
EVERYTHING = "everything"
RESIDENT = "schema-first, resident"


@dataclass(frozen=True, slots=True)
class Switch:
    """An optimization that can be turned off.

    Attributes:
        name: What it is called.
        used: Whether it is in use on a model, by its engine.
        engine: Arguments of an `Engine` without it.
        around: Entered while scoring without it.
    """

    name: str
    used: "Callable[[Bench, Engine], bool]"
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    around: "Callable[[], AbstractContextManager[None]]" = nullcontext


def switches() -> tuple[Switch, ...]:
    """Return the optimizations of one long document that can be turned off."""
    from weighbridge.scorer.reference import stock_gated_delta

    return (
        Switch("packed branches", lambda _, engine: not engine.passes, {"packed": False}),
        Switch("prefill in chunks", lambda _bench, _engine: True, {"chunk": WHOLE}),
        Switch(
            "gated delta in chunks",
            lambda bench, _: bench.has("GatedDelta") and bench.backend.device == "cpu",
            around=stock_gated_delta,
        ),
    )


DOCUMENT_SWITCHES = (
    Switch("one pass behind a prefix", lambda _, engine: engine.passes, {"one_pass": False}),
    Switch(
        "short documents together",
        lambda bench, engine: bool(bench.backend.pass_tokens) if engine.passes else engine.trees,
        {"together": False, "pass_tokens": 0},
    ),
)
"""Those of many short documents."""


def scenario_names() -> list[str]:
    """Name everything that can be measured."""
    return [
        *(f"{fields}x{shared}" for fields, shared in PUBLISHED),
        *(f"documents-{fields}x{tokens}" for fields, tokens in DOCUMENTS),
        "switches",
        "switches-documents",
        "labels",
        "memory",
    ]


@dataclass(frozen=True, slots=True)
class Bench:
    """A model made ready to be measured.

    Attributes:
        model: The model of mlx-lm.
        twin: Makes another one with the very same arrays.
        source: Tokens from which prompts are cut.
        backend: What it computes with.
        tolerance: By how much branches may differ from whole prompts, relative.
        context_tokens: Positions of the model.
    """

    model: Any
    twin: Callable[[], Any]
    source: tuple[int, ...]
    backend: "Backend"
    tolerance: float
    context_tokens: int = WHOLE

    def engine(self, model: Any, **arguments: Any) -> "Engine":
        """Make an engine and check it as loading a checkpoint does."""
        from weighbridge.scorer.engine import Engine
        from weighbridge.scorer.errors import CheckpointError

        settings: dict[str, Any] = {
            "chunk": self.backend.chunk,
            "pass_tokens": self.backend.pass_tokens,
            **arguments,
        }
        made = Engine(model, **settings)
        made.check_head(self.tolerance)
        apart = made.probe()
        if not apart <= self.tolerance:
            raise CheckpointError(
                f"branches must equal whole prompts within {self.tolerance:g} (relative), got "
                f"{apart:.2g}",
                hint="this checkpoint is scored field by field, and there is nothing to compare",
            )
        return made

    def has(self, layer: str) -> bool:
        """Whether a layer of the model has a name with this part."""
        return any(layer in type(each).__name__ for _, each in self.model.named_modules())


def open_random(name: str, backend: "Backend", tolerance: float) -> Bench:
    """Make a random model ready. Call on the MLX thread."""
    import numpy as np

    from weighbridge.scorer.random_models import RANDOM_MODELS, random_model, share_weights

    model = random_model(name, backend.dtype)
    tokens = np.random.default_rng(0).integers(0, RANDOM_MODELS[name]["vocab_size"], 4096)
    return Bench(
        model,
        lambda: share_weights(model, random_model(name, backend.dtype)),
        tuple(tokens.tolist()),
        backend,
        tolerance,
    )


def open_checkpoint(info: "CheckpointInfo", backend: "Backend", tolerance: float) -> Bench:
    """Load a checkpoint, and its adapter, as scoring does; prompts are of the sample documents.

    Call on the MLX thread.
    """
    from weighbridge.scorer.chat import ChatTokenizer
    from weighbridge.scorer.model_weights import load_model
    from weighbridge.scorer.random_models import share_weights

    def load() -> Any:
        return load_model(
            info.folder,
            backend.dtype,
            adapter=info.adapter,
            dequantize=backend.device == "cpu",
        )

    samples = importlib.resources.files("weighbridge.examples") / "documents" / "tickets.jsonl"
    lines = samples.read_text(encoding="utf-8").split("\n")
    texts = [json.loads(line)["text"] for line in lines if line]
    source = ChatTokenizer.load(info.folder).encode("\n".join(texts))
    model = load()
    return Bench(
        model,
        lambda: share_weights(model, load()),
        source,
        backend,
        tolerance,
        info.context_tokens or WHOLE,
    )


def contests(bench: Bench, wanted: Sequence[str]) -> Iterator[Contest]:
    """Yield the contests of a model, by the names of `scenario_names`.

    Left out are those whose prompts have more tokens than the model has positions.
    """
    from weighbridge.scorer import gated_delta
    from weighbridge.scorer.reference import ReferenceScorer

    gated_delta.install()
    engine, reference = bench.engine(bench.model), ReferenceScorer(bench.model)

    def fits(name: str, shared: int) -> bool:
        return name in wanted and shared + max(SUFFIXES) <= bench.context_tokens

    for fields, shared in PUBLISHED:
        if fits(f"{fields}x{shared}", shared):
            yield published(bench, engine, reference, fields, shared)
    for fields, tokens in DOCUMENTS:
        longest = CONTEXT_FIRST[fields]
        if fits(f"documents-{fields}x{tokens}", longest.before + tokens + longest.behind):
            yield documents(bench, engine, reference, fields, tokens)
    if fits("switches", SWITCHED[1]):
        asked = [Document(prompts(bench.source, *SWITCHED))]
        yield switched(bench, engine, "switches", asked, switches())
    fields, tokens = SWITCHED_DOCUMENTS
    around = SCHEMA_FIRST[fields]
    if fits("switches-documents", around.before + tokens + around.behind):
        asked = documents_around(bench.source, fields, around, tokens, 8)
        yield switched(bench, engine, "switches-documents", asked, DOCUMENT_SWITCHES)
    if fits("labels", LABELLED[1]):
        yield labelled(bench, engine, reference, *LABELLED)
    if fits("memory", BRANCHED[1]):
        yield branched(bench, engine, *BRANCHED)


def published(
    bench: Bench, engine: "Engine", reference: "ReferenceScorer", fields: int, shared: int
) -> Contest:
    """All modes on the same prompts, over the reference with and without a shared prefix."""
    asked = [Document(prompts(bench.source, fields, shared))]
    both = (REFERENCE, INDEPENDENT)
    by_reference, by_engine = partial(_each, reference.score), partial(_resident, engine)
    return Contest(
        f"{fields}x{shared}",
        shared,
        (
            Contender(REFERENCE, by_reference("parallel"), asked, (INDEPENDENT,), INDEPENDENT),
            Contender(
                INDEPENDENT, by_reference("independent"), asked, (REFERENCE,), REFERENCE, True
            ),
            Contender("parallel", by_engine("parallel"), asked, both, REFERENCE),
            Contender("cached_serial", by_engine("cached_serial"), asked, both, REFERENCE),
            Contender("independent", by_engine("independent"), asked, both, REFERENCE, True),
            Contender("auto", by_engine("auto"), asked, both, REFERENCE),
        ),
    )


def documents(
    bench: Bench, engine: "Engine", reference: "ReferenceScorer", fields: int, tokens: int
) -> Contest:
    """Many documents behind the questions, which stay; over the reference.

    Each in prompts of its own: the reference puts the document first, so nothing of a prompt
    is that of the next one. Answers are compared with those to the same prompts.
    """
    few = 1 if tokens > 100 else 2
    theirs = documents_around(bench.source, fields, CONTEXT_FIRST[fields], tokens, few)
    kept = documents_around(bench.source, fields, SCHEMA_FIRST[fields], tokens, 4 * few)
    forgotten = [Document(each.rows) for each in kept]
    by_engine = partial(_resident, engine)
    name, alone = RESIDENT, "schema-first, fields on their own"
    contenders = (
        Contender(REFERENCE, _each(reference.score, "parallel"), theirs, (name,), REFERENCE),
        Contender(name, by_engine("auto"), kept, (REFERENCE, "schema-first"), alone, warm=True),
        Contender("schema-first", by_engine("parallel"), forgotten[:few], (REFERENCE,), alone),
        Contender(alone, by_engine("independent"), forgotten[:1], (REFERENCE,), name, True),
    )
    both = CONTEXT_FIRST[fields], SCHEMA_FIRST[fields]
    theirs_shared, ours_shared = (tokens + each.before + each.behind for each in both)
    return Contest(
        f"documents-{fields}x{tokens}",
        ours_shared,
        (replace(contenders[0], prefix_tokens=theirs_shared), *contenders[1:]),
    )


def switched(
    bench: Bench,
    engine: "Engine",
    name: str,
    asked: list[Document],
    some: Sequence[Switch],
) -> Contest:
    """What one optimization brings, all others being there: with it over without it."""
    from weighbridge.scorer.rows import common_prefix

    without: list[Contender] = []
    for each in some:
        if not each.used(bench, engine):
            continue
        other = bench.engine(bench.twin(), **each.engine) if each.engine else engine
        score = _around(each.around, _resident(other, "parallel"))
        without.append(
            Contender(f"without {each.name}", score, asked, (EVERYTHING,), EVERYTHING, warm=True)
        )
    names = tuple(each.name for each in without)
    like = names[0] if names else EVERYTHING
    whole = Contender(EVERYTHING, _resident(engine, "parallel"), asked, names, like, warm=True)
    shared = common_prefix([row.tokens for row in asked[0].rows])
    return Contest(name, shared, (whole, *without))


def labelled(
    bench: Bench, engine: "Engine", reference: "ReferenceScorer", fields: int, shared: int
) -> Contest:
    """Labels of several tokens: what the tree of their rows brings, and the reference."""
    asked = [Document(branchings(prompts(bench.source, fields, shared)))]
    by_reference, name = _each(reference.score, "parallel"), "without label trees"
    over = (REFERENCE, name) if engine.trees or engine.passes else (REFERENCE,)
    contenders = (
        Contender(REFERENCE, by_reference, asked, (EVERYTHING,), EVERYTHING),
        Contender(EVERYTHING, _resident(engine, "parallel"), asked, over, REFERENCE),
    )
    if engine.trees or engine.passes:
        flat = bench.engine(bench.twin(), one_pass=False)
        flat.trees = False
        score = _resident(flat, "parallel")
        contenders += (Contender(name, score, asked, (EVERYTHING,), REFERENCE),)
    return Contest("labels", shared, contenders)


def branched(bench: Bench, engine: "Engine", fields: int, shared: int) -> Contest:
    """Bytes of branches behind a prefix that is there already, packed and copied."""
    asked = [Document(prompts(bench.source, fields, shared), resident_tokens=shared)]
    copied = bench.engine(bench.twin(), packed=False, one_pass=False)
    copies, packed = "prefix copied", "prefix packed"
    return Contest(
        "memory",
        shared,
        (
            Contender(packed, _resident(engine, "parallel"), asked, (copies,), copies, warm=True),
            Contender(copies, _resident(copied, "parallel"), asked, (packed,), packed, warm=True),
        ),
    )


def _each(score: Callable[..., Any], mode: str) -> Score:
    """Score documents one after the other, in a mode."""
    from weighbridge.scorer.rows import Mode

    chosen = Mode(mode)
    return lambda some: [score(each.rows, mode=chosen) for each in some]


def _resident(engine: "Engine", mode: str) -> Score:
    """Score documents as a batch, behind what they share, which is kept."""
    from weighbridge.scorer.rows import Mode

    chosen = Mode(mode)
    return lambda some: engine.score_documents(some, mode=chosen)


def _around(around: Callable[[], AbstractContextManager[None]], score: Score) -> Score:
    def run(some: Sequence[Document]) -> "list[tuple[list[Any], Timings]]":
        with around():
            return score(some)

    return run
