"""Linux's view of processes: their descendants, memory, processor time and limits."""

import os
import resource
import select
import signal
import sys
from functools import lru_cache
from pathlib import Path

from djqueue.runtime.executors.sandbox.syscalls import prctl

PR_SET_CHILD_SUBREAPER = 36
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4_096
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
MAX_DESCENDANTS = 256
"""Maximum of descendants of a process that are looked at."""


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


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    pids: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:
        # A thread, or the process, ended in the meantime.
        return pids
    return pids


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, parents first; at most `MAX_DESCENDANTS`."""
    pids: list[int] = []
    left = [pid]
    while left and len(pids) < MAX_DESCENDANTS:
        direct = children(left.pop())
        pids += direct
        left += direct
    return pids[:MAX_DESCENDANTS]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may already have ended, or have become another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def kill_descendants(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the descendants of a process."""
    for descendant in descendants(pid):
        kill(descendant, number)


def memory(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * PAGE_SIZE
    except (OSError, IndexError):
        return 0


def proportional_memory(pid: int) -> int:
    """Return the resident bytes of a process, with its share of those that others use, too."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1_024
    except (OSError, ValueError):
        # It has ended, or the system does not provide this.
        return memory(pid)
    return memory(pid)


def memory_of_all(pid: int, limit: int) -> int:
    """Return the resident bytes of a process and its descendants, exactly if they exceed a limit."""
    pids = [pid, *descendants(pid)]
    used = sum(map(memory, pids))
    if used <= limit or len(pids) == 1:
        return used
    # Forked processes share memory, which counts once. Finding out takes milliseconds.
    return sum(map(proportional_memory, pids))


def wait(pidfd: int, seconds: float) -> None:
    """Wait until a process has ended."""
    ending = select.poll()
    ending.register(pidfd, select.POLLIN)
    ending.poll(max(0.0, seconds) * 1_000)


def processor_time(pid: int) -> float:
    """Return the seconds of processor time that a process has used; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


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
