"""The processes of `runworkers`: their exit codes, the signals that stop them, and their ties to each other.

Standard library only: a sandboxed child imports this module before anything else.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
from typing import NoReturn

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.threads import start_daemon

FINISHED = 0
"""Nothing is left to do."""
FAILED = 1
"""The process could not start or continue; it may be restarted."""
MISUSED = 2
"""The options of the command are wrong."""
RECYCLED = 76
"""The process reached a limit and is to be replaced."""
REFUSED = 77
"""The process can never run, such as a second scheduler."""
CONFIG = 78
"""The system lacks what the settings require, such as a layer of the sandbox. A restart cannot help."""

STOP: signal.Signals = signal.SIGUSR2 if hasattr(signal, "SIGUSR2") else signal.SIGTERM
"""Stops a child process. Only the supervisor sends it: children ignore SIGTERM, SIGINT and SIGHUP, which
terminals and service managers send to all processes of a group at once."""

GROUP_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)
"""Signals that terminals and service managers send to whole groups of processes. Only the process that was
started obeys them, and stops the others in order."""
FLUSH_TIMEOUT = 5.0
"""Seconds that log handlers have to flush at the end of a process."""
PR_SET_NAME, PR_SET_PDEATHSIG = 15, 1
SIGKILL = int(getattr(signal, "SIGKILL", 9))

_masks = threading.local()
"""Signals that the forking thread had blocked before."""
_supervisor: int | None = None
"""Process ID of the supervisor that forked this process."""


def end_with(parent: int, number: int = SIGKILL) -> None:
    """Ask Linux to kill this process when its parent ends, and exit if that has already happened.

    Linux means the thread that forked this process, so fork on the main thread only. Call this again after
    an exec of a program with other credentials, which resets it.

    Args:
        parent: Process ID of the parent, read before the fork.
        number: Signal that Linux sends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(FAILED)


def leave(code: int) -> NoReturn:
    """Exit the process without its parent's exit handlers, and without waiting for threads of handlers."""
    try:
        if "django.db" in sys.modules:
            sys.modules["django.db"].connections.close_all()
        # A log handler of the project that blocks holds its lock.
        try:
            start_daemon("djqueue-exit", _flush).join(FLUSH_TIMEOUT)
        except StorageUnavailableError:
            _flush()
    finally:
        os._exit(code)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def name_process(name: str) -> None:
    """Name this process in `ps -o comm` and `top`, which show 15 characters."""
    if sys.platform == "linux":
        title = f"dq:{name.replace(' ', '-')}"[:15]
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, title.encode())


def ignore(*_: object) -> None:
    """Handle a signal by doing nothing. Started programs do not inherit this, unlike SIG_IGN."""


def let_forks_end() -> None:
    """Let the processes that handlers fork from now on end on `GROUP_SIGNALS`, as those of other programs do.

    Call this once in a process that handles these signals itself. Otherwise its forks would inherit its
    handlers, and `multiprocessing.Process.terminate` would have no effect.
    """
    os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals, after_in_child=_reset_signals)


def note_supervisor(pid: int) -> None:
    """Store the process ID of the supervisor that forked this process."""
    global _supervisor
    _supervisor = pid


def supervisor() -> int | None:
    """Return the process ID of this process's supervisor; None if it has none."""
    # A fork of a child, such as a pool's process, has another parent.
    return _supervisor if _supervisor == os.getppid() else None


def end_copy() -> NoReturn:
    """End a child that a handler has forked from its worker, and in which it has returned."""
    Log("djqueue.worker").error(
        "A handler has forked the process of its worker, and returned in the child, which has ended. Call "
        "os._exit() in such a child."
    )
    os._exit(os.EX_SOFTWARE)


def _hold_signals() -> None:
    # One that comes right after the fork must not meet the handlers of this process.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)


def _let_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _reset_signals() -> None:
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _let_signals()
