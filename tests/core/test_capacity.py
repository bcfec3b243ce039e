"""Which job goes when a queue is full."""

from djqueue.core.capacity import COMPACT_FROM, DropOrder
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State
from tests.core.making import Bench, make_job


def an_order(**given):
    return DropOrder(lambda job: True, **given)


def test_the_oldest_goes_first():
    order = an_order(by_priority=False)
    jobs = [make_job(created_at=at, priority=at) for at in (3, 1, 2)]
    for job in jobs:
        order.push(job, 3)

    assert order.first(-9) is jobs[1]


def test_of_the_lowest_priority_the_oldest_goes_first():
    order = an_order(by_priority=True)
    jobs = [make_job(priority=priority) for priority in (1, 0, 0)]
    order.extend(jobs)

    assert order.first(0) is jobs[1]
    assert order.first(-1) is None


def test_a_job_that_has_started_or_is_gone_is_passed_over():
    there = set()
    order = DropOrder(there.__contains__, by_priority=False)
    started, active, gone, kept = (make_job() for _ in range(4))
    started.started_at = 5
    active.state = State.ACTIVE
    there |= {started, active, kept}
    order.extend([started, active, gone, kept])

    assert order.first(0) is kept
    assert len(order) == 1


def test_what_has_gone_leaves_no_entries_behind_for_long():
    order = an_order(by_priority=False)
    for _ in range(20 * COMPACT_FROM):
        job = make_job()
        order.push(job, 1)
        job.state = State.COMPLETED

    assert len(order) <= COMPACT_FROM + 4


def test_a_policy_given_later_knows_the_jobs_that_are_there():
    bench = Bench()
    for job_id in ("a", "b", "c"):
        bench.enqueue(job_id)
    bench.engine.queues.configure("q", QueuePolicy(max_size=3, when_full="drop_oldest"))

    bench.enqueue("d")

    assert bench.state("a") is State.CANCELLED
    assert [claimed.id for claimed in bench.claim(9)] == ["b", "c", "d"]
