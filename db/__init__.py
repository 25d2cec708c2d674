"""The store: documents, runs, decisions, raw logits and the probabilities derived from them.

Knows SQLModel, SQLAlchemy, Alembic and what SQLite needs. Knows no model and no tokenizer,
no Prefect, no terminal and no setting: callers bring plain values and a database URL.

`open_engine` opens a store and migrates it, `Store` is the writing side, `queries` the
reading side, `tables` and `views` are what plain SQL sees.
"""

from weighbridge.db.engine import open_engine, upgrade_store
from weighbridge.db.errors import (
    ExportRefused,
    MigrationFailed,
    NotAStore,
    QueryRefused,
    RecordRefused,
    RunRefused,
    StoreBusy,
    StoreError,
    StoreOutdated,
    StoreTooNew,
    StoreUnavailable,
)
from weighbridge.db.export import export_format, export_rows
from weighbridge.db.location import display_url, sqlite_url, store_path
from weighbridge.db.migrate import Upgrade, copy_store
from weighbridge.db.queries import (
    FieldValue,
    RejectedRow,
    ResultRow,
    SqlRows,
    answer_distribution,
    batches,
    existing_run,
    latest_run_id,
    mean_flip_rate,
    rejected,
    rejected_codes,
    results,
    run_sql,
    run_summary,
    runs,
)
from weighbridge.db.records import (
    AnswerRecord,
    BatchOutcome,
    BatchRecord,
    BatchTimings,
    CheckpointRow,
    ChoiceRecord,
    DocumentRecord,
    FinalStatus,
    ItemRecord,
    ItemStatus,
    RunHandle,
    RunStart,
    RunSummary,
    SchemaRow,
)
from weighbridge.db.store import Store

__all__ = [
    "AnswerRecord",
    "BatchOutcome",
    "BatchRecord",
    "BatchTimings",
    "CheckpointRow",
    "ChoiceRecord",
    "DocumentRecord",
    "ExportRefused",
    "FieldValue",
    "FinalStatus",
    "ItemRecord",
    "ItemStatus",
    "MigrationFailed",
    "NotAStore",
    "QueryRefused",
    "RecordRefused",
    "RejectedRow",
    "ResultRow",
    "RunHandle",
    "RunRefused",
    "RunStart",
    "RunSummary",
    "SchemaRow",
    "SqlRows",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreOutdated",
    "StoreTooNew",
    "StoreUnavailable",
    "Upgrade",
    "answer_distribution",
    "batches",
    "copy_store",
    "display_url",
    "existing_run",
    "export_format",
    "export_rows",
    "latest_run_id",
    "mean_flip_rate",
    "open_engine",
    "rejected",
    "rejected_codes",
    "results",
    "run_sql",
    "run_summary",
    "runs",
    "sqlite_url",
    "store_path",
    "upgrade_store",
]
