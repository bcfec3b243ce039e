"""Retention of results, attempts and log lines that expire before the records of their jobs."""

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    a_completed_job,
    batch,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    report_of,
    retrying,
)
from .case import (
    BRIEF_DETAILS,
    BRIEF_RESULTS,
    FEW_RESULTS,
    LATER,
    SOON,
    StorageCase,
    bounded,
    swept_clean,
)


class BelongingsContract(StorageCase):
    """Cases about queues that keep less of what belongs to a job than its record."""

    # Results.

    def test_results_beyond_the_maximum_bytes_are_removed_without_their_records(
        self, storage: Storage
    ) -> None:
        bounded(storage, FEW_RESULTS)
        for job_id, kept in (("for ever", None), ("long", 10 * LATER), ("usual", LATER), ("none", LATER)):
            result = None if job_id == "none" else bytes(150)
            a_completed_job(storage, queue=FEW_RESULTS, id=job_id, result=result, result_ttl=kept)

        swept_clean(storage)

        assert counts(storage, FEW_RESULTS) == {State.COMPLETED: 4}
        assert job(storage, "usual", FEW_RESULTS).result is None
        assert job(storage, "long", FEW_RESULTS).result == bytes(150)
        assert job(storage, "for ever", FEW_RESULTS).result == bytes(150)
        [answer] = storage.enqueue([batch(ids=["usual"], queue=FEW_RESULTS)])
        assert (answer.status, answer.result) == ("completed", None)

    def test_thousand_results_beyond_the_maximum_bytes_are_removed(self, storage: Storage) -> None:
        bounded(storage, FEW_RESULTS)
        ids = enqueue_many(storage, 1_200, queue=FEW_RESULTS)
        finish(storage, *(completing(claimed, bytes(10)) for claimed in claim(storage, 1_200)))

        swept_clean(storage)

        results = [record.result for record in storage.reads.jobs(FEW_RESULTS, ids) if record is not None]
        assert len(results) == 1_200
        assert len([result for result in results if result is not None]) == 30

    @pytest.mark.parametrize("kept", [None, LATER])
    def test_results_beyond_the_maximum_age_are_removed(self, storage: Storage, kept: int | None) -> None:
        bounded(storage, BRIEF_RESULTS)
        a_completed_job(storage, queue=BRIEF_RESULTS, id="done", result_ttl=kept, result=b"result")
        assert job(storage, "done", BRIEF_RESULTS).result == b"result"

        self.pass_time(storage, SOON + 1)

        record = job(storage, "done", BRIEF_RESULTS)
        assert (record.state, record.result) == (State.COMPLETED, None)

    # Attempts and log lines.

    def test_job_keeps_the_maximum_number_of_attempts_and_log_lines(self, storage: Storage) -> None:
        bounded(storage, BRIEF_DETAILS)
        enqueue(storage, queue=BRIEF_DETAILS, id="told")
        for number in range(4):
            claimed = claim_one(storage)
            storage.report([report_of(claimed, None, [(number, f"line {number}")])])
            finish(storage, retrying(claimed))

        record = job(storage, "told", BRIEF_DETAILS)
        assert [run.attempt for run in record.history] == [3, 4]
        assert [line for _, line in record.logs] == ["line 1", "line 2", "line 3"]

    @pytest.mark.parametrize("end", [State.COMPLETED, State.CANCELLED, State.FAILED])
    def test_attempts_and_log_lines_expire_before_the_record(self, storage: Storage, end: State) -> None:
        bounded(storage, BRIEF_DETAILS)
        _with_details(storage, "told", end)
        record = job(storage, "told", BRIEF_DETAILS)
        assert (len(record.history), len(record.logs)) == (1 + (end is not State.COMPLETED), 1)

        self.pass_time(storage, SOON + 1)
        record = job(storage, "told", BRIEF_DETAILS)
        assert (len(record.history), len(record.logs)) == (0, 1)

        self.pass_time(storage, 2 * SOON + 1)
        record = job(storage, "told", BRIEF_DETAILS)
        assert (record.state, record.history, record.logs) == (end, (), ())

    def test_attempts_of_live_job_do_not_expire(self, storage: Storage) -> None:
        bounded(storage, BRIEF_DETAILS)
        _with_details(storage, "again", State.FAILED)
        storage.jobs.retry(BRIEF_DETAILS, ["again"])

        self.pass_time(storage, 10 * SOON)

        record = job(storage, "again", BRIEF_DETAILS)
        assert (len(record.history), len(record.logs)) == (2, 1)


def _with_details(storage: Storage, job_id: str, end: State) -> None:
    """Return a job that has run once in vain, and logged a line, before it ended."""
    enqueue(storage, queue=BRIEF_DETAILS, id=job_id)
    claimed = claim_one(storage)
    storage.report([report_of(claimed, None, [(1, "line")])])
    finish(storage, retrying(claimed))
    claimed = claim_one(storage)
    kinds = {State.COMPLETED: "complete", State.CANCELLED: "cancel", State.FAILED: "fail"}
    finish(storage, ENDINGS[kinds[end]](claimed))
