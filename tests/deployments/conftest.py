"""A work pool on the real server, with real workers in processes of their own."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from tests.conftest import held

URGENT = {"urgent": {"type": "boolean", "description": "The text asks for help at once."}}
PROGRAM = Path(sys.executable).with_name("weighbridge")
# As a shell script starts it: in the background, where SIGINT is ignored.
IN_BACKGROUND = '"$@" & echo $!; wait $!; echo exit $?'
# Far longer than anything takes: a wait that ends early costs nothing, and machines stall.
PATIENCE = 300.0


@dataclass
class Worker:
    """A worker that a shell has started in the background."""

    shell: "subprocess.Popen[str]"
    pid: int
    log: Path

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_code(self, timeout: float = PATIENCE) -> int:
        out, _ = self.shell.communicate(timeout=timeout)
        return int(out.split()[-1])


@dataclass(frozen=True)
class Caught:
    """A run in its middle.

    Attributes:
        id: Its flow run.
        documents: The file that it reads.
        count: How many documents there are.
        scored: How many are recorded.
    """

    id: UUID
    documents: Path
    count: int
    scored: int


@dataclass
class Yard:
    """A folder with a store, a deployment in a pool of its own, and the workers of that pool."""

    folder: Path
    pool: str
    environment: dict[str, str]
    workers: list[Worker] = field(default_factory=list[Worker])

    @property
    def database(self) -> Path:
        return self.folder / "store.db"

    def start(
        self,
        *options: str,
        env: dict[str, str] | None = None,
        program: Sequence[str] = (str(PROGRAM),),
    ) -> Worker:
        """Start a worker and return it at once."""
        log = self.folder / f"worker-{len(self.workers)}.log"
        command = [*program, "worker", "start", "--pool", self.pool, *options]
        with log.open("w") as stderr:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", IN_BACKGROUND, "sh", *command],
                env={**self.environment, **(env or {})},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert shell.stdout is not None
        worker = Worker(shell, int(shell.stdout.readline()), log)
        self.workers.append(worker)
        return worker

    def deploy(self, pool: str | None = None, **options: Any) -> None:
        """Make the pool, as its worker would, and the deployment."""
        from prefect.client.schemas.actions import WorkPoolCreate
        from prefect.exceptions import ObjectAlreadyExists
        from prefect.types.entrypoint import EntrypointType

        from weighbridge.deployments.worker import WeighbridgeWorker
        from weighbridge.flows import score_documents

        pool = pool or self.pool
        if pool == self.pool:
            template = WeighbridgeWorker.get_default_base_job_template()
            made = WorkPoolCreate(name=pool, type="weighbridge", base_job_template=template)
            with client() as api, suppress(ObjectAlreadyExists):
                api.create_work_pool(made)
        deployment: Any = score_documents.to_deployment(
            pool, entrypoint_type=EntrypointType.MODULE_PATH, work_pool_name=pool, **options
        )
        deployment.apply(work_pool_name=pool)

    def documents(self, texts: Sequence[str], name: str = "documents") -> Path:
        path = self.folder / f"{name}.jsonl"
        records = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def trigger(self, documents: Path, pool: str | None = None, **changes: Any) -> UUID:
        from prefect.deployments import run_deployment

        request = {
            "documents": str(documents),
            "schema": json.dumps(URGENT),
            "schema_name": "urgent",
            # Without the prior of labels, which each process would compute first.
            "encoding": "codes",
            "database": str(self.database),
            **changes,
        }
        flow_run: Any = run_deployment(
            f"score-documents/{pool or self.pool}",
            parameters={"request": request},
            timeout=0,
            as_subflow=False,
        )
        return flow_run.id

    def held(self) -> AbstractContextManager[None]:
        """Keep the workers from writing to the store, and their runs from ending."""
        return held(self.database)

    @contextmanager
    def caught(
        self, name: str, count: int = 40, *, scored: int = 1, whole: bool = False, **changes: Any
    ) -> Iterator[Caught]:
        """Trigger a run and hold it in its middle, where a batch of it is claimed.

        One that was through before it could be held is followed by one that is twice as long.

        Args:
            name: What the documents are about, and their file is called.
            count: How many documents there are.
            scored: How many must be recorded first.
            whole: Whether all of them are one batch.
            changes: As for `trigger`.
        """
        for size in (count << doublings for doublings in range(8)):
            texts = [f"{name} {number} of {size} broke." for number in range(size)]
            documents = self.documents(texts, f"{name}-{size}")
            if whole:
                changes["batch_size"] = size
            flow_run = self.trigger(documents, **changes)
            self.until(lambda run=flow_run: self._under_way(run, scored))
            with self.held():
                row = self.run_row(flow_run)
                assert row["status"] in {"running", "completed"}, row
                if row["status"] == "running" and row["documents"] < size:
                    yield Caught(flow_run, documents, size, row["scored"])
                    return
        raise AssertionError("every run was through before it could be held")

    def _under_way(self, flow_run: UUID, scored: int) -> bool:
        row = self.run_row(flow_run)
        if not row or row["status"] != "running":
            return bool(row)
        claims = self.rows("select 1 from claim where run_id = ?", row["id"])
        return row["scored"] >= scored and bool(claims)

    def flow_run(self, flow_run: UUID) -> Any:
        with client() as api:
            return api.read_flow_run(flow_run)

    def history(self, flow_run: UUID) -> list[str]:
        """The names of all states that a flow run has had, in order."""
        with client() as api:
            states = api.read_flow_run_states(flow_run)
        return [state.name for state in sorted(states, key=lambda state: state.timestamp)]

    def until(self, true: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Wait until something is the case; it is what comes back."""
        deadline = time.monotonic() + seconds
        while not (found := true()):
            if time.monotonic() > deadline:
                logs = "\n\n".join(worker.log.read_text() for worker in self.workers)
                raise AssertionError(f"not within {seconds} s; the workers' logs:\n{logs}")
            time.sleep(0.1)
        return found

    def ended(self, flow_run: UUID, seconds: float = PATIENCE) -> str:
        """Wait for a flow run's last state and return its name."""
        return self.until(
            lambda: (
                (state := self.flow_run(flow_run).state) is not None
                and state.is_final()
                and state.name
            ),
            seconds,
        )

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        if not self.database.exists():
            return []
        connection = sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=60)
        connection.row_factory = sqlite3.Row
        try:
            return [dict(row) for row in connection.execute(sql, values)]
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise
        finally:
            connection.close()

    def run_row(self, flow_run: UUID) -> dict[str, Any]:
        """The run of a flow run in the store, empty while there is none."""
        rows = self.rows("select * from run where flow_run_id = ?", str(flow_run))
        return rows[0] if rows else {}

    def decided(self, run_id: int) -> tuple[int, int]:
        """Count the decisions on a run's documents, and those documents."""
        (counts,) = self.rows(
            "select count(*) as decisions, count(distinct document_id) as documents from decision "
            "where document_id in (select d.document_id from decision d join item i "
            "on i.decision_id = d.id where i.run_id = ?)",
            run_id,
        )
        return counts["decisions"], counts["documents"]

    def client(self) -> Any:
        return client()


