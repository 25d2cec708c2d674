"""The reading side: what commands and tasks ask a store. Takes readers and writers alike.

The names of several files, gathered: `run_queries`, `fields`, `answers`, `details`, `diff`
and `typed_sql`.
"""

from weighbridge.db.answers import (
    RESULT_TYPES,
    AnswerOrder,
    AnswerPage,
    ResultRow,
    count_answers,
    count_wide,
    reading_answers,
    reading_wide,
    results,
)
from weighbridge.db.details import (
    AnswerDetails,
    ChoiceDetails,
    ItemDetails,
    RunDetails,
    count_items,
    document_items,
    item_details,
    run_details,
    run_fields,
    schema_view,
)
from weighbridge.db.diff import (
    ChangedAnswer,
    FieldPairs,
    PairedField,
    Pairing,
    UnpairedDocument,
    count_pairs,
    pair_runs,
    reading_expected,
    reading_pairs,
    unpaired_documents,
)
from weighbridge.db.fields import RunField
from weighbridge.db.filters import AnswerFilter
from weighbridge.db.metadata import column_types
from weighbridge.db.rescaled import reading_rescaled
from weighbridge.db.run_queries import (
    FieldValue,
    RejectedRow,
    RunFilter,
    answer_distribution,
    batches,
    count_runs,
    existing_run,
    latest_run_id,
    mean_flip_rate,
    rejected,
    rejected_codes,
    require_run,
    run_sources,
    run_summary,
    runs,
    summarise,
)
from weighbridge.db.schema_views import SchemaView
from weighbridge.db.typed_sql import SqlRows, run_sql
from weighbridge.db.wide import ITEM_TYPES, WideColumns

__all__ = [
    "ITEM_TYPES",
    "RESULT_TYPES",
    "AnswerDetails",
    "AnswerFilter",
    "AnswerOrder",
    "AnswerPage",
    "ChangedAnswer",
    "ChoiceDetails",
    "FieldPairs",
    "FieldValue",
    "ItemDetails",
    "PairedField",
    "Pairing",
    "RejectedRow",
    "ResultRow",
    "RunDetails",
    "RunField",
    "RunFilter",
    "SchemaView",
    "SqlRows",
    "UnpairedDocument",
    "WideColumns",
    "answer_distribution",
    "batches",
    "column_types",
    "count_answers",
    "count_items",
    "count_pairs",
    "count_runs",
    "count_wide",
    "document_items",
    "existing_run",
    "item_details",
    "latest_run_id",
    "mean_flip_rate",
    "pair_runs",
    "reading_answers",
    "reading_expected",
    "reading_pairs",
    "reading_rescaled",
    "reading_wide",
    "rejected",
    "rejected_codes",
    "require_run",
    "results",
    "run_details",
    "run_fields",
    "run_sources",
    "run_sql",
    "run_summary",
    "runs",
    "schema_view",
    "summarise",
    "unpaired_documents",
]
