"""Control of processes on Linux: adopting orphans, signals, waiting for an end, and limits."""

import os
import resource
import select
import signal
import sys
from functools import lru_cache
from pathlib import Path

from djqueue.core import procfs
from djqueue.runtime.executors.sandbox.syscalls import prctl

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


def wait(pidfd: int, seconds: float) -> None:
    """Wait until a process has ended."""
    ending = select.poll()
    ending.register(pidfd, select.POLLIN)
    ending.poll(max(0.0, seconds) * 1_000)


def limit_self(*, memory: int | None, files: int | None, file_size: int | None) -> None:
    """Limit this process: no core dumps, address space, open files, bytes of each file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, file_size),
    ):
        if value is not None:
            hard = resource.getrlimit(number)[1]
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (limit, limit))
