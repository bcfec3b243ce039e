"""Limiters in the database: what was said to them outlives a restart."""

import pytest

from djqueue import models
from djqueue.core.limiter import Rate
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy
from djqueue.testing.factories import claim, enqueue_many
from tests.support import eventually

DAY = 86_400_000
"""Milliseconds in which a rate adds no token, however slow the machine is."""
QUEUES = ("charges", "refunds")
POLICIES = {queue: QueuePolicy(limiter="stripe") for queue in QUEUES}


@pytest.fixture
def make(make_storage):
    def make(**limits):
        # A client on a busy machine may wait longer for the scheduler than the default allows.
        return make_storage(policies=POLICIES, limiters={"stripe": LimiterPolicy(**limits)})

    return make


@pytest.mark.parametrize("said", [(Rate(2, 60_000), None), (None, 5), (None, None)])
def test_limiter_override_survives_restart(make, said):
    first = make(concurrency=3)
    first.connect()
    first.limiters.set("stripe", *said)
    first.close()
    second = make(concurrency=1)
    row = models.LimiterState.objects.get(name="stripe")
    assert (row.rate_capacity, row.concurrency) == (said[0] and said[0].capacity, said[1])
    assert second.limiters.state("stripe")[:2] == said
    second.connect()

    assert second.limiters.state("stripe")[:2] == said
    for queue in QUEUES:
        enqueue_many(second, 5, queue=queue)
    assert len(claim(second, 20)) == (2 if said[0] else said[1] or 10)


def test_limiter_override_equal_to_settings_is_removed(make):
    first = make(concurrency=3)
    first.connect()
    first.limiters.set("stripe", None, 5)
    first.limiters.set("stripe", None, 3)
    assert not models.LimiterState.objects.exists()
    first.close()

    assert make(concurrency=4).limiters.state("stripe") == (None, 4, 0, None, ())


def test_client_sets_limits_with_and_without_scheduler(make):
    client, scheduler = make(concurrency=3), make(concurrency=3)
    client.limiters.set("stripe", Rate(9, DAY), 2)
    assert client.limiters.state("stripe") == (Rate(9, DAY), 2, 0, 9, ())
    scheduler.connect()
    enqueue_many(scheduler, 5, queue=QUEUES[0])
    assert len(claim(scheduler, 10)) == 2
    # A read falls back to the tables, which count no permits, if the scheduler needs longer than a second.
    state = eventually(lambda: (found := client.limiters.state("stripe")).used and found)
    assert (state.used, state.free, state.tokens, state.waiting) == (2, 0, 7, QUEUES[:1])

    client.limiters.set("stripe", None, 4)

    assert len(claim(scheduler, 10)) == 2


def test_scheduler_that_died_leaves_no_permit_taken(make):
    first = make(concurrency=2)
    first.connect()
    enqueue_many(first, 5, queue=QUEUES[0])
    claim(first, 2)
    first.close()
    second = make(concurrency=2)
    second.connect()

    assert second.limiters.state("stripe").used == 0
    # Jobs with a stall are claimed alone: each worker gets one.
    assert [len(claim(second, 9, worker=f"worker-{number}")) for number in range(3)] == [1, 1, 0]
