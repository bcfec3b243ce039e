"""A worker's leases in shared memory, and the process that renews them while the worker cannot.

The worker renews its leases on a thread, and a thread needs the GIL. A call into C that holds the GIL, such
as a regular expression that backtracks endlessly, blocks that thread; the leases would expire, and other
workers would run the jobs a second time. So `runworkers` forks a small process, the lease keeper, before it
opens any connection. That process reads the worker's leases from the table in shared memory, and renews them
only when the worker has not responded for a third of a lease.
"""

import gc
import io
import marshal
import mmap
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from django.db import connections

from djqueue.core import procfs
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.job import Lease
from djqueue.core.logs import Log
from djqueue.core.threads import start_daemon
from djqueue.storage.base import Storage

from .exits import STOP, end_with

CHECKS_PER_LEASE = 12
"""Number of checks of the worker within the time of a lease, at least one per second."""
MAX_SILENCE = 5_000
"""Maximum of milliseconds without a response until the keeper renews the leases, however long they are."""
RENEWALS_PER_LEASE = 4
"""Number of renewals within the time of a lease."""
EXIT_TIMEOUT = 5.0
"""Seconds to wait for the end of the keeper's process."""
BATCH = 500
"""Maximum of leases renewed in one call."""
STDERR = 2
"""Descriptors up to this one are kept: a service manager may have opened them as sockets."""
REGION_SIZE = 1 << 20
"""Bytes of one region. When it is full, the worker replaces it by the leases that are still held."""
READ_TRIES = 50
"""Number of reads until a reader gives up, because the worker may be stopped during a change."""
_HEADER = struct.Struct("<qqqq")
"""Monotonic milliseconds of the last sign of life, shortest lease, region in use, and its length."""
_NUMBER = struct.Struct("<q")
_LENGTH_AT = 24
"""Position of the length in the header."""
_SEQUENCE_AT = 32
"""Position of a number that is odd while the header or a region is replaced."""
_REGIONS_AT = 512
"""Position of the first region."""

LeaseFields = tuple[str, str, int]
"""The fields of a `Lease`, which is such a tuple."""

logger = Log("djqueue.worker")


class TornReadError(Exception):
    """The worker was stopped while it was changing the table."""


class LeaseTableView(NamedTuple):
    """The lease table as the lease keeper reads it."""

    beat: int
    """Monotonic milliseconds of the worker's last sign of life; 0 while it does not run."""
    shortest_lease: int
    """Milliseconds of the shortest lease."""
    leases: list[Lease]
    """Leases held at the last heartbeat, and claimed since. Some may have ended."""


class LeaseTable:
    """A table that one worker writes, and the process forked from it reads.

    A lease is added before its handler starts, because a handler that never releases the GIL keeps the worker
    from writing. Leases are appended; every heartbeat replaces them by those that are still held, in the
    other one of two regions, so that a reader always finds a complete list.
    """

    def __init__(self, shortest_lease: int) -> None:
        self._memory = mmap.mmap(-1, _REGIONS_AT + 2 * REGION_SIZE)
        self._lock = threading.Lock()
        self._region = 0
        self._length = 0
        self._shortest = shortest_lease
        self._beat = 0
        self._changes = 0
        self._write_header()

    def add(self, leases: Iterable[LeaseFields]) -> bool:
        """Append leases; return False if the region is full, and `replace` must be called."""
        packed = _packed(leases)
        with self._lock:
            end = self._length + len(packed)
            if end > REGION_SIZE:
                return False
            start = _REGIONS_AT + self._region * REGION_SIZE + self._length
            self._memory[start : start + len(packed)] = packed
            self._length = end
            # Written last, in one step: a reader uses only what lies before it.
            _NUMBER.pack_into(self._memory, _LENGTH_AT, end)
        return True

    def show_life(self, now: int) -> None:
        """Record that the worker is running at a monotonic time; 0 records its end."""
        with self._lock, self._changing():
            self._beat = now
            self._write_header()

    def replace(self, leases: Iterable[Lease]) -> None:
        """Replace all leases by these."""
        packed = _packed(leases)
        if len(packed) > REGION_SIZE:
            packed = b""  # Tens of thousands of leases: only the heartbeat renews them.
        with self._lock, self._changing():
            self._region = 1 - self._region
            start = _REGIONS_AT + self._region * REGION_SIZE
            self._memory[start : start + len(packed)] = packed
            self._length = len(packed)
            self._write_header()

    @property
    def shortest_lease(self) -> int:
        """Milliseconds of the shortest lease."""
        return self._shortest

    def expect(self, lease: int) -> None:
        """Record a lease that may be shorter than all before."""
        with self._lock, self._changing():
            self._shortest = min(self._shortest, lease)
            self._write_header()

    def read(self) -> LeaseTableView:
        """Read the table, in the other process.

        Raises TornReadError if the worker was stopped during a change.
        """
        for _ in range(READ_TRIES):
            before = self._sequence()
            copy = self._memory[:]
            if before == self._sequence() and not before % 2:
                return self._parse(copy)
            time.sleep(0.001)
        raise TornReadError

    def _parse(self, memory: bytes) -> LeaseTableView:
        beat, shortest, region, length = _HEADER.unpack_from(memory)
        start = _REGIONS_AT + region * REGION_SIZE
        written = io.BytesIO(memory[start : start + length])
        leases: list[Lease] = []
        while written.tell() < length:
            leases += [Lease(*fields) for fields in marshal.load(written)]  # noqa: S302 - written by the parent process
        return LeaseTableView(beat, shortest, leases)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._step()
        try:
            yield
        finally:
            self._step()

    def _step(self) -> None:
        self._changes += 1
        _NUMBER.pack_into(self._memory, _SEQUENCE_AT, self._changes)

    def _sequence(self) -> int:
        number: int = _NUMBER.unpack_from(self._memory, _SEQUENCE_AT)[0]
        return number

    def _write_header(self) -> None:
        _HEADER.pack_into(self._memory, 0, self._beat, self._shortest, self._region, self._length)


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
        self._waiter = start_daemon("djqueue-keeper", self._wait)

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
            self._waiter.join(EXIT_TIMEOUT)
        self.table.close()


