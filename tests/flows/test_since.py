"""`:since` on the real server: nothing is lost between the runs of a deployment."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from weighbridge.flows.resolving import resolve_request
from weighbridge.tasks.errors import SourceError

pytestmark = pytest.mark.prefect

QUERY = "SELECT id, text FROM mails WHERE datetime(created) >= :since ORDER BY id"
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


class Mails:
    """A database that others write to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("create table mails (id integer primary key, text, created)")

    def add(self, text: str, **ago: float) -> None:
        created = datetime.now(UTC) - timedelta(**ago)
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(
                "insert into mails (text, created) values (?, ?)",
                (text, created.strftime("%Y-%m-%d %H:%M:%S")),
            )


@pytest.fixture
def mails(tmp_path: Path) -> Mails:
    return Mails(tmp_path / "mails.db")


@pytest.fixture
def nightly(deployed: Any, mails: Mails) -> Callable[..., list[str]]:
    """Trigger the deployment and return the texts that it read."""

    def run(*, during: Callable[[], None] = lambda: None, **changes: Any) -> list[str]:
        request = {"documents": str(mails.path), "query": QUERY, **changes}
        deployed.execute(deployed.create(request), during=during)
        return deployed.texts

    return run


def start_of(deployed: Any) -> datetime:
    return deployed.resolved.parameters["since"]


def test_what_came_while_a_run_read_is_read_by_the_next(
    deployed: Any, mails: Mails, nightly: Callable[..., list[str]]
):
    mails.add("old", days=400)
    before = datetime.now(UTC).replace(microsecond=0)
    assert nightly(during=lambda: mails.add("in between")) == ["old"]
    assert start_of(deployed) == BEGINNING
    assert deployed.resolved.label.endswith(f"mails.db: {QUERY} (since 1970-01-01 00:00:00 UTC)")

    mails.add("new")
    assert nightly() == ["in between", "new"]
    assert before <= start_of(deployed) <= datetime.now(UTC)
    assert start_of(deployed).tzinfo is UTC


def test_only_a_completed_run_counts(
    deployed: Any, mails: Mails, nightly: Callable[..., list[str]]
):
    mails.add("old", days=400)

    def fail() -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        nightly(during=fail)
    assert nightly() == ["old"]
    assert start_of(deployed) == BEGINNING
    assert nightly() == []


def test_a_run_that_asked_something_else_does_not_count(
    deployed: Any, mails: Mails, nightly: Callable[..., list[str]], tmp_path: Path
):
    mails.add("old", days=400)
    Mails(tmp_path / "other.db")
    for changes in (
        {"documents": str(tmp_path / "other.db")},
        {"query": f"{QUERY} LIMIT 0"},
        {"schema": "other.json"},
        {"checkpoint": "other"},
        {"limit": 1},
        {"since": "2001-01-01"},
    ):
        nightly(**changes)
    assert nightly() == ["old"]
    assert start_of(deployed) == BEGINNING
    # What changes neither what is read nor what is asked does not matter.
    assert nightly(batch_size=7, rescore=True, output="answers.csv") == []
    assert start_of(deployed) > BEGINNING
    # A trial with a limit reads from where the others are, and does not move them.
    marks = [start_of(deployed)]
    nightly(limit=1)
    marks.append(start_of(deployed))
    assert min(marks) > BEGINNING


def test_a_retry_keeps_its_value_whatever_completed_meanwhile(
    deployed: Any, mails: Mails, nightly: Callable[..., list[str]]
):
    mails.add("old", days=400)
    request = {"documents": str(mails.path), "query": QUERY}
    first = deployed.create(request)

    def fail() -> None:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        deployed.execute(first, during=fail)
    assert nightly() == ["old"]
    second = deployed.run
    mails.add("new")
    deployed.execute(deployed.put_back(first))
    assert start_of(deployed) == BEGINNING
    assert deployed.texts == ["old", "new"]
    # It completed last, and yet began first: what counts is when the second began.
    nightly()
    assert int(start_of(deployed).timestamp()) == int(deployed.read(second).start_time.timestamp())


