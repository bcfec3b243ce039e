"""The lease keeper: a process that renews a worker's leases while the worker cannot.

The worker renews its leases on a thread, and a thread needs the GIL. A call into C that holds the GIL, such
as a regular expression that backtracks endlessly, blocks that thread; the leases would expire, and other
workers would run the jobs a second time. So `runworkers` forks a small process before it opens any
connection. That process reads the worker's leases from shared memory, and renews them only when the worker
has not responded for a third of a lease.
"""

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

from .exits import STOP, end_with
from .leasetable import LeaseTable, LeaseTableView, TornReadError

LOOKS = 12
"""Number of checks of the worker within the time of a lease, at least one per second."""
LONGEST_SILENCE = 5_000
"""Maximum of milliseconds without a response until the keeper renews the leases, however long they are."""
SHARE = 4
"""Number of renewals within the time of a lease."""
GRACE = 5.0
"""Seconds to wait for the end of the keeper's process."""
AT_ONCE = 500
"""Maximum of leases renewed in one call."""
STDERR = 2
"""Descriptors up to this one are kept: a service manager may have opened them as sockets."""

logger = logging.getLogger("djqueue.worker")


class LeaseKeeper:
    """A child process. `close` ends it, and so does the end of the worker's process.

    storage: Storage that is not connected yet. The child uses its own copy.
    lease: Milliseconds of the shortest lease of a claim.
    patience: Milliseconds without a response from the worker after which its leases are no longer renewed.
    """

    def __init__(self, storage: Storage, lease: int, patience: int) -> None:
        self.table = LeaseTable(lease)
        self._parent = os.getpid()
        # Two processes must not share a connection; the next use opens a new one.
        connections.close_all()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns if other threads exist. The child only runs this module and the storage, which
            # creates its locks and connections again after a fork.
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
            return  # Other code in this process has waited for it.
        if not self._closing:
            logger.warning(
                "The lease keeper exited (status %s). The worker process now renews its leases itself: "
                "the job of a handler that holds the GIL for longer than a lease will run again.",
                status,
            )

    def close(self) -> None:
        """End the keeper's process."""
        if os.getpid() != self._parent:
            return  # This process is a fork of the worker, so the keeper is not its child.
        self._closing = True
        if self._waiter.is_alive():
            # The process ID stays valid until the waiter has waited for it.
            os.kill(self.pid, signal.SIGKILL)
            self._waiter.join(GRACE)
        self.table.close()


def can_keep() -> bool:
    """Return whether this process can start a keeper."""
    return hasattr(os, "fork") and threading.current_thread() is threading.main_thread()


def _keep(table: LeaseTable, storage: Storage, parent: int, patience: int) -> NoReturn:
    """Run the keeper, in the child process."""
    try:
        end_with(parent)
        # These signals are for the worker, which may run for a while; its end ends this process.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, STOP):
            signal.signal(number, signal.SIG_IGN)
        _close_inherited_connections()
        gc.freeze()
        keeping = Keeping(storage, patience)
        seen = table.read()
        while os.getppid() == parent:
            try:
                seen = table.read()
            except TornReadError:
                pass  # The last state is still valid: the worker has not run since.
            now = SYSTEM_CLOCK.monotonic()
            if not is_stopped(parent):
                keeping.look(seen, now)
            time.sleep(seconds_between_looks(seen.shortest_lease))
    except BaseException:
        logger.exception("The lease keeper failed; only the worker renews its leases now.")
        os._exit(1)
    os._exit(0)


def seconds_between_looks(lease: int) -> float:
    """Return the seconds between a worker's signs of life, and between its keeper's checks."""
    return min(1.0, lease / LOOKS / 1_000)


class Keeping:
    """Decides when to renew which leases."""

    def __init__(self, storage: Storage, patience: int) -> None:
        self._storage = storage
        self._patience = patience
        self._renewed: int | None = None
        """Monotonic milliseconds of the last renewal, while the worker does not respond."""
        self._given_up = False

    def look(self, seen: LeaseTableView, now: int) -> None:
        """Renew the leases that are due at a monotonic time."""
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
            for start in range(0, len(seen.leases), AT_ONCE):
                self._storage.renew(seen.leases[start : start + AT_ONCE])
        except Exception as error:
            logger.warning("The lease keeper could not renew the leases, retrying: %s", error)
            self._renewed = None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP) or a zombie. Known on Linux only."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "TtZX"


def _close_inherited_connections() -> None:
    """Replace connections and ports that were opened before the fork by /dev/null.

    Otherwise they would stay open when the worker closes them. Their descriptors stay in use, so that a
    logging handler with such a connection does not write into another one.
    """
    folder = Path("/proc/self/fd") if sys.platform == "linux" else Path("/dev/fd")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(name) for name in os.listdir(folder) if name.isdecimal()]:
        try:
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:
            continue  # This descriptor only listed the folder.
        if is_socket and number > STDERR:
            with socket.socket(fileno=os.dup(number)) as found:
                is_connection = found.type == socket.SOCK_STREAM
            if is_connection:
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
