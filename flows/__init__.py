"""The flows: what Prefect runs from end to end, built from our tasks.

`score_documents` scores the documents of a `ScoreRequest` and records the answers;
`listening` follows its progress within this process.

Knows the tasks, Prefect and its artifacts, and asks the store for summaries. Does not know
who starts a flow or where its output is shown, and neither MLX nor SQL.
"""

from weighbridge.flows.progress import Progress, listening
from weighbridge.flows.request import ScoreRequest
from weighbridge.flows.score import score_documents

__all__ = ["Progress", "ScoreRequest", "listening", "score_documents"]
