"""The event that tells a handler to stop: for threads to wait on, and for coroutines."""

import asyncio
from collections.abc import Awaitable
from threading import Event, Lock
from typing import Any


class Cancelled:
    """Set when a job should end early: cancelled, out of time, its lease lost, or its worker stopping."""

    __slots__ = ("_event", "_lock", "_sleepers")

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[bool]]] = []

    def __repr__(self) -> str:
        return f"<Cancelled: {self._event.is_set()}>"

    def is_set(self) -> bool:
        """Whether the job should stop."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the job should stop, `timeout` seconds at most; True if it should.

        In a thread this blocks and returns the bool; on an event loop it returns an awaitable of it.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._event.wait(timeout)
        return self._sleep(timeout)

    def set(self) -> None:
        """Ask the handler to stop. Called by the worker, from any thread."""
        with self._lock:
            self._event.set()
            sleepers, self._sleepers = self._sleepers, []
        for loop, future in sleepers:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                # That loop has been closed, and whoever waited there is gone with it.
                continue

    async def _sleep(self, timeout: float | None) -> bool:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._event.is_set():
                return True
            future: asyncio.Future[bool] = loop.create_future()
            entry = (loop, future)
            self._sleepers.append(entry)
        try:
            return await _within(future, timeout)
        finally:
            with self._lock:
                if entry in self._sleepers:
                    self._sleepers.remove(entry)


async def _within(future: Awaitable[bool], timeout: float | None) -> bool:
    try:
        return await asyncio.wait_for(future, timeout)
    except TimeoutError:
        return False


def _resolve(future: "asyncio.Future[bool]") -> None:
    if not future.done():
        future.set_result(True)