def can_keep() -> bool:
    """Return whether this process can start a keeper."""
    return hasattr(os, "fork") and threading.current_thread() is threading.main_thread()


def seconds_between_checks(lease: int) -> float:
    """Return the seconds between a worker's signs of life, and between its keeper's checks."""
    return min(1.0, lease / CHECKS_PER_LEASE / 1_000)


class RenewalPolicy:
    """Decides when to renew which leases."""

    def __init__(self, storage: Storage, patience: int) -> None:
        self._storage = storage
        self._patience = patience
        self._renewed: int | None = None
        """Monotonic milliseconds of the last renewal, while the worker does not respond."""
        self._given_up = False

    def look(self, view: LeaseTableView, now: int) -> None:
        """Renew the leases that are due at a monotonic time."""
        silence = now - view.beat if view.beat else 0
        if silence < min(view.shortest_lease / 3, MAX_SILENCE):
            if self._renewed is not None:
                logger.warning("The worker responds again and renews its leases itself.")
                connections.close_all()
            self._renewed, self._given_up = None, False
            return
        if silence > self._patience:
            if not self._given_up:
                self._given_up = True
                logger.error(
                    "The worker has not responded for %s s; its leases are no longer renewed, and its "
                    "running jobs will run again: %s.",
                    silence // 1_000,
                    len(view.leases),
                )
            return
        if self._renewed is not None and now - self._renewed < view.shortest_lease / RENEWALS_PER_LEASE:
            return
        if self._renewed is None:
            logger.warning(
                "The worker has not responded for %.1f s: a handler holds the GIL, or the machine is "
                "overloaded. Renewing its %s leases for up to %s s.",
                silence / 1_000,
                len(view.leases),
                self._patience // 1_000,
            )
        self._renewed = now
        self._renew(view)

    def _renew(self, view: LeaseTableView) -> None:
        try:
            for start in range(0, len(view.leases), BATCH):
                self._storage.renew(view.leases[start : start + BATCH])
        except Exception as error:
            logger.warning("The lease keeper could not renew the leases, retrying: %s", error)
            self._renewed = None


def _keep(table: LeaseTable, storage: Storage, parent: int, patience: int) -> NoReturn:
    """Run the keeper, in the child process."""
    try:
        end_with(parent)
        # These signals are for the worker, which may run for a while; its end ends this process.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, STOP):
            signal.signal(number, signal.SIG_IGN)
        _close_inherited_connections()
        gc.freeze()
        policy = RenewalPolicy(storage, patience)
        view = table.read()
        while os.getppid() == parent:
            try:
                view = table.read()
            except TornReadError:
                pass  # The last state is still valid: the worker has not run since.
            now = SYSTEM_CLOCK.monotonic()
            if not _is_stopped(parent):
                policy.look(view, now)
            time.sleep(seconds_between_checks(view.shortest_lease))
    except BaseException:
        logger.exception("The lease keeper failed; only the worker renews its leases now.")
        os._exit(1)
    os._exit(0)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP) or a zombie. Known on Linux only."""
    found = procfs.stat(pid)
    return found is not None and found.state in "TtZX"


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
            with socket.socket(fileno=os.dup(number)) as inherited:
                is_connection = inherited.type == socket.SOCK_STREAM
            if is_connection:
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _packed(leases: Iterable[LeaseFields]) -> bytes:
    # Both sides run the same interpreter, and tokens have more bits than MessagePack supports.
    return marshal.dumps([tuple(lease) for lease in leases])
