"""Child processes of the supervisor, forked from its image, which has no open connections."""

import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from django.db import connections

from djqueue.core import procfs
from djqueue.core.logs import Log
from djqueue.core.overview import Finding
from djqueue.core.threads import start_daemon

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
from .beats import BeatReader, BeatWriter

LOOK_FOR_PARENT = 0.5
"""Seconds between checks for the parent, on systems that do not end a child with it."""

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
        self.problems: tuple[Finding, ...] = ()
        """Problems that it has reported."""
        self.silence = 0.0
        """Seconds of the supervisor's time in which no beat has arrived."""
        self.pipe, writer = os.pipe()
        os.set_blocking(self.pipe, False)
        self._beats = BeatReader(self.pipe)
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

    def read_beats(self) -> bool:
        """Take in the beats that have arrived; return whether more can follow."""
        beats = self._beats.read()
        if beats:
            self.silence = 0.0
            self.is_ready = self.is_ready or any(beat.is_ready for beat in beats)
            self.problems = beats[-1].problems
            self.planned_code = beats[-1].code
        return beats is not None

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
            start_daemon("djqueue-parent", _follow, parent)
        note_supervisor(parent)
        gc.freeze()
        beats = BeatWriter(writer)
        beats.start()
        code = role.run(beats.ready)
        beats.end(code)
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
