"""Stalls: runs that were lost with their worker."""

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    an_active_job,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    lease_of,
    state,
    worker,
)
from .case import StorageCase, recorded, so_far, swept_clean
from .transitions import shows


class StallsContract(StorageCase):
    """Cases about lost leases."""

    @shows("stall", State.ACTIVE, State.WAITING)
    def test_a_job_whose_lease_is_lost_waits_again(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        self.advance(claimed.lease + 1)

        assert storage.maintain().stalled == 1

        record = job(storage, claimed.id)
        assert (record.state, record.stalls, record.failures) == (State.WAITING, 1, 0)
        assert (record.attempts, record.worker) == (1, "")
        assert counts(storage) == {State.WAITING: 1}
        assert claim_one(storage).attempts == 2

    def test_a_second_sweep_finds_nothing(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        self.advance(claimed.lease + 1)

        assert [storage.maintain().stalled for _ in range(3)] == [1, 0, 0]
        assert job(storage, claimed.id).stalls == 1

    @shows("stall", State.ACTIVE, State.FAILED)
    def test_a_job_that_takes_its_workers_with_it_ends_as_a_dead_letter(self, storage: Storage) -> None:
        enqueue(storage, id="poison", max_stalls=2)
        for _ in range(3):
            self.lose_lease(storage, claim_one(storage).lease)

        record = job(storage, "poison")

        assert (record.state, record.stalls, record.failures) == (State.FAILED, 3, 0)
        assert [run.outcome for run in record.history] == ["stalled"] * 3
        assert record.error is not None
        assert [letter.id for letter in storage.dead_letters(QUEUE)] == ["poison"]
        assert claim(storage) == []

    def test_a_job_that_may_never_stall_is_dead_at_once(self, storage: Storage) -> None:
        claimed = an_active_job(storage, max_stalls=0)

        self.lose_lease(storage, claimed.lease)

        assert state(storage, claimed.id) is State.FAILED

    @pytest.mark.parametrize("alive", [True, False])
    def test_the_dead_letter_tells_whether_the_worker_is_gone(self, storage: Storage, alive: bool) -> None:
        claimed = an_active_job(storage, max_stalls=0, worker="the worker")
        if alive:
            storage.register_worker(worker("the worker"))

        self.lose_lease(storage, claimed.lease)

        expected = "stalled" if alive else "worker_lost"
        assert storage.dead_letters(QUEUE)[0].reason == expected
        assert job(storage, claimed.id).reason == expected

    def test_subscribers_hear_of_each_stall_and_of_one_end(self, storage: Storage) -> None:
        with recorded(storage) as recorder:
            enqueue(storage, id="poison", max_stalls=1)
            for _ in range(2):
                self.lose_lease(storage, claim_one(storage).lease)
            words = [event.event for event in so_far(storage, recorder)]

        assert words == ["queued", "active", "stalled", "active", "stalled", "failed"]

    def test_stalls_do_not_use_up_failures(self, storage: Storage) -> None:
        enqueue(storage, id="order:1", max_attempts=1, max_stalls=5)
        for _ in range(4):
            self.lose_lease(storage, claim_one(storage).lease)

        claimed = claim_one(storage)

        assert (claimed.attempts, claimed.failures, claimed.stalls) == (5, 0, 4)
        assert finish(storage, completing(claimed)) == [True]

    def test_thousands_of_stalls_are_all_found(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 2_500)
        claimed = claim(storage, 2_500)
        renewed = claimed[::5]
        self.advance(claimed[0].lease // 2 + 1)
        assert all(renewal.held for renewal in storage.renew([lease_of(one) for one in renewed]))
        self.advance(claimed[0].lease // 2 + 1)

        swept_clean(storage)

        assert counts(storage) == {State.WAITING: 2_000, State.ACTIVE: 500}
        lost = {one.id for one in claim(storage, 2_500, worker="worker-2")}
        assert lost == set(ids) - {one.id for one in renewed}

    def test_a_stalled_job_that_was_to_be_cancelled_is_cancelled(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.cancel(QUEUE, [claimed.id], "changed my mind")

        self.lose_lease(storage, claimed.lease)

        assert state(storage, claimed.id) is State.CANCELLED
        assert claim(storage) == []
