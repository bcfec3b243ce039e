"""A worker as a process: its signals, its parent process, and its exit.

A process of its own stops on SIGINT and SIGTERM. A child of the supervisor ignores these, and stops on
`STOP`.
"""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from djqueue.core.threads import start_daemon

from .exits import STOP
from .loops import run_loop
from .worker import RUNWORKERS, Worker

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that stop a process of its own."""
CHILD_SIGNALS = (STOP,)
"""Signals that stop a child of the supervisor."""
PARENT_PIPE = "DJQUEUE_PARENT_PIPE"
"""Environment variable with a file descriptor that reaches its end when the parent process exits."""

_interrupted_by: int | None = None
"""Number of the signal for which `interrupt` has raised, until it is known that this had an effect."""


def serve(worker: Worker, signals: tuple[signal.Signals, ...] = SIGNALS) -> None:
    """Run a worker until it ends; the first of these signals stops it, the second one hurries it."""
    # Objects loaded so far, perhaps a million jobs, live until they are done: a garbage collector that
    # scanned them again and again would take a quarter of the time.
    gc.freeze()
    worker.kind = RUNWORKERS
    try:
        with _stopped_by(signals, worker):
            _follow_parent(worker)
            run_loop(worker.run(), worker.events.loop_stopped)
    finally:
        gc.unfreeze()


@contextmanager
def interruptible(signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[None]:
    """Raise KeyboardInterrupt on these signals, so that cleanup runs before and after `serve`.

    SIGINT, too: Python's own handler raises it without a trace where exceptions are ignored, as in an import.
    """
    try:
        with handling(signals, interrupt):
            yield
    finally:
        take_interrupt()


def let_interrupts_come() -> None:
    """Receive the signals that have arrived while a supervisor started again, in an `interruptible` block."""
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def _stopped_by(signals: tuple[signal.Signals, ...], worker: Worker) -> Iterator[None]:
    received = 0

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal received
        received += 1
        worker.stop(hurry=received > 1)
        if received > 1:
            # A third signal kills the process.
            signal.signal(number, signal.SIG_DFL)

    with handling(signals, on_signal):
        yield


@contextmanager
def handling(numbers: tuple[signal.Signals, ...], handler: "signal._HANDLER") -> Iterator[None]:
    """Handle signals, and restore their earlier handlers; do nothing outside the main thread.

    If `interrupt` has raised for nothing before, call the new handler at once.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread can handle signals; a caller on another thread stops the worker directly.
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        if callable(handler) and (missed := take_interrupt()) is not None:
            handler(missed, None)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def interrupt(number: int, _: FrameType | None) -> None:
    """Handle a signal by raising KeyboardInterrupt.

    Python ignores the exception if it is raised in a finalizer, or in a callback of a weak reference, the
    garbage collector or a fork. So whoever handles signals next has to call `take_interrupt`.
    """
    global _interrupted_by
    _interrupted_by = number
    raise KeyboardInterrupt


def take_interrupt() -> int | None:
    """Return the signal for which `interrupt` has raised, and forget it; None if there was none."""
    global _interrupted_by
    number, _interrupted_by = _interrupted_by, None
    return number


def _follow_parent(worker: Worker) -> None:
    pipe = os.environ.pop(PARENT_PIPE, None)
    if pipe is not None:
        # A parent that was killed cannot forward a signal.
        start_daemon("djqueue-parent", _wait_for_end, int(pipe), worker)


def _wait_for_end(pipe: int, worker: Worker) -> None:
    with os.fdopen(pipe, "rb") as end:
        end.read()
    worker.stop()
