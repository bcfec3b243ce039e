"""The lease table: a worker's leases in memory that it shares with its lease keeper."""

import io
import marshal
import mmap
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from djqueue.core.job import Lease

SIZE = 1 << 20
"""Bytes of one region. When it is full, the worker replaces it by the leases that are still held."""

_HEADER = struct.Struct("<qqqq")
"""Monotonic milliseconds of the last sign of life, shortest lease, region in use, and its length."""
_SEQUENCE_AT = 32
"""Position of a number that is odd while the header or a region is replaced."""
TRIES = 50
"""Number of reads until a reader gives up, because the worker may be stopped during a change."""
_REGIONS_AT = 512
_LENGTH_AT = 24


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
        self._memory = mmap.mmap(-1, _REGIONS_AT + 2 * SIZE)
        self._lock = threading.Lock()
        self._region = 0
        self._length = 0
        self._shortest = shortest_lease
        self._beat = 0
        self._changes = 0
        self._write_header()

    def add(self, leases: Sequence[Lease]) -> bool:
        """Append leases; return False if the region is full, and `replace` must be called."""
        packed = _packed(leases)
        with self._lock:
            end = self._length + len(packed)
            if end > SIZE:
                return False
            start = _REGIONS_AT + self._region * SIZE + self._length
            self._memory[start : start + len(packed)] = packed
            self._length = end
            # Written last, in one step: a reader uses only what lies before it.
            struct.pack_into("<q", self._memory, _LENGTH_AT, end)
        return True

    def show_life(self, now: int) -> None:
        """Record that the worker is running at a monotonic time; 0 records its end."""
        with self._lock, self._changing():
            self._beat = now
            self._write_header()

    def replace(self, leases: Iterable[Lease]) -> None:
        """Replace all leases by these."""
        packed = _packed(leases)
        if len(packed) > SIZE:
            packed = b""  # Tens of thousands of leases: only the heartbeat renews them.
        with self._lock, self._changing():
            self._region = 1 - self._region
            start = _REGIONS_AT + self._region * SIZE
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
        for _ in range(TRIES):
            before = self._sequence()
            copy = self._memory[:]
            if before == self._sequence() and not before % 2:
                return self._parse(copy)
            time.sleep(0.001)
        raise TornReadError

    def _parse(self, memory: bytes) -> LeaseTableView:
        beat, shortest, region, length = _HEADER.unpack_from(memory)
        start = _REGIONS_AT + region * SIZE
        written = io.BytesIO(memory[start : start + length])
        leases: list[Lease] = []
        while written.tell() < length:
            leases += [Lease(*found) for found in marshal.load(written)]  # noqa: S302 - written by the parent process
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
        struct.pack_into("<q", self._memory, _SEQUENCE_AT, self._changes)

    def _sequence(self) -> int:
        number: int = struct.unpack_from("<q", self._memory, _SEQUENCE_AT)[0]
        return number

    def _write_header(self) -> None:
        _HEADER.pack_into(self._memory, 0, self._beat, self._shortest, self._region, self._length)


def _packed(leases: Iterable[Lease]) -> bytes:
    # Both sides run the same interpreter, and tokens have more bits than MessagePack supports.
    return marshal.dumps([tuple(lease) for lease in leases])
