"""Why the ready jobs lie in a FIFO per priority: `python -m tools.benchmarks.structures`.

Three structures with the same bounds, each with removal by id, under four loads: the engine's own (a
FIFO for each priority, under a small heap of those that there are), an indexed 4-ary heap with lazy
deletion, and the standard library's binary heap used in the same way.
"""

import gc
import heapq
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from djqueue.core.engine.joblists import COMPACT_ABOVE, COMPACT_FROM, PriorityQueue
from djqueue.core.enginejob import EngineJob
from djqueue.core.options import JobOptions
from djqueue.core.states import State

JOBS = 20_000
ROUNDS = 3
"""Runs of each load; the best counts, for the others were disturbed."""
ARITY = 4

Entry = tuple[int, int, EngineJob]
"""(negated priority, generation, job): stale once the index knows another generation."""


class Structure(Protocol):
    """What a priority queue must do here."""

    def push(self, job: EngineJob) -> None:
        """Add a job behind those of its priority."""
        ...

    def pop(self) -> EngineJob | None:
        """Take the best job."""
        ...

    def remove(self, job: EngineJob) -> None:
        """Take out a job that is here."""
        ...


class FifoPerPriority:
    """The engine's own."""

    def __init__(self) -> None:
        self._queue = PriorityQueue()
        self._generation = 0

    def push(self, job: EngineJob) -> None:
        self._generation += 1
        job.generation = self._generation
        self._queue.push(job)

    def pop(self) -> EngineJob | None:
        jobs = self._queue.pop(1)
        return jobs[0] if jobs else None

    def remove(self, job: EngineJob) -> None:
        self._queue.remove(job)


class BinaryHeap:
    """`heapq`, with an index of generations and lazy deletion."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._index: dict[str, int] = {}
        self._generation = 0

    def push(self, job: EngineJob) -> None:
        self._generation += 1
        self._index[job.id] = self._generation
        self._put((-job.options.priority, self._generation, job))

    def pop(self) -> EngineJob | None:
        while self._heap:
            _, generation, job = self._take()
            if self._index.get(job.id) == generation:
                del self._index[job.id]
                return job
        return None

    def remove(self, job: EngineJob) -> None:
        del self._index[job.id]
        stale = len(self._heap) - len(self._index)
        if len(self._heap) >= COMPACT_FROM and stale > len(self._heap) * COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if self._index.get(entry[2].id) == entry[1]]
            self._order()

    def _put(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)

    def _take(self) -> Entry:
        return heapq.heappop(self._heap)

    def _order(self) -> None:
        heapq.heapify(self._heap)


class FourAryHeap(BinaryHeap):
    """The same over a heap whose nodes have four children: fewer levels, all of them in Python."""

    def _put(self, entry: Entry) -> None:
        heap = self._heap
        heap.append(entry)
        at = len(heap) - 1
        while at:
            parent = (at - 1) // ARITY
            if heap[parent] <= entry:
                break
            heap[at] = heap[parent]
            at = parent
        heap[at] = entry

    def _take(self) -> Entry:
        heap = self._heap
        best, last = heap[0], heap.pop()
        if heap:
            heap[0] = last
            self._sink(0)
        return best

    def _order(self) -> None:
        for at in range((len(self._heap) - 2) // ARITY, -1, -1):
            self._sink(at)

    def _sink(self, at: int) -> None:
        heap = self._heap
        size, entry = len(heap), heap[at]
        while (first := at * ARITY + 1) < size:
            children = heap[first : first + ARITY]
            least = min(children)
            if entry <= least:
                break
            heap[at] = least
            at = first + children.index(least)
        heap[at] = entry


STRUCTURES: dict[str, Callable[[], Structure]] = {
    "FIFO per priority (djqueue)": FifoPerPriority,
    "heapq, lazy deletion": BinaryHeap,
    "4-ary heap, lazy deletion": FourAryHeap,
}


def one_priority() -> Iterator[int]:
    """The common case: nobody gives a priority."""
    return iter([0] * JOBS)


def five_priorities() -> Iterator[int]:
    """What applications do that use priorities."""
    chance = random.Random(1)
    return (chance.randrange(5) for _ in range(JOBS))


def all_different() -> Iterator[int]:
    """The worst case for a FIFO per priority: each holds one job."""
    numbers = list(range(JOBS))
    random.Random(2).shuffle(numbers)
    return iter(numbers)


def fill_and_drain(structure: Structure, jobs: list[EngineJob]) -> None:
    """All in, then all out."""
    for job in jobs:
        structure.push(job)
    for _ in jobs:
        assert structure.pop() is not None
    assert structure.pop() is None


def steady(structure: Structure, jobs: list[EngineJob]) -> None:
    """A backlog of a tenth; for each job that comes one goes."""
    backlog = len(jobs) // 10
    for job in jobs[:backlog]:
        structure.push(job)
    for job in jobs[backlog:]:
        structure.push(job)
        structure.pop()
    for _ in range(backlog):
        structure.pop()
    assert structure.pop() is None


def with_removals(structure: Structure, jobs: list[EngineJob]) -> None:
    """All in, every third taken out again, the rest out."""
    for job in jobs:
        structure.push(job)
    for job in jobs[::3]:
        structure.remove(job)
    while structure.pop() is not None:
        pass


LOADS = (
    ("one priority, fill and drain", one_priority, fill_and_drain),
    ("five priorities, fill and drain", five_priorities, fill_and_drain),
    ("five priorities, steady", five_priorities, steady),
    ("five priorities, a third removed", five_priorities, with_removals),
    ("all priorities different, fill and drain", all_different, fill_and_drain),
)


def measure(
    make: Callable[[], Structure],
    priorities: Callable[[], Iterator[int]],
    load: Callable[[Structure, list[EngineJob]], None],
) -> float:
    """Jobs a second through the structure."""
    best = float("inf")
    options = {priority: JobOptions(priority=priority) for priority in set(priorities())}
    for _ in range(ROUNDS):
        jobs = [
            EngineJob(str(number), "q", "job", b"", options[priority], State.WAITING, 0, 0)
            for number, priority in enumerate(priorities())
        ]
        structure = make()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        load(structure, jobs)
        best = min(best, time.perf_counter() - start)
        gc.enable()
    return JOBS / best


def main() -> None:
    """Measure and print."""
    version = f"{platform.python_implementation()} {platform.python_version()}"
    print(f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} cores, {version}")
    print(f"{JOBS:,} jobs, best of {ROUNDS}; jobs a second in and out\n")
    width = max(len(name) for name, _, _ in LOADS)
    print(" " * width, *(f"{name:>28}" for name in STRUCTURES))
    for name, priorities, load in LOADS:
        rates = [measure(make, priorities, load) for make in STRUCTURES.values()]
        print(f"{name:{width}}", *(f"{rate:>28,.0f}" for rate in rates))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
