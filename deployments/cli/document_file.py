"""The documents of a command as a file: named, piped in, or typed."""

import json
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from weighbridge.deployments.console import print_note
from weighbridge.tasks.errors import SourceError


@contextmanager
def document_file(documents: str | None, text: str | None) -> Generator[tuple[str, str | None]]:
    """Give the path of the documents, and what people know them as.

    Standard input and a typed text are spooled to a private file, because no
    document text may become a parameter of a flow run.
    """
    if text is None and documents != "-":
        yield str(documents), None
        return
    folder = tempfile.mkdtemp(prefix="weighbridge-")  # for the user's eyes only, mode 0700
    # Under its own name, as a single text file takes its id from it.
    name = str(Path(folder) / ("stdin" if text is None else "text.jsonl"))
    try:
        with Path(name).open("wb") as file:
            if text is None:
                if sys.stdin.isatty():
                    print_note("reading documents from the terminal; end them with Ctrl-D")
                while chunk := sys.stdin.buffer.read(1 << 20):
                    file.write(chunk)
            else:
                file.write(json.dumps({"text": text}).encode())
        yield name, "stdin" if text is None else "--text"
    except SourceError as error:
        # Where it was spooled says nothing to whoever piped it in.
        hint = error.hint and error.hint.replace(name, "-")
        raise SourceError(error.message.replace(name, "standard input"), hint=hint) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
