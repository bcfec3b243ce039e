"""The marks of handlers, seen from outside: how many jobs have run, how fast, and at which cost."""

import math
import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

POLL = 0.002
"""Seconds between two looks at the file."""
WARM_UP = 0.1
"""Share of the backlog that a worker handles before the measurement begins."""
IDLE = 30.0
"""Seconds without a new mark after which a worker counts as stuck."""

Usage = Mapping[str, float]
"""Seconds of CPU time that each process has used so far, by its name."""


@dataclass(frozen=True)
class Drain:
    """The rate of a drained backlog, and the CPU time that each job took."""

    rate: float
    """Jobs per second from the end of the warm-up to the last mark."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Microseconds of CPU time per job, by process."""
    cores: dict[str, float] = field(default_factory=dict)
    """Cores that each process kept busy."""


class StuckError(Exception):
    """A backlog was not drained, or too fast to be measured."""


class Marks:
    """A file to which handlers append: a byte for each job, or eight for each measured time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def count(self) -> int:
        return os.stat(self.path).st_size

    def clear(self) -> None:
        os.truncate(self.path, 0)

    def wait_for(
        self,
        count: int,
        alive: Callable[[], object] = lambda: None,
        limit: float = math.inf,
        idle: float = IDLE,
    ) -> float:
        """Wait until there are so many marks, and return the time at which they were seen.

        alive: Called at times; raises if waiting has no point.
        limit: The number of seconds after which fewer marks are enough.
        idle: The number of seconds without another mark after which it raises StuckError.
        """
        last, changed = -1, time.perf_counter()
        deadline = changed + limit
        while True:
            found, now = self.count(), time.perf_counter()
            if found >= count or now >= deadline:
                return now
            if found != last:
                last, changed = found, now
            elif now - changed > 0.5:
                alive()
                if now - changed > idle:
                    raise StuckError(f"{found} of {count} jobs have run, and no other for {idle:g} s")
            time.sleep(POLL)

    def drain(
        self,
        count: int,
        usage: Callable[[], Usage],
        alive: Callable[[], object],
        limit: float = math.inf,
    ) -> Drain:
        """Measure a worker that is starting on a backlog of so many jobs.

        limit: The number of seconds, after the warm-up, to which the measurement is limited.
        """
        self.wait_for(max(1, int(count * WARM_UP)), alive)
        before = usage()
        start, first = time.perf_counter(), self.count()
        end = self.wait_for(count, alive, limit)
        jobs = min(self.count(), count) - first
        after, took = usage(), end - start
        if first >= count:
            raise StuckError(f"a backlog of {count} jobs is too small: it was gone at the first look")
        if not jobs:
            raise StuckError(f"no job ran within {limit:g} s after the first {first}")
        used = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after}
        return Drain(
            jobs / took,
            {name: seconds / jobs * 1e6 for name, seconds in used.items()},
            {name: seconds / took for name, seconds in used.items()},
        )

    def times(self) -> list[float]:
        """Return the times that handlers left, in seconds."""
        return [value for (value,) in struct.iter_unpack("d", self.path.read_bytes())]


def marks_folder() -> str | None:
    """Return a folder in memory for the file, or None where there is none: then the default will do."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
