"""Operations that are written once, as generators of calls, and run on a thread or on an event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from djqueue.storage.base import Storage

T = TypeVar("T")


class Step(NamedTuple):
    """One call, in a blocking and an async version that take the same arguments."""

    call: Callable[..., Any]
    acall: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...] = ()


Steps = Generator[Step, Any, T]
"""An operation: it yields calls, is sent their answers, and returns its result."""


def in_thread(storage: Storage, call: Callable[..., Any], *args: Any) -> Step:
    """Return a step whose async version runs the blocking call on a thread of the storage."""
    return Step(call, partial(storage.acall, call), args)


def run(steps: Steps[T]) -> T:
    """Run an operation on this thread."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step.call(*step.args)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def arun(steps: Steps[T]) -> T:
    """Run an operation on the running event loop."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await step.acall(*step.args)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


class Signal(Protocol):
    """An event that any thread may set, and that one caller waits for: `threading.Event` or `LoopSignal`."""

    def set(self) -> None:
        """Wake the caller."""

    def clear(self) -> None:
        """Reset the event."""

    def wait(self, seconds: float, /) -> Any:
        """Wait until the event is set, at most so many seconds."""


class LoopSignal:
    """A signal for a coroutine of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the caller."""
        # A late event may come in on another thread after the loop has been closed.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Reset the event."""
        self._event.clear()

    async def wait(self, seconds: float, /) -> None:
        """Wait until the event is set, at most so many seconds."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            pass
