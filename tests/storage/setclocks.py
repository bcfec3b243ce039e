"""The clock of a storage is set: the same rule for each storage whose tests inject the clock."""

import pytest

from djqueue.core.policies import DeadLetterPolicy, QueuePolicy, Rate
from djqueue.core.states import State
from djqueue.testing.contract import POLICIES, StorageCase
from djqueue.testing.factories import (
    QUEUE,
    an_active_job,
    batch,
    claim_ids,
    claim_one,
    completing,
    enqueue,
    enqueue_many,
    failing,
    finish,
    retrying,
    state,
)

HOUR = 3_600_000
HEALING = "healing-in-two-hours"
SET_CLOCK_POLICIES = {
    **POLICIES,
    HEALING: QueuePolicy(dead_letters=DeadLetterPolicy(auto_retries=1, auto_retry_delay=2 * HOUR)),
}


def delayed(storage):
    return QUEUE, enqueue(storage, delay=2 * HOUR)


def retried(storage):
    job_id = enqueue(storage)
    finish(storage, retrying(claim_one(storage), delay=2 * HOUR))
    return QUEUE, job_id


def dead(storage):
    job_id = enqueue(storage, queue=HEALING)
    finish(storage, failing(claim_one(storage, queues=[HEALING])))
    return HEALING, job_id


def expiring(storage):
    return QUEUE, enqueue(storage, ttl=2 * HOUR)


WAITS = {
    delayed: State.WAITING,
    retried: State.WAITING,
    dead: State.WAITING,
    expiring: State.FAILED,
}
"""Jobs that something happens to in two hours, and their state afterwards."""


class SetClocksCase(StorageCase):
    """Times are points on the storage's clock, and move with it when it is set."""

    @pytest.mark.parametrize("jump", [-HOUR, HOUR])
    @pytest.mark.parametrize("make", WAITS)
    def test_what_waits_for_a_time_happens_when_the_clock_shows_it(self, storage, make, jump):
        queue, job_id = make(storage)
        before = state(storage, job_id, queue)

        self.clock.jump(jump)
        self.advance(2 * HOUR - jump - 1_000)
        storage.sweep()
        assert state(storage, job_id, queue) is before

        self.advance(1_000)
        storage.sweep()
        assert state(storage, job_id, queue) is WAITS[make]

    @pytest.mark.parametrize("jump", [-HOUR, HOUR])
    def test_unique_key_is_free_when_the_clock_shows_its_time(self, storage, jump):
        enqueue(storage, unique_key="k", unique_ttl=2 * HOUR)

        self.clock.jump(jump)
        self.advance(2 * HOUR - jump - 1_000)
        assert [one.status for one in storage.enqueue([batch(unique_key="k")])] == ["duplicate"]

        self.advance(1_000)
        assert [one.status for one in storage.enqueue([batch(unique_key="k")])] == ["queued"]

    def test_blocked_job_is_not_due_before_the_time_of_its_enqueue(self, storage):
        first = enqueue(storage)
        dependent = enqueue(storage, depends_on=((QUEUE, first),))

        self.clock.jump(-HOUR)
        finish(storage, completing(claim_one(storage)))

        assert state(storage, dependent) is State.DELAYED
        self.advance(HOUR)
        assert claim_ids(storage) == [dependent]

    @pytest.mark.parametrize("jump", [-HOUR, HOUR])
    def test_jobs_that_wait_for_a_worker_keep_their_order(self, storage, jump):
        ids = enqueue_many(storage, 2)
        self.clock.jump(jump)
        ids.append(enqueue(storage))

        assert claim_ids(storage, 9) == ids


class MonotonicCase(StorageCase):
    """Leases and rates count the time that passes, whatever the wall clock shows."""

    @pytest.mark.parametrize("jump", [-HOUR, HOUR])
    def test_setting_the_clock_changes_no_lease(self, storage, jump):
        claimed = an_active_job(storage)
        self.clock.jump(jump)

        self.advance(claimed.lease - 1)
        assert storage.sweep().stalled == 0

        self.advance(1)
        assert storage.sweep().stalled == 1

    @pytest.mark.parametrize("jump", [-HOUR, HOUR])
    def test_setting_the_clock_changes_no_rate(self, storage, jump):
        storage.queues.set_limits(QUEUE, rate=Rate(1, 60_000))
        first, second = enqueue_many(storage, 2)
        assert claim_ids(storage, 9) == [first]
        self.clock.jump(jump)

        self.advance(59_999)
        assert claim_ids(storage, 9) == []

        self.advance(1)
        assert claim_ids(storage, 9) == [second]
