"""Tasks that are handed documents and answers as they are.

Prefect walks through every argument of a task, twice, in search of other tasks' results: on
a batch of documents with their answers that takes longer than recording them. A task made
here has its arguments resolved (a future of another task is waited for), not searched.
"""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from prefect.utilities.annotations import opaque

P = ParamSpec("P")
R = TypeVar("R")

SEARCHED = False
"""Whether arguments are searched all the same: for measuring what that takes."""


class _DirectTask(Task[..., Any]):
    def __call__(self, *arguments: Any, **named: Any) -> Any:  # pyright: ignore
        if SEARCHED:
            return super().__call__(*arguments, **named)
        return super().__call__(
            *map(opaque, arguments), **{name: opaque(value) for name, value in named.items()}
        )


def direct_task(
    name: Callable[[Mapping[str, Any]], str],
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a function a task of which Prefect keeps, and looks at, neither texts nor answers.

    Args:
        name: Gives the name of a task run, from its arguments by name.
    """

    def run_name() -> str:
        arguments: dict[str, Any] = task_run.parameters or {}
        return name({key: _bare(value) for key, value in arguments.items()})

    def made(function: Callable[P, R]) -> Task[P, R]:
        return _DirectTask(
            function, cache_policy=NO_CACHE, persist_result=False, task_run_name=run_name
        )

    return made


def _bare(value: Any) -> Any:
    return cast("opaque[Any]", value).unwrap() if isinstance(value, opaque) else value
