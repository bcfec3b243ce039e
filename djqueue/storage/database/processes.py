"""Processes that hold claims: written with the jobs' rows, for the scheduler that comes next."""

import os
import socket
import struct
from collections.abc import Callable

from .lease import LeaseHolder, died_here, host_name, start_mark

CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix domain socket."""
SCHEDULER = "scheduler "
"""Prefix of a process that claims jobs as the scheduler: their leases are not renewed in the tables."""
REMOTE = "remote"
"""A process that only its connection is known of."""


def own_process() -> str:
    """This process, as the scheduler."""
    return f"{SCHEDULER}{host_name()}{start_mark(os.getpid())}/{os.getpid()}"


def peer_process(connection: socket.socket) -> str:
    """The process at the other end of a connection; never empty."""
    if connection.family == socket.AF_UNIX and hasattr(socket, "SO_PEERCRED"):
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid = CREDENTIALS.unpack(data)[0]
        if pid:  # 0: a process of a namespace that this one cannot see into
            return f"{host_name()}{start_mark(pid)}/{pid}"
    return f"{REMOTE}/{socket.gethostname()}"


def has_died() -> Callable[[str], bool]:
    """A function that tells whether a process is known to be gone; it looks at each process once."""
    known: dict[str, bool] = {}

    def look(process: str) -> bool:
        if process not in known:
            host, _, pid = process.rpartition("/")
            known[process] = pid.isdecimal() and died_here(LeaseHolder("", host, int(pid), ""))
        return known[process]

    return look
