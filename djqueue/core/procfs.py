"""Processes of this machine, as Linux shows them in /proc: whether they run, and what they use."""

import os
import socket
from pathlib import Path
from typing import NamedTuple

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4_096
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
MAX_DESCENDANTS = 256
"""Maximum of descendants of a process that are looked at."""


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat."""

    state: str
    """R running | S, D sleeping | T, t stopped | Z zombie | X dead, and others."""
    processor_time: float
    """Seconds of processor time that the process has used."""
    threads: int
    started: str
    """When the process started, in ticks since the boot."""


def stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if there is no such process, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, can contain anything.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return ProcessStat(fields[0], (int(fields[11]) + int(fields[12])) / TICKS, int(fields[17]), fields[19])


def lock_holders(path: str, byte: int | None = None) -> list[str]:
    """Return the processes (id and name of the program) that have locked a file for writing.

    Args:
        path: The file.
        byte: A byte that the lock must include; None for any.
    """
    try:
        inode = os.stat(path).st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    holders = []
    for line in lines:
        fields = line.split()
        # 1: POSIX ADVISORY WRITE PID MAJOR:MINOR:INODE START END; "->" marks one that waits.
        if len(fields) != 8 or fields[3] != "WRITE" or fields[5].rpartition(":")[2] != str(inode):
            continue
        end = float("inf") if fields[7] == "EOF" else int(fields[7])
        if byte is None or int(fields[6]) <= byte <= end:
            holders.append(_described(fields[4]))
    return list(dict.fromkeys(holders))


def _described(pid: str) -> str:
    try:
        return f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return pid


# Names of processes.


def host_name() -> str:
    """Return a name for this machine, boot and PID namespace; processes of one name can see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return socket.gethostname()
    namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot.read_text().strip()[:8]}/{namespace}"


def boot_of(host: str | None = None) -> str:
    """Return the boot of a machine, in the form of `host_name`; "" if unknown. None: of this one."""
    parts = (host_name() if host is None else host.partition("@")[0]).split("/")
    return parts[1] if len(parts) > 1 else ""


def start_mark(pid: int) -> str:
    """Return "@" and the start time of a process, which a later process with its id lacks; "" if unknown."""
    found = stat(pid)
    return f"@{found.started}" if found is not None else ""


def this_process() -> str:
    """Return a name that no other process with the id of this one has: `host_name` and its start."""
    return host_name() + start_mark(os.getpid())


def died_here(pid: int, name: str) -> bool:
    """Return whether a process with a name like `this_process` was one of this machine and has ended."""
    return _is_here(name) and not exists(pid, name)


def lives_here(pid: int, name: str) -> bool:
    """Return whether a process with a name like `this_process` is running on this machine."""
    return _is_here(name) and exists(pid, name)


def exists(pid: int, name: str) -> bool:
    """Return whether a process of this machine is running: the one that started when its name says."""
    _, mark, started = name.partition("@")
    found = stat(pid)
    if found is not None:
        if mark and found.started != started:
            return False  # Another process has the id now.
        if found.state in "ZX" and found.threads <= 1:
            return False  # It has ended, and its parent has not read its exit code yet.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_here(name: str) -> bool:
    host = name.partition("@")[0]
    return host == host_name() and "/" in host


# Children and resources of processes.


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


def processor_time(pid: int) -> float:
    """Return the seconds of processor time that a process has used; 0 if it has ended."""
    found = stat(pid)
    return found.processor_time if found is not None else 0.0
