"""Rows of a table, one a second, about what the queues have done and what is left."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from demo_project.flights.jobs import OPEN_STATES
from demo_project.flights.season import QUEUES, counts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Per queue: jobs completed, failed, and still open."""

    done: dict[str, int]
    failed: dict[str, int]
    open: dict[str, int]

    @classmethod
    def take(cls, queues: Sequence[str]) -> "Snapshot":
        found = {name: counts(name) for name in queues}
        return cls(
            done={name: found[name]["completed"] for name in queues},
            failed={name: found[name]["failed"] for name in queues},
            open={name: sum(found[name][state] for state in OPEN_STATES) for name in queues},
        )

    @property
    def finished(self) -> int:
        return sum(self.done.values()) + sum(self.failed.values())

    @property
    def empty(self) -> bool:
        return not any(self.open.values())

    def __str__(self) -> str:
        return "".join(
            f"{self.done[name]:>9,}{self.failed[name]:>7,}{self.open[name]:>9,}" for name in self.done
        )


class Progress:
    """A table that gets a row whenever the queues have moved since the last one."""

    def __init__(self, queues: Sequence[str] = QUEUES) -> None:
        self._queues = queues
        self._last = Snapshot.take(queues)
        self._at = time.monotonic()
        print("".join(f"{name:>25}" for name in queues))
        columns = "".join(f"{'done':>9}{'failed':>7}{'waiting':>9}" for _ in queues)
        print(f"{columns}{'jobs/s':>9}", flush=True)

    def tell(self) -> Snapshot:
        snapshot, now = Snapshot.take(self._queues), time.monotonic()
        if snapshot != self._last:
            rate = max(0, snapshot.finished - self._last.finished) / (now - self._at)
            print(f"{snapshot}{rate:>9,.0f}", flush=True)
        self._last, self._at = snapshot, now
        return snapshot
