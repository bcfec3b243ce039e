"""Compares an engine with itself and with the tables."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db import connection

from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, State

Fail = Callable[[str], None]
TABLE = "djqueue_job"


def read_states() -> dict[JobKey, State]:
    """The state of every job in the tables, read past all faults."""
    rows = connection.connection.execute(f"SELECT queue, job_id, state FROM {TABLE}")
    return {(queue, job_id): State(state) for queue, job_id, state in rows}


def compare_with_tables(scheduler: Any, fail: Fail) -> None:
    """Check that the rows are those of the engine's jobs; the journal has nothing left to write."""
    rows = connection.connection.execute(
        f"SELECT queue, job_id, state, attempts, failures, stalls FROM {TABLE} WHERE NOT inbox"
    )
    tables = {(row[0], row[1]): row[2:] for row in rows}
    for shard in scheduler.engine.context.shards:
        for queue in shard.queues.values():
            for job in queue.jobs.values():
                row = tables.pop((job.queue, job.id), None)
                expected = (job.state.value, job.attempts, job.failures, job.stalls)
                if row is None:
                    fail(f"the engine's job {job.queue}:{job.id} ({job.state}) has no row")
                elif row != expected:
                    fail(f"the row of {job.queue}:{job.id} says {row}, and the engine {expected}")
    for key, row in tables.items():
        if State(row[0]) in LIVE or row[0] == State.FAILED.value:
            fail(f"the row of {key} is {row[0]}, and the engine does not know the job")


def count_jobs(engine: Any, fail: Fail) -> None:
    """Check that an engine's structures hold exactly its jobs, and no limit is exceeded."""
    active: Counter[str] = Counter()
    for place in engine.context.processing:
        active.update(place.counts)
        if sum(place.counts.values()) != len(place.active):
            fail("a processing shard's counts are not those of its jobs")
    weights: Counter[Any] = Counter()
    for shard in engine.context.shards:
        for queue in shard.queues.values():
            _count_queue(engine, queue, active[queue.name], weights, fail)
    for shared, used in weights.items():
        if shared.state().used != used:
            fail(f"a limiter counts {shared.state().used} permits, and its jobs have {used}")


def _count_queue(engine: Any, queue: Any, active: int, weights: Counter[Any], fail: Fail) -> None:
    states: Counter[State] = Counter()
    owners: Counter[str] = Counter()
    groups: Counter[str] = Counter()
    taken = 0
    for job in queue.jobs.values():
        state, options = job.state, job.options
        states[state] += 1
        if state not in LIVE:
            continue
        if options.unique_key is not None and state is not State.BLOCKED:
            owners[options.unique_key] += 1
        if state is State.ACTIVE:
            taken += options.weight
            if options.group is not None:
                groups[options.group] += 1
            if queue.shared is not None:
                weights[queue.shared] += options.weight
    if queue.shared is not None:
        weights[queue.shared] += 0
    counted = (queue.waiting, queue.delayed.size, queue.blocked, active)
    found = tuple(states[state] for state in (State.WAITING, State.DELAYED, State.BLOCKED, State.ACTIVE))
    if counted != found:
        fail(f"{queue.name} counts {counted} waiting, delayed, blocked and active jobs, and has {found}")
    if any(count > 1 for count in owners.values()):
        fail(f"two live jobs of {queue.name} have one unique key: {_owners(queue)}")
    if any(count > 1 for count in groups.values()):
        fail(f"two jobs of one group of {queue.name} are active: {groups}")
    most = queue.limiter.concurrency
    if most is not None and taken > most:
        fail(f"{taken} jobs of {queue.name} are active, and {most} may be")


def _owners(queue: Any) -> str:
    live = [job for job in queue.jobs.values() if job.state in LIVE and job.options.unique_key is not None]
    return ", ".join(
        f"{job.id} ({job.state}, {job.options.unique_key}, {job.options.on_duplicate})" for job in live
    )
