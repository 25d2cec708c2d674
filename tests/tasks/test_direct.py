"""Tasks whose arguments Prefect does not walk through."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prefect import flow, task
from prefect.runtime import task_run

from weighbridge.tasks import direct
from weighbridge.tasks.direct import direct_task

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


class Watched(list[int]):
    """A list that knows how often somebody walked through it."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        type(self).walks += 1
        return super().__iter__()


def _name(arguments: Mapping[str, Any]) -> str:
    values = arguments["values"]
    return f"count {len(values) if isinstance(values, list) else 'later'}"


@direct_task(_name)
def count(values: list[int], *, more: int = 0) -> tuple[str, int, bool]:
    return str(task_run.name), len(values) + more, isinstance(values, Watched)


@flow(persist_result=False)
def counted(values: Any, more: int = 0) -> tuple[str, int, bool]:
    return count(values, more=more)


@pytest.mark.parametrize("searched", [False, True])
def test_arguments_arrive_and_are_not_walked_through(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, searched: bool
):
    monkeypatch.setattr(direct, "SEARCHED", searched)
    values = Watched([1, 2, 3])

    @flow(persist_result=False)
    def run() -> tuple[tuple[str, int, bool], int]:
        before = Watched.walks
        found = count(values, more=2)
        return found, Watched.walks - before

    found, walks = run()
    # The very object, under its name; searched, which is the negative control, Prefect walks.
    assert found == ("count 3", 5, True)
    assert bool(walks) is searched


def test_a_future_is_waited_for(prefect_server: str):
    @task(persist_result=False)
    def make() -> list[int]:
        return [1, 2, 3, 4]

    @flow(persist_result=False)
    def run() -> tuple[str, int, bool]:
        made: Any = make.submit()
        return count(made)

    assert run() == ("count later", 4, False)


def test_an_error_comes_out_as_it_is(prefect_server: str):
    with pytest.raises(TypeError, match="len"):
        counted(3)
