"""Job ids: UUIDv7 texts that sort by the time at which they were made."""

import os
import threading
from collections.abc import Callable

COUNTER_BITS = 12
COUNTER_LIMIT = 1 << COUNTER_BITS


class IdSource:
    """Makes UUIDv7 ids (RFC 9562, method 1 of section 6.2: a counter in the bits after the time).

    Ids of one source ascend strictly, also when the clock stands or goes back: once a millisecond's
    4,096 numbers are used, the next millisecond is borrowed. Threads may share a source.
    """

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._last = 0
        os.register_at_fork(after_in_child=self._forget_lock)

    def new(self, now: int) -> str:
        """One id, for a time in UTC milliseconds."""
        return self.many(1, now)[0]

    def many(self, count: int, now: int) -> list[str]:
        """`count` ascending ids, for a time in UTC milliseconds."""
        with self._lock:
            first = max(now << COUNTER_BITS, self._last + 1)
            self._last = first + count - 1
        noise = self._random_bytes(8 * count).hex()
        ids: list[str] = []
        append = ids.append
        at = 0
        prefix, left = "", 0
        for tick in range(first, first + count):
            if not left:
                left = COUNTER_LIMIT - (tick & (COUNTER_LIMIT - 1))
                time = f"{tick >> COUNTER_BITS:012x}"
                prefix = f"{time[:8]}-{time[8:]}-7"
            left -= 1
            # The variant's two bits are 10, which 8 stands for; 60 random bits follow.
            append(f"{prefix}{tick & 0xFFF:03x}-8{noise[at : at + 3]}-{noise[at + 3 : at + 15]}")
            at += 15
        return ids

    def _forget_lock(self) -> None:
        self._lock = threading.Lock()
