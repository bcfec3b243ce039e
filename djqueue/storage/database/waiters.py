"""Wake the threads and coroutines that wait for a flush of the journal."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from .buffer import Done

logger = logging.getLogger("djqueue.journal")


class Waiter:
    """A coroutine that waits for a flush."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.written: asyncio.Future[BaseException | None] = loop.create_future()

    def __call__(self, error: BaseException | None) -> None:
        """Wake the coroutine. Called on its loop."""
        if not self.written.done():
            self.written.set_result(error)


def notify(waiting: list[Done], error: BaseException | None) -> None:
    """Call the waiters of a flush with its error; those on one loop together, which wakes it once."""
    callbacks: list[Callable[[], object]] = []
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for done in waiting:
        if isinstance(done, Waiter):
            by_loop.setdefault(done.loop, []).append(done)
        else:
            callbacks.append(partial(done, error))
    for loop, waiters in by_loop.items():
        callbacks.append(partial(loop.call_soon_threadsafe, _notify_each, waiters, error))
    for callback in callbacks:
        try:
            callback()
        except Exception:
            # For example, the loop of a waiter has ended.
            logger.exception(
                "A callback that waited for the journal raised an exception; the journal continues."
            )


def _notify_each(waiters: list[Waiter], error: BaseException | None) -> None:
    for waiter in waiters:
        waiter(error)
