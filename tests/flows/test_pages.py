"""What a person sees in the Prefect UI: the real server's real pages, in headless Chromium."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weighbridge.flows.artifacts import artifact_key

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
SCHEMA = {
    "mood|<b>": {
        "type": "enum",
        "choices": ["**good**", "<i>bad</i>"],
        "description": "DESCRIBED as the feeling of the text.",
    },
    "urgent": {
        "type": "boolean",
        "description": "Whether somebody must act.",
        "labels": {"true": "urgent", "false": "relaxed"},
    },
}
DOCUMENTS = [
    {"id": "d0", "text": "PAGETEXT The parcel came and I am happy.", "who": "PAGEMETA"},
    {"id": "d1", "text": "PAGETEXT Everything is on fire, help!", "who": "PAGEMETA"},
    {"id": "d2", "text": "", "who": "PAGEMETA"},
]


def browser_file() -> str | None:
    """Return the Chromium or Chrome of this machine."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (str(MAC) if MAC.exists() else None)


@dataclass(frozen=True)
class Pages:
    """A server with a scored run, and a browser that reads its pages."""

    url: str
    flow_run: dict[str, Any]
    artifacts: dict[str, dict[str, Any]]
    read: Callable[..., str]


def ask(url: str, path: str, body: object = None) -> Any:
    request = urllib.request.Request(
        f"{url}/api{path}",
        data=json.dumps(body or {}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run a Prefect server that serves its pages too; return its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        "PREFECT_HOME": str(folder / "prefect"),
        # The pages ask the API by this, wherever they came from.
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "prefect", "server", "start"),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{url}/api/health", timeout=10),
            ):
                break
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server did not answer"
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def browser(executable: str) -> Iterator[Callable[..., str]]:
    """Open a browser; give a function that opens a page and reads it once some texts are there."""
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=executable,
            # Containers have no user namespaces; the pages are our own.
            args=["--no-sandbox", "--disable-background-networking"],
        )
        page: Page = chromium.new_page()
        # The pages look at nothing outside this machine.
        page.route(lambda url: "127.0.0.1" not in url, lambda route: route.abort("blockedbyclient"))

        def read(url: str, *awaited: str, heading: str | None = None) -> str:
            page.goto(url, timeout=300_000)
            # Each part of a page asks the server for itself, and comes when it is answered.
            for text in awaited:
                page.get_by_text(text).first.wait_for(timeout=300_000)
            if heading:  # Markdown may stand there as it is written at first
                page.get_by_role("heading", name=heading).first.wait_for(timeout=300_000)
            return page.inner_text("body")

        try:
            yield read
        finally:
            chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Iterator[Pages]:
    executable = browser_file()
    if executable is None:
        pytest.skip(f"no Chromium or Chrome on this machine: {', '.join(NAMES)}, {MAC}")
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    folder = tmp_path_factory.mktemp("pages")
    (folder / "mood.json").write_text(json.dumps(SCHEMA))
    (folder / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    with server(folder) as url:
        scored = subprocess.run(
            [
                *(sys.executable, "-m", "weighbridge.deployments.cli", "score", "documents.jsonl"),
                *("--schema", "mood.json", "--checkpoint", str(embedded)),
            ],
            env={
                **os.environ,
                "PREFECT_API_URL": f"{url}/api",
                "PREFECT_HOME": str(folder / "prefect"),
                "WEIGHBRIDGE_DATABASE_URL": f"sqlite:///{folder / 'store.db'}",
                "WEIGHBRIDGE_LEASE": str(folder / "accelerator.lock"),
            },
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert scored.returncode == 3, scored.stderr  # some documents were rejected
        (flow_run,) = ask(url, "/flow_runs/filter")
        artifacts = {each["key"]: each for each in ask(url, "/artifacts/filter")}
        with browser(executable) as read:
            yield Pages(url, flow_run, artifacts, read)


@pytest.mark.parametrize("ui", ["", "/v2"])
def test_the_summary_can_be_read(pages: Pages, ui: str):
    artifact = pages.artifacts[artifact_key("mood", "summary")]
    text = pages.read(
        f"{pages.url}{ui}/artifacts/artifact/{artifact['id']}", "Made with", heading="Run 1: mood"
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Run 1: mood" in lines
    assert any(line.startswith("3 documents: 2 scored, 0 reused, 1 rejected in") for line in lines)
    # Names are shown as they are written, whatever they mean to markdown and HTML.
    assert "mood|<b>" in lines
    assert "**good**" in text or "<i>bad</i>" in text
    assert "Temperature 1 (default:" in text
    assert "not calibrated" in text
    assert "weighbridge results 1 --db" in text
    for secret in ("PAGETEXT", "PAGEMETA", "DESCRIBED"):
        assert secret not in text


@pytest.mark.parametrize("ui", ["", "/v2"])
def test_the_run_can_be_followed(pages: Pages, ui: str):
    run = pages.flow_run
    awaited = ("run 1 is completed", run["name"], "schema:mood", "Completed", "1 document rejected")
    text = pages.read(f"{pages.url}{ui}/runs/flow-run/{run['id']}?tab=Logs", *awaited)
    assert run["name"].startswith("score-mood-20")
    assert run["name"] in text
    assert "schema:mood" in text
    assert "Completed" in text
    for line in ("run 1: 3 documents, schema mood", "batch 1: ", "1 document rejected"):
        assert line in text
    assert "PAGETEXT" not in text
    assert "PAGEMETA" not in text


def test_the_tables_can_be_read(pages: Pages):
    rejected = pages.artifacts[artifact_key("mood", "rejected")]
    address = f"{pages.url}/v2/artifacts/artifact"
    assert "document.empty" in pages.read(f"{address}/{rejected['id']}", "document.empty")
    outcome = pages.artifacts[artifact_key("mood", "outcome")]
    assert "documents_per_second" in pages.read(f"{address}/{outcome['id']}", "wasted")
    progress = pages.artifacts[artifact_key("mood", "progress")]
    text = pages.read(f"{address}/{progress['id']}", "3 of 3 documents")
    assert "100" in text
