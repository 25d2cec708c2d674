"""The file that a run's answers are written to when all is scored.

Looked at before the first document is scored, as hours would be lost with a wrong name. If
it cannot be written in the end, the flow run fails and says so; the answers stay in the store.

Knows the request and the store's export. Does not know the terminal.
"""

from collections.abc import Iterator
from pathlib import Path

from prefect import get_run_logger

from weighbridge.db.errors import ExportRefused
from weighbridge.db.export import Exported, export_format, export_values
from weighbridge.db.location import store_path
from weighbridge.db.queries import RESULT_TYPES, reading_answers
from weighbridge.flows.request import ScoreRequest, is_schema_file
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.file_kinds import is_many
from weighbridge.tasks.recording import Run
from weighbridge.tasks.sql_source import is_url
from weighbridge.tasks.text_files import find_text_files

_HINT = "name a file such as answers.csv, in a folder that can be written"


def check_output(request: ScoreRequest, database_url: str) -> None:
    """Look whether the output of a request can be written; makes its folders.

    Args:
        request: Its dates are filled in.
        database_url: The store.

    Raises:
        ExportRefused: The name has no format, nothing can be written there, or it is a file
            that this run reads or keeps its answers in.
    """
    if request.output is None:
        return
    path = Path(request.output)
    for what, other in _needed(request, database_url):
        if _same(path, other):
            raise ExportRefused(
                f"the output must not replace {what}, got {path}", hint="name another file"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportRefused(
            f"the output must be in a folder that can be made, got {path}: {error.strerror}",
            hint=_HINT,
        ) from None
    try:
        export_format(path)
    except ExportRefused as error:
        raise ExportRefused(error.message, hint=_HINT) from None


def _needed(request: ScoreRequest, database_url: str) -> Iterator[tuple[str, Path]]:
    store = store_path(database_url)
    if store is not None:
        yield "the store", store
    if is_schema_file(request.schema_):
        yield "the schema", Path(request.schema_)
    if is_url(request.documents):
        return
    documents = Path(request.documents)
    yield "the documents", documents
    if request.query is None and is_many(documents):
        try:
            files = find_text_files(request.documents, named=request.format == "text")
        except SourceError:
            return  # told by who reads them
        for _, file in files:
            yield "a document", file


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them is not there
        return path.absolute() == other.absolute()


def deliver(run: Run, output: str) -> Exported:
    """Write all answers of a finished run to a file, in the format that its name asks for.

    The file appears when it is whole, in place of a former one.

    Args:
        run: Closed; its answers are kept, whatever becomes of the file.
        output: The file, as `check_output` has seen it.

    Raises:
        ExportRefused: It cannot be written.
    """
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with reading_answers(run.engine, run.run_id) as rows:
            done = export_values(rows, path, columns=RESULT_TYPES)
    except (ExportRefused, OSError) as error:
        raise ExportRefused(
            f"all is scored and kept as run {run.run_id}, and its output must be a file that can "
            f"be written: {error}",
            hint=f"write it once more: weighbridge results {run.run_id} --output {path}",
        ) from None
    finally:
        run.engine.dispose()
    counted = f"{done.rows:,} row{'' if done.rows == 1 else 's'}"
    get_run_logger().info("%s of run %d written to %s", counted, run.run_id, path)
    if done.formulas:
        get_run_logger().warning(
            "%s of its cells %s with = + - or @, which a spreadsheet runs as a formula",
            f"{done.formulas:,}",
            "begins" if done.formulas == 1 else "begin",
        )
    return done
