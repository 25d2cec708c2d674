"""Removes one document for good: its text, its metadata, its items and its answers."""

import sqlite3
from dataclasses import dataclass

from weighbridge.db.errors import NoSuchDocument, RunRefused, StoreError
from weighbridge.db.housekeeping import (
    abandoned_runs,
    close_abandoned,
    column,
    delete_decisions,
    delete_items,
    deleting,
    fill,
    rewrite,
    store_file,
    transaction,
)
from weighbridge.db.recording import storable


@dataclass(frozen=True)
class Forgotten:
    """What was removed of one external id, or would be.

    Attributes:
        external_id: As the store spells it.
        runs: The runs that had it.
        items: Its rows in those runs, with their metadata.
        documents: Texts that go, with their decisions.
        decisions: Decisions that go.
        answers: Answers that go.
        shared: Texts that stay, because records with another id, or with none, have them.
        others: How many ids share them; a record without an id counts as one.
    """

    external_id: str
    runs: tuple[int, ...]
    items: int
    documents: int
    decisions: int
    answers: int
    shared: int
    others: int


def plan_forget(url: str, external_id: str) -> Forgotten:
    """Count what `forget_document` would remove; changes nothing.

    Raises:
        NoSuchDocument: No item has this id.
        RunRefused: A run is running.
        StoreError: The store cannot be opened, or is not a SQLite file.
    """
    path = store_file(url)
    abandoned = abandoned_runs(url)
    with deleting(path) as connection:
        connection.execute("BEGIN")
        return _choose(connection, _spelt(external_id), abandoned)


def forget_document(url: str, external_id: str) -> Forgotten:
    """Remove every item of an external id, and each text that no other record has.

    A text goes with its hash, its decisions and their answers. The file is written anew
    afterwards and its log emptied, so that no byte of it is left in free space; copies of
    the file are not touched. The counts of the runs go down with their items.

    Args:
        url: The store.
        external_id: The id, exactly as the records had it.

    Returns:
        What was removed.

    Raises:
        NoSuchDocument: No item has this id.
        RunRefused: A run is running; it may be about to record the document.
        StoreError: The store cannot be opened, or is not a SQLite file; or the rows are
            removed, and the file could not be written anew.
    """
    path = store_file(url)
    close_abandoned(url)
    spelt = _spelt(external_id)
    with deleting(path) as connection:
        with transaction(connection):
            found = _choose(connection, spelt, [])
            delete_items(connection, "external_id = ?", [spelt])
            delete_decisions(connection, column(connection, "SELECT id FROM temp.gone_decision"))
            connection.execute(
                "DELETE FROM claim WHERE document_sha256 IN (SELECT sha256 FROM document"
                " WHERE id IN (SELECT id FROM temp.gone_document))"
            )
            connection.execute(
                "DELETE FROM document WHERE id IN (SELECT id FROM temp.gone_document)"
            )
        try:
            rewrite(connection, path)
        except (sqlite3.Error, StoreError) as error:
            raise _half_done(found, error) from error
    return found


def _half_done(found: Forgotten, error: Exception) -> StoreError:
    return StoreError(
        f"the rows of {found.external_id!r} are removed, but bytes of it may be left in the file"
        f" and its log: {error}",
        hint="end what else has the store open, make room, then: weighbridge db vacuum",
    )


def _choose(connection: sqlite3.Connection, external_id: str, abandoned: list[int]) -> Forgotten:
    """List in temporary tables what has to go with an id."""
    _require_quiet(connection, abandoned)
    items = connection.execute(
        "SELECT run_id, document_id FROM item WHERE external_id = ?", [external_id]
    ).fetchall()
    if not items:
        raise NoSuchDocument(
            f"an id must be one that the store has, and no record has the id {external_id!r:.200}",
            hint="ids are taken exactly as they were; weighbridge results shows them",
        )
    fill(connection, "candidate", {document for _, document in items if document is not None})
    shared = connection.execute(
        "SELECT DISTINCT document_id, external_id FROM item"
        " WHERE document_id IN (SELECT id FROM temp.candidate)"
        " AND external_id IS NOT ?",
        [external_id],
    ).fetchall()
    staying = {document for document, _ in shared}
    candidates = column(connection, "SELECT id FROM temp.candidate")
    going = [each for each in candidates if each not in staying]
    fill(connection, "gone_document", going)
    decisions = column(
        connection,
        "SELECT id FROM decision WHERE document_id IN (SELECT id FROM temp.gone_document)",
    )
    fill(connection, "gone_decision", decisions)
    answers = column(
        connection,
        "SELECT count(*) FROM answer WHERE decision_id IN (SELECT id FROM temp.gone_decision)",
    )
    return Forgotten(
        external_id=external_id,
        runs=tuple(sorted({run_id for run_id, _ in items})),
        items=len(items),
        documents=len(going),
        decisions=len(decisions),
        answers=answers[0],
        shared=len(staying),
        others=len({other for _, other in shared}),
    )


def _require_quiet(connection: sqlite3.Connection, abandoned: list[int]) -> None:
    fill(connection, "abandoned", abandoned)
    running = connection.execute(
        "SELECT id, pid, host FROM run WHERE status = 'running'"
        " AND id NOT IN (SELECT id FROM temp.abandoned) ORDER BY id"
    ).fetchone()
    if running:
        run_id, pid, host = running
        raise RunRefused(
            f"no run may be running while a document is forgotten, and run {run_id} is, as "
            f"process {pid} on {host}",
            hint="it may be about to record this very document: end it or wait for it\n"
            "a run that died on another machine is closed by the next command there",
        )


def _spelt(external_id: str) -> str:
    """Spell an id as it was kept: a database cannot hold every character."""
    return storable(external_id) or ""
