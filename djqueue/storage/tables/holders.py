"""Processes that hold a lease, and whether they are still running on this machine."""

import os
import socket
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from djqueue.core.units import EPOCH

SCHEDULER_LEASE = "scheduler"
"""Name of the lease of the process that is the scheduler of a database."""
RELEASED, ABANDONED = 0, 1
"""Expiry times of a lease that was released, and of one whose process was killed."""
STATE, THREADS, START = 0, 17, 19
"""Indices of fields of /proc/<pid>/stat after the name: state, number of threads, start time."""


class LeaseHolder(NamedTuple):
    """The process that has a lease, as its row names it."""

    holder: str
    host: str
    pid: int
    address: str
    generation: int = 0
    renewed_at: datetime = EPOCH
    expires_at: datetime = EPOCH

    def describe(self) -> str:
        """Return the process and its host as text."""
        return f"process {self.pid} on {self.host.partition('/')[0]}"


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
    fields = _stat(pid)
    return f"@{fields[START]}" if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of a process in /proc after its name, or [] if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The name of the program, in parentheses, can contain anything.
    return stat.rpartition(")")[2].split()


def died_here(holder: LeaseHolder) -> bool:
    """Return whether the holder was a process of this machine and has ended."""
    return _is_here(holder) and not exists(holder)


def lives_here(holder: LeaseHolder) -> bool:
    """Return whether the holder is a running process of this machine."""
    return _is_here(holder) and exists(holder)


def exists(holder: LeaseHolder) -> bool:
    """Return whether the process of a holder on this machine is running."""
    _, mark, started = holder.host.partition("@")
    fields = _stat(holder.pid)
    if fields:
        if mark and fields[START] != started:
            return False  # Another process has the id now.
        if fields[STATE] in "ZX" and int(fields[THREADS]) <= 1:
            return False  # It has ended, and its parent has not read its exit code yet.
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_here(holder: LeaseHolder) -> bool:
    host = holder.host.partition("@")[0]
    return host == host_name() and "/" in host
