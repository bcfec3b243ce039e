"""The memory storage passes the conformance suite, with few shards and with many."""

from contextlib import closing

import pytest

from djqueue.core.job import ItemMark
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import POLICIES, StorageContract
from djqueue.testing.factories import (
    QUEUE,
    an_active_job,
    claim,
    completing,
    enqueue,
    finish,
    state,
)
from tests.core.anatomy import check_empty, check_engine
from tests.storage.setclocks import SET_CLOCK_POLICIES, MonotonicCase, SetClocksCase
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


class TestOnFourShards(MemoryContract):
    cores = 1


@pytest.mark.thorough
class TestOnSixtyFourShards(MemoryContract):
    cores = 64

    @pytest.mark.thorough
    def test_random_operations_behave_like_the_reference(self, storage):
        super().test_random_operations_behave_like_the_reference(storage)


class TestSetClocks(SetClocksCase, MonotonicCase):
    @pytest.fixture
    def storage(self):
        self.clock = FakeClock()
        with closing(MemoryStorage(clock=self.clock, policies=SET_CLOCK_POLICIES)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


def test_description_says_that_memory_is_not_persistent():
    assert MemoryStorage().describe() == "memory (this process only, not persistent)"


def test_two_memory_storages_share_no_jobs():
    one, other = MemoryStorage(), MemoryStorage()
    enqueue(one, id="a")

    assert other.queues.names() == []
    assert claim(other) == []
    assert state(other, "a", QUEUE) is None


def test_reads_create_neither_queues_nor_limiters():
    storage = MemoryStorage(policies={"q": QueuePolicy(limiter="l")})
    reads, queues = storage.reads, storage.queues
    some = [
        reads.jobs("q", ["a"]),
        reads.items("q", [ItemMark("a")]),
        reads.states("q", ["a"]),
        reads.find("a", ["q"]),
        reads.explain("q", "a"),
        reads.flow("q", "a"),
        reads.dependents(("q", "a"), 9),
        reads.page("q", None, 9),
        reads.cursor_page("q", State.WAITING, 9),
        reads.jobs_about("subject", 9, queues=["q"]),
        reads.dead_letters("q"),
        reads.dead_letter_page("q", 9),
        reads.counts("q"),
        reads.waiting_names("q"),
        reads.concurrency_keys("q", 9, ["g"]),
        reads.key_modes(["q"]),
        reads.overview(["q"]),
        reads.series(["q"], 0, 60_000, 60_000),
        reads.cumulative(["q"]),
        queues.is_paused("q"),
        queues.limits("q"),
        queues.key_limits("q"),
        storage.limiters.state("l"),
        storage.events.subscribe("q", print),
    ]

    assert len(some) == 24
    assert queues.names() == []
    assert storage.engine.context.limiters == {}


def test_memory_storage_uses_the_system_clock_by_default():
    storage = MemoryStorage()
    enqueue(storage, delay=1)
    enqueue(storage, delay=DAY)
    an_active_job(storage, queue="other")

    while not (claimed := claim(storage, queues=[QUEUE])):
        storage.sweep()

    assert finish(storage, completing(claimed[0])) == [True]
    assert storage.reads.counts(QUEUE)[State.DELAYED] == 1
