"""Child processes of the supervisor, forked from its image, which has no open connections."""

import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from django.db import connections

from djqueue.core import procfs
from djqueue.core.logs import Log

from ..exits import (
    FAILED,
    FINISHED,
    GROUP_SIGNALS,
    STOP,
    end_with,
    ignore,
    leave,
    name_process,
    note_supervisor,
)
from ..serving import interrupt

LOOK_FOR_PARENT = 0.5
"""Seconds between checks for the parent, on systems that do not end a child with it."""

READY, ENDING = b"r\0", b"e"
"""Messages of a child: it is ready; it ends as planned, with the exit code in the next byte."""

logger = Log("djqueue.supervisor")


class ProcessRole(NamedTuple):
    """The purpose of a child."""

    name: str
    """Name in logs, in the health file and in the process list."""
    run: Callable[[Callable[[], None]], int]
    """Runs in the child; receives a function to call when the child is ready, and returns the exit code."""
    stage: int
    """Children with a lower stage start earlier and stop later: workers need the scheduler to report."""
    is_worker: bool = False
    """Whether the supervisor ends when all children like this one have finished."""


class ChildProcess:
    """A running child process.

    Args:
        role: What it does.
        close: File descriptors of the supervisor that the child must close.
    """

    def __init__(self, role: ProcessRole, close: tuple[int, ...]) -> None:
        self.role = role
        self.is_ready = False
        self.planned_code: int | None = None
        """Exit code that the child has reported before its end. Without a report, its end is a crash, even
        with the same code: any code of a handler may call `os._exit`."""
        self.is_recycled = False
        self.signals = 0
        """Number of signals sent to stop it."""
        self.kill_at: float | None = None
        """Monotonic seconds at which it is killed."""
        self.pipe, writer = os.pipe()
        """The child's messages."""
        os.set_blocking(self.pipe, False)
        parent = os.getpid()
        # Two processes must not share a connection, and buffered output would be written twice.
        connections.close_all()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns if other threads exist: imported modules of the project may have started some.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Signals that arrive before the child has its own handlers wait until then.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (*GROUP_SIGNALS, STOP))
            try:
                self.pid = os.fork()
                if not self.pid:
                    _run(role, parent, writer, (*close, self.pipe), before)
            except OSError:
                self.close()
                raise
            finally:
                os.close(writer)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def name(self) -> str:
        """Name of the child."""
        return self.role.name

    @property
    def memory(self) -> int:
        """Resident memory in bytes; 0 if the system does not report it."""
        return procfs.memory(self.pid)

    def read_messages(self) -> bool:
        """Note what the child has reported; return False at the end of its pipe."""
        try:
            data = os.read(self.pipe, len(READY) + len(ENDING) + 1)
        except BlockingIOError:
            # The child has ended, and a process that it started has the pipe.
            return False
        self.is_ready = self.is_ready or data.startswith(READY)
        message = data.removeprefix(READY)
        if message.startswith(ENDING):
            self.planned_code = message[-1]
        return bool(data)

    def send(self, number: signal.Signals) -> None:
        """Send a signal. The process id is valid until the supervisor has waited for the child."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Close the descriptors of a child that has ended."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


def describe(status: int) -> str:
    """Return how a process ended, from the status of `waitpid`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _run(
    role: ProcessRole, parent: int, writer: int, close: tuple[int, ...], mask: set[int | signal.Signals]
) -> NoReturn:
    """Run a role in the child process."""
    code = FAILED
    try:
        end_with(parent)
        _handle_signals(mask)
        for descriptor in close:
            os.close(descriptor)
        _leave_terminal()
        name_process(role.name)
        if sys.platform != "linux":
            threading.Thread(target=_follow, args=(parent,), name="djqueue-parent", daemon=True).start()
        note_supervisor(parent)
        gc.freeze()
        is_reported = False

        def ready() -> None:
            nonlocal is_reported
            if not is_reported:
                is_reported = True
                os.write(writer, READY)

        code = role.run(ready)
        os.write(writer, ENDING + bytes([code]))
    except KeyboardInterrupt:
        code = FINISHED
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the parent's exit handlers.
        leave(code)


def _handle_signals(mask: set[int | signal.Signals]) -> None:
    """Ignore the signals of groups, and stop on `STOP`, until the role has handlers of its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in GROUP_SIGNALS:
        # A handler: programs that jobs execute would inherit SIG_IGN, and could not be stopped.
        signal.signal(number, ignore)
    signal.signal(STOP, interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _leave_terminal() -> None:
    """Give up the terminal: Ctrl-C is for the supervisor, and programs that jobs run must not receive it.

    A process outside the terminal's foreground group that read from it would be stopped without a message,
    so standard input is empty.
    """
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing > 0:
        os.close(nothing)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_FOR_PARENT)
    os._exit(FAILED)
