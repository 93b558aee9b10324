"""Several outputs in one stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio


async def each_at_once(one: Callable[[int], Awaitable[None]], count: int) -> None:
    """``one(0)`` to ``one(count - 1)`` together; the first error ends the rest and is raised."""
    if count == 1:
        await one(0)
        return
    errors: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def run(index: int) -> None:
            try:
                await one(index)
            except Exception as error:
                errors.append(error)
                group.cancel_scope.cancel()

        for index in range(count):
            group.start_soon(run, index)
    if errors:
        raise errors[0]
