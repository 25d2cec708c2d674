"""The task library: what a flow is built from, each a thin Prefect task or a plain function.

`validate_schema`, `resolve_temperature`, `score_batch` and `record_batch` are the tasks;
`recorded_run` holds them together in one run of the store, and `read_documents` gives it
records. Texts and answers go from task to task in this process: Prefect keeps neither.

Knows the scorer, the store and Prefect's tasks. Does not know how a flow is started, what
a terminal is, or how MLX and SQL work; `errors`, `settings`, `sources`, `records`,
`planning`, `convert`, `checkpoints`, `questions`, `scorers` and `looking` do not know
Prefect either.

Importing this package loads nothing: the names below are imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighbridge.tasks.errors import ResultRefused, SettingsError, SourceError, TaskError
    from weighbridge.tasks.planning import Batch
    from weighbridge.tasks.questions import read_schema
    from weighbridge.tasks.recording import Run, record_batch, recorded_run
    from weighbridge.tasks.schema import validate_schema
    from weighbridge.tasks.scorers import ScorerSpec, open_scorer, pinned
    from weighbridge.tasks.scoring import score_batch
    from weighbridge.tasks.settings import Settings, load_settings
    from weighbridge.tasks.sources import BadRecord, Document, read_documents
    from weighbridge.tasks.temperature import resolve_temperature

_MODULES = {
    "BadRecord": "sources",
    "Batch": "planning",
    "Document": "sources",
    "ResultRefused": "errors",
    "Run": "recording",
    "ScorerSpec": "scorers",
    "Settings": "settings",
    "SettingsError": "errors",
    "SourceError": "errors",
    "TaskError": "errors",
    "load_settings": "settings",
    "open_scorer": "scorers",
    "pinned": "scorers",
    "read_documents": "sources",
    "read_schema": "questions",
    "record_batch": "recording",
    "recorded_run": "recording",
    "resolve_temperature": "temperature",
    "score_batch": "scoring",
    "validate_schema": "schema",
}

__all__ = [
    "BadRecord",
    "Batch",
    "Document",
    "ResultRefused",
    "Run",
    "ScorerSpec",
    "Settings",
    "SettingsError",
    "SourceError",
    "TaskError",
    "load_settings",
    "open_scorer",
    "pinned",
    "read_documents",
    "read_schema",
    "record_batch",
    "recorded_run",
    "resolve_temperature",
    "score_batch",
    "validate_schema",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
