"""Job ids, UUIDv7 strings that sort by creation time, and the hash that selects a queue's shard."""

import os
import threading
from collections.abc import Callable
from functools import lru_cache

from .threads import after_fork

COUNTER_BITS = 12
COUNTER_LIMIT = 1 << COUNTER_BITS
NOISE_SIZE, NOISES = 8, 128
"""Random bytes of a call, and number of calls for which they are fetched at once."""
NUMBERS = [f"{number:03x}" for number in range(COUNTER_LIMIT)]


class IdSource:
    """Source of UUIDv7 ids (RFC 9562, method 1 of section 6.2: a counter in the bits after the time).

    Ids of one source ascend strictly, also when the clock stops or is set back: once a millisecond's 4,096
    numbers are used, the next millisecond is borrowed. Ids of one call share their random bits, and differ in
    time and counter. Threads may share a source.
    """

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._last = 0
        self._noise: list[str] = []
        """Random hexadecimal digits, one entry for each call."""
        after_fork(self._part)

    def new(self, now: int) -> str:
        """Return one id for a time in UTC milliseconds."""
        with self._lock:
            self._last = number = max(now << COUNTER_BITS, self._last + 1)
            noise = self._noise.pop() if self._noise else self._fetched()
        time = f"{number >> COUNTER_BITS:012x}"
        return f"{time[:8]}-{time[8:]}-7{NUMBERS[number & (COUNTER_LIMIT - 1)]}-8{noise[:3]}-{noise[3:15]}"

    def many(self, count: int, now: int) -> list[str]:
        """Return `count` ascending ids for a time in UTC milliseconds."""
        with self._lock:
            first = max(now << COUNTER_BITS, self._last + 1)
            self._last = first + count - 1
            noise = self._noise.pop() if self._noise else self._fetched()
        # 8 sets the two bits of the variant to 10; 60 random bits follow.
        tail = f"-8{noise[:3]}-{noise[3:15]}"
        ids: list[str] = []
        end = first + count
        while first < end:
            time, number = f"{first >> COUNTER_BITS:012x}", first & (COUNTER_LIMIT - 1)
            prefix = f"{time[:8]}-{time[8:]}-7"
            ids += [prefix + digits + tail for digits in NUMBERS[number : number + end - first]]
            first = (first | (COUNTER_LIMIT - 1)) + 1
        return ids

    def _fetched(self) -> str:
        """Return new random digits, and keep some more: a system call takes as long as hundreds of ids."""
        noise = self._random_bytes(NOISE_SIZE * NOISES).hex()
        self._noise = [noise[at : at + 16] for at in range(0, len(noise), 2 * NOISE_SIZE)]
        return self._noise.pop()

    def _part(self) -> None:
        """Drop random digits in a forked child, because the parent will use them."""
        self._lock = threading.Lock()
        self._noise = []


FNV_OFFSET_BASIS = 0x811C9DC5
FNV_PRIME = 0x01000193


@lru_cache(maxsize=4096)
def fnv1a32(text: str) -> int:
    """Return the 32-bit FNV-1a hash of a text's UTF-8 bytes, unsigned.

    Source: Fowler, Noll, Vo, http://www.isthe.com/chongo/tech/comp/fnv/
    """
    value = FNV_OFFSET_BASIS
    for byte in text.encode("utf-8", "surrogatepass"):
        value = ((value ^ byte) * FNV_PRIME) & 0xFFFFFFFF
    return value


def shard_count(cores: int | None) -> int:
    """Return the number of shards for a number of cores: a power of two, 4 to 64."""
    cores = cores or 4
    for limit, shards in ((4, 4), (8, 8), (16, 16), (32, 32)):
        if cores <= limit:
            return shards
    return 64
