"""Leases: which reports about an attempt are accepted, and what happens when a worker goes silent."""

from collections.abc import Callable

import pytest

from djqueue.core.job import Claimed, Lease, Renewal
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    QUEUE,
    a_completed_job,
    an_active_job,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    lease_of,
    releasing,
    report_of,
    retrying,
    state,
    worker,
)
from .case import LATER, SOON, StorageCase, nothing_changes

Stale = Callable[["LeasesContract", Storage], Claimed]
Word = Callable[[Storage, Claimed], bool]


def swept(case: "LeasesContract", storage: Storage) -> Claimed:
    """The lease expired; the job waits again."""
    claimed = an_active_job(storage, id="contested")
    case.lose_lease(storage, claimed.lease)
    return claimed


def claimed_again(case: "LeasesContract", storage: Storage) -> Claimed:
    """The lease expired, and another worker runs the job."""
    claimed = swept(case, storage)
    claim_one(storage, worker="worker-2")
    return claimed


def claimed_again_by_itself(case: "LeasesContract", storage: Storage) -> Claimed:
    """The lease expired, and the same worker runs the job again."""
    claimed = swept(case, storage)
    claim_one(storage, worker="worker-1")
    return claimed


def completed_by_another(case: "LeasesContract", storage: Storage) -> Claimed:
    """The lease expired, and another worker has completed the job."""
    claimed = swept(case, storage)
    finish(storage, completing(claim_one(storage, worker="worker-2"), b"of worker 2"))
    return claimed


def already_completed(_: "LeasesContract", storage: Storage) -> Claimed:
    """Return a claim that has already been completed."""
    claimed = an_active_job(storage, id="contested")
    finish(storage, completing(claimed, b"the first word"))
    return claimed


def already_failed(_: "LeasesContract", storage: Storage) -> Claimed:
    """Return a claim that has already failed."""
    claimed = an_active_job(storage, id="contested")
    finish(storage, failing(claimed))
    return claimed


def given_back(_: "LeasesContract", storage: Storage) -> Claimed:
    """The worker has released the job."""
    claimed = an_active_job(storage, id="contested")
    finish(storage, releasing(claimed))
    return claimed


def waiting_for_its_retry(_: "LeasesContract", storage: Storage) -> Claimed:
    """The worker has requested a retry."""
    claimed = an_active_job(storage, id="contested")
    finish(storage, retrying(claimed, LATER))
    return claimed


def removed(_: "LeasesContract", storage: Storage) -> Claimed:
    """The job has ended, and its record was removed."""
    claimed = already_completed(_, storage)
    storage.jobs.remove(QUEUE, ["contested"])
    return claimed


def enqueued_again(_: "LeasesContract", storage: Storage) -> Claimed:
    """The job was removed, and another one has its id."""
    claimed = removed(_, storage)
    enqueue(storage, id="contested")
    return claimed


def running_again(_: "LeasesContract", storage: Storage) -> Claimed:
    """The job was removed, and another one with its id is running."""
    claimed = enqueued_again(_, storage)
    claim_one(storage)
    return claimed


def obliterated(_: "LeasesContract", storage: Storage) -> Claimed:
    """The queue was obliterated with all its jobs."""
    claimed = an_active_job(storage, id="contested")
    storage.queues.obliterate(QUEUE, force=True)
    return claimed


STALE: list[Stale] = [
    swept,
    claimed_again,
    claimed_again_by_itself,
    completed_by_another,
    already_completed,
    already_failed,
    given_back,
    waiting_for_its_retry,
    removed,
    enqueued_again,
    running_again,
    obliterated,
]


def _ending(kind: str) -> Word:
    def say(storage: Storage, claimed: Claimed) -> bool:
        return finish(storage, ENDINGS[kind](claimed)) == [True]

    return say


def _renew(storage: Storage, claimed: Claimed) -> bool:
    return storage.renew([lease_of(claimed)]) != [Renewal(False)]


def _report(storage: Storage, claimed: Claimed) -> bool:
    return storage.report([report_of(claimed, 50, [(1, "still here")])]) == [True]


