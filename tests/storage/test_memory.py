"""The memory storage keeps the contract, with few shards and with many."""

from contextlib import closing

import pytest

from djqueue.core.states import State
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import POLICIES, StorageContract
from djqueue.testing.factories import (
    QUEUE,
    a_completed_job,
    an_active_job,
    claim,
    claim_ids,
    completing,
    enqueue,
    enqueue_many,
    finish,
    state,
)
from tests.core.anatomy import check_empty, check_engine
from tests.storage.thorough import ManyExamples

DAY = 86_400_000


class MemoryContract(ManyExamples, StorageContract):
    """The contract over an engine with a clock that the tests move."""

    cores: int

    @pytest.fixture
    def storage(self):
        self.clock = FakeClock()
        with closing(MemoryStorage(clock=self.clock, policies=POLICIES, cores=self.cores)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)

    def check(self, storage):
        check_engine(storage.engine)

    def check_empty(self, storage):
        for queue in storage.queues.names():
            ids = [job.id for job in storage.reads.page(queue, None, 1_000)]
            storage.jobs.cancel(queue, ids)
        self.clock.advance(60_000)
        storage.sweep()
        # A dependent of a removed job fails, so it takes a second pass.
        for queue in storage.queues.names() * 2:
            storage.queues.clean(queue, frozenset(State), self.clock.now() + 1)
        self.clock.advance(2 * 3_600_000)
        storage.sweep()
        check_empty(storage.engine)

    # What people and NTP do to the wall clock.

    @pytest.mark.parametrize("jump", [-DAY, DAY])
    def test_a_wall_clock_that_is_set_loses_no_lease(self, storage, jump):
        claimed = an_active_job(storage)
        self.clock.jump(jump)

        assert storage.sweep().stalled == 0

        self.clock.advance(claimed.lease + 1)
        assert storage.sweep().stalled == 1

    @pytest.mark.parametrize("jump", [-DAY, DAY])
    def test_a_wall_clock_that_is_set_holds_up_no_waiting_job(self, storage, jump):
        ids = [*enqueue_many(storage, 2), enqueue(storage, id="named")]
        self.clock.jump(jump)
        ids.append(enqueue(storage))

        assert claim_ids(storage, 9) == ids
        assert len(set(ids)) == 4

    def test_a_wall_clock_that_is_set_back_keeps_results(self, storage):
        done = a_completed_job(storage, result_ttl=1_000)
        self.clock.jump(-DAY)
        storage.sweep()

        assert state(storage, done) is State.COMPLETED


class TestOnFourShards(MemoryContract):
    cores = 1


class TestOnSixtyFourShards(MemoryContract):
    cores = 64

    @pytest.mark.thorough
    def test_random_operations_behave_like_the_reference(self, storage):
        super().test_random_operations_behave_like_the_reference(storage)


def test_it_says_that_nothing_survives():
    assert MemoryStorage().describe() == "memory (this process only, not persistent)"


def test_two_storages_share_nothing():
    one, other = MemoryStorage(), MemoryStorage()
    enqueue(one, id="a")

    assert other.queues.names() == []
    assert claim(other) == []
    assert state(other, "a", QUEUE) is None


def test_without_a_clock_it_goes_by_the_machines():
    storage = MemoryStorage()
    enqueue(storage, delay=1)
    enqueue(storage, delay=DAY)
    an_active_job(storage, queue="other")

    while not (claimed := claim(storage, queues=[QUEUE])):
        storage.sweep()

    assert finish(storage, completing(claimed[0])) == [True]
    assert storage.reads.counts(QUEUE)[State.DELAYED] == 1
