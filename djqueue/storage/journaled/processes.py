"""Identify the processes that hold claims, so that the next scheduler can check whether they are alive."""

import os
import socket
import struct
from collections.abc import Callable

from djqueue.storage.tables.holders import LeaseHolder, died_here, host_name, start_mark

CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a Unix socket's peer."""
SCHEDULER = "scheduler "
"""Prefix of a process that claims jobs as the scheduler: their leases are not renewed in the tables."""
REMOTE = "remote"
"""A process known only by its connection."""


def own_process() -> str:
    """Return the identifier of this process as the scheduler."""
    return f"{SCHEDULER}{host_name()}{start_mark(os.getpid())}/{os.getpid()}"


def peer_process(connection: socket.socket) -> str:
    """Return the identifier of a connection's peer; never empty."""
    if connection.family == socket.AF_UNIX and hasattr(socket, "SO_PEERCRED"):
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid = CREDENTIALS.unpack(data)[0]
        if pid:  # 0 for a process in an invisible PID namespace.
            return f"{host_name()}{start_mark(pid)}/{pid}"
    return f"{REMOTE}/{socket.gethostname()}"


def has_died() -> Callable[[str], bool]:
    """Return a function that reports whether a process is known to have died, checking each once."""
    known: dict[str, bool] = {}

    def look(process: str) -> bool:
        if process not in known:
            host, _, pid = process.rpartition("/")
            known[process] = pid.isdecimal() and died_here(LeaseHolder("", host, int(pid), ""))
        return known[process]

    return look
