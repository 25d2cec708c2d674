"""Waits of a worker for its server, given up shortly after a signal asks the worker to end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import anyio

from weighbridge.tasks.stopping import stop_asked

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")

# A server that is there has answered by then. One that is away Prefect would ask for up to
# a minute before it gives up.
_GRACE_SECONDS = 2.0


class Waits:
    """All that a worker waits for the server with at a time."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()

    async def until_told(self, work: Awaitable[T]) -> T | None:
        """Do some work; None when it was given up."""
        with anyio.CancelScope() as scope:
            if stop_asked():
                scope.deadline = anyio.current_time() + _GRACE_SECONDS
            self._scopes.add(scope)
            try:
                return await work
            finally:
                self._scopes.discard(scope)
        return None

    def hurry(self) -> None:
        """Leave what is under way only so much time; call in the event loop."""
        for scope in self._scopes:
            # Not the clock of anyio, which asks what task it is in: a signal is in none.
            scope.deadline = asyncio.get_running_loop().time() + _GRACE_SECONDS
