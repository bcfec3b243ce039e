"""Eviction of jobs from full queues."""

from djqueue.core.engine.joblists import COMPACT_FROM, DropOrder
from djqueue.core.states import State
from tests.core.making import make_job


def an_order(**given):
    return DropOrder(lambda job: True, **given)


def test_oldest_job_is_evicted_first():
    order = an_order(by_priority=False)
    jobs = [make_job(created_at=at, priority=at) for at in (3, 1, 2)]
    for job in jobs:
        order.push(job, 3)

    assert order.first(-9) is jobs[1]


def test_oldest_job_of_the_lowest_priority_is_evicted_first():
    order = an_order(by_priority=True)
    jobs = [make_job(priority=priority) for priority in (1, 0, 0)]
    for job in jobs:
        order.push(job, len(jobs))

    assert order.first(0) is jobs[1]
    assert order.first(-1) is None


def test_started_and_removed_jobs_are_not_evicted():
    there = set()
    order = DropOrder(there.__contains__, by_priority=False)
    started, active, gone, kept = (make_job() for _ in range(4))
    started.started_at = 5
    active.state = State.ACTIVE
    there |= {started, active, kept}
    for job in (started, active, gone, kept):
        order.push(job, 4)

    assert order.first(0) is kept
    assert len(order) == 1


def test_entries_of_removed_jobs_are_cleaned_up():
    order = an_order(by_priority=False)
    for _ in range(20 * COMPACT_FROM):
        job = make_job()
        order.push(job, 1)
        job.state = State.COMPLETED

    assert len(order) <= COMPACT_FROM + 4
