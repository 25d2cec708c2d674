"""A real store for the tests of a file, and waits in which the world goes on."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine

from weighbridge.db import Store, open_engine, sqlite_url
from weighbridge.tasks import planning


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = open_engine(sqlite_url(tmp_path_factory.mktemp("planning") / "store.db"))
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def store(engine: Engine) -> Store:
    return Store(engine)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens in the world during each wait of a plan, instead of time going by."""
    happenings: list[Callable[[], None]] = []
    monkeypatch.setattr(planning.time, "sleep", lambda _: happenings.pop(0)())
    return happenings