class Way:
    """The way to the server: open, closed, or one on which the server refuses the password."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = parts._replace(netloc=f"127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        self.closed = self._refuses = False
        self.refused = 0
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def open(self) -> None:
        self.closed = self._refuses = False

    def close(self) -> None:
        self.closed = True
        self._cut()

    def refuse(self) -> None:
        self._refuses = True
        self._cut()

    def end(self) -> None:
        # Closing alone wakes no thread that waits in it.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()
        for thread in self._threads:
            thread.join(timeout=10)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _cut(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._start(self._carry, self._listener.accept()[0])

    def _carry(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            # Known first: it may be closed between the two, which would not cut this one.
            self._open.append(near)
            if self.closed:
                self.refused += 1
                return
            start = near.recv(65536)
            # The server tells anyone that it is there.
            if self._refuses and b"/health" not in start.partition(b"\n")[0]:
                body = b'{"exception_message":"Unauthorized"}'
                head = f"HTTP/1.1 401 Unauthorized\r\nContent-Length: {len(body)}\r\n"
                kind = "Content-Type: application/json\r\nConnection: close\r\n\r\n"
                near.sendall((head + kind).encode() + body)
                return
            with socket.create_connection(self._server) as far:
                self._open.append(far)
                far.sendall(start)
                back = threading.Thread(target=self._copy, args=(far, near), daemon=True)
                back.start()
                self._copy(near, far)
                back.join(timeout=10)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def way(prefect_server: str) -> Iterator[Way]:
    made = Way(prefect_server)
    yield made
    made.end()


def client() -> Any:
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


@pytest.fixture(scope="module")
def yard(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: str, embedded: Path
) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("yard")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WEIGHBRIDGE_", "PREFECT_", "XDG_"))
    }
    environment = {
        **kept,
        "DO_NOT_TRACK": "1",
        "HOME": str(folder),
        "PYTHONPATH": str(Path(__file__).parent.parent / "no_network"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": prefect_server,
        "WEIGHBRIDGE_CACHE": str(folder / "cache"),
        "WEIGHBRIDGE_LEASE": str(folder / "lease"),
        "WEIGHBRIDGE_CHECKPOINT": str(embedded),
        "WEIGHBRIDGE_DATABASE_URL": f"sqlite:///{folder / 'setting.db'}",
    }
    made = Yard(folder, f"pool-{folder.name}-{os.getpid()}", environment)
    yield made
    for worker in made.workers:
        if worker.shell.poll() is None:
            os.kill(worker.pid, signal.SIGKILL)
            worker.shell.communicate(timeout=PATIENCE)
        if worker.shell.stdout is not None:
            worker.shell.stdout.close()