def test_a_run_that_is_still_at_it_does_not_count(
    deployed: Any, mails: Mails, nightly: Callable[..., list[str]]
):
    mails.add("old", days=400)
    inner: list[datetime] = []

    def another() -> None:
        kept = deployed.during, deployed.resolved
        nightly()
        inner.append(start_of(deployed))
        deployed.during, deployed.resolved = kept

    nightly(during=another)
    assert inner == [BEGINNING]


def test_since_may_be_given(deployed: Any, mails: Mails, nightly: Callable[..., list[str]]):
    for days in (10, 5, 1):
        mails.add(f"{days} days", days=days, hours=1)
    six = f"{datetime.now(UTC) - timedelta(days=6):%Y-%m-%d}"
    assert nightly(since=six, timezone="UTC") == ["5 days", "1 days"]
    assert deployed.resolved.label.endswith(f"(since {six} 00:00:00 UTC)")
    assert nightly(since="{date-2}", timezone="UTC") == ["1 days"]
    with pytest.raises(SourceError, match="must come with a query that has the parameter :since"):
        nightly(since=six, query="SELECT id, text FROM mails WHERE text <> ':since'")


def test_a_query_without_the_parameter_asks_nobody(mails: Mails):
    from weighbridge.flows import ScoreRequest

    for query in (None, "SELECT text FROM mails -- :since", "SELECT ':since' AS text"):
        request = ScoreRequest.model_validate(
            {"documents": str(mails.path), "schema": "s.json", "query": query}
        )
        resolved = resolve_request(request)
        assert (resolved.request, resolved.parameters) == (request, {})
        assert resolved.label == request.source_label


def test_outside_a_deployment_it_must_be_given(mails: Mails):
    from weighbridge.flows import ScoreRequest

    asked = {"documents": str(mails.path), "schema": "s.json", "query": QUERY}
    with pytest.raises(SourceError, match="must be run by a deployment") as caught:
        resolve_request(ScoreRequest.model_validate(asked))
    assert "give since" in str(caught.value.hint)
    given = ScoreRequest.model_validate({**asked, "since": "2026-11-01T06:00+01:00"})
    assert resolve_request(given).parameters == {"since": datetime(2026, 11, 1, 5, tzinfo=UTC)}


@pytest.mark.mlx
@pytest.mark.slow
def test_nights_of_the_real_flow(bench: Any, deployed: Any, mails: Mails):
    from weighbridge.flows import score_documents
    from weighbridge.flows.progress import Progress, listening

    deployed.deploy(score_documents)
    asked = bench.request(mails.path, query=QUERY).model_dump(mode="json", by_alias=True)
    # The form of a deployment sends what is set, and Prefect keeps that.
    asked = {name: value for name, value in asked.items() if value is not None}

    def night() -> tuple[int, int, int]:
        outcome = deployed.execute(deployed.create(asked))
        return outcome["documents"], outcome["scored"], outcome["reused"]

    def at_the_door(progress: Progress) -> None:
        if progress.stage == "scoring" and not late:
            late.append(progress)
            mails.add("It broke while you slept.")

    late: list[Progress] = []
    mails.add("It broke.", days=1)
    mails.add("Thanks!", days=1)
    with listening(at_the_door):
        assert night() == (2, 2, 0)
    assert late
    assert night() == (1, 1, 0)
    # What is of the same second as the last start is read again, and free.
    documents, scored, _ = night()
    assert (documents <= 1, scored) == (True, 0)
    sources = [row["documents_source"] for row in bench.rows("select documents_source from run")]
    assert sources[0].endswith("(since 1970-01-01 00:00:00 UTC)")
    assert all("(since 20" in source for source in sources[1:])
    bench.assert_accounts_close()
