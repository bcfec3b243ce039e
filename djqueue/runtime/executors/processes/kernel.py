"""Control of processes on Linux: adopting orphans, signals, waiting for an end, and limits."""

import os
import resource
import select
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from djqueue.core import procfs
from djqueue.runtime.executors.sandbox.syscalls import prctl
from djqueue.runtime.exits import FAILED, STOP, end_with, name_process

PR_SET_CHILD_SUBREAPER = 36


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Return what this system lacks to run jobs in processes of their own; None if nothing."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the kernel has no pidfd_open (Linux 5.3 or later has it): {error}"
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        return "/proc does not list the children of processes (the kernel option CONFIG_PROC_CHILDREN)"
    return None


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends (PR_SET_CHILD_SUBREAPER of prctl(2))."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def guard(parent: int, *descriptors: int) -> int:
    """Fork the process of a job, and return the id of its parent there.

    Here, wait until that process and all that it has left behind have ended, and end as it did.
    This process is the parent of every program whose own parent has ended, and reaps it at once: the handler
    knows nothing of such programs, and must not mistake one for its own.

    parent: Id of the parent of this process. When it ends, so do the job and all its programs.
    descriptors: To be closed here.
    """
    guarding = os.getpid()
    name_process("guard")
    signal.signal(STOP, _kill_all)
    end_with(parent, STOP)
    adopt_orphans()
    child = os.fork()
    if child == 0:
        signal.signal(STOP, signal.SIG_DFL)
        return guarding
    for descriptor in descriptors:
        os.close(descriptor)
    status = 0
    with suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, 0)
            if pid == child:
                status = ended
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(guarding, number)
    os._exit(os.WEXITSTATUS(status))


def _kill_all(*_: object) -> NoReturn:
    """Kill all descendants of this process, and end."""
    while pids := procfs.descendants(os.getpid()):
        for pid in pids:
            kill(pid)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(FAILED)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may already have ended, or have become another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def kill_descendants(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the descendants of a process."""
    for descendant in procfs.descendants(pid):
        kill(descendant, number)


def wait(pidfd: int, seconds: float) -> bool:
    """Wait until a process has ended; return whether it has."""
    ending = select.poll()
    ending.register(pidfd, select.POLLIN)
    return bool(ending.poll(max(0.0, seconds) * 1_000))


def signal_to(pidfd: int, number: int) -> None:
    """Send a signal to a process that may already have ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


@lru_cache(maxsize=1)
def most_processes() -> int:
    """Return how many processes and threads the machine can have. To be called first outside of a sandbox."""
    names = ("pid_max", "threads-max")
    return min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in names)


def limit_self(*, memory: int | None, files: int | None, file_size: int | None) -> None:
    """Limit this process: no core dumps, address space, open files, bytes of each file.

    Whatever it does, half of the machine's process ids stay free: its limit of processes is checked now and
    then only. The kernel does not limit root.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, value in (
        (resource.RLIMIT_NPROC, most_processes() // 2),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, file_size),
    ):
        if value is not None:
            hard = resource.getrlimit(number)[1]
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (limit, limit))
