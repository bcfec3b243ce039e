"""Sync and async calls from one definition.

`asynchronous` makes the async version of a method that may run on a thread. Operations that wait are written
as generators of steps, which `run` runs on a thread and `arun` on an event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from asgiref.sync import sync_to_async

from djqueue.codecs import PLAIN
from djqueue.storage.base import Storage

P = ParamSpec("P")
T = TypeVar("T")


class HasStorage(Protocol):
    """An object whose methods call a storage."""

    @property
    def storage(self) -> Storage:
        """The storage."""


S = TypeVar("S", bound=HasStorage)


def asynchronous(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return the async version of a method, which runs it on a thread of the object's storage.

    In a class: `acancel = asynchronous(cancel)`.
    """
    name = method.__name__

    @wraps(method)
    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # A subclass may have changed the method.
        own: Callable[P, T] = getattr(self, name)
        return await self.storage.acall(own, *args, **kwargs)

    twin.__name__ = f"a{name}"
    twin.__qualname__ = f"{method.__qualname__.removesuffix(name)}a{name}"
    twin.__doc__ = f"Async version of `{name}`."
    return twin


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


async def apart(content_type: str, call: Callable[..., T], *args: Any) -> T:
    """Call a function that encodes or decodes values of a content type: if the codec is the project's, on the
    thread of database queries.
    """
    return call(*args) if content_type in PLAIN else await sync_to_async(call)(*args)


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
