"""Cancel: a pending job never starts, and an active job is asked to stop."""

from collections.abc import Callable

import pytest

from djqueue.core.job import CancelResult
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    JOB_IN,
    QUEUE,
    a_blocked_job,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    releasing,
    retrying,
    state,
)
from .case import LATER, SOON, StorageCase, nothing_changes, recorded
from .transitions import shows


class CancellingContract(StorageCase):
    """Cases about taking jobs back."""

    @shows("cancel", [State.WAITING, State.DELAYED, State.BLOCKED], State.CANCELLED)
    @pytest.mark.parametrize("there", [State.WAITING, State.DELAYED, State.BLOCKED])
    def test_pending_job_is_cancelled_and_never_starts(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage, id="order:1")

        [answer] = storage.jobs.cancel(QUEUE, [job_id], "no longer wanted")

        assert answer == CancelResult("order:1", "cancelled")
        assert answer
        record = job(storage, job_id)
        assert (record.state, record.reason) == (State.CANCELLED, "no longer wanted")
        assert (record.attempts, record.started_at) == (0, 0)
        assert record.finished_at >= record.created_at
        assert counts(storage) == {State.CANCELLED: 1}
        self.pass_time(storage, SOON)
        assert claim(storage, 10, queues=[QUEUE]) == []
        assert storage.reads.dead_letters(QUEUE) == []

    def test_job_waiting_for_retry_can_be_cancelled(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        finish(storage, retrying(claimed, delay=SOON))

        assert storage.jobs.cancel(QUEUE, [claimed.id])[0].status == "cancelled"

        self.pass_time(storage, SOON + 1)
        assert claim(storage) == []
        assert state(storage, claimed.id) is State.CANCELLED

    def test_cancel_of_active_job_requests_a_stop(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        with recorded(storage) as recorder:
            [answer] = storage.jobs.cancel(QUEUE, [claimed.id])
            recorder.until("cancel_requested", claimed.id)

        assert answer == CancelResult(claimed.id, "requested")
        assert answer
        assert state(storage, claimed.id) is State.ACTIVE

    def test_job_with_requested_cancel_can_still_complete(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id])

        assert finish(storage, completing(claimed)) == [True]

        assert state(storage, claimed.id) is State.COMPLETED

    @pytest.mark.parametrize("end", ["retry", "release", "cancel"])
    def test_job_with_requested_cancel_does_not_run_again(self, storage: Storage, end: str) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id])

        assert finish(storage, ENDINGS[end](claimed)) == [True]

        assert state(storage, claimed.id) is State.CANCELLED
        assert claim(storage) == []
        assert counts(storage) == {State.CANCELLED: 1}

    @pytest.mark.parametrize(("make", "status"), [(a_completed_job, "completed"), (a_failed_job, "failed")])
    def test_cancel_of_finished_job_changes_nothing(
        self, storage: Storage, make: Callable[[Storage], str], status: str
    ) -> None:
        job_id = make(storage)

        with nothing_changes(storage):
            [answer] = storage.jobs.cancel(QUEUE, [job_id])

        assert answer == CancelResult(job_id, status)
        assert not answer

    def test_cancel_of_unknown_job_returns_not_found(self, storage: Storage) -> None:
        [answer] = storage.jobs.cancel(QUEUE, ["nobody"])

        assert answer == CancelResult("nobody", "not_found")
        assert not answer

    def test_second_cancel_changes_nothing(self, storage: Storage) -> None:
        job_id = a_waiting_job(storage)
        storage.jobs.cancel(QUEUE, [job_id])

        with nothing_changes(storage):
            assert storage.jobs.cancel(QUEUE, [job_id]) == [CancelResult(job_id, "cancelled")]

    def test_cancel_results_follow_the_order_of_ids(self, storage: Storage) -> None:
        a_completed_job(storage, id="done")
        an_active_job(storage, id="running")
        a_waiting_job(storage, id="waiting")
        a_delayed_job(storage, id="delayed")

        ids = ["waiting", "nobody", "running", "done", "delayed", "waiting"]
        answers = storage.jobs.cancel(QUEUE, ids)

        assert [answer.id for answer in answers] == ids
        assert [answer.status for answer in answers] == [
            *("cancelled", "not_found", "requested", "completed", "cancelled", "cancelled"),
        ]

    def test_thousands_of_jobs_are_cancelled_in_the_middle_of_the_queue(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3_000)
        kept = set(ids[::10])

        storage.jobs.cancel(QUEUE, [job_id for job_id in ids if job_id not in kept])

        assert counts(storage) == {State.WAITING: 300, State.CANCELLED: 2_700}
        assert [one.id for one in claim(storage, 3_000)] == ids[::10]

    def test_cancel_does_not_affect_same_id_in_another_queue(self, storage: Storage) -> None:
        enqueue(storage, queue="left", id="same")
        enqueue(storage, queue="right", id="same")

        storage.jobs.cancel("left", ["same"])

        assert claim_one(storage).queue == "right"

    def test_cancelled_job_stays_cancelled(self, storage: Storage) -> None:
        """Nothing that a storage does by itself, and no other verb, brings it back."""
        job_id = a_delayed_job(storage, delay=SOON, ttl=SOON * 2)
        storage.jobs.cancel(QUEUE, [job_id])

        assert storage.jobs.promote(QUEUE, [job_id]) == [False]
        assert storage.jobs.reschedule(QUEUE, [job_id], self.now(storage)) == [False]
        assert storage.jobs.retry(QUEUE, [job_id]) == ["not_failed"]
        self.pass_time(storage, SOON * 3)
        assert state(storage, job_id) is State.CANCELLED
        assert claim(storage) == []

    def test_cancelled_blocked_job_is_not_unblocked_later(self, storage: Storage) -> None:
        job_id = a_blocked_job(storage)
        storage.jobs.cancel(QUEUE, [job_id])

        finish(storage, completing(claim_one(storage)))

        assert state(storage, job_id) is State.CANCELLED
        assert claim(storage) == []

    def test_released_job_with_requested_cancel_is_cancelled(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id], "enough")

        finish(storage, releasing(claimed, delay=LATER))

        assert state(storage, claimed.id) is State.CANCELLED
        [answer] = storage.enqueue([batch(ids=[claimed.id])])
        assert answer.status == "queued"
