"""Handlers in callback style: `handler(job, done)` ends its job by calling `done(error, result)`."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from djqueue.runtime.events import RunEvents
from djqueue.runtime.handlers import Handler
from djqueue.runtime.runs import Run


class CallbackError(Exception):
    """What a callback handler gave as its error, not being an exception itself."""


def as_coroutine_function(
    handler: Handler, call_in_thread: Callable[..., Awaitable[Any]], tell: RunEvents
) -> Callable[[Run], Awaitable[Any]]:
    """A callback handler as an async one: it returns what `done` is given, or raises it."""

    async def call(run: Run) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def end(error: Any, result: Any) -> None:
            if not future.done():
                _resolve(future, error, result)
            elif not future.cancelled():
                tell.called_twice(run)

        def done(error: Any = None, result: Any = None) -> None:
            """End the job, from any thread: with an error (an exception, or a text), or a result."""
            try:
                loop.call_soon_threadsafe(end, error, result)
            except RuntimeError:
                # The worker has ended in the meantime, and with it the loop.
                tell.too_late("the result of a handler")

        if handler.is_async:
            await handler.function(run.context, done)
        else:
            await call_in_thread(run, handler.function, run.context, done)
        return await future

    return call


def _resolve(future: "asyncio.Future[Any]", error: Any, result: Any) -> None:
    if error is None:
        future.set_result(result)
    elif isinstance(error, BaseException) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        # No future takes a StopIteration.
        future.set_exception(CallbackError(str(error)))
