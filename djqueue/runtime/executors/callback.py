"""Handlers in callback style: `handler(job, done)` ends its job by calling `done(error, result)`."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from djqueue.runtime.runs import Run
from djqueue.runtime.telling import Teller


class CallbackError(Exception):
    """What a callback handler gave as its error, not being an exception itself."""


async def call_with_done(run: Run, call_in_thread: Callable[..., Awaitable[Any]], tell: Teller) -> Any:
    """Call a callback handler and wait for its word; its result, or its error raised."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def end(error: Any, result: Any) -> None:
        if future.done():
            if not future.cancelled():
                tell.called_twice(run)
        elif error is None:
            future.set_result(result)
        else:
            is_error = isinstance(error, BaseException)
            future.set_exception(error if is_error else CallbackError(str(error)))

    def done(error: Any = None, result: Any = None) -> None:
        """End the job, from any thread: with an error (an exception, or a text), or a result."""
        try:
            loop.call_soon_threadsafe(end, error, result)
        except RuntimeError:
            # The worker has ended in the meantime, and with it the loop.
            tell.too_late("the end of a handler")

    handler = run.handler
    if handler.is_async:
        await handler.function(run.context, done)
    else:
        await call_in_thread(run, handler.function, run.context, done)
    return await future
