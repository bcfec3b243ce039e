"""Threads of a process: beside a block or a loop, across forks; pauses of their garbage collector."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from itertools import count
from threading import Event, Lock, Thread
from types import MethodType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from .errors import StorageUnavailableError

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def resources_for(purpose: str) -> Iterator[None]:
    """Raise StorageUnavailableError if the system has no thread, descriptor or memory for the block.

    Args:
        purpose: What the block starts.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        raise StorageUnavailableError(
            f"{purpose} could not start: {str(error) or 'out of memory'}. Raise the limits of this process "
            "(descriptors, threads, memory), or find what uses them up."
        ) from error


def start_daemon(name: str, run: Callable[..., object], *args: Any) -> Thread:
    """Start a daemon thread that calls a function, and return it.

    Refer to the thread by the returned object only: then the next call starts one that could not start.

    Raises StorageUnavailableError if the system has no thread at the moment.
    """
    with resources_for(f"the thread {name!r}"):
        thread = Thread(target=run, args=args, name=name, daemon=True)
        thread.start()
    return thread


@contextmanager
def beside(run: Callable[[Event], object], name: str, patience: float | None = None) -> Iterator[None]:
    """Context manager: call a function on a daemon thread within the block.

    Args:
        run: Gets an event that is set at the end of the block, and should then return.
        name: Name of the thread.
        patience: Maximum seconds to wait for the thread at the end; None waits until it has ended.
    """
    stop = Event()
    thread = start_daemon(name, run, stop)
    try:
        yield
    finally:
        stop.set()
        thread.join(patience)


_executors: "WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor]" = WeakKeyDictionary()
"""Threads of djqueue's own for loops on which other code runs."""


def add_threads(loop: asyncio.AbstractEventLoop) -> ThreadPoolExecutor:
    """Give a loop threads for `on_thread` beside its default executor, which handlers may shut down."""
    executor = _executors[loop] = ThreadPoolExecutor(thread_name_prefix="djqueue-calls")
    return executor


async def on_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function on a thread beside the running loop, as `asyncio.to_thread` does."""
    loop = asyncio.get_running_loop()
    call = partial(copy_context().run, function, *args, **kwargs)
    return await loop.run_in_executor(threads_of(loop), call)


def threads_of(loop: asyncio.AbstractEventLoop) -> ThreadPoolExecutor | None:
    """Return djqueue's threads beside a loop; None for its default executor."""
    return _executors.get(loop)


FORK_WAIT = 1.0
"""Maximum seconds that a fork waits for each lock."""

_numbers = count()
_locks: "WeakSet[threading.Lock]" = WeakSet()
_acquired: list[threading.Lock] = []
_methods: "dict[int, tuple[ref[Any], Callable[[Any], Any]]]" = {}
"""Objects and functions, in the order in which they were registered."""


def after_fork(method: Callable[[], Any]) -> None:
    """Call a bound method in every forked child, without keeping its object alive.

    `os.register_at_fork` would keep the method, and its object, until the process ends.
    """
    assert isinstance(method, MethodType)
    number, methods = next(_numbers), _methods

    def forget(_: object) -> None:
        methods.pop(number, None)

    # `WeakMethod` sometimes fails in the callback of its function while the interpreter ends.
    methods[number] = ref(method.__self__, forget), method.__func__


def registered() -> int:
    """Return the number of methods whose objects are alive."""
    return len(_methods)


def fork_lock() -> threading.Lock:
    """Return a lock for a thread that uses a library with locks of its own: a fork waits until it is free.

    Otherwise such a lock could be locked in the child, where no thread would ever unlock it.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _wait_for_threads() -> None:
    _acquired.extend(lock for lock in list(_locks) if lock.acquire(timeout=FORK_WAIT))


def _let_threads_go_on() -> None:
    while _acquired:
        _acquired.pop().release()


def _call_all() -> None:
    _let_threads_go_on()
    _locks.clear()  # Their threads do not exist here: one that is still locked is never released.
    for reference, function in list(_methods.values()):
        owner = reference()
        if owner is not None:
            function(owner)


os.register_at_fork(before=_wait_for_threads, after_in_parent=_let_threads_go_on, after_in_child=_call_all)


MIN_OBJECTS = 1_000
"""Minimum number of new objects for a pause."""

_lock = Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def gc_paused(count: int) -> Iterator[None]:
    """Pause garbage collection, in all threads, while `count` lasting objects are created. May be nested.

    It starts after every few hundred allocations, which takes as long as adding a hundred thousand jobs; none
    of them is garbage.
    """
    if count < MIN_OBJECTS:
        yield
        return
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1


def _end() -> None:
    global _pauses
    with _lock:
        _pauses -= 1
        if not _pauses and _was_enabled:
            gc.enable()
