"""`python -m tools.benchmarks.failovers`: count the acknowledged jobs that failovers lose.

A master and a replica run behind three sentinels. While two threads and a coroutine enqueue, each with a
storage of its own, the replica is made the master: by `SENTINEL FAILOVER` (`planned`), or because the
master is killed (`killed`), for which the enqueues are durable. A row is printed for each failover.
"""

import argparse
import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from djqueue.core.errors import StorageError
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.storage.redis import RedisStorage
from tests import servers
from tests.support import eventually

QUEUE = "default"
PAGE = 1_000
"""Jobs looked up at a time."""
BEFORE = AFTER = 200
"""Jobs that each producer enqueues before the failover, and behind it."""


class Producer:
    """A thread that enqueues one job after another, and keeps the ids that were acknowledged."""

    def __init__(self, name: str, storage: RedisStorage, *, durable: bool, is_async: bool) -> None:
        self.acknowledged: list[str] = []
        self.refused = 0
        self.longest_gap = 0.0
        """Seconds between two acknowledged jobs."""
        self._name = name
        self._storage = storage
        self._options = JobOptions(durable=durable or None)
        self._over = threading.Event()
        run: Callable[[], None] = (lambda: asyncio.run(self._aproduce())) if is_async else self._produce
        self._thread = threading.Thread(target=run, daemon=True)

    def __enter__(self) -> "Producer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _produce(self) -> None:
        last = time.monotonic()
        while (batch := self._next()) is not None:
            try:
                self._storage.enqueue([batch])
            except StorageError:
                self.refused += 1
            else:
                last = self._note(batch, last)

    async def _aproduce(self) -> None:
        last = time.monotonic()
        while (batch := self._next()) is not None:
            try:
                await self._storage.aenqueue([batch])
            except StorageError:
                self.refused += 1
            else:
                last = self._note(batch, last)

    def _next(self) -> Batch | None:
        if self._over.is_set():
            return None
        number = len(self.acknowledged) + self.refused
        return Batch(QUEUE, "job", self._options, [b"\x90"], [f"{self._name}-{number}"])

    def _note(self, batch: Batch, last: float) -> float:
        assert batch.ids is not None
        self.acknowledged += batch.ids
        now = time.monotonic()
        self.longest_gap = max(self.longest_gap, now - last)
        return now


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.failovers", description=__doc__)
    parser.add_argument("kind", choices=["planned", "killed"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    print("| failover | acknowledged | lost | refused | longest gap |\n|---|---|---|---|---|")
    totals = [0, 0, 0]
    with servers.RedisSentinel() as group:
        for number in range(1, options.rounds + 1):
            *row, gap = one(group, options.kind)
            totals = [total + value for total, value in zip(totals, row, strict=True)]
            print(f"| {number} | " + " | ".join(map(str, row)) + f" | {gap:.1f} s |", flush=True)
            group.clean()
    print("| all | " + " | ".join(map(str, totals)) + " | |")
    return int(totals[1] > 0)


def one(group: servers.RedisSentinel, kind: str) -> tuple[int, int, int, float]:
    """Fail over once: acknowledged, lost and refused jobs, and the longest gap in seconds."""
    with ExitStack() as stack:
        producers = [
            stack.enter_context(
                Producer(
                    f"{kind}-{number}",
                    stack.enter_context(closing(RedisStorage(**group.options))),
                    durable=kind == "killed",
                    is_async=number == 2,
                )
            )
            for number in range(3)
        ]
        _wait_for(producers, BEFORE)
        if kind == "planned":
            group.fail_over()
        else:
            former = group.master
            with former.client() as client:
                os.kill(client.info("server")["process_id"], signal.SIGKILL)
            eventually(lambda: group.master is not former, timeout=60, message="the replica is promoted")
            group.settle()
        _wait_for(producers, AFTER)
    with closing(RedisStorage(**group.options)) as storage:
        lost = sum(_lost(storage, producer.acknowledged) for producer in producers)
    acknowledged = sum(len(producer.acknowledged) for producer in producers)
    refused = sum(producer.refused for producer in producers)
    return acknowledged, lost, refused, max(producer.longest_gap for producer in producers)


def _wait_for(producers: list[Producer], count: int) -> None:
    for producer in producers:
        enough = len(producer.acknowledged) + count
        eventually(lambda p=producer, n=enough: len(p.acknowledged) >= n, timeout=60, message="jobs come in")


def _lost(storage: RedisStorage, ids: list[str]) -> int:
    pages = (ids[start : start + PAGE] for start in range(0, len(ids), PAGE))
    return sum(state is None for page in pages for state in storage.reads.states(QUEUE, page))


if __name__ == "__main__":
    raise SystemExit(main())
