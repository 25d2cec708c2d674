"""Real SQLite files, and the values that tests record; child processes load this file too."""

import hashlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from weighbridge.db import (
    AnswerRecord,
    BatchRecord,
    BatchTimings,
    CheckpointRow,
    ChoiceRecord,
    DocumentRecord,
    ItemRecord,
    RunStart,
    SchemaRow,
    Store,
    open_engine,
    sqlite_url,
)

HERE = Path(__file__)
LOGITS = {
    "topic": ("enum", {"billing": 2.0, "login": 0.5, "other": -1.0}),
    "urgent": ("boolean", {"false": -0.25, "true": 0.75}),
    "anger": ("score", {"calm": 1.0, "annoyed": 2.0, "furious": 0.0}),
}


class Builders:
    """Small values of every kind, changed by keyword."""

    @staticmethod
    def sha(text: str) -> str:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def document(self, text: str) -> DocumentRecord:
        return DocumentRecord(self.sha(text), text, len(text))

    def start(self, **changes: Any) -> RunStart:
        start = RunStart(
            flow_run_id=None,
            name="test",
            host="this-host",
            pid=os.getpid(),
            schema=SchemaRow("5" * 64, "triage", '{"fields":[]}'),
            checkpoint=CheckpointRow("c" * 64, "smollm2-135m"),
            temperature=1.0,
            temperature_kind="default",
            temperature_source="no temperature is known for this checkpoint",
            documents_source="tickets.jsonl",
            mode="auto",
            layout="schema-first",
            encoding="labels",
            contract=None,
            dtype="float32",
            prompt_version="1",
            max_input_tokens=4096,
            backend="cpu",
            versions={"mlx": "0.32.4"},
        )
        return replace(start, **changes)

    def answers(self, **logits: dict[str, float]) -> tuple[AnswerRecord, ...]:
        rows: list[AnswerRecord] = []
        for field, (kind, default) in LOGITS.items():
            values = logits.get(field, default)
            choices = tuple(ChoiceRecord(choice, logit) for choice, logit in values.items())
            order = sorted(values.values(), reverse=True)
            margin = order[0] - order[1] if len(order) > 1 else None
            selected = list(values.values()).index(order[0])
            rows.append(AnswerRecord(field, kind, choices, selected, margin))
        return tuple(rows)

    def scored(self, position: int, text: str | None = None, **changes: Any) -> ItemRecord:
        text = f"document {position}" if text is None else text
        item = ItemRecord(
            position=position,
            document=self.document(text),
            status="scored",
            line=position + 1,
            external_id=f"T-{position}",
            answers=self.answers(),
        )
        return replace(item, **changes)

    def reused(self, position: int, text: str | None = None) -> ItemRecord:
        return self.scored(position, text, status="reused", answers=())

    def rejected(self, position: int, **changes: Any) -> ItemRecord:
        item = ItemRecord(
            position=position,
            document=None,
            status="rejected",
            line=position + 1,
            external_id=f"T-{position}",
            code="document.empty",
            message="a document must hold text, got none",
        )
        return replace(item, **changes)

    def batch(self, *items: ItemRecord) -> BatchRecord:
        timings = BatchTimings(0.5, 0.25, 0.75, 120, 40, 1, 1000, 2000, 80, 3)
        return BatchRecord(datetime.now(UTC), timings, "parallel", "cpu", items)


@pytest.fixture
def make() -> Builders:
    return Builders()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    engine = open_engine(sqlite_url(path))
    yield engine
    engine.dispose()


@pytest.fixture
def store(engine: Engine) -> Store:
    return Store(engine)


@pytest.fixture
def child(path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a Python process with `make`, `path`, `store` and `say` (a line to its parent)."""
    before = f"""
        import os, runpy, signal, sys, time
        from pathlib import Path
        from weighbridge.db import *
        make = runpy.run_path({str(HERE)!r})["Builders"]()
        path = Path({str(path)!r})
        def say(word): print(word, flush=True)
    """
    children: list[subprocess.Popen[str]] = []

    def start(body: str, **options: Any) -> "subprocess.Popen[str]":
        script = textwrap.dedent(before) + textwrap.dedent(body)
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        children.append(process)
        return process

    yield start
    for process in children:
        process.kill()
        process.communicate()
