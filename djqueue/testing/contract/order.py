"""Order: which waiting job is claimed next."""

from random import Random

import pytest

from djqueue.core.options import MAX_INTEGER
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    claim_ids,
    claim_one,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    releasing,
    retrying,
)
from .case import SOON, StorageCase


class OrderContract(StorageCase):
    """Cases about what comes first."""

    def test_jobs_are_claimed_in_order_of_arrival(self, storage: Storage) -> None:
        ids = [enqueue(storage) for _ in range(5)] + enqueue_many(storage, 5)

        assert claim_ids(storage, 4) + claim_ids(storage, 100) == ids

    def test_higher_priority_is_claimed_first(self, storage: Storage) -> None:
        for priority in (0, -1, MAX_INTEGER, 1, -MAX_INTEGER):
            enqueue(storage, id=str(priority), priority=priority)

        order = [MAX_INTEGER, 1, 0, -1, -MAX_INTEGER]
        assert claim_ids(storage, 10) == [str(priority) for priority in order]

    def test_jobs_of_equal_priority_keep_their_order(self, storage: Storage) -> None:
        for number in range(12):
            enqueue(storage, id=f"{number % 3}:{number}", priority=number % 3)

        claimed = [job_id for _ in range(6) for job_id in claim_ids(storage, 2)]

        assert claimed == [f"{p}:{n}" for p in (2, 1, 0) for n in range(p, 12, 3)]

    def test_lifo_jobs_are_claimed_before_others_of_equal_priority(self, storage: Storage) -> None:
        enqueue(storage, id="high", priority=1)
        enqueue(storage, id="first")
        enqueue(storage, id="last in", lifo=True)
        enqueue(storage, id="last of all in", lifo=True)
        enqueue(storage, id="second")

        assert claim_ids(storage, 10) == ["high", "last of all in", "last in", "first", "second"]

    def test_claim_order_spans_all_job_names(self, storage: Storage) -> None:
        for number in range(9):
            enqueue(storage, id=str(number), name="abc"[number % 3])

        assert claim_ids(storage, 4, names="abc") == ["0", "1", "2", "3"]
        assert claim_ids(storage, 9, names="ac") == ["5", "6", "8"]
        assert claim_ids(storage, 9, names="abc") == ["4", "7"]

    def test_priorities_span_all_job_names(self, storage: Storage) -> None:
        enqueue(storage, id="low", name="a", priority=1)
        enqueue(storage, id="high", name="b", priority=2)
        enqueue(storage, id="top", name="a", priority=3)

        assert claim_ids(storage, 3, names="ab") == ["top", "high", "low"]

    def test_thousand_jobs_are_claimed_by_priority_then_arrival(self, storage: Storage) -> None:
        random = Random(7)
        given = [(random.randrange(-5, 6), f"{number}") for number in range(1_000)]
        for priority, job_id in given:
            enqueue(storage, id=job_id, priority=priority)
        removed = {job_id for _, job_id in random.sample(given, 300)}
        storage.jobs.remove(QUEUE, sorted(removed))

        claimed = [job_id for _ in range(8) for job_id in claim_ids(storage, 100)]

        left = [entry for entry in given if entry[1] not in removed]
        assert claimed == [job_id for _, job_id in sorted(left, key=lambda entry: -entry[0])]

    @pytest.mark.parametrize("delay", [0, SOON])
    def test_retried_job_keeps_its_priority(self, storage: Storage, delay: int) -> None:
        enqueue(storage, id="again", priority=5)
        finish(storage, retrying(claim_one(storage), delay=delay))
        enqueue(storage, id="low", priority=1)
        enqueue(storage, id="high", priority=9)
        self.pass_time(storage, delay + 1)

        assert claim_ids(storage, 3) == ["high", "again", "low"]

    def test_retried_job_goes_behind_waiting_jobs(self, storage: Storage) -> None:
        ids = [enqueue(storage) for _ in range(3)]

        finish(storage, retrying(claim_one(storage)))

        assert claim_ids(storage, 3) == [*ids[1:], ids[0]]

    def test_released_job_goes_before_waiting_jobs(self, storage: Storage) -> None:
        ids = [enqueue(storage) for _ in range(3)]

        finish(storage, releasing(claim_one(storage)))

        assert claim_ids(storage, 3) == ids

    def test_stalled_job_goes_before_waiting_jobs(self, storage: Storage) -> None:
        ids = [enqueue(storage) for _ in range(3)]
        self.lose_lease(storage, claim_one(storage).lease)

        assert [one for _ in range(2) for one in claim_ids(storage, 2)] == ids

    def test_released_job_does_not_overtake_higher_priority(self, storage: Storage) -> None:
        enqueue(storage, id="low")
        low = claim_one(storage)
        enqueue(storage, id="high", priority=1)

        finish(storage, releasing(low))

        assert claim_ids(storage, 2) == ["high", "low"]

    def test_due_jobs_are_claimed_in_order_of_their_run_times(self, storage: Storage) -> None:
        now = self.now(storage)
        for job_id, run_at in [("c", now + 3), ("a", now + 1), ("b", now + 2)]:
            enqueue(storage, id=job_id, run_at=run_at + SOON)
        enqueue(storage, id="at once")
        self.pass_time(storage, 2 * SOON)

        assert claim_ids(storage, 4) == ["at once", "a", "b", "c"]

    def test_jobs_due_at_the_same_time_are_claimed_in_order_of_arrival(self, storage: Storage) -> None:
        run_at = self.now(storage) + SOON
        ids = [enqueue(storage, run_at=run_at) for _ in range(5)]
        self.pass_time(storage, 2 * SOON)

        assert claim_ids(storage, 5) == ids

    def test_due_job_keeps_its_priority(self, storage: Storage) -> None:
        enqueue(storage, id="delayed", delay=SOON, priority=5)
        enqueue(storage, id="low", priority=1)
        enqueue(storage, id="high", priority=9)
        self.pass_time(storage, SOON + 1)

        assert claim_ids(storage, 3) == ["high", "delayed", "low"]

    def test_promoted_job_goes_behind_waiting_jobs(self, storage: Storage) -> None:
        enqueue(storage, id="delayed", delay=SOON)
        enqueue(storage, id="waiting")
        storage.jobs.promote(QUEUE, ["delayed"])

        assert claim_ids(storage, 2) == ["waiting", "delayed"]

    def test_retried_dead_letter_keeps_its_priority(self, storage: Storage) -> None:
        enqueue(storage, id="high", priority=2)

        finish(storage, failing(claim_one(storage)))
        enqueue(storage, id="low", priority=1)
        storage.jobs.retry(QUEUE, ["high"])

        assert claim_ids(storage, 2) == ["high", "low"]
        assert counts(storage) == {State.ACTIVE: 2}
