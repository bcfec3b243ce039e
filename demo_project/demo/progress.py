"""Rows of a table, one a second, about what the queues have done and what is left."""

import time
from dataclasses import dataclass

from demo_project.flights.jobs import OPEN_STATES
from demo_project.flights.season import QUEUES
from djqueue import Queue


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Per queue: jobs completed, failed, and still open."""

    done: dict[str, int]
    failed: dict[str, int]
    open: dict[str, int]

    @classmethod
    def take(cls) -> "Snapshot":
        counts = {name: Queue(name).counts() for name in QUEUES}
        return cls(
            done={name: counts[name]["completed"] for name in QUEUES},
            failed={name: counts[name]["failed"] for name in QUEUES},
            open={name: sum(counts[name][state] for state in OPEN_STATES) for name in QUEUES},
        )

    @property
    def finished(self) -> int:
        return sum(self.done.values()) + sum(self.failed.values())

    @property
    def empty(self) -> bool:
        return not any(self.open.values())

    def __str__(self) -> str:
        return "".join(
            f"{self.done[name]:>9,}{self.failed[name]:>7,}{self.open[name]:>9,}" for name in QUEUES
        )


HEADER = "\n".join(
    [
        "".join(f"{name:>25}" for name in QUEUES),
        "".join(f"{'done':>9}{'failed':>7}{'waiting':>9}" for _ in QUEUES) + f"{'jobs/s':>9}",
    ]
)


class Progress:
    """A table that gets a row whenever the queues have moved since the last one."""

    def __init__(self) -> None:
        self._last = Snapshot.take()
        self._at = time.monotonic()
        print(HEADER, flush=True)

    def tell(self) -> Snapshot:
        snapshot, now = Snapshot.take(), time.monotonic()
        if snapshot != self._last:
            rate = max(0, snapshot.finished - self._last.finished) / (now - self._at)
            print(f"{snapshot}{rate:>9,.0f}", flush=True)
        self._last, self._at = snapshot, now
        return snapshot
