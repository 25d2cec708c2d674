"""The real flow on the real checkpoint, and what Prefect's server has kept of it."""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

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


Rows = dict[str, list[dict[str, Any]]]
Kept = Callable[[Callable[[Rows], Any]], Rows]


@pytest.fixture
def kept_by_prefect(prefect_server: str) -> Kept:
    """Return all rows of all tables of Prefect's server, once what is awaited has arrived.

    Logs, tasks and events each take a way of their own, and come when the server has time.
    """
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL

    del prefect_server
    url = str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value())

    def tables() -> Rows:
        connection = sqlite3.connect(Path(url.partition(":///")[2]), timeout=60)
        connection.row_factory = sqlite3.Row
        try:
            names = connection.execute("select name from sqlite_master where type = 'table'")
            return {
                name: [dict(row) for row in connection.execute(f'select * from "{name}"')]
                for (name,) in names.fetchall()
            }
        finally:
            connection.close()

    def settled(awaited: Callable[[Rows], Any]) -> Rows:
        APILogWorker.drain_all(timeout=120)
        deadline = time.monotonic() + 300
        before = -1
        while time.monotonic() < deadline:
            found = tables()
            now = sum(map(len, found.values()))
            # And what is not awaited: at rest, most of it is there.
            if now == before and awaited(found):
                return found
            before = now
            time.sleep(1)
        raise AssertionError("what is awaited has not arrived, or the server came to no rest")

    return settled


class Deployed:
    """A deployment on the real server, whose runs are executed here, as our worker does.

    Its flow fills in a request and reads the documents, where there are some.
    """

    def __init__(self, client: Any) -> None:
        from prefect import flow

        from weighbridge.flows import ScoreRequest
        from weighbridge.flows.resolving import resolve_request
        from weighbridge.tasks.sources import Document, read_documents

        self.client = client
        self.during: Callable[[], None] = lambda: None
        self.resolved: Any = None
        self.texts: list[str] = []
        self.run: Any = None

        @flow(name=f"reading-{uuid4()}", persist_result=False)
        def reading(request: ScoreRequest) -> str:
            self.resolved = resolved = resolve_request(request)
            if request.query is not None:
                records = read_documents(
                    resolved.request.documents, query=request.query, parameters=resolved.parameters
                )
                self.texts = [each.text for each in records if isinstance(each, Document)]
            self.during()
            return resolved.request.documents

        self.deploy(reading)

    def deploy(self, flow: Any) -> None:
        """Have a deployment of a flow, which the next runs are of."""
        self.flow = flow
        self.id = self.client.create_deployment(
            self.client.create_flow(flow), f"nightly-{uuid4()}", enforce_parameter_schema=False
        )

    def create(self, request: Mapping[str, Any], *, at: datetime | None = None) -> Any:
        """Create a flow run, scheduled for a time of its own."""
        from prefect.states import Scheduled

        return self.client.create_flow_run_from_deployment(
            self.id,
            parameters={"request": {"schema": "schema.json", **request}},
            state=Scheduled(scheduled_time=at or datetime.now(UTC)),
        )

    def execute(self, run: Any, *, during: Callable[[], None] = lambda: None) -> Any:
        """Execute a flow run; ours returns the documents it was to read."""
        from prefect.flow_engine import run_flow

        self.during, self.resolved, self.texts = during, None, []
        self.run = self.read(run)
        return run_flow(self.flow, flow_run=self.run)

    def put_back(self, run: Any) -> Any:
        """Have a flow run wait for another attempt, as a worker that stops does."""
        from prefect.states import AwaitingRetry

        self.client.set_flow_run_state(run.id, AwaitingRetry())
        return self.read(run)

    def read(self, run: Any) -> Any:
        return self.client.read_flow_run(run.id)

    def schedule(self, cron: str, timezone: str) -> None:
        from prefect.client.schemas.schedules import CronSchedule

        schedule = CronSchedule(cron=cron, timezone=timezone)
        self.client.create_deployment_schedules(self.id, [(schedule, False)])


@pytest.fixture
def deployed(prefect_server: str) -> Iterator[Deployed]:
    from prefect.client.orchestration import get_client

    del prefect_server
    with get_client(sync_client=True) as client:
        yield Deployed(client)
