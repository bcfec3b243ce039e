"""Threads of a process: beside a block, across forks, and for calls of the project's code; pauses of their
garbage collector.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from types import MethodType
from typing import Any
from weakref import WeakSet, ref


@contextmanager
def beside(run: Callable[[Event], object], name: str, patience: float | None = None) -> Iterator[None]:
    """Context manager: call a function on a daemon thread within the block.

    Args:
        run: Gets an event that is set at the end of the block, and should then return.
        name: Name of the thread.
        patience: Maximum seconds to wait for the thread at the end; None waits until it has ended.
    """
    stop = Event()
    thread = Thread(target=run, args=(stop,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(patience)


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


IDLE = 10.0
"""Seconds after which the idle thread of a `CallQueue` ends."""


class CallQueue:
    """Calls functions one after the other on a daemon thread, which ends when it is idle.

    A function that raises does not affect those after it. Queues last as long as their process.

    Args:
        name: Name of the thread.
        limit: Maximum number of waiting functions; those that come then are dropped.
        on_error: Called with what a function raises.
        on_drop: Called with the number of dropped functions, before the next one that was not.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        *,
        on_error: Callable[[BaseException], object],
        on_drop: Callable[[int], object],
    ) -> None:
        self._name = name
        self._limit = limit
        self._on_error = on_error
        self._on_drop = on_drop
        self.before: Callable[[], object] = _nothing
        """Called before each function."""
        self.idle: Callable[[], object] = _nothing
        """Called when no function waits any more, and at the end of the thread."""
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._waiting: SimpleQueue[Callable[[], object] | Event] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._dropped = 0

    def __len__(self) -> int:
        return self._waiting.qsize()

    def put(self, function: Callable[[], object]) -> None:
        """Call a function later. May be called from any thread."""
        with self._lock:
            if len(self) >= self._limit:
                self._dropped += 1
            else:
                self._waiting.put(function)
            if self._thread is None:
                self._start()

    def flush(self, timeout: float) -> bool:
        """Wait, up to `timeout` seconds, until all functions have returned; return whether they have."""
        done = Event()
        with self._lock:
            if self._thread is None:
                return self._waiting.empty()
            self._waiting.put(done)
        return done.wait(timeout)

    def _start(self) -> None:
        thread = Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The system has no thread for it at the moment. The next call tries again.
            self._on_error(error)
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            try:
                found = self._waiting.get(timeout=IDLE)
            except Empty:
                found = None
            if found is None or isinstance(found, Event):
                if self._ends(found):
                    return
                continue
            dropped, self._dropped = self._dropped, 0
            if dropped:
                self._call(partial(self._on_drop, dropped))
            self._call(self.before)
            self._call(found)

    def _ends(self, done: Event | None) -> bool:
        """Release what the functions have used; return whether the thread ends, because none waits."""
        self._call(self.idle)
        with self._lock:
            is_over = self._waiting.empty()
            if is_over:
                self._thread = None
        if done is not None:
            done.set()
        return is_over

    def _call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            # SystemExit, too: the functions after it would wait for ever.
            self._on_error(error)


def _nothing() -> None:
    """Do nothing."""
