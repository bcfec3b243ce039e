"""Stalls: attempts whose lease expired."""

from datetime import UTC, datetime
from typing import Any

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    an_active_job,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    lease_of,
    request,
    state,
    worker,
)
from .case import LIMITER, SHARING, StorageCase, recorded, so_far, swept_clean
from .transitions import shows


class StallsContract(StorageCase):
    """Cases about lost leases."""

    @shows("stall", State.ACTIVE, State.WAITING)
    def test_job_with_expired_lease_returns_to_waiting(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        self.advance(claimed.lease + 1)

        assert storage.sweep().stalled == 1

        record = job(storage, claimed.id)
        assert (record.state, record.stalls, record.failures) == (State.WAITING, 1, 0)
        assert (record.attempts, record.worker) == (1, "")
        assert counts(storage) == {State.WAITING: 1}
        assert claim_one(storage).attempts == 2

    def test_stalled_job_is_reclaimed_by_one_sweep_only(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        self.advance(claimed.lease + 1)

        assert [storage.sweep().stalled for _ in range(3)] == [1, 0, 0]
        assert job(storage, claimed.id).stalls == 1

    @shows("stall", State.ACTIVE, State.FAILED)
    def test_job_that_stalls_too_often_becomes_dead_letter(self, storage: Storage) -> None:
        enqueue(storage, id="poison", max_stalls=2)
        for _ in range(3):
            self.lose_lease(storage, claim_one(storage).lease)

        record = job(storage, "poison")

        assert (record.state, record.stalls, record.failures) == (State.FAILED, 3, 0)
        assert [run.outcome for run in record.history] == ["stalled"] * 3
        assert record.error is not None
        assert [letter.id for letter in storage.reads.dead_letters(QUEUE)] == ["poison"]
        assert claim(storage) == []

    def test_job_without_allowed_stalls_fails_at_its_first_stall(self, storage: Storage) -> None:
        claimed = an_active_job(storage, max_stalls=0)

        self.lose_lease(storage, claimed.lease)

        assert state(storage, claimed.id) is State.FAILED

    @pytest.mark.parametrize("alive", [True, False])
    def test_dead_letter_reason_depends_on_whether_the_worker_is_alive(
        self, storage: Storage, alive: bool
    ) -> None:
        claimed = an_active_job(storage, max_stalls=0, worker="the worker")
        if alive:
            storage.workers.register(worker("the worker"))

        self.lose_lease(storage, claimed.lease)

        expected = "stalled" if alive else "worker_lost"
        assert storage.reads.dead_letters(QUEUE)[0].reason == expected
        assert job(storage, claimed.id).reason == expected

    def test_events_report_each_stall_and_one_failure(self, storage: Storage) -> None:
        with recorded(storage) as recorder:
            enqueue(storage, id="poison", max_stalls=1)
            for _ in range(2):
                self.lose_lease(storage, claim_one(storage).lease)
            words = [event.event for event in so_far(storage, recorder)]

        assert words == ["enqueued", "started", "stalled", "started", "stalled", "failed"]

    def test_stalls_do_not_count_as_failures(self, storage: Storage) -> None:
        enqueue(storage, id="order:1", max_attempts=1, max_stalls=5)
        for _ in range(4):
            self.lose_lease(storage, claim_one(storage).lease)

        claimed = claim_one(storage)

        assert (claimed.attempts, claimed.failures, claimed.stalls) == (5, 0, 4)
        assert finish(storage, completing(claimed)) == [True]

    def test_sweeps_reclaim_thousands_of_stalled_jobs(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 2_500)
        claimed = claim(storage, 2_500)
        renewed = claimed[::5]
        self.advance(claimed[0].lease // 2 + 1)
        assert all(renewal.held for renewal in storage.renew([lease_of(one) for one in renewed]))
        self.advance(claimed[0].lease // 2 + 1)

        swept_clean(storage)

        assert counts(storage) == {State.WAITING: 2_000, State.ACTIVE: 500}
        lost = {one.id for one in storage.reads.page(QUEUE, State.WAITING, 2_500)}
        assert lost == set(ids) - {one.id for one in renewed}

    def test_stalled_job_is_claimed_alone(self, storage: Storage) -> None:
        enqueue(storage, id="stalled")
        self.lose_lease(storage, claim_one(storage).lease)
        enqueue_many(storage, 3)

        assert claim_ids(storage, 10) == ["stalled"]
        assert len(claim(storage, 10)) == 3

    def test_two_stalled_jobs_are_not_claimed_together(self, storage: Storage) -> None:
        enqueue_many(storage, 2)
        self.lose_lease(storage, claim(storage, 2)[0].lease)

        assert [len(claim(storage, 10)) for _ in range(3)] == [1, 1, 0]

    def test_jobs_ahead_of_a_stalled_job_are_claimed_without_it(self, storage: Storage) -> None:
        enqueue(storage, id="stalled")
        self.lose_lease(storage, claim_one(storage).lease)
        for number in range(2):
            enqueue(storage, id=f"urgent {number}", priority=5)

        first = storage.claim(request(10))

        assert [one.id for one in first.jobs] == ["urgent 0", "urgent 1"]
        assert first.wait == 0
        assert claim_ids(storage, 10) == ["stalled"]

    def test_stalled_job_is_claimed_without_jobs_of_other_queues(self, storage: Storage) -> None:
        enqueue(storage, id="stalled")
        self.lose_lease(storage, claim_one(storage).lease)
        for queue in ("others", "more"):
            enqueue(storage, queue=queue)

        claims = [claim_ids(storage, 10) for _ in range(4)]

        assert ["stalled"] in claims
        assert sum(map(len, claims)) == 3

    @pytest.mark.parametrize(
        "given", [{"concurrency_key": "g"}, {"weight": 2}, {"lifo": True}, {"priority": -3}]
    )
    def test_stalled_job_with_options_is_claimed_alone(self, storage: Storage, given: dict[str, Any]) -> None:
        storage.queues.set_limits(QUEUE, None, 10)
        enqueue(storage, id="stalled", **given)
        self.lose_lease(storage, claim_one(storage).lease)
        enqueue_many(storage, 2, priority=-5)

        assert claim_ids(storage, 10) == ["stalled"]
        assert len(claim(storage, 10)) == 2

    def test_stalled_job_of_shared_limiter_is_claimed_alone(self, storage: Storage) -> None:
        queue = SHARING[0]
        storage.limiters.set(LIMITER, None, 5)
        enqueue(storage, id="stalled", queue=queue)
        self.lose_lease(storage, claim_one(storage).lease)
        ids = enqueue_many(storage, 2, queue=queue)

        assert claim_ids(storage, 10) == ["stalled"]
        assert claim_ids(storage, 10) == ids
        assert storage.limiters.state(LIMITER).used == 3

    @pytest.mark.parametrize("given", [{}, {"priority": 5}, {"priority": -5}, {"weight": 2}, {"lifo": True}])
    def test_claim_can_exclude_stalled_jobs(self, storage: Storage, given: dict[str, Any]) -> None:
        storage.queues.set_limits(QUEUE, None, 100)
        ids = enqueue_many(storage, 20, **given)
        lost = claim(storage, 10)
        self.lose_lease(storage, lost[0].lease)
        self.lose_lease(storage, claim_one(storage).lease)
        good = enqueue_many(storage, 3)

        assert set(claim_ids(storage, 30, stalled=False)) == {*ids, *good} - {one.id for one in lost}
        assert claim(storage, 10, stalled=False) == []
        assert counts(storage)[State.WAITING] == 10
        assert {claim_one(storage).id for _ in range(10)} == {one.id for one in lost}

    def test_excluded_stalled_jobs_keep_their_order(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 5)
        self.lose_lease(storage, claim(storage, 5)[0].lease)
        good = enqueue_many(storage, 2)

        first = [claim_ids(storage, 10), claim_ids(storage, 10, stalled=False), claim_ids(storage, 10)]
        rest = [claim_ids(storage, 10) for _ in range(4)]

        assert first[1] == good
        assert [*first[0], *first[2], *(one for one_claim in rest for one in one_claim)] == ids

    def test_stalled_job_blocks_only_its_own_group(self, storage: Storage) -> None:
        enqueue(storage, id="stalled", concurrency_key="a")
        self.lose_lease(storage, claim_one(storage).lease)
        enqueue(storage, id="behind", concurrency_key="a")
        enqueue(storage, id="other", concurrency_key="b")

        assert claim_ids(storage, 10, stalled=False) == ["other"]
        claimed = claim_one(storage)
        assert claimed.id == "stalled"
        finish(storage, completing(claimed))
        assert claim_ids(storage, 10, stalled=False) == ["behind"]

    def test_claim_can_exclude_stalled_jobs_of_a_shared_limiter(self, storage: Storage) -> None:
        queue = SHARING[0]
        storage.limiters.set(LIMITER, None, 5)
        enqueue(storage, id="stalled", queue=queue)
        self.lose_lease(storage, claim_one(storage).lease)

        assert claim(storage, 10, stalled=False) == []
        ids = enqueue_many(storage, 2, queue=queue)
        assert claim_ids(storage, 10, stalled=False) == ids
        assert claim_ids(storage, 10) == ["stalled"]
        assert storage.limiters.state(LIMITER).used == 3

    def test_waiting_stalled_job_can_be_listed_counted_and_controlled(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3)
        self.lose_lease(storage, claim(storage, 3)[0].lease)
        good = enqueue_many(storage, 2)
        storage.workers.register(worker("w1"))

        assert {one.id for one in storage.reads.page(QUEUE, State.WAITING, 10)} == {*ids, *good}
        assert counts(storage) == {State.WAITING: 5}
        [overview] = storage.reads.overview([QUEUE]).queues
        assert sum(overview.names.values()) == 5
        explained = [storage.reads.explain(QUEUE, one) for one in (*ids, *good)]
        assert [one and one.before for one in explained] == [0, 1, 2, 3, 4]
        storage.jobs.update(QUEUE, ids[0], priority=7)
        storage.jobs.cancel(QUEUE, [ids[1]], "changed my mind")
        assert claim_ids(storage, 10) == [ids[0]]
        assert claim_ids(storage, 10, stalled=False) == good
        assert claim_ids(storage, 10) == [ids[2]]
        assert claim(storage, 10) == []

    def test_most_recently_claimed_stalled_job_is_claimed_first(self, storage: Storage) -> None:
        enqueue(storage, id="first")
        claimed = claim_one(storage)
        enqueue(storage, id="second")
        self.advance(2)
        claim_one(storage)
        self.lose_lease(storage, claimed.lease)

        assert [claim_ids(storage, 10) for _ in range(2)] == [["second"], ["first"]]

    def test_dead_letter_lists_lost_attempts(self, storage: Storage) -> None:
        enqueue(storage, id="poison", max_stalls=1)
        for worker_id in ("worker-1", "worker-2"):
            self.lose_lease(storage, claim_one(storage, worker=worker_id).lease)

        record = job(storage, "poison")

        assert record.error is not None
        told = record.error.message
        assert told.startswith("stalled 2 times, last on worker-2: ")
        for attempt in record.history:
            started, lost = (
                f"{datetime.fromtimestamp(at // 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
                for at in (attempt.started_at, attempt.finished_at)
            )
            assert f"attempt {attempt.attempt} on {attempt.worker}, started {started}, lost {lost}" in told

    def test_stalled_job_with_requested_cancel_is_cancelled(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id], "changed my mind")

        self.lose_lease(storage, claimed.lease)

        assert state(storage, claimed.id) is State.CANCELLED
        assert claim(storage) == []
