"""A flow of your own, built from our tasks: score tickets, list the answers to look at twice.

    python examples/own_flow.py tickets.jsonl triage.json

Store and checkpoint come from the settings, as for `weighbridge score`; which Prefect API
the flow reports to is Prefect's own setting.
"""

import os
import sys
from pathlib import Path

# Before Prefect is imported, which sends analytics otherwise.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

from prefect import flow

from weighbridge.db import ResultRow, results
from weighbridge.tasks import (
    ScorerSpec,
    read_documents,
    record_batch,
    recorded_run,
    resolve_temperature,
    score_batch,
    validate_schema,
)

SAMPLES = Path(__file__).parent


@flow(persist_result=False)
def doubtful_tickets(documents: str, schema_file: str, count: int = 5) -> list[ResultRow]:
    """Score documents, record the answers, and return those the model is least sure of."""
    scorer = ScorerSpec()  # ScorerSpec(checkpoint="…", temperature=1.5) would be explicit
    questions = validate_schema(schema_file)
    temperature = resolve_temperature(scorer)
    with recorded_run(questions, scorer, temperature, documents=documents) as run:
        # batch.texts leaves out what an earlier run has decided: that is recorded as reused.
        for batch in run.batches(read_documents(documents)):
            answers = score_batch(batch.texts, questions, scorer)
            record_batch(run, batch, answers)
        return results(run.engine, run.run_id, uncertain=True, limit=count)


def main() -> None:
    """Run the flow on the documents and the schema that were named, else on the samples."""
    samples = [str(SAMPLES / "documents/tickets.jsonl"), str(SAMPLES / "schemas/triage.json")]
    documents, schema_file = sys.argv[1:] or samples
    for answer in doubtful_tickets(documents, schema_file):
        said = f"{answer['field']} is {answer['value']}"
        print(f"{answer['external_id']}: {said}? The model gives it {answer['probability']:.0%}")


if __name__ == "__main__":
    main()