WORDS: dict[str, Word] = {
    **{kind: _ending(kind) for kind in ENDINGS},
    "renew": _renew,
    "report": _report,
}
"""Everything that a worker can report about an attempt; each returns whether it was accepted."""


class LeasesContract(StorageCase):
    """Cases about leases that are held, renewed and lost."""

    @pytest.mark.parametrize("stale", STALE, ids=lambda stale: stale.__name__)
    def test_stale_lease_token_is_rejected_without_side_effects(self, storage: Storage, stale: Stale) -> None:
        claimed = stale(self, storage)

        with nothing_changes(storage):
            assert [word for word in WORDS if WORDS[word](storage, claimed)] == []

    def test_current_lease_token_is_accepted(self, storage: Storage) -> None:
        for word in WORDS:
            assert WORDS[word](storage, an_active_job(storage, queue=f"queue of {word}")), word

    def test_lease_token_is_valid_only_for_its_own_job(self, storage: Storage) -> None:
        enqueue_many(storage, 24)
        claimed = claim(storage, 24)

        with nothing_changes(storage):
            for one, other in zip(claimed, [*claimed[1:], claimed[0]], strict=True):
                for word in WORDS:
                    assert not WORDS[word](storage, one._replace(id=other.id)), word
                    assert not WORDS[word](storage, one._replace(queue="another")), word
                    assert not WORDS[word](storage, one._replace(id="nobody")), word

    def test_stale_lease_token_does_not_recreate_an_obliterated_queue(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.queues.obliterate(QUEUE, force=True)

        for word in WORDS:
            assert not WORDS[word](storage, claimed), word
            assert QUEUE not in storage.queues.names(), word

    def test_each_claim_has_its_own_lease_token(self, storage: Storage) -> None:
        enqueue(storage)
        tokens = []
        for _ in range(5):
            claimed = claim_one(storage)
            tokens.append(claimed.token)
            finish(storage, releasing(claimed))

        assert len(set(tokens)) == 5

    def test_job_of_dead_worker_runs_again(self, storage: Storage) -> None:
        """No job is lost between its claim and the first report about it."""
        claimed = an_active_job(storage, id="order:1")

        self.lose_lease(storage, claimed.lease)

        again = claim_one(storage, worker="worker-2")
        assert (again.id, again.attempts, again.stalls) == ("order:1", 2, 1)
        assert finish(storage, completing(again)) == [True]

    def test_lease_is_held_until_it_expires(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        self.pass_time(storage, claimed.lease // 2)

        assert state(storage, claimed.id) is State.ACTIVE
        assert finish(storage, completing(claimed)) == [True]

    def test_renewed_lease_is_held_far_beyond_its_length(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        for _ in range(9):
            self.pass_time(storage, claimed.lease * 2 // 3)
            assert storage.renew([lease_of(claimed)]) == [Renewal(True, False)]
            assert claim(storage, 10, worker="worker-2") == []

        record = job(storage, claimed.id)
        assert (record.state, record.attempts, record.stalls) == (State.ACTIVE, 1, 0)
        assert finish(storage, completing(claimed)) == [True]

    def test_renewal_extends_the_lease_to_its_full_length(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        self.advance(claimed.lease * 2 // 3)
        storage.renew([lease_of(claimed)])

        self.pass_time(storage, claimed.lease * 2 // 3)
        assert state(storage, claimed.id) is State.ACTIVE
        self.pass_time(storage, claimed.lease)
        assert state(storage, claimed.id) is State.WAITING

    def test_renewal_affects_only_the_given_leases(self, storage: Storage) -> None:
        enqueue_many(storage, 3)
        kept, lost, ended = claim(storage, 3)
        finish(storage, completing(ended))
        self.advance(kept.lease * 2 // 3)

        leases = [lease_of(ended), lease_of(kept), Lease(QUEUE, "nobody", 1)]
        held = [renewal.held for renewal in storage.renew(leases)]
        self.pass_time(storage, kept.lease * 2 // 3)

        assert held == [False, True, False]
        assert state(storage, kept.id) is State.ACTIVE
        assert state(storage, lost.id) is State.WAITING

    def test_calls_without_leases_reports_or_outcomes_return_nothing(self, storage: Storage) -> None:
        assert storage.renew([]) == []
        assert storage.report([]) == []
        assert finish(storage) == []

    def test_renewal_reports_a_requested_cancel(self, storage: Storage) -> None:
        enqueue_many(storage, 2)
        one, other = claim(storage, 2)
        storage.jobs.cancel(QUEUE, [one.id])

        assert storage.renew([lease_of(one), lease_of(other)]) == [
            Renewal(True, True),
            Renewal(True, False),
        ]

    def test_cancel_request_does_not_carry_over_to_a_new_job_with_the_same_id(self, storage: Storage) -> None:
        """The completed job was asked to stop; the new one was not."""
        claimed = an_active_job(storage, id="order:1")
        storage.jobs.cancel(QUEUE, ["order:1"])
        finish(storage, completing(claimed))
        storage.jobs.remove(QUEUE, ["order:1"])
        again = an_active_job(storage, id="order:1")

        assert storage.renew([lease_of(again)]) == [Renewal(True, False)]

    def test_unregistered_worker_can_finish_its_jobs_or_lose_their_leases(self, storage: Storage) -> None:
        storage.workers.register(worker("worker-1"))
        finishing = an_active_job(storage, id="finishing")
        silent = an_active_job(storage, id="silent")
        storage.workers.unregister("worker-1")

        assert finish(storage, completing(finishing)) == [True]
        self.lose_lease(storage, silent.lease)
        assert claim_one(storage).id == "silent"

    def test_restarted_worker_with_same_id_does_not_keep_orphaned_jobs_alive(self, storage: Storage) -> None:
        storage.workers.register(worker("stable-name", pid=1))
        orphan = an_active_job(storage, worker="stable-name")
        storage.workers.register(worker("stable-name", pid=2))
        fresh = an_active_job(storage, worker="stable-name")

        for _ in range(3):
            self.pass_time(storage, orphan.lease // 2)
            storage.workers.register(worker("stable-name", pid=2))
            assert storage.renew([lease_of(fresh)]) == [Renewal(True, False)]

        assert state(storage, orphan.id) is State.WAITING
        assert state(storage, fresh.id) is State.ACTIVE

    def test_stale_leases_are_counted_until_a_sweep_reclaims_their_jobs(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        an_active_job(storage, queue="other")
        assert storage.reads.stale_leases(0) == {}

        self.advance(claimed.lease + 1_000)
        assert storage.reads.stale_leases(0) == {QUEUE: 1, "other": 1}
        assert storage.reads.stale_leases(60_000) == {}

        storage.sweep()
        assert storage.reads.stale_leases(0) == {}

    def test_delay_longer_than_lease_runs_job_once(self, storage: Storage) -> None:
        lease = an_active_job(storage, id="measure").lease
        enqueue(storage, id="late", delay=3 * lease)

        for _ in range(5):
            assert "late" not in [one.id for one in claim(storage, 10)]
            self.pass_time(storage, lease * 2 // 3)

        record = job(storage, "late")
        assert (record.state, record.attempts, record.stalls) in [
            (State.WAITING, 0, 0),
            (State.DELAYED, 0, 0),
        ]

    def test_finished_job_keeps_its_state_after_its_lease_ends(self, storage: Storage) -> None:
        completed = a_completed_job(storage, id="done", result_ttl=None)
        failed = an_active_job(storage, id="dead")
        finish(storage, failing(failed))

        for _ in range(3):
            self.lose_lease(storage, failed.lease)

        assert state(storage, completed) is State.COMPLETED
        record = job(storage, "dead")
        assert (record.state, record.stalls, len(record.history)) == (State.FAILED, 0, 1)
        assert counts(storage) == {State.COMPLETED: 1, State.FAILED: 1}

    def test_lease_is_long_enough_to_be_renewed(self, storage: Storage) -> None:
        assert an_active_job(storage).lease >= SOON
