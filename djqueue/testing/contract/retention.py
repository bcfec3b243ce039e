"""Retention by age and count: the finished jobs that a queue keeps, per outcome."""

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    a_cancelled_job,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    a_waiting_job,
    completing,
    counts,
    enqueue_many,
    finish,
    job,
    report_of,
    retrying,
    state,
)
from ..factories import claim as claim_jobs
from .case import BRIEF_RECORDS, FEW_RECORDS, LATER, SOON, StorageCase, swept_clean


class RetentionContract(StorageCase):
    """Cases about queues with a `retention`."""

    def test_records_beyond_the_maximum_count_are_removed(self, storage: Storage) -> None:
        done = []
        for number in range(6):
            done.append(a_completed_job(storage, queue=FEW_RECORDS, id=f"done {number}"))
            self.advance(1)
        gone = [a_cancelled_job(storage, queue=FEW_RECORDS, id=f"cancelled {number}") for number in range(3)]
        a_failed_job(storage, queue=FEW_RECORDS)
        a_delayed_job(storage, queue=FEW_RECORDS)

        swept_clean(storage)

        assert storage.reads.states(FEW_RECORDS, done) == [None] * 3 + [State.COMPLETED] * 3
        assert len([one for one in storage.reads.states(FEW_RECORDS, gone) if one]) == 1
        assert counts(storage, FEW_RECORDS) == {
            State.COMPLETED: 3,
            State.CANCELLED: 1,
            State.FAILED: 1,
            State.DELAYED: 1,
        }

    def test_maximum_count_does_not_extend_the_result_ttl(self, storage: Storage) -> None:
        a_completed_job(storage, queue=FEW_RECORDS, id="brief", result_ttl=SOON)

        self.pass_time(storage, SOON + 1)

        assert counts(storage, FEW_RECORDS) == {}

    def test_records_that_expire_first_are_removed_first(self, storage: Storage) -> None:
        for job_id, kept in (("for ever", None), ("long", 10 * LATER), ("short", SOON), ("usual", LATER)):
            a_completed_job(storage, queue=FEW_RECORDS, id=job_id, result_ttl=kept)
        storage.sweep()
        assert state(storage, "short", FEW_RECORDS) is None
        a_completed_job(storage, queue=FEW_RECORDS, id="next", result_ttl=5 * LATER)

        swept_clean(storage)

        assert storage.reads.states(FEW_RECORDS, ["for ever", "long", "usual", "next"]) == [
            State.COMPLETED,
            State.COMPLETED,
            None,
            State.COMPLETED,
        ]

    def test_failed_jobs_do_not_prevent_removal_of_completed_records(self, storage: Storage) -> None:
        for number in range(3):
            a_failed_job(storage, queue=FEW_RECORDS, id=f"failed {number}")
        for number in range(4):
            a_completed_job(storage, queue=FEW_RECORDS, id=str(number), result_ttl=None)

        swept_clean(storage)

        assert counts(storage, FEW_RECORDS) == {State.COMPLETED: 3, State.FAILED: 3}

    def test_record_removed_by_count_leaves_nothing_behind(self, storage: Storage) -> None:
        for job_id in ("told", "b", "c", "d"):
            a_waiting_job(storage, queue=FEW_RECORDS, id=job_id)
            [claimed] = claim_jobs(storage)
            if job_id == "told":
                storage.report([report_of(claimed, 1, [(1, "line")])])
                finish(storage, retrying(claimed))
                [claimed] = claim_jobs(storage)
            finish(storage, completing(claimed, b"result"))
            self.advance(1)

        swept_clean(storage)

        assert state(storage, "told", FEW_RECORDS) is None
        a_waiting_job(storage, queue=FEW_RECORDS, id="told")
        record = job(storage, "told", FEW_RECORDS)
        assert (record.history, record.logs, record.progress, record.result) == ((), (), None, None)

    def test_thousand_records_beyond_the_maximum_count_are_removed(self, storage: Storage) -> None:
        enqueue_many(storage, 1_200, queue=FEW_RECORDS)
        finish(storage, *map(completing, claim_jobs(storage, 1_200)))

        swept_clean(storage)

        assert counts(storage, FEW_RECORDS) == {State.COMPLETED: 3}

    @pytest.mark.parametrize("kept", [None, LATER])
    def test_records_beyond_the_maximum_age_are_removed(self, storage: Storage, kept: int | None) -> None:
        a_waiting_job(storage, queue=BRIEF_RECORDS, id="plain")
        storage.sweep()
        [claimed] = claim_jobs(storage)
        finish(storage, completing(claimed))
        a_completed_job(storage, queue=BRIEF_RECORDS, id="done", result_ttl=kept)
        a_cancelled_job(storage, queue=BRIEF_RECORDS, id="cancelled", result_ttl=kept)
        a_failed_job(storage, queue=BRIEF_RECORDS, id="failed", result_ttl=kept)
        assert counts(storage, BRIEF_RECORDS)[State.COMPLETED] == 2

        self.pass_time(storage, SOON + 1)
        swept_clean(storage)
        assert counts(storage, BRIEF_RECORDS) == {State.CANCELLED: 1, State.FAILED: 1}

        self.pass_time(storage, SOON + 1)
        swept_clean(storage)
        assert counts(storage, BRIEF_RECORDS) == {State.FAILED: 1}

    def test_maximum_age_does_not_extend_the_result_ttl(self, storage: Storage) -> None:
        a_waiting_job(storage, queue=BRIEF_RECORDS, id="brief", result_ttl=SOON // 2)
        storage.sweep()
        finish(storage, *map(completing, claim_jobs(storage)))

        self.pass_time(storage, SOON // 2 + 1)

        assert counts(storage, BRIEF_RECORDS) == {}
