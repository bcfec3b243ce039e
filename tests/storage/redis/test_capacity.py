"""Full queues on Redis: the drop order, and jobs that are accepted regardless."""

from contextlib import closing

import pytest

from djqueue.core.errors import QueueFullError
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import batch, claim, completing, counts, enqueue_many, finish, state

OLDEST_GO, LOWEST_GO, SMALL = "oldest-go", "lowest-go", "small"
POLICIES = {
    OLDEST_GO: QueuePolicy(max_size=5, when_full="drop_oldest"),
    LOWEST_GO: QueuePolicy(max_size=5, when_full="drop_lowest"),
    SMALL: QueuePolicy(max_size=5),
}


@pytest.fixture
def storage(redis_options):
    with closing(RedisStorage(policies=POLICIES, clock=FakeClock(), **redis_options)) as made:
        yield made


def entries(storage, redis_server, queue):
    return redis_server.run("ZCARD", storage.keys(queue).key("drops"))


@pytest.mark.parametrize("queue", [OLDEST_GO, LOWEST_GO])
def test_ended_jobs_leave_few_entries_in_the_drop_order(storage, redis_server, queue):
    for number in range(60):
        storage.enqueue([batch(4, queue=queue, priority=number % 3)])
        finish(storage, *map(completing, claim(storage, 4, queues=[queue])))

    assert counts(storage, queue) == {State.COMPLETED: 240}
    assert entries(storage, redis_server, queue) < 40
    storage.sweep()
    storage.sweep()
    assert entries(storage, redis_server, queue) == 0


def test_full_queue_accepts_jobs_from_the_relay(storage):
    enqueue_many(storage, 5, queue=SMALL)

    assert storage.capabilities.enqueue_directly([batch(queue=SMALL, ids=["late"])])[0].status == "queued"

    assert state(storage, "late", SMALL) is State.WAITING
    with pytest.raises(QueueFullError):
        storage.enqueue([batch(queue=SMALL)])


def test_batches_for_queues_with_room_are_stored_when_another_queue_is_full(storage):
    enqueue_many(storage, 5, queue=SMALL)

    with pytest.raises(QueueFullError, match="queue 'small'"):
        storage.enqueue([batch(queue=SMALL), batch(2, queue="other")])

    assert counts(storage, "other") == {State.WAITING: 2}


def test_obliterated_queue_has_no_drop_order(storage, redis_server):
    enqueue_many(storage, 5, queue=OLDEST_GO)

    storage.queues.obliterate(OLDEST_GO)

    assert entries(storage, redis_server, OLDEST_GO) == 0
