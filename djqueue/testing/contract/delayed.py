"""Delays and TTLs: jobs that are not due yet, and jobs that expire before they start."""

from collections.abc import Callable

import pytest

from djqueue.core.job import Claimed, Outcome
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    NAME,
    QUEUE,
    a_blocked_job,
    a_delayed_job,
    a_waiting_job,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    releasing,
    request,
    retrying,
    state,
)
from .case import LATER, SOON, StorageCase, nothing_changes, swept_clean
from .transitions import shows


class DelayedContract(StorageCase):
    """Cases about `delay`, `run_at`, `promote` and `reschedule`."""

    @pytest.mark.parametrize("word", ["delay", "run_at"])
    def test_delayed_job_is_not_claimed_before_it_is_due(self, storage: Storage, word: str) -> None:
        start = 0 if word == "delay" else self.now(storage)
        job_id = enqueue(storage, **{word: start + LATER})

        assert claim(storage) == []
        record = job(storage, job_id)
        assert record.state is State.DELAYED
        assert record.run_at == (record.created_at if word == "delay" else start) + LATER
        assert counts(storage) == {State.DELAYED: 1}
        assert storage.reads.waiting_names(QUEUE) == {}

    @pytest.mark.parametrize("given", [{"delay": 0}, {"run_at": 0}, {"run_at": 1}])
    def test_job_with_past_run_time_is_waiting(self, storage: Storage, given: dict[str, int]) -> None:
        job_id = enqueue(storage, **given)

        assert state(storage, job_id) is State.WAITING
        assert claim_ids(storage) == [job_id]

    @shows("promote", State.DELAYED, State.WAITING)
    def test_sweep_promotes_due_jobs(self, storage: Storage) -> None:
        due = enqueue(storage, delay=SOON)
        later = enqueue(storage, delay=LATER)
        self.advance(SOON + 1)

        assert [storage.sweep().promoted for _ in range(2)] == [1, 0]

        assert storage.reads.states(QUEUE, [due, later]) == [State.WAITING, State.DELAYED]
        assert storage.reads.waiting_names(QUEUE) == {NAME: 1}

    def test_claim_takes_due_jobs_without_a_sweep(self, storage: Storage) -> None:
        job_id = enqueue(storage, delay=SOON)
        assert claim(storage) == []
        self.advance(SOON + 1)

        assert claim_ids(storage) == [job_id]

    def test_due_jobs_are_promoted_repeatedly(self, storage: Storage) -> None:
        for _ in range(5):
            job_id = enqueue(storage, delay=SOON)
            assert claim(storage) == []
            self.pass_time(storage, SOON + 1)
            assert claim_ids(storage) == [job_id]

    def test_thousands_of_jobs_become_due_at_once(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3_000, delay=SOON)
        self.advance(SOON + 1)

        swept_clean(storage)

        assert counts(storage) == {State.WAITING: 3_000}
        assert claim_ids(storage, 3_000) == ids

    def test_delay_may_exceed_32_bits(self, storage: Storage) -> None:
        """Past 2^31 milliseconds timers of some systems fire at once."""
        century = 100 * 365 * 86_400_000
        ids = [enqueue(storage, delay=delay) for delay in (2**31, 2**32 + 1, century)]
        self.pass_time(storage, SOON)

        assert claim(storage, 3) == []
        assert storage.reads.states(QUEUE, ids) == [State.DELAYED] * 3
        claims = storage.claim(request())
        assert claims.wait is not None
        assert claims.wait > 2**31 - LATER

    @shows("promote", State.DELAYED, State.WAITING)
    def test_promote_makes_delayed_job_waiting(self, storage: Storage) -> None:
        job_id = a_delayed_job(storage)

        assert storage.jobs.promote(QUEUE, [job_id, "nobody", job_id]) == [True, False, False]

        assert job(storage, job_id).state is State.WAITING
        assert claim_ids(storage) == [job_id]

    @pytest.mark.parametrize("there", sorted(set(State) - {State.DELAYED}))
    def test_promote_is_rejected_for_job_that_is_not_delayed(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage)

        with nothing_changes(storage):
            assert storage.jobs.promote(QUEUE, [job_id]) == [False]

    @shows("reschedule", State.WAITING, [State.WAITING, State.DELAYED])
    @shows("reschedule", State.DELAYED, [State.WAITING, State.DELAYED])
    def test_waiting_and_delayed_jobs_can_be_rescheduled(self, storage: Storage) -> None:
        now = self.now(storage)
        ids = [a_waiting_job(storage), a_delayed_job(storage), a_waiting_job(storage)]
        delayed_too = a_delayed_job(storage)

        assert storage.jobs.reschedule(QUEUE, ids[:2], now + 2 * LATER) == [True, True]
        assert storage.reads.states(QUEUE, ids) == [State.DELAYED, State.DELAYED, State.WAITING]
        assert job(storage, ids[0]).run_at == now + 2 * LATER
        assert storage.jobs.reschedule(QUEUE, [ids[2], delayed_too], now - 1) == [True, True]
        assert storage.reads.states(QUEUE, [ids[2], delayed_too]) == [State.WAITING, State.WAITING]
        assert sorted(claim_ids(storage, 10)) == sorted([ids[2], delayed_too])
        assert counts(storage) == {State.ACTIVE: 2, State.DELAYED: 2}

    def test_rescheduled_job_is_due_only_at_its_new_time(self, storage: Storage) -> None:
        earlier, later = enqueue(storage, delay=LATER), enqueue(storage, delay=SOON)
        now = self.now(storage)
        storage.jobs.reschedule(QUEUE, [earlier], now + SOON)
        storage.jobs.reschedule(QUEUE, [later], now + LATER)

        self.pass_time(storage, SOON + 1)

        assert claim_ids(storage, 2) == [earlier]
        assert state(storage, later) is State.DELAYED

    @pytest.mark.parametrize("there", sorted(set(State) - {State.DELAYED, State.WAITING}))
    def test_reschedule_is_rejected_for_job_that_is_not_pending(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage)

        with nothing_changes(storage):
            assert storage.jobs.reschedule(QUEUE, [job_id, "nobody"], 1) == [False, False]

    def test_retried_job_waits_for_its_delay(self, storage: Storage) -> None:
        job_id = enqueue(storage)
        finish(storage, retrying(claim_one(storage), delay=SOON))
        assert claim(storage) == []

        self.pass_time(storage, SOON + 1)

        assert claim_ids(storage) == [job_id]

    def test_delayed_jobs_of_several_queues_become_due_together(self, storage: Storage) -> None:
        for number in range(6):
            enqueue(storage, queue=f"q{number}", id=f"{number}", delay=SOON)
        self.advance(SOON + 1)

        assert sorted(claim_ids(storage, 10)) == list("012345")

    @shows("expire", [State.WAITING, State.DELAYED, State.BLOCKED], State.FAILED)
    @pytest.mark.parametrize("there", [State.WAITING, State.DELAYED, State.BLOCKED])
    def test_job_not_started_within_its_ttl_becomes_dead_letter(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage, ttl=SOON)
        self.advance(SOON + 1)

        assert [storage.sweep().expired for _ in range(2)] == [1, 0]

        record = job(storage, job_id)
        assert (record.state, record.reason, record.attempts) == (State.FAILED, "ttl_expired", 0)
        assert record.error is not None
        assert [letter.reason for letter in storage.reads.dead_letters(QUEUE)] == ["ttl_expired"]
        assert claim(storage, 10, queues=[QUEUE]) == []

    @shows("expire", State.WAITING, State.FAILED)
    def test_expired_job_is_not_claimed_without_a_sweep(self, storage: Storage) -> None:
        job_id = a_waiting_job(storage, ttl=SOON)
        self.advance(SOON + 1)

        assert claim(storage) == []

        assert job(storage, job_id).reason == "ttl_expired"
        assert counts(storage) == {State.FAILED: 1}

    @pytest.mark.parametrize("end", [retrying, releasing])
    def test_started_job_can_run_again_after_its_ttl(
        self, storage: Storage, end: Callable[[Claimed], Outcome]
    ) -> None:
        job_id = enqueue(storage, ttl=SOON)
        claimed = claim_one(storage)
        self.pass_time(storage, SOON + 1)
        assert state(storage, job_id) is State.ACTIVE

        finish(storage, end(claimed))
        storage.sweep()

        assert claim_ids(storage) == [job_id]

    def test_stalled_job_runs_again_after_its_ttl(self, storage: Storage) -> None:
        job_id = enqueue(storage, ttl=SOON)
        claimed = claim_one(storage)

        self.lose_lease(storage, max(SOON, claimed.lease))

        assert claim_ids(storage) == [job_id]

    def test_job_within_its_ttl_is_claimed(self, storage: Storage) -> None:
        job_id = enqueue(storage, ttl=LATER)

        self.pass_time(storage, SOON)

        assert claim_ids(storage) == [job_id]

    def test_delay_counts_toward_the_ttl(self, storage: Storage) -> None:
        job_id = enqueue(storage, delay=2 * SOON, ttl=SOON)

        self.pass_time(storage, SOON + 1)

        assert job(storage, job_id).reason == "ttl_expired"

    def test_id_of_expired_job_can_be_enqueued_again(self, storage: Storage) -> None:
        a_blocked_job(storage, id="order:1", ttl=SOON)
        self.pass_time(storage, SOON + 1)
        enqueue(storage, id="order:1")

        self.pass_time(storage, SOON + 1)

        assert claim_ids(storage, queues=[QUEUE]) == ["order:1"]
        assert finish(storage, completing(claim_one(storage))) == [True]
