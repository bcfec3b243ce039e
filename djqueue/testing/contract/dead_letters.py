"""Dead letters: permanently failed jobs, their expiry, and retries."""

import pytest

from djqueue.core.job import Renewal
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ERROR,
    JOB_IN,
    QUEUE,
    a_cancelled_job,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    failing,
    finish,
    job,
    lease_of,
    releasing,
    retrying,
    state,
)
from .case import (
    BRIEF_LETTERS,
    FEW_LETTERS,
    LATER,
    LONG_LETTERS,
    SELF_HEALING,
    SOON,
    YEAR,
    StorageCase,
    nothing_changes,
    swept_clean,
)
from .transitions import shows


class DeadLettersContract(StorageCase):
    """Cases about failed jobs."""

    def test_dead_letter_has_an_expiry_time(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1", reason="timeout")

        [letter] = storage.reads.dead_letters(QUEUE)

        record = job(storage, "order:1")
        assert (letter.id, letter.reason, letter.retries) == ("order:1", "timeout", 0)
        assert letter.entered_at == record.finished_at
        assert letter.expires_at > letter.entered_at
        assert letter.next_retry_at == 0

    def test_dead_letters_are_listed_oldest_first(self, storage: Storage) -> None:
        ids = [a_failed_job(storage, id=str(number)) for number in (3, 1, 2)]
        a_failed_job(storage, queue="other")

        assert [letter.id for letter in storage.reads.dead_letters(QUEUE)] == ids

    @shows("retry_dead", State.FAILED, State.WAITING)
    def test_retried_dead_letter_waits_with_failures_and_stalls_reset(self, storage: Storage) -> None:
        enqueue(storage, id="order:1", max_stalls=0)
        finish(storage, retrying(claim_one(storage)))
        self.lose_lease(storage, claim_one(storage).lease)
        assert state(storage, "order:1") is State.FAILED

        assert storage.jobs.retry(QUEUE, ["order:1"]) == ["retried"]

        record = job(storage, "order:1")
        assert (record.state, record.failures, record.stalls) == (State.WAITING, 0, 0)
        assert (record.attempts, record.reason, record.finished_at) == (2, "", 0)
        assert len(record.history) == 2
        assert storage.reads.dead_letters(QUEUE) == []
        assert counts(storage) == {State.WAITING: 1}

    def test_retried_dead_letter_can_complete(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1", error=ERROR)
        storage.jobs.retry(QUEUE, ["order:1"])

        claimed = claim_one(storage)
        assert (claimed.id, claimed.attempts) == ("order:1", 2)
        assert finish(storage, completing(claimed, b"at last")) == [True]

        record = job(storage, "order:1")
        assert (record.state, record.result, record.error) == (State.COMPLETED, b"at last", None)
        assert counts(storage) == {State.COMPLETED: 1}

    def test_retried_dead_letter_that_fails_again_is_one_dead_letter(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1", reason="timeout")
        storage.jobs.retry(QUEUE, ["order:1"])
        finish(storage, failing(claim_one(storage), "explicit_fail"))

        assert [letter.reason for letter in storage.reads.dead_letters(QUEUE)] == ["explicit_fail"]
        assert counts(storage) == {State.FAILED: 1}

    @pytest.mark.parametrize("there", sorted(set(State) - {State.FAILED}))
    def test_retry_is_rejected_for_job_that_did_not_fail(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage)

        with nothing_changes(storage):
            assert storage.jobs.retry(QUEUE, [job_id]) == ["not_failed"]

    def test_retry_results_follow_the_order_of_ids(self, storage: Storage) -> None:
        a_completed_job(storage, id="done")
        a_failed_job(storage, id="dead 1")
        a_failed_job(storage, id="dead 2")

        answers = storage.jobs.retry(QUEUE, ["dead 2", "nobody", "done", "dead 1", "dead 2"])

        assert answers == ["retried", "not_found", "not_failed", "retried", "not_failed"]
        assert [one.id for one in claim(storage, 5)] == ["dead 2", "dead 1"]

    def test_retry_is_rejected_while_another_job_has_its_unique_key(self, storage: Storage) -> None:
        a_failed_job(storage, id="old", unique_key="k")
        a_waiting_job(storage, id="new", unique_key="k")

        with nothing_changes(storage):
            assert storage.jobs.retry(QUEUE, ["old"]) == ["unique_key_taken"]

        storage.jobs.cancel(QUEUE, ["new"])
        assert storage.jobs.retry(QUEUE, ["old"]) == ["retried"]
        [answer] = storage.enqueue([batch(unique_key="k")])
        assert (answer.status, answer.id) == ("duplicate", "old")

    def test_only_one_of_two_dead_letters_with_same_unique_key_is_retried(self, storage: Storage) -> None:
        a_failed_job(storage, id="a", unique_key="k")
        a_failed_job(storage, id="b", unique_key="k")

        assert storage.jobs.retry(QUEUE, ["a", "b"]) == ["retried", "unique_key_taken"]

    def test_oldest_dead_letters_are_removed_beyond_the_maximum(self, storage: Storage) -> None:
        for number in range(5):
            a_failed_job(storage, queue=FEW_LETTERS, id=str(number))

        assert [letter.id for letter in storage.reads.dead_letters(FEW_LETTERS)] == ["2", "3", "4"]
        assert storage.reads.states(FEW_LETTERS, list("01234")) == [None, None, *[State.FAILED] * 3]
        assert counts(storage, FEW_LETTERS) == {State.FAILED: 3}
        assert storage.jobs.retry(FEW_LETTERS, ["0"]) == ["not_found"]

    def test_expired_dead_letter_is_removed_with_its_job(self, storage: Storage) -> None:
        a_failed_job(storage, queue=BRIEF_LETTERS, id="brief")
        a_failed_job(storage, id="kept")
        self.advance(SOON + 1)

        swept_clean(storage)

        assert storage.reads.dead_letters(BRIEF_LETTERS) == []
        assert storage.reads.jobs(BRIEF_LETTERS, ["brief"]) == [None]
        assert counts(storage, BRIEF_LETTERS) == {}
        assert state(storage, "kept") is State.FAILED

    def test_retried_dead_letter_does_not_expire(self, storage: Storage) -> None:
        a_failed_job(storage, queue=BRIEF_LETTERS, id="brief")
        storage.jobs.retry(BRIEF_LETTERS, ["brief"])

        self.pass_time(storage, SOON + 1)

        assert state(storage, "brief", BRIEF_LETTERS) is State.WAITING

    def test_dead_letter_is_kept_beyond_result_ttl(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1", result_ttl=SOON)

        self.pass_time(storage, SOON + 1)

        assert state(storage, "order:1") is State.FAILED

    def test_dead_letter_is_kept_for_a_year_with_that_queue_policy(self, storage: Storage) -> None:
        a_failed_job(storage, queue=LONG_LETTERS, id="order:1")
        [letter] = storage.reads.dead_letters(LONG_LETTERS)
        assert letter.expires_at == letter.entered_at + YEAR

        self.pass_time(storage, YEAR // 2)

        assert state(storage, "order:1", LONG_LETTERS) is State.FAILED

    def test_auto_retries_stop_at_the_maximum(self, storage: Storage) -> None:
        enqueue(storage, queue=SELF_HEALING, id="order:1")
        retries = []
        for _ in range(3):
            finish(storage, failing(claim_one(storage)))
            [letter] = storage.reads.dead_letters(SELF_HEALING)
            retries.append((letter.retries, letter.next_retry_at > letter.entered_at))
            assert claim(storage) == []
            self.pass_time(storage, SOON + 1)

        assert retries == [(0, True), (1, True), (2, False)]
        self.pass_time(storage, SOON + 1)
        assert claim(storage) == []
        assert counts(storage, SELF_HEALING) == {State.FAILED: 1}

    def test_manual_retry_resets_auto_retries(self, storage: Storage) -> None:
        enqueue(storage, queue=SELF_HEALING, id="order:1")
        for _ in range(3):
            finish(storage, failing(claim_one(storage)))
            self.pass_time(storage, SOON + 1)
        storage.jobs.retry(SELF_HEALING, ["order:1"])
        finish(storage, failing(claim_one(storage)))

        assert storage.reads.dead_letters(SELF_HEALING)[0].retries == 0

    def test_new_job_does_not_inherit_auto_retries_of_removed_job(self, storage: Storage) -> None:
        a_failed_job(storage, queue=SELF_HEALING, id="order:1")
        self.pass_time(storage, SOON + 1)
        storage.jobs.remove(SELF_HEALING, ["order:1"])
        a_failed_job(storage, queue=SELF_HEALING, id="order:1")

        assert storage.reads.dead_letters(SELF_HEALING)[0].retries == 0

    def test_sweep_returns_the_number_of_auto_retries(self, storage: Storage) -> None:
        a_failed_job(storage, queue=SELF_HEALING, id="a")
        a_failed_job(storage, queue=SELF_HEALING, id="b")
        self.advance(SOON + 1)

        assert [storage.sweep().retried for _ in range(2)] == [2, 0]

    def test_removing_a_dead_letter_removes_its_job(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1")

        assert storage.jobs.remove(QUEUE, ["order:1"]) == [True]

        assert storage.reads.dead_letters(QUEUE) == []
        assert counts(storage) == {}
        assert storage.jobs.retry(QUEUE, ["order:1"]) == ["not_found"]

    def test_expired_job_runs_after_manual_retry(self, storage: Storage) -> None:
        enqueue(storage, id="late", ttl=SOON)
        self.pass_time(storage, SOON + 1)
        assert state(storage, "late") is State.FAILED

        storage.jobs.retry(QUEUE, ["late"])
        storage.sweep()

        assert claim_one(storage).id == "late"

    def test_retried_dead_letter_has_no_cancel_request(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id])
        finish(storage, failing(claimed))
        storage.jobs.retry(QUEUE, [claimed.id])

        again = claim_one(storage)

        assert storage.renew([lease_of(again)]) == [Renewal(True, False)]
        finish(storage, releasing(again))
        assert state(storage, claimed.id) is State.WAITING

    def test_only_failed_jobs_are_dead_letters(self, storage: Storage) -> None:
        a_completed_job(storage)
        a_cancelled_job(storage)
        a_waiting_job(storage)
        enqueue(storage, delay=LATER)

        assert storage.reads.dead_letters(QUEUE) == []
