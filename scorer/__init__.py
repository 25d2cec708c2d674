"""The scorer: documents and a schema in, typed answers with raw logits out.

Loads a local decision model with mlx-lm, prefills what the questions of a
document share once, branches for each question, and reads only the logits of
the allowed answers. Knows no Prefect, no SQL and no terminal.

Importing this package loads the BLAS that MLX should use, and little else: the
names below are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from weighbridge.scorer.backend import preload_blas

if TYPE_CHECKING:
    from weighbridge.scorer.checkpoint import CheckpointInfo, inspect_checkpoint
    from weighbridge.scorer.embedded import embedded_checkpoint
    from weighbridge.scorer.errors import (
        BackendError,
        CheckpointError,
        DocumentError,
        SchemaError,
        ScorerError,
        TemperatureError,
    )
    from weighbridge.scorer.parallel_scorer import ParallelScorer
    from weighbridge.scorer.results import FieldResult, Rejection, ScoreResult
    from weighbridge.scorer.schema import Field, FieldKind, Schema
    from weighbridge.scorer.temperature import Temperature, TemperatureKind, resolve_temperature

_MODULES = {
    "BackendError": "errors",
    "CheckpointError": "errors",
    "CheckpointInfo": "checkpoint",
    "DocumentError": "errors",
    "Field": "schema",
    "FieldKind": "schema",
    "FieldResult": "results",
    "ParallelScorer": "parallel_scorer",
    "Rejection": "results",
    "Schema": "schema",
    "SchemaError": "errors",
    "ScoreResult": "results",
    "ScorerError": "errors",
    "Temperature": "temperature",
    "TemperatureError": "errors",
    "TemperatureKind": "temperature",
    "embedded_checkpoint": "embedded",
    "inspect_checkpoint": "checkpoint",
    "resolve_temperature": "temperature",
}

__all__ = [
    "BackendError",
    "CheckpointError",
    "CheckpointInfo",
    "DocumentError",
    "Field",
    "FieldKind",
    "FieldResult",
    "ParallelScorer",
    "Rejection",
    "Schema",
    "SchemaError",
    "ScoreResult",
    "ScorerError",
    "Temperature",
    "TemperatureError",
    "TemperatureKind",
    "embedded_checkpoint",
    "inspect_checkpoint",
    "resolve_temperature",
]

preload_blas()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
