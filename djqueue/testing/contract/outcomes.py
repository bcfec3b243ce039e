"""Outcomes: how an attempt ends, and what is counted and recorded."""

import pytest

from djqueue.core.job import DEAD_LETTER_REASONS, AttemptRecord, JobFailure
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ERROR,
    QUEUE,
    RESULT,
    an_active_job,
    cancelling,
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
)
from .case import LATER, StorageCase, nothing_changes
from .transitions import shows


class OutcomesContract(StorageCase):
    """Cases about ends of runs."""

    @shows("complete", State.ACTIVE, State.COMPLETED)
    def test_completed_job_keeps_its_result(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        assert finish(storage, completing(claimed, RESULT)) == [True]

        record = job(storage, claimed.id)
        assert (record.state, record.result, record.error) == (State.COMPLETED, RESULT, None)
        assert record.finished_at >= record.started_at > 0
        assert (record.attempts, record.failures, record.stalls) == (1, 0, 0)
        assert counts(storage) == {State.COMPLETED: 1}

    @shows("retry", State.ACTIVE, State.WAITING)
    def test_failed_attempt_with_attempts_left_returns_job_to_waiting(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        finish(storage, retrying(claimed))

        record = job(storage, claimed.id)
        assert (record.state, record.attempts, record.failures) == (State.WAITING, 1, 1)
        assert (record.error, record.worker, record.finished_at) == (ERROR, "", 0)
        assert counts(storage) == {State.WAITING: 1}

    @shows("retry", State.ACTIVE, State.DELAYED)
    def test_retry_with_delay_makes_job_delayed(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        finish(storage, retrying(claimed, delay=LATER))

        record = job(storage, claimed.id)
        assert (record.state, record.failures) == (State.DELAYED, 1)
        assert record.run_at >= record.started_at + LATER
        assert claim(storage) == []

    @shows("release", State.ACTIVE, State.WAITING)
    def test_released_job_has_not_used_an_attempt(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        finish(storage, releasing(claimed))

        record = job(storage, claimed.id)
        assert record.state is State.WAITING
        assert (record.attempts, record.failures, record.stalls) == (0, 0, 0)
        assert claim_one(storage).attempts == 1

    @shows("release", State.ACTIVE, State.DELAYED)
    def test_snoozed_job_has_not_used_an_attempt(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        finish(storage, releasing(claimed, delay=LATER))

        record = job(storage, claimed.id)
        assert (record.state, record.attempts, record.failures) == (State.DELAYED, 0, 0)

    @shows("fail", State.ACTIVE, State.FAILED)
    @pytest.mark.parametrize("reason", sorted({*DEAD_LETTER_REASONS} - {"stalled", "worker_lost"}))
    def test_permanently_failed_job_becomes_dead_letter(self, storage: Storage, reason: str) -> None:
        claimed = an_active_job(storage)

        finish(storage, failing(claimed, reason))

        record = job(storage, claimed.id)
        assert (record.state, record.reason, record.error) == (State.FAILED, reason, ERROR)
        assert record.finished_at >= record.started_at
        [letter] = storage.reads.dead_letters(QUEUE)
        assert (letter.queue, letter.id, letter.reason) == (QUEUE, claimed.id, reason)
        assert letter.entered_at == record.finished_at
        assert counts(storage) == {State.FAILED: 1}

    @pytest.mark.parametrize("reason", ["", "made up"])
    def test_unrecognized_failure_reason_is_stored_as_unknown(self, storage: Storage, reason: str) -> None:
        claimed = an_active_job(storage)

        finish(storage, failing(claimed, reason))

        assert job(storage, claimed.id).reason == "unknown"
        assert [letter.reason for letter in storage.reads.dead_letters(QUEUE)] == ["unknown"]

    @shows("cancel", State.ACTIVE, State.CANCELLED)
    def test_cancelled_attempt_leaves_no_dead_letter(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        finish(storage, cancelling(claimed, "the handler discarded it"))

        record = job(storage, claimed.id)
        assert (record.state, record.reason) == (State.CANCELLED, "the handler discarded it")
        assert record.finished_at >= record.started_at
        assert storage.reads.dead_letters(QUEUE) == []
        assert counts(storage) == {State.CANCELLED: 1}

    def test_attempts_failures_and_stalls_are_counted_separately(self, storage: Storage) -> None:
        enqueue(storage, id="order:1")
        finish(storage, retrying(claim_one(storage)))
        finish(storage, releasing(claim_one(storage)))
        self.lose_lease(storage, claim_one(storage).lease)
        finish(storage, retrying(claim_one(storage)))

        claimed = claim_one(storage)

        assert (claimed.attempts, claimed.failures, claimed.stalls) == (4, 2, 1)
        record = job(storage, "order:1")
        assert (record.attempts, record.failures, record.stalls) == (4, 2, 1)

    def test_each_ended_attempt_is_recorded(self, storage: Storage) -> None:
        enqueue(storage, id="order:1")
        other = JobFailure("KeyError", "größer", "Traceback")
        finish(storage, retrying(claim_one(storage, worker="w1"), error=ERROR))
        finish(storage, releasing(claim_one(storage, worker="w2")))
        self.lose_lease(storage, claim_one(storage, worker="w3").lease)
        finish(storage, failing(claim_one(storage, worker="w4"), error=other))

        record = job(storage, "order:1")

        assert [(run.attempt, run.worker, run.outcome, run.error) for run in record.history] == [
            (1, "w1", "retried", ERROR),
            (2, "w2", "released", None),
            (2, "w3", "stalled", None),
            (3, "w4", "failed", other),
        ]
        assert all(run.finished_at >= run.started_at > 0 for run in record.history)
        assert record.all_attempts() == record.history

    def test_last_error_is_kept_until_the_job_completes(self, storage: Storage) -> None:
        job_id = enqueue(storage)
        finish(storage, retrying(claim_one(storage), error=ERROR))
        finish(storage, releasing(claim_one(storage)))
        assert job(storage, job_id).error == ERROR
        self.lose_lease(storage, claim_one(storage).lease)
        assert job(storage, job_id).error == ERROR

        finish(storage, completing(claim_one(storage)))

        assert job(storage, job_id).error is None

    def test_completed_attempt_is_last_of_all_attempts(self, storage: Storage) -> None:
        enqueue(storage, id="order:1")
        finish(storage, retrying(claim_one(storage, worker="w1")))
        finish(storage, completing(claim_one(storage, worker="w2")))

        record = job(storage, "order:1")

        assert record.error is None
        assert len(record.history) == 1
        assert record.all_attempts()[-1] == AttemptRecord(
            2, "w2", record.started_at, record.finished_at, "completed"
        )

    def test_one_finish_accepts_every_kind_of_outcome(self, storage: Storage) -> None:
        enqueue_many(storage, 5)
        a, b, c, d, e = claim(storage, 5)

        accepted = finish(
            storage,
            completing(a),
            retrying(b, LATER),
            completing(a),
            failing(c),
            cancelling(d),
            releasing(e),
        )

        assert accepted == [True, True, False, True, True, True]
        assert storage.reads.states(QUEUE, [one.id for one in (a, b, c, d, e)]) == [
            State.COMPLETED,
            State.DELAYED,
            State.FAILED,
            State.CANCELLED,
            State.WAITING,
        ]

    def test_one_finish_accepts_outcomes_of_several_queues(self, storage: Storage) -> None:
        for queue in ("a", "b", "c"):
            enqueue(storage, queue=queue, id="same")

        accepted = finish(storage, *map(completing, claim(storage, 3)))

        assert accepted == [True, True, True]
        assert [state(storage, "same", queue) for queue in "abc"] == [State.COMPLETED] * 3

    def test_second_outcome_of_an_attempt_is_rejected(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        assert finish(storage, failing(claimed), completing(claimed)) == [True, False]
        record = job(storage, claimed.id)
        assert (record.state, record.result) == (State.FAILED, None)
        assert len(storage.reads.dead_letters(QUEUE)) == 1

    def test_unknown_outcome_kind_raises_and_changes_nothing(self, storage: Storage) -> None:
        enqueue_many(storage, 2)
        fine, claimed = claim(storage, 2)

        with nothing_changes(storage), pytest.raises(ValueError, match="'explode'"):
            finish(storage, completing(fine), completing(claimed)._replace(kind="explode"))

        assert finish(storage, completing(fine), completing(claimed)) == [True, True]

    def test_error_text_is_stored_unchanged(self, storage: Storage) -> None:
        error = JobFailure("app.Übel", "line 1\nline 2 \U0001f4a5 'quoted' %s {0}", "x" * 100_000)
        claimed = an_active_job(storage)

        finish(storage, failing(claimed, error=error))

        assert job(storage, claimed.id).error == error

    def test_failure_without_error_is_recorded(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        finish(storage, failing(claimed, error=None))

        assert job(storage, claimed.id).error is None
        assert len(storage.reads.dead_letters(QUEUE)) == 1

    def test_progress_and_log_lines_are_recorded(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        assert storage.report([report_of(claimed, 10)]) == [True]
        assert storage.report([report_of(claimed, lines=[(1, "one"), (2, "zwei ü")])]) == [True]
        assert storage.report([report_of(claimed, {"rows": 7}, [(3, "three")])]) == [True]

        record = job(storage, claimed.id)
        assert record.progress == {"rows": 7}
        assert record.logs == ((1, "one"), (2, "zwei ü"), (3, "three"))

    def test_progress_and_log_lines_are_kept_across_attempts(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.report([report_of(claimed, 10, [(1, "one")])])
        finish(storage, retrying(claimed))
        claimed = claim_one(storage)
        storage.report([report_of(claimed, 20, [(2, "two")])])
        finish(storage, completing(claimed))

        record = job(storage, claimed.id)

        assert (record.progress, record.logs) == (20, ((1, "one"), (2, "two")))

    def test_each_report_has_its_own_result(self, storage: Storage) -> None:
        enqueue_many(storage, 2)
        one, other = claim(storage, 2)
        finish(storage, completing(other))

        reports = [report_of(other, 1), report_of(one, 2), report_of(one, 3)]

        assert storage.report(reports) == [False, True, True]
        assert job(storage, one.id).progress == 3
        assert job(storage, other.id).progress is None

    def test_report_does_not_renew_lease(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        self.advance(claimed.lease * 2 // 3)
        storage.report([report_of(claimed, 50)])

        self.pass_time(storage, claimed.lease * 2 // 3)

        assert state(storage, claimed.id) is State.WAITING
        assert not storage.renew([lease_of(claimed)])[0].held
