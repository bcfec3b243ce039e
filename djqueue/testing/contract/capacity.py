"""Capacity: the maximum number of pending jobs in a queue, and what an enqueue beyond it does."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from djqueue.core.errors import QueueFullError
from djqueue.core.job import EnqueueResult
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    UPSTREAM,
    a_completed_job,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    retrying,
    state,
)
from ..waiting import PATIENCE
from .case import IMPATIENT, LATER, LOWEST_GO, MAX_SIZE, OLDEST_GO, PATIENT, SMALL, StorageCase, snapshot

Free = Callable[[Storage], object]
FREEING: dict[str, Free] = {
    "claimed": lambda storage: claim(storage, queues=[PATIENT]),
    "cancelled": lambda storage: storage.jobs.cancel(PATIENT, ["0"]),
    "removed": lambda storage: storage.jobs.remove(PATIENT, ["0"]),
    "cleaned": lambda storage: storage.queues.clean(PATIENT, frozenset({State.WAITING}), 2**52),
}
"""Ways to make room in a full queue."""


def fill(storage: Storage, queue: str, **options: object) -> list[str]:
    """Fill the queue with as many jobs as may wait; their ids are numbers."""
    return [enqueue(storage, queue=queue, id=f"{number}", **options) for number in range(MAX_SIZE)]


@contextmanager
def unchanged(storage: Storage, queue: str) -> Iterator[None]:
    """Assert that the block leaves the full queue unchanged."""
    before = snapshot(storage, queue)
    yield
    assert snapshot(storage, queue) == before


class CapacityContract(StorageCase):
    """Cases about full queues."""

    @pytest.mark.parametrize("queue", [SMALL, IMPATIENT])
    def test_full_queue_rejects_jobs(self, storage: Storage, queue: str) -> None:
        fill(storage, queue)

        with (
            unchanged(storage, queue),
            pytest.raises(QueueFullError, match=f"queue '{queue}' is full: its MAX_SIZE allows 3"),
        ):
            storage.enqueue([batch(queue=queue)])

    def test_waiting_delayed_and_blocked_jobs_count_toward_queue_size(self, storage: Storage) -> None:
        upstream = enqueue(storage, queue=UPSTREAM)
        enqueue(storage, queue=SMALL)
        enqueue(storage, queue=SMALL, delay=LATER)
        enqueue(storage, queue=SMALL, depends_on=((UPSTREAM, upstream),))

        with pytest.raises(QueueFullError):
            storage.enqueue([batch(queue=SMALL)])

    def test_active_and_finished_jobs_do_not_count_toward_queue_size(self, storage: Storage) -> None:
        a_completed_job(storage, queue=SMALL)
        a_failed_job(storage, queue=SMALL)
        storage.jobs.cancel(SMALL, [enqueue(storage, queue=SMALL)])
        an_active_job(storage, queue=SMALL)

        assert len(enqueue_many(storage, MAX_SIZE, queue=SMALL)) == MAX_SIZE

    def test_claim_frees_space_in_a_full_queue(self, storage: Storage) -> None:
        fill(storage, SMALL)
        claim(storage, 2, queues=[SMALL])

        enqueue_many(storage, 2, queue=SMALL)

        with pytest.raises(QueueFullError):
            storage.enqueue([batch(queue=SMALL)])

    def test_batch_that_does_not_fit_is_rejected_as_a_whole(self, storage: Storage) -> None:
        enqueue(storage, queue=SMALL)

        with unchanged(storage, SMALL), pytest.raises(QueueFullError, match="3 more do not fit"):
            storage.enqueue([batch(3, queue=SMALL)])
        with unchanged(storage, SMALL), pytest.raises(QueueFullError):
            storage.enqueue([batch(queue=SMALL, ids=["a", "b", "c"], priority=2)])
        assert len(enqueue_many(storage, 2, queue=SMALL)) == 2

    def test_batch_larger_than_the_queue_is_rejected_without_waiting(self, storage: Storage) -> None:
        with pytest.raises(QueueFullError):
            storage.enqueue([batch(2_500, queue=PATIENT)])

        assert counts(storage, PATIENT) == {}

    def test_full_queue_does_not_affect_other_queues(self, storage: Storage) -> None:
        fill(storage, SMALL)

        assert len(enqueue_many(storage, 10)) == 10

    def test_duplicate_is_accepted_by_a_full_queue(self, storage: Storage) -> None:
        fill(storage, SMALL, unique_key=None)
        [answer] = storage.enqueue([batch(queue=SMALL, ids=["0"])])
        assert (answer.status, answer.id) == ("duplicate", "0")

        storage.jobs.cancel(SMALL, ["0"])
        enqueue(storage, queue=SMALL, id="keyed", unique_key="k")
        [answer] = storage.enqueue([batch(queue=SMALL, unique_key="k")])
        assert (answer.status, answer.id) == ("duplicate", "keyed")

    def test_replacing_job_is_accepted_by_a_full_queue(self, storage: Storage) -> None:
        enqueue(storage, queue=SMALL, id="old", unique_key="k")
        enqueue_many(storage, MAX_SIZE - 1, queue=SMALL)

        [answer] = storage.enqueue([batch(queue=SMALL, unique_key="k", on_duplicate="replace")])

        assert (answer.status, answer.replaced) == ("queued", "old")

    def test_successor_is_rejected_by_a_full_queue(self, storage: Storage) -> None:
        an_active_job(storage, queue=SMALL, unique_key="k")
        enqueue_many(storage, MAX_SIZE, queue=SMALL)

        with unchanged(storage, SMALL), pytest.raises(QueueFullError):
            storage.enqueue([batch(queue=SMALL, unique_key="k", on_duplicate="keep_last_if_active")])

    def test_retried_jobs_are_accepted_by_a_full_queue(self, storage: Storage) -> None:
        claimed = an_active_job(storage, queue=SMALL)
        dead = a_failed_job(storage, queue=SMALL)
        fill(storage, SMALL)

        finish(storage, retrying(claimed))
        assert storage.jobs.retry(SMALL, [dead]) == ["retried"]

        assert counts(storage, SMALL) == {State.WAITING: MAX_SIZE + 2}

    # Waiting for room.

    @pytest.mark.parametrize("free", FREEING)
    def test_enqueue_blocks_until_the_queue_has_space(self, storage: Storage, free: str) -> None:
        fill(storage, PATIENT)
        answers: list[EnqueueResult] = []

        def produce() -> None:
            answers.extend(storage.enqueue([batch(queue=PATIENT, ids=["late"])]))

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        try:
            FREEING[free](storage)
        finally:
            producer.join(PATIENCE)

        assert answers == [EnqueueResult("late", "queued", PATIENT)]
        assert state(storage, "late", PATIENT) is State.WAITING

    def test_async_enqueue_waits_for_space_without_blocking_the_event_loop(self, storage: Storage) -> None:
        fill(storage, PATIENT)

        async def produce_and_claim() -> list[EnqueueResult]:
            late = asyncio.create_task(storage.aenqueue([batch(queue=PATIENT, ids=["late"])]))
            await asyncio.sleep(0)
            assert not late.done()
            await storage.acall(storage.jobs.cancel, PATIENT, ["0"])
            return await asyncio.wait_for(late, PATIENCE)

        answers = asyncio.run(produce_and_claim())

        assert answers == [EnqueueResult("late", "queued", PATIENT)]

    # Dropping.

    def test_drop_oldest_cancels_the_oldest_job(self, storage: Storage) -> None:
        fill(storage, OLDEST_GO)

        assert enqueue(storage, queue=OLDEST_GO, id="new", priority=-5) == "new"

        dropped = job(storage, "0", OLDEST_GO)
        assert (dropped.state, dropped.reason) == (State.CANCELLED, "dropped")
        assert claim_ids(storage, 9, queues=[OLDEST_GO]) == ["1", "2", "new"]

    def test_drop_oldest_includes_delayed_blocked_and_grouped_jobs(self, storage: Storage) -> None:
        upstream = enqueue(storage, queue=UPSTREAM)
        enqueue(storage, queue=OLDEST_GO, id="delayed", delay=LATER)
        enqueue(storage, queue=OLDEST_GO, id="blocked", depends_on=((UPSTREAM, upstream),))
        enqueue(storage, queue=OLDEST_GO, id="grouped", concurrency_key="g", priority=9)

        for number, gone in enumerate(["delayed", "blocked", "grouped"]):
            enqueue(storage, queue=OLDEST_GO, id=f"new {number}", concurrency_key="g")
            assert state(storage, gone, OLDEST_GO) is State.CANCELLED
        assert claim_ids(storage, 9, queues=[OLDEST_GO]) == ["new 0"]

    def test_drop_oldest_keeps_the_last_jobs_of_a_large_batch(self, storage: Storage) -> None:
        answers = storage.enqueue([batch(queue=OLDEST_GO, ids=[f"{number}" for number in range(10)])])

        assert {answer.status for answer in answers} == {"queued"}
        assert claim_ids(storage, 99, queues=[OLDEST_GO]) == ["7", "8", "9"]
        assert counts(storage, OLDEST_GO) == {State.CANCELLED: 7, State.ACTIVE: MAX_SIZE}

    def test_drop_oldest_includes_jobs_with_generated_ids(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 5, queue=OLDEST_GO)

        assert claim_ids(storage, 9, queues=[OLDEST_GO]) == ids[2:]

    def test_drop_oldest_spares_jobs_that_have_run(self, storage: Storage) -> None:
        finish(storage, retrying(an_active_job(storage, queue=OLDEST_GO, id="again")))
        enqueue_many(storage, 2, queue=OLDEST_GO)

        enqueue(storage, queue=OLDEST_GO, id="new")

        assert state(storage, "again", OLDEST_GO) is State.WAITING
        assert counts(storage, OLDEST_GO) == {State.WAITING: MAX_SIZE, State.CANCELLED: 1}

    def test_drop_oldest_rejects_jobs_when_none_can_be_dropped(self, storage: Storage) -> None:
        fill(storage, OLDEST_GO)
        finish(storage, *map(retrying, claim(storage, MAX_SIZE, queues=[OLDEST_GO])))

        with unchanged(storage, OLDEST_GO), pytest.raises(QueueFullError):
            storage.enqueue([batch(2, queue=OLDEST_GO)])

    def test_drop_lowest_cancels_the_oldest_job_of_the_lowest_priority(self, storage: Storage) -> None:
        for job_id, priority in [("high", 5), ("low", -1), ("low too", -1)]:
            enqueue(storage, queue=LOWEST_GO, id=job_id, priority=priority)

        enqueue(storage, queue=LOWEST_GO, id="new")
        assert state(storage, "low", LOWEST_GO) is State.CANCELLED
        enqueue(storage, queue=LOWEST_GO, id="newer")

        assert claim_ids(storage, 9, queues=[LOWEST_GO]) == ["high", "new", "newer"]

    def test_drop_lowest_rejects_job_below_all_others(self, storage: Storage) -> None:
        fill(storage, LOWEST_GO, priority=1)

        with unchanged(storage, LOWEST_GO), pytest.raises(QueueFullError):
            storage.enqueue([batch(queue=LOWEST_GO)])

    def test_drop_lowest_uses_updated_priorities(self, storage: Storage) -> None:
        fill(storage, LOWEST_GO, priority=1)
        storage.jobs.update(LOWEST_GO, ["0"], priority=9)
        storage.jobs.update(LOWEST_GO, ["2"], priority=-9)

        enqueue(storage, queue=LOWEST_GO, id="new")

        assert claim_ids(storage, 9, queues=[LOWEST_GO]) == ["0", "1", "new"]

    def test_drop_oldest_treats_a_reused_id_as_a_new_job(self, storage: Storage) -> None:
        fill(storage, OLDEST_GO)
        storage.jobs.remove(OLDEST_GO, ["0"])
        enqueue(storage, queue=OLDEST_GO, id="0")

        enqueue(storage, queue=OLDEST_GO, id="new")

        assert claim_ids(storage, 9, queues=[OLDEST_GO]) == ["2", "0", "new"]

    def test_dropped_job_frees_its_unique_key_and_ends_its_dependents(self, storage: Storage) -> None:
        enqueue(storage, queue=OLDEST_GO, id="old", unique_key="k")
        waiting = enqueue(storage, depends_on=((OLDEST_GO, "old"),), on_dependency_failure="cancel")

        enqueue_many(storage, MAX_SIZE, queue=OLDEST_GO)

        assert state(storage, waiting) is State.CANCELLED
        assert storage.enqueue([batch(queue=OLDEST_GO, unique_key="k")])[0].status == "queued"

    def test_drop_oldest_queue_keeps_working_over_many_batches(self, storage: Storage) -> None:
        for _ in range(40):
            enqueue_many(storage, MAX_SIZE, queue=OLDEST_GO)
            claimed = claim(storage, MAX_SIZE - 1, queues=[OLDEST_GO])
            assert all(finish(storage, *map(completing, claimed)))

        assert counts(storage, OLDEST_GO)[State.COMPLETED] == 80
        assert len(claim(storage, 9, queues=[OLDEST_GO])) == 1
