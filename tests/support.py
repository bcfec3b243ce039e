"""Waiting for what happens elsewhere, without sleeping longer than it takes."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from django.db import connections

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds that a test waits for something that should happen soon, before it fails: far longer than on an
idle machine, because a busy one may stop a process for seconds at any line. Every wait of the tests uses it.
"""


def eventually(predicate: Callable[[], T], timeout: float = PATIENCE, message: str = "") -> T:
    """Return the first true value of `predicate()`, asked for up to `timeout` seconds."""
    for pause in _pauses(timeout):
        if value := predicate():
            return value
        time.sleep(pause)
    raise _never(predicate, value, timeout, message)


async def aeventually(
    predicate: Callable[[], T | Awaitable[T]], timeout: float = PATIENCE, message: str = ""
) -> T:
    """See `eventually`; leaves the event loop free, and `predicate` may be a coroutine function."""
    for pause in _pauses(timeout):
        value = predicate()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(pause)
    raise _never(predicate, value, timeout, message)


def elsewhere(call: Callable[[], T]) -> T:
    """Call a function on another thread, which the caller's transaction does not concern."""

    def run() -> T:
        try:
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(PATIENCE)


def _pauses(timeout: float) -> Iterator[float]:
    """Short pauses first, then longer ones; the last ends when the time is up."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.5, 0.05)
    yield 0


def _never(predicate: object, value: object, timeout: float, message: str) -> AssertionError:
    what = message or getattr(predicate, "__qualname__", repr(predicate))
    return AssertionError(f"not within {timeout:g} s: {what} (last value: {value!r})")
