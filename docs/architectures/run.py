"""Write docs/architectures.md: tiny random models of mlx-lm's architectures, in all modes.

    python docs/architectures/run.py

Each model has a few thousand float32 weights and runs on the CPU: what a checkpoint is put
to when it is loaded (the head against the whole one, branches against whole prompts), then
rows of codes and of labels in every mode. Outside the tests, because it takes a minute.
"""

import importlib
import logging
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weighbridge.scorer.backend import PROBE_TOLERANCE, preload_blas

preload_blas()  # before MLX is imported: what a scorer computes with

import mlx.core as mx  # noqa: E402
import mlx_lm.models  # noqa: E402
import numpy as np  # noqa: E402
from a_to_l import A_TO_L  # noqa: E402
from m_to_z import M_TO_Z  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from shapes import COMMON, Config  # noqa: E402

from weighbridge.scorer.caches import empty_prefix  # noqa: E402
from weighbridge.scorer.engine import Engine  # noqa: E402
from weighbridge.scorer.heads import HeadCut, relative_difference  # noqa: E402
from weighbridge.scorer.plan import Prompted  # noqa: E402
from weighbridge.scorer.rows import Mode, Row, Scored  # noqa: E402
from weighbridge.scorer.trees import plant, run_levels  # noqa: E402

PAGE = Path(__file__).parents[1] / "architectures.md"
TOLERANCE = PROBE_TOLERANCE["float32"]
CODES = (12, 15, 13, 14)
LABELS = (21, 24, 40, 23, 29)
CACHED = ((Mode.PARALLEL, None), (Mode.PARALLEL, 2), (Mode.CACHED_SERIAL, None))
"""Modes and rows per branch batch: with no limit a model goes its fastest way."""

RESIDENT = 33
"""Tokens of the resident prefix."""

PASS_TOKENS = 128
"""Room for two short documents in one pass."""

UNTRIED = {
    "bitnet": "its ternary products are a kernel for Metal, with no form for a CPU",
    "deepseek_v41": "has no tiny configuration here yet: compressed keys, shared indices",
    "kimi_k3": "has no tiny configuration here yet: residual blocks over gated delta layers",
    "muse_spark": "computes with kernels for Metal, and with nothing on a CPU",
    "olmo": "needs the package ai2-olmo",
    "prism_hadamard_qwen35": "needs a quantized checkpoint with a table of its modules",
}
KNOWN = {
    "gear": "mlx-lm reads the offset of a cache of convolutions, which has none",
    "plamo3": "its rotating caches hold one token less than its window mask shows",
    "gemma3n": "whole prompts get empty caches: without any, its last layers differ",
    "phi3small": "its block mask depends on where a prompt is split; writes to logits by token",
    "talkie": "its head is a bare array and no layer",
    **dict.fromkeys(
        ("llama4_text", "minicpm", "seed_oss"),
        "multiplies by its tied embeddings itself: candidates, but at every position",
    ),
}
"""What an architecture is special in, beyond what the table shows; found by reading it."""

PARTS = {
    "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline",
    "rope_utils", "ssm", "switch_layers",
}  # fmt: skip
"""Modules of mlx-lm that are parts of models and none themselves."""


@dataclass
class Outcome:
    """What came of one architecture.

    Attributes:
        caches: The kinds of its caches.
        head: How far its head is cut.
        branches: Whether branches are used, or every prompt is computed whole.
        packs: Whether rows can attend to one copy of their prefix.
        trees: Whether rows can go on from others, padded ones too.
        passes: Whether all that stands behind a prefix can be computed in one pass.
        worst: Largest difference of any mode from whole prompts, relative to the spread.
        reason: Why it falls back, or does not run at all.
    """

    caches: list[str] = field(default_factory=list)
    head: HeadCut | None = None
    branches: bool = False
    packs: bool = False
    trees: bool = False
    passes: bool = False
    worst: float = float("nan")
    reason: str = ""


