"""Random operations on a queue with all bounds in use, to compare byte counters with the sums."""

from collections.abc import Callable, Collection, Iterator
from random import Random
from typing import Any

from djqueue.core.enginejob import size_of_error
from djqueue.core.job import JobFailure
from djqueue.core.states import State
from djqueue.storage.base import Storage
from djqueue.testing import factories as f
from djqueue.testing.contract.case import MEASURED, WHILE, bounded

ELSEWHERE = "elsewhere"
PARENTS = "parents"
IDS = ["a", "b", "c:{d}", "ü"]
TIMES = [None, WHILE, 8 * WHILE, 3_600_000]


def walk(storage: Storage, seed: int, advance: Callable[[int], None], steps: int) -> Iterator[int]:
    """One operation after another; yields after some rounds of upkeep."""
    random = Random(seed)
    bounded(storage, MEASURED)
    for step in range(steps):
        _step(storage, random, advance)
        if random.random() < 0.2:
            advance(random.choice([0, WHILE // 2, WHILE, 3 * WHILE]))
            storage.sweep()
            # The first sweep may let go of a record that has expired meanwhile: no page has it any more.
            storage.sweep()
            yield step
    while any(storage.sweep()):
        pass
    yield steps


def _step(storage: Storage, random: Random, advance: Callable[[int], None]) -> None:
    ids = random.sample(IDS, 2)
    operation = random.choice(
        ["enqueue"] * 4
        + ["finish"] * 6
        + ["cancel", "remove", "retry", "move", "clean", "obliterate", "update", "replace_payload"]
        + ["depend", "depend", "give up"]
    )
    if operation == "enqueue":
        options: dict[str, Any] = {
            "result_ttl": random.choice(TIMES),
            "retention": random.choice([None, 60_000]),
        }
        named = random.choice([ids, None])
        payloads = [bytes(random.randrange(150)) for _ in range(2)]
        queue = random.choice([MEASURED, MEASURED, ELSEWHERE])
        storage.enqueue([f.batch(2, queue=queue, payloads=payloads, ids=named, **options)])
    elif operation == "finish":
        for claimed in f.claim(storage, random.randrange(4)):
            if random.random() < 0.3:
                storage.report([f.report_of(claimed, 0.5, [(1, "line")])])
            ending = random.choice(["complete", "complete", "retry", "release", "fail", "cancel", "lost"])
            if ending == "complete":
                result = random.choice([None, b"", bytes(random.randrange(150))])
                f.finish(storage, f.completing(claimed, result))
            elif ending == "fail":
                error = random.choice([None, JobFailure("T", "\N{SNOWMAN}" * random.randrange(30), "t")])
                f.finish(storage, f.failing(claimed, error=error))
            elif ending == "lost":
                advance(31_000)
            else:
                f.finish(storage, f.ENDINGS[ending](claimed))
    elif operation == "clean" and random.random() < 0.3:
        states = frozenset(random.sample(sorted(State), 2)) - {State.ACTIVE}
        storage.queues.clean(MEASURED, states, f.job(storage, f.enqueue(storage)).created_at, limit=2)
    elif operation == "obliterate" and random.random() < 0.2:
        storage.queues.obliterate(MEASURED, force=True)
    elif operation == "move":
        storage.jobs.move(ELSEWHERE, ids, MEASURED)
    elif operation == "depend":
        there = [one for one, state in zip(IDS, storage.reads.states(MEASURED, IDS), strict=True) if state]
        needs = tuple((MEASURED, one) for one in there)
        if needs:
            f.enqueue(storage, queue=PARENTS, depends_on=needs, on_dependency_failure="ignore")
    elif operation == "give up":
        storage.jobs.cancel(PARENTS, [parent.id for parent in storage.reads.page(PARENTS, None, 10)])
    elif operation == "update":
        storage.jobs.update(MEASURED, ids, random.randrange(2), bytes(random.randrange(150)))
    elif operation == "replace_payload":
        for record in filter(None, storage.reads.jobs(MEASURED, ids)):
            payload, is_dead = bytes(random.randrange(150)), record.state is State.FAILED
            storage.jobs.replace_payload(MEASURED, record.id, payload, record.payload, retry=is_dead)
    elif operation in ("cancel", "remove", "retry"):
        getattr(storage.jobs, operation)(MEASURED, ids)


def sums(storage: Storage, held: Collection[str]) -> dict[str, int]:
    """Bytes by outcome, and of results, of what the storage says that it has; without those that are held."""
    found = {"completed": 0, "cancelled": 0, "failed": 0, "results": 0}
    for record in storage.reads.page(MEASURED, None, 10_000):
        if record.state.value in found and record.id not in held:
            error = 0 if record.error is None else size_of_error(record.error)
            found[record.state.value] += len(record.payload) + error
            found["results"] += len(record.result or b"")
    return found
