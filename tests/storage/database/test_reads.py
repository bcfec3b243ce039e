"""Reads and tallies of the SQL storage: few statements, and no number lost or counted twice."""

import pytest
from django.db import transaction

from djqueue import models
from djqueue.core.errors import ConfigurationError
from djqueue.core.metrics import DAY
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.database.transaction import Tx
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import QUEUE, a_completed_job, enqueue, enqueue_many, worker
from djqueue.testing.waiting import together


@pytest.fixture
def make(tables):
    clock = FakeClock()
    made = []

    def make(mode="optional"):
        made.append(DatabaseStorage(clock=clock, policies={QUEUE: QueuePolicy(key_mode=mode)}))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


@pytest.mark.parametrize(
    ("first", "second"), [("keyed", "optional"), ("global", "keyed"), ("optional", "global")]
)
def test_process_configured_for_another_mode_is_rejected(make, first, second):
    enqueue(make(first), concurrency_key="g")
    message = f"'{QUEUE}'.*'{first}'.*'{second}'"

    with pytest.raises(ConfigurationError, match=message):
        enqueue(make(second), concurrency_key="g")
    with pytest.raises(ConfigurationError, match=message):
        make(second).connect()
    make(first).connect()


def test_obliterated_queue_may_have_another_mode(make):
    first = make("keyed")
    enqueue(first, concurrency_key="g")
    first.queues.obliterate(QUEUE)

    enqueue(make("global"))

    with pytest.raises(ConfigurationError):
        enqueue(make("keyed"), concurrency_key="g")


def test_queue_of_rolled_back_enqueue_is_recorded_by_the_next_one(make):
    storage = make()
    with transaction.atomic():
        enqueue(storage)
        transaction.set_rollback(True)

    enqueue(storage)

    assert models.QueueState.objects.filter(name=QUEUE).exists()


def test_overview_of_many_queues_takes_few_statements(make, monkeypatch):
    storage = make()
    for number in range(30):
        enqueue_many(storage, 3, queue=f"q{number}")
    statements = []
    rows = Tx.rows
    monkeypatch.setattr(Tx, "rows", lambda tx, *given: (statements.append(given), rows(tx, *given))[1])

    found = storage.reads.overview()

    assert [one.counts[State.WAITING] for one in found.queues] == [3] * 30
    assert len(statements) <= 8


def test_sweep_leaves_one_tally_for_each_queue(make):
    storage = make()
    for _ in range(5):
        a_completed_job(storage)
    before = storage.reads.overview([QUEUE])

    storage.sweep()

    assert models.QueueTally.objects.filter(queue=QUEUE).count() == 1
    assert storage.reads.overview([QUEUE]) == before


def test_concurrent_sweeps_count_each_enqueue_once(make):
    storage = make()
    start = storage.clock.now()

    def fill():
        for _ in range(15):
            enqueue(storage)

    def sweep():
        for _ in range(15):
            storage.sweep()

    together([fill, fill, sweep, sweep, sweep])
    storage.sweep()

    [found] = storage.reads.overview([QUEUE]).queues
    [bucket] = storage.reads.series([QUEUE], start, start + 1, DAY)
    assert (found.counts[State.WAITING], found.totals.enqueued, bucket.enqueued) == (30, 30, 30)
    assert storage.reads.cumulative([QUEUE])[0].enqueued == 30


def test_command_of_another_process_is_received_with_the_next_heartbeat(make):
    mine, other = make(), make()
    mine.workers.register(worker("w1"))

    assert other.workers.control("w1", "quiet") == "asked"

    assert mine.workers.register(worker("w1")) == ("quiet",)


def test_silent_worker_is_not_alive_before_a_sweep(make):
    storage = make()
    storage.workers.register(worker("w1"))
    storage.clock.advance(61_000)

    assert storage.workers.all() == []
    assert storage.workers.control("w1", "quiet") == "not_found"


def test_large_queue_is_counted_by_name_once_in_a_while(make, monkeypatch):
    monkeypatch.setattr("djqueue.storage.database.reads.MAX_COUNTED_BY_NAME", 9)
    storage = make()
    enqueue_many(storage, 8, name="a")
    enqueue_many(storage, 2, name="b")
    assert storage.reads.waiting_names(QUEUE) == {"a": 8, "b": 2}

    enqueue_many(storage, 10, name="b")
    assert storage.reads.waiting_names(QUEUE) == {"a": 16, "b": 4}

    storage.clock.advance(30_000)
    assert storage.reads.waiting_names(QUEUE) == {"a": 8, "b": 12}