def build(name: str, config: Config) -> Any:
    """Make a model with random weights; norms are near 1, and states decay slowly."""
    classes = importlib.import_module(f"mlx_lm.models.{name}")
    arguments = {**COMMON, "model_type": name, **config}
    if "text_config" in config:
        text = {"model_type": name, **config["text_config"]}
        arguments = {"model_type": name, **config, "text_config": text}
    draw = np.random.default_rng(0)
    model = classes.Model(classes.ModelArgs.from_dict(arguments))
    weights = [(path, _random(draw, path, leaf)) for path, leaf in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    if name == "gemma3_text":
        model.sanitize({})  # ties the head, as a checkpoint without one does
    mx.eval(model.parameters())
    return model.eval()


def _random(draw: np.random.Generator, path: str, leaf: Any) -> mx.array:
    if not mx.issubdtype(leaf.dtype, mx.floating):
        return leaf
    centre, spread = (1.0 if leaf.ndim == 1 else 0.0), 0.2
    if path.endswith(("A_log", "dt_bias")):
        centre, spread = (-2.5, 0.3) if path.endswith("A_log") else (0.0, 0.2)
    return mx.array(draw.normal(centre, spread, leaf.shape).astype(np.float32))


def rows(candidates: Sequence[int], lengths: Sequence[int]) -> list[Row]:
    """Make rows that share 70 tokens: beyond every window, chunk and convolution."""
    draw = np.random.default_rng(1)
    shared = tuple(draw.integers(1, 97, 70).tolist())
    return [
        Row((*shared, number, *draw.integers(0, 97, length - 1).tolist()), tuple(candidates))
        for number, length in enumerate(lengths, start=1)
    ]


def run(name: str, config: Config) -> Outcome:
    """Put one architecture to what a checkpoint is put to, and to all modes."""
    outcome = Outcome()
    model = build(name, config)
    engine = Engine(model, chunk=16, pass_tokens=PASS_TOKENS)
    outcome.head = engine.check_head(TOLERANCE)
    outcome.caches = sorted({type(cache).__name__ for cache in empty_prefix(model).caches})
    probed = engine.probe()
    outcome.branches = probed <= TOLERANCE
    if not outcome.branches:
        outcome.worst, outcome.reason = probed, _why(engine)
        return outcome
    worst = probed
    for asked in (rows(CODES, [3, 9, 5]), rows(LABELS, [4, 1, 7, 2, 6])):
        whole, _ = engine.score(asked, mode=Mode.INDEPENDENT)
        for mode, batch_size in CACHED:
            for _ in range(2):  # with a resident prefix that is made, and one that is taken
                found, _ = engine.score(
                    asked, mode=mode, batch_size=batch_size, resident_tokens=RESIDENT
                )
                worst = max(worst, relative_difference(np.array(found), np.array(whole)))
    worst = max(worst, _documents_off(engine))
    outcome.packs, outcome.trees, outcome.passes = engine.packs, engine.trees, engine.passes
    if engine.trees:
        worst = max(worst, _trees_off(engine))
    outcome.worst = worst
    if not worst <= TOLERANCE:
        outcome.branches, outcome.reason = False, "modes differ beyond what the probe sees"
    return outcome


def _documents_off(engine: Engine) -> float:
    """Return how far two short documents, scored together, are off from whole prompts."""
    asked: list[Prompted] = []
    for cut, lengths in ((50, [3, 9, 5]), (44, [4, 1, 7])):
        own = tuple(
            Row(row.tokens[:RESIDENT] + row.tokens[cut:], row.candidates)
            for row in rows(LABELS, lengths)
        )
        asked.append(Prompted(own, max(len(row.tokens) for row in own), RESIDENT, seconds=0.0))
    whole = _logits(engine.score_documents(asked, mode=Mode.INDEPENDENT))
    return relative_difference(_logits(engine.score_documents(asked)), whole)


def _logits(scored: Sequence[Scored]) -> np.ndarray:
    return np.array([logits for found, _ in scored for logits in found])


def _trees_off(engine: Engine) -> float:
    """Return how far several documents, their fields and labels are off from whole prompts."""
    asked = [
        [
            Row((*document.tokens, number, *document.tokens[:length], *label), LABELS)
            for number, length in enumerate((1, 4), start=1)
            for label in ((), (24,), (40, 23))
        ]
        for document in rows(LABELS, [4, 1, 19])
    ]
    prefix = engine.prefill(asked[0][0].tokens[:70])
    levels = plant([[row.tokens[70:] for row in each] for each in asked], twigs=True)
    assert levels is not None  # noqa: S101  # rows of a document share it
    found = run_levels(lambda caches, each: engine._run(caches, each, LABELS), prefix, levels)
    whole, _ = engine.score([row for each in asked for row in each], mode=Mode.INDEPENDENT)
    return relative_difference(found, np.array(whole))


def _why(engine: Engine) -> str:
    """Say what fails when branches are taken."""
    try:
        engine.score(rows(CODES, [3, 9]), mode=Mode.PARALLEL)
    except (ValueError, TypeError, AttributeError, RuntimeError, LookupError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "branches differ from whole prompts"


def page(outcomes: dict[str, Outcome]) -> str:
    """Write the page."""
    right = {name: each for name, each in outcomes.items() if each.branches}
    worst = max(each.worst for each in right.values())
    lines = [
        "# Architectures",
        "",
        "Made by `python docs/architectures/run.py` on mlx-lm "
        f"{version('mlx-lm')} and mlx {version('mlx')}, CPU, float32; not part of the tests.",
        "",
        f"Tiny random models of {len(outcomes)} architectures, the real classes of mlx-lm, went",
        "through the check of the head, the probe at loading, and rows of codes and of labels",
        "with suffixes of unequal length in the modes `parallel`, with and without a batch size,",
        "and `cached_serial`, each with a resident prefix made and taken, against `independent`;",
        "then two short documents together. It says that the architecture is computed rightly,",
        "not that a checkpoint of it answers well.",
        "",
        f"{len(right)} run in all modes; the largest difference among them is {worst:.0e} of the",
        f"spread of the logits ({TOLERANCE:.0e} is allowed). For an architecture that falls back,",
        "every prompt is computed whole, which is slower and right.",
        "",
        "- **head**: `columns` computes the candidates at one position; `positions` all of the",
        "  vocabulary there; `all positions` the candidates everywhere; `none` everything.",
        "- **branches**: whether caches of a shared prefix are forked, or it falls back.",
        "- **packs**: whether rows can attend to one copy of a long prefix instead.",
        "- **trees**: whether rows can go on from others: labels from the question of a field,",
        "  fields from one of several documents. Recurrent layers must then keep the state at",
        "  the end of a padded row; some of mlx-lm do not, which the probe finds out.",
        "- **one pass**: whether all that stands behind a resident prefix, documents, fields and",
        "  labels, is computed in one pass. No layer may be recurrent.",
        "",
        "| architecture | caches | head | branches | packs | trees | one pass | difference | |",
        "|---|---|---|---|---|---|---|--:|---|",
    ]
    for name, each in outcomes.items():
        note = KNOWN.get(name) or each.reason
        branches = "yes" if each.branches else "falls back"
        able = (each.packs, each.trees, each.passes)
        ways = " | ".join("yes" if way else "no" for way in able)
        caches = ", ".join(kind.removesuffix("Cache") for kind in each.caches)
        lines.append(
            f"| {name} | {caches} | {each.head} | {branches} | {ways} | {each.worst:.0e} | {note} |"
        )
    lines += ["", "Not tried:", "", "| architecture | why |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in UNTRIED.items()]
    return "\n".join([*lines, ""])


def main() -> int:
    logging.disable(logging.WARNING)
    outcomes: dict[str, Outcome] = {}
    failed: list[str] = []
    with mx.stream(mx.cpu):
        for name, config in sorted({**A_TO_L, **M_TO_Z}.items(), key=lambda each: each[0].lower()):
            print(name, end=" ", flush=True)
            try:
                outcomes[name] = run(name, config)
            except Exception as error:  # noqa: BLE001  # for UNTRIED, or a bug
                failed.append(f"{name}: {type(error).__name__}: {error}")
    modules = {each.name for each in pkgutil.iter_modules(mlx_lm.models.__path__)} - PARTS
    failed += [f"{name}: no configuration" for name in modules - {*outcomes, *UNTRIED}]
    for line in failed:
        print(line, file=sys.stderr)
    if not failed:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
