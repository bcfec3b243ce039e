"""Renew a worker's leases while its own process cannot.

The worker renews its leases on a thread, and a thread needs the interpreter lock. One call into C that
keeps the lock (a regular expression that backtracks without end, say) stops that thread for as long as it
takes; the leases would end and other workers would run the jobs again, beside the first runs. So
`runworkers` forks a small process before it opens any connection. It sleeps, reads the worker's claims from
shared memory, and renews them only when the worker has shown no sign of life for a third of a lease.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import NoReturn

from django.db import connections

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.storage.base import Storage

from .leasetable import LeaseTable, LeaseTableView, TornReadError

LOOKS = 12
"""A keeper looks at the worker so many times in a lease, at least once a second."""
LONGEST_SILENCE = 5_000
"""Milliseconds after which a silent worker's leases are renewed, however long they are."""
SHARE = 4
"""A keeper renews a lease so many times before it would end."""
GRACE = 5.0
"""Seconds that the end of the process may take."""
AT_ONCE = 500
"""Leases renewed in one call."""
PR_SET_PDEATHSIG = 1
STDERR = 2
"""A service manager may have made a socket of this, and of those before it."""

logger = logging.getLogger("djqueue.worker")


class LeaseKeeper:
    """A child process; `close` ends it, and so does the end of the worker's process.

    storage: not connected yet. The child uses its own copy of it.
    lease: milliseconds of the shortest lease that a claim may have.
    patience: milliseconds after the worker's last sign of life for which its leases are renewed.
    """

    def __init__(self, storage: Storage, lease: int, patience: int) -> None:
        self.table = LeaseTable(lease)
        self._parent = os.getpid()
        # A connection must not be shared by two processes; the next use opens a new one.
        connections.close_all()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns when other threads exist. The child runs only what is in this module and the
            # storage, whose locks and connections are made anew after a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            _keep(self.table, storage, self._parent, patience)
        self._closing = False
        self._waiter = threading.Thread(target=self._wait, name="djqueue-keeper", daemon=True)
        self._waiter.start()

    def _wait(self) -> None:
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return  # Something else in this process has waited for it.
        if not self._closing:
            logger.warning(
                "The lease keeper exited (status %s). The worker process now renews its leases itself: "
                "the job of a handler that holds the GIL for longer than a lease will run again.",
                status,
            )

    def close(self) -> None:
        """End the process."""
        if os.getpid() != self._parent:
            return  # This is a fork of the worker: the keeper is not its child.
        self._closing = True
        if self._waiter.is_alive():
            # Until the waiter has waited for it, the process has its id.
            os.kill(self.pid, signal.SIGKILL)
            self._waiter.join(GRACE)
        self.table.close()


def can_keep() -> bool:
    """Whether this process can have a keeper."""
    return hasattr(os, "fork") and threading.current_thread() is threading.main_thread()


def _keep(table: LeaseTable, storage: Storage, parent: int, patience: int) -> NoReturn:
    """The child."""
    try:
        _end_with(parent)
        # Both are for the worker, which may go on for a while; its end ends this process.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _let_go_of_connections()
        gc.freeze()
        keeping = Keeping(storage, patience)
        seen = table.read()
        while os.getppid() == parent:
            try:
                seen = table.read()
            except TornReadError:
                pass  # What was seen last still holds: the worker has shown no sign of life since.
            now = SYSTEM_CLOCK.monotonic()
            if not is_stopped(parent):
                keeping.look(seen, now)
            time.sleep(seconds_between_looks(seen.shortest_lease))
    except BaseException:
        logger.exception("The lease keeper failed; only the worker renews its leases now.")
        os._exit(1)
    os._exit(0)


def seconds_between_looks(lease: int) -> float:
    """How often a worker shows that it is alive, and its keeper looks whether it has."""
    return min(1.0, lease / LOOKS / 1_000)


class Keeping:
    """When to renew, and what."""

    def __init__(self, storage: Storage, patience: int) -> None:
        self._storage = storage
        self._patience = patience
        self._renewed: int | None = None
        """Monotonic milliseconds of the last renewal, while the worker is silent."""
        self._given_up = False

    def look(self, seen: LeaseTableView, now: int) -> None:
        """Renew what is due, at a monotonic time."""
        silence = now - seen.beat if seen.beat else 0
        if silence < min(seen.shortest_lease / 3, LONGEST_SILENCE):
            if self._renewed is not None:
                logger.warning("The worker responds again and renews its leases itself.")
                connections.close_all()
            self._renewed, self._given_up = None, False
            return
        if silence > self._patience:
            if not self._given_up:
                self._given_up = True
                logger.error(
                    "The worker has not responded for %s s; its leases are no longer renewed, and its %s "
                    "jobs will run again.",
                    silence // 1_000,
                    len(seen.leases),
                )
            return
        if self._renewed is not None and now - self._renewed < seen.shortest_lease / SHARE:
            return
        if self._renewed is None:
            logger.warning(
                "The worker has not responded for %.1f s: a handler holds the GIL, or the machine is "
                "overloaded. Renewing its %s leases for up to %s s.",
                silence / 1_000,
                len(seen.leases),
                self._patience // 1_000,
            )
        self._renewed = now
        self._renew(seen)

    def _renew(self, seen: LeaseTableView) -> None:
        try:
            scheduler = self._storage.capabilities.scheduler
            if seen.scheduler_claim and scheduler is not None:
                scheduler.renew(seen.scheduler_claim)
                return  # Jobs of the scheduler's own process have no leases that another could renew.
            for start in range(0, len(seen.leases), AT_ONCE):
                self._storage.renew(seen.leases[start : start + AT_ONCE])
        except Exception as error:
            logger.warning("The lease keeper could not renew the leases, retrying: %s", error)
            self._renewed = None


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP) or is a zombie. Only Linux says so."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "TtZX"


def _let_go_of_connections() -> None:
    """Put /dev/null in the place of connections and ports that were opened before the fork.

    Else they would stay open when the worker closes them. Their numbers stay taken: a logging handler that
    has such a connection must not write into another one.
    """
    folder = Path("/proc/self/fd") if sys.platform == "linux" else Path("/dev/fd")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(name) for name in os.listdir(folder) if name.isdecimal()]:
        try:
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:
            continue  # It was open to list the folder.
        if is_socket and number > STDERR:
            with socket.socket(fileno=os.dup(number)) as found:
                is_connection = found.type == socket.SOCK_STREAM
            if is_connection:
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _end_with(parent: int) -> None:
    """Have the system end this process with its parent. Elsewhere than on Linux, the loop looks for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
