"""The real flow on the real checkpoint, and what Prefect's server has kept of it."""

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SENTIMENT = {
    "sentiment": {
        "type": "enum",
        "choices": ["negative", "positive"],
        "description": "The feeling of the text.",
    }
}
Record = Mapping[str, Any] | str
Documents = Sequence[Record]


def write_documents(path: Path, documents: Documents) -> Path:
    """Write records as JSONL; a text alone gets an id."""
    records = [
        {"id": f"d{number}", "text": each} if isinstance(each, str) else dict(each)
        for number, each in enumerate(documents)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@dataclass(frozen=True)
class Bench:
    """A folder with a store, and the flow that fills it."""

    folder: Path
    checkpoint: Path

    @property
    def database(self) -> Path:
        return self.folder / "store.db"

    def request(self, documents: Documents | Path, **changes: Any) -> Any:
        from weighbridge.flows import ScoreRequest

        path = (
            documents
            if isinstance(documents, Path)
            else write_documents(self.folder / "documents.jsonl", documents)
        )
        return ScoreRequest.model_validate(
            {
                "documents": str(path),
                "schema": json.dumps(SENTIMENT),
                "checkpoint": str(self.checkpoint),
                "database": str(self.database),
                **changes,
            }
        )

    def score(self, documents: Documents | Path, **changes: Any) -> dict[str, Any]:
        from weighbridge.flows import score_documents

        return score_documents(self.request(documents, **changes))

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        connection = sqlite3.connect(self.database)
        connection.row_factory = sqlite3.Row
        try:
            return [dict(row) for row in connection.execute(sql, values)]
        finally:
            connection.close()

    def change(self, sql: str) -> None:
        connection = sqlite3.connect(self.database)
        with connection:
            connection.executescript(sql)
        connection.close()

    def assert_accounts_close(self) -> None:
        """Every run counts its own items, and no document was decided twice."""
        for run in self.rows("select * from run"):
            items = self.rows("select status from item where run_id = ?", run["id"])
            statuses = [item["status"] for item in items]
            for status in ("scored", "reused", "rejected"):
                assert run[status] == statuses.count(status)
            assert run["documents"] == len(items)
        generations = self.rows(
            "select count(*) as made, max(generation) + 1 as latest from decision "
            "group by document_id, schema_version_id, checkpoint_id, dtype, prompt_version"
        )
        assert all(each["made"] == each["latest"] for each in generations)
        assert self.rows("select * from claim") == []


@pytest.fixture
def bench(
    tmp_path: Path, embedded: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    del prefect_server
    monkeypatch.chdir(tmp_path)  # no settings of the folder that tests were started in
    return Bench(tmp_path, embedded)


@pytest.fixture
def kept_by_prefect(prefect_server: str) -> Callable[[], dict[str, list[dict[str, Any]]]]:
    """Return all rows of all tables of Prefect's server, once all logs have arrived."""
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL

    del prefect_server
    url = str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value())

    def tables() -> dict[str, list[dict[str, Any]]]:
        connection = sqlite3.connect(Path(url.partition(":///")[2]))
        connection.row_factory = sqlite3.Row
        try:
            names = connection.execute("select name from sqlite_master where type = 'table'")
            return {
                name: [dict(row) for row in connection.execute(f'select * from "{name}"')]
                for (name,) in names.fetchall()
            }
        finally:
            connection.close()

    def settled() -> dict[str, list[dict[str, Any]]]:
        APILogWorker.drain_all(timeout=20)
        deadline = time.monotonic() + 20
        before = -1
        while time.monotonic() < deadline:
            found = tables()
            now = sum(map(len, found.values()))
            if now == before:
                return found
            before = now
            time.sleep(1)
        raise AssertionError("Prefect's server did not come to rest")

    return settled
