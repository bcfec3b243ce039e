"""The claims of a worker in memory that it shares with its lease keeper."""

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
"""Bytes of one region. Claims that do not fit any more make the worker list what it still holds."""
MAX_SCHEDULER_CLAIM = 240
"""Bytes of a scheduler's claim."""

_HEADER = struct.Struct("<qqqq")
"""Monotonic milliseconds of the last sign of life, the shortest lease, the region in use, and its length."""
_CLAIM_AT = 64
_SEQUENCE_AT = 32
"""Odd while the header or a region is replaced."""
TRIES = 50
"""Of a reader that meets a change: the worker may have been stopped in the middle of one."""
_REGIONS_AT = 512
_LENGTH_AT = 24


class TornReadError(Exception):
    """The worker was stopped while it changed the table."""


class LeaseTableView(NamedTuple):
    """What a lease keeper reads."""

    beat: int
    """Monotonic milliseconds of the worker's last sign of life; 0 while it does not run."""
    shortest_lease: int
    """Milliseconds."""
    leases: list[Lease]
    """What the worker held at its last heartbeat, and has claimed since. Some may have ended."""
    scheduler_claim: bytes
    """What renews the scheduler's lease; empty unless the worker's process is the scheduler."""


class LeaseTable:
    """Written by one worker, read by the process that was forked from it.

    A claim is here before its handler starts: a handler that never lets go of the interpreter keeps the
    worker from writing anything more. Claims are appended; every heartbeat replaces them by the ones that
    are still held, in the other one of two regions, so that a reader always finds a whole list.
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
        """Append claims; False if there is no room: then call `replace`."""
        packed = _packed(leases)
        with self._lock:
            end = self._length + len(packed)
            if end > SIZE:
                return False
            start = _REGIONS_AT + self._region * SIZE + self._length
            self._memory[start : start + len(packed)] = packed
            self._length = end
            # Last, and in one step: a reader takes what lies before it.
            struct.pack_into("<q", self._memory, _LENGTH_AT, end)
        return True

    def show_life(self, now: int) -> None:
        """Note that the worker runs, at a monotonic time; 0: it does not any more."""
        with self._lock, self._changing():
            self._beat = now
            self._write_header()

    def replace(self, leases: Iterable[Lease]) -> None:
        """Put these claims in place of all others."""
        packed = _packed(leases)
        if len(packed) > SIZE:
            packed = b""  # Tens of thousands of claims: they have the heartbeat alone.
        with self._lock, self._changing():
            self._region = 1 - self._region
            start = _REGIONS_AT + self._region * SIZE
            self._memory[start : start + len(packed)] = packed
            self._length = len(packed)
            self._write_header()

    @property
    def shortest_lease(self) -> int:
        """Milliseconds."""
        return self._shortest

    def expect(self, lease: int) -> None:
        """Note a lease that is shorter than all before."""
        with self._lock, self._changing():
            self._shortest = min(self._shortest, lease)
            self._write_header()

    def set_scheduler_claim(self, claim: bytes, lease: int) -> None:
        """Note what renews the scheduler's lease, and its length in milliseconds."""
        if len(claim) > MAX_SCHEDULER_CLAIM:
            raise ValueError(
                f"a scheduler claim must have at most {MAX_SCHEDULER_CLAIM} bytes; got {len(claim)}"
            )
        self._memory[_CLAIM_AT : _CLAIM_AT + 1 + len(claim)] = bytes([len(claim)]) + claim
        self.expect(lease)

    def read(self) -> LeaseTableView:
        """Read it, in the other process.

        Raises TornReadError if the worker was stopped in the middle of a change.
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
            leases += [Lease(*found) for found in marshal.load(written)]  # noqa: S302 - our own parent wrote it
        size = memory[_CLAIM_AT]
        claim = memory[_CLAIM_AT + 1 : _CLAIM_AT + 1 + size]
        return LeaseTableView(beat, shortest, leases, claim)

    def close(self) -> None:
        """Let go of the memory."""
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
    # Both sides are one interpreter, and tokens have more than 64 bits: too many for MessagePack.
    return marshal.dumps([tuple(lease) for lease in leases])
