"""A small hub on this machine: the endpoints that the real client asks, over real HTTP."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# A process per environment: the client reads it once, at its import.
_RESOLVE = """
import json, sys, traceback
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.hub import parse_hub_id, resolve_hub_id

for text in sys.argv[1:]:
    said = []
    try:
        found = resolve_hub_id(parse_hub_id(text), say=said.append)
        names = sorted(path.name for path in found.folder.iterdir())
        result = {"folder": str(found.folder), "commit": found.commit, "names": names}
    except CheckpointError as error:
        result = {"error": error.message, "hint": error.hint}
        result["traceback"] = "".join(traceback.format_exception(error))
    print(json.dumps({**result, "said": said}))
"""
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"w" * 3000,
}
Resolve = Callable[..., list[dict[str, Any]]]


@dataclass
class Repo:
    """What the hub holds of one name.

    Attributes:
        files: Content by name, for each commit.
        refs: Commit by branch.
        error: Status and `X-Error-Code` for whatever is asked of it.
        gated: Its description can be read, its files cannot.
        cut: Bytes after which the connection breaks, by name of the file.
        claims: Sizes that are told in place of the real ones.
    """

    files: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    error: tuple[int, str] | None = None
    gated: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)


@dataclass
class Hub:
    """A running hub.

    Attributes:
        url: For HF_ENDPOINT.
        repos: By `org/name`; may be changed while it runs.
        asked: Method and path of each request.
        tokens: What came as Authorization.
    """

    url: str
    repos: dict[str, Repo]
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def add(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Commit files to a branch; return the commit, which is made of their content."""
        content = json.dumps({key: _sha1(value) for key, value in sorted(files.items())})
        commit = _sha1(f"{name}{content}".encode())
        repo = self.repos.setdefault(name, Repo({}, {}))
        repo.files[commit] = dict(files)
        repo.refs[branch] = commit
        return commit

    def fetched(self) -> list[str]:
        """Name the files whose content was asked for."""
        paths = [entry.split(" ", 1)[1] for entry in self.asked if entry.startswith("GET")]
        return sorted(
            path.split("/resolve/")[1].split("/", 1)[1] for path in paths if "/res" in path
        )


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = urlsplit(self.path).path.strip("/")
            hub.asked.append(f"{self.command} {path}")
            hub.tokens.add(self.headers.get("Authorization", ""))
            name, action, rest = _split(path)
            repo = hub.repos.get(name, Repo({}, {}, error=(404, "RepoNotFound")))
            revision, _, file = (unquote(part) for part in rest.partition("/"))
            commit = repo.refs.get(revision, revision)
            if repo.error is not None:
                self.refuse(*repo.error)
            elif commit not in repo.files:
                self.refuse(404, "RevisionNotFound")
            elif action == "revision":
                self.send(_described(name, repo, commit))
            elif action == "tree":
                self.send(_tree(repo, commit))
            elif repo.gated:
                self.refuse(403, "GatedRepo")
            elif file not in repo.files[commit]:
                self.refuse(404, "EntryNotFound")
            else:
                self.give(repo, commit, file)

        def give(self, repo: Repo, commit: str, file: str) -> None:
            content = repo.files[commit][file]
            self.send_response(200)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{_sha1(content)}"')
            if file.endswith(".safetensors"):
                self.send_header("X-Linked-ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(content[: repo.cut.get(file)])
            if file in repo.cut:
                self.close_connection = True

        def send(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", {})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _split(path: str) -> tuple[str, str, str]:
    """Split a path into repository, what is asked of it, and the rest: revision and file.

    Slashes within a revision come escaped.
    """
    parts = path.split("/")
    if parts[:2] == ["api", "models"]:
        action = parts[4] if len(parts) > 4 else "revision"
        return "/".join(parts[2:4]), action, "/".join(parts[5:]) or "main"
    return "/".join(parts[:2]), "resolve", "/".join(parts[3:])


def _described(name: str, repo: Repo, commit: str) -> dict[str, Any]:
    sizes = {file: len(content) for file, content in repo.files[commit].items()} | repo.claims
    siblings = [
        {"rfilename": file, "size": size, "blobId": "0" * 40} for file, size in sizes.items()
    ]
    return {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}


def _tree(repo: Repo, commit: str) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": file, "size": len(content), "oid": _sha1(content)}
        for file, content in repo.files[commit].items()
    ]


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def resolver(hub: Hub, home: Path) -> Resolve:
    """Return what resolves ids one after the other, in one new process, with a cache in a home."""

    def resolve(*ids: str, **environment: str) -> list[dict[str, Any]]:
        printed = run_client(_RESOLVE, hub, home, *ids, **environment)
        # Neither the library's own lines nor a token reach the terminal.
        assert printed.stderr == ""
        assert "nobody_may_see" not in printed.stdout
        return [json.loads(line) for line in printed.stdout.splitlines()]

    return resolve


def run_client(
    code: str, hub: Hub, home: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with the real client, in a process of its own and with a hub set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *words],
        env={
            **kept,
            "PYTHONPATH": str(Path(__file__).parents[1] / "no_network"),
            "HF_HOME": str(home),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_nobody_may_see_this",
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
