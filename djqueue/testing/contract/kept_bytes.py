"""Retention by bytes: the finished jobs that a queue keeps, per outcome."""

from typing import Any

from djqueue.core.job import JobFailure
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    a_cancelled_job,
    a_completed_job,
    a_failed_job,
    claim_one,
    completing,
    counts,
    enqueue,
    finish,
    job,
    state,
)
from .case import FEW_BYTES, LATER, SOON, StorageCase, bounded, swept_clean


class KeptBytesContract(StorageCase):
    """Cases about queues with bounds in bytes."""

    def test_records_beyond_the_maximum_bytes_are_removed(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        done = []
        for number in range(6):
            done.append(_completed(storage, f"done {number}", payload=bytes(100), result=bytes(200)))
            self.advance(1)

        swept_clean(storage)

        assert storage.reads.states(FEW_BYTES, done) == [None] * 3 + [State.COMPLETED] * 3

    def test_records_up_to_the_maximum_bytes_are_kept(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        _completed(storage, "a", payload=bytes(300), result=bytes(200))
        _completed(storage, "b", payload=bytes(499), result=b"1")
        swept_clean(storage)
        assert counts(storage, FEW_BYTES) == {State.COMPLETED: 2}

        _completed(storage, "c", payload=b"1", result=None)
        swept_clean(storage)

        assert counts(storage, FEW_BYTES) == {State.COMPLETED: 2}
        assert state(storage, "a", FEW_BYTES) is None

    def test_removed_and_expired_records_do_not_count_toward_maximum_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        for number in range(4):
            _completed(storage, f"removed {number}", payload=bytes(400), result=bytes(500))
            storage.jobs.remove(FEW_BYTES, [f"removed {number}"])
        _completed(storage, "brief", payload=bytes(400), result=bytes(500), result_ttl=SOON)
        self.pass_time(storage, SOON + 1)
        _completed(
            storage, "result over", payload=bytes(100), result=bytes(800), result_ttl=SOON, retention=LATER
        )
        self.pass_time(storage, SOON + 1)
        assert job(storage, "result over", FEW_BYTES).result is None

        _completed(storage, "last", payload=bytes(400), result=bytes(500))
        swept_clean(storage)

        assert counts(storage, FEW_BYTES) == {State.COMPLETED: 2}

    def test_each_outcome_has_its_own_maximum_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        _completed(storage, "done", payload=bytes(500), result=bytes(500))
        for number in range(3):
            _cancelled(storage, f"cancelled {number}", payload=bytes(250))
            self.advance(1)
            _failed(storage, f"failed {number}", payload=bytes(400))
            self.advance(1)

        swept_clean(storage)

        assert counts(storage, FEW_BYTES) == {State.COMPLETED: 1, State.CANCELLED: 2, State.FAILED: 2}
        assert state(storage, "cancelled 0", FEW_BYTES) is None
        assert [letter.id for letter in storage.reads.dead_letters(FEW_BYTES)] == ["failed 1", "failed 2"]

    def test_error_texts_count_toward_maximum_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        _failed(storage, "old", payload=bytes(100))
        _failed(storage, "new", payload=bytes(400), error=JobFailure("T", "\N{SNOWMAN}" * 100, "t" * 199))
        swept_clean(storage)
        assert counts(storage, FEW_BYTES) == {State.FAILED: 2}

        _failed(storage, "newest", payload=b"1")
        swept_clean(storage)

        assert [letter.id for letter in storage.reads.dead_letters(FEW_BYTES)] == ["new", "newest"]

    def test_retried_dead_letter_does_not_count_toward_maximum_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        for _ in range(3):
            _failed(storage, "again", payload=bytes(900))
            assert storage.jobs.retry(FEW_BYTES, ["again"]) == ["retried"]
            storage.jobs.cancel(FEW_BYTES, ["again"])
            storage.jobs.remove(FEW_BYTES, ["again"])
        _failed(storage, "a", payload=bytes(500))
        _failed(storage, "b", payload=bytes(500))

        swept_clean(storage)

        assert counts(storage, FEW_BYTES) == {State.FAILED: 2}

    def test_id_enqueued_again_counts_its_new_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        for _ in range(4):
            _cancelled(storage, "again", payload=bytes(400))
        _cancelled(storage, "other", payload=bytes(100))

        swept_clean(storage)

        assert counts(storage, FEW_BYTES) == {State.CANCELLED: 2}

    def test_moved_job_counts_toward_maximum_bytes_of_its_last_queue(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        for job_id in ("a", "b"):
            enqueue(storage, queue=QUEUE, id=job_id, payload=bytes(600))
            storage.jobs.move(QUEUE, [job_id], FEW_BYTES)
            finish(storage, completing(claim_one(storage, queues=[FEW_BYTES]), None))
            self.advance(1)

        swept_clean(storage)

        assert storage.reads.states(FEW_BYTES, ["a", "b"]) == [None, State.COMPLETED]

    def test_obliterate_resets_counted_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        _completed(storage, "a", payload=bytes(900), result=None)
        storage.queues.obliterate(FEW_BYTES)
        bounded(storage, FEW_BYTES)
        _completed(storage, "b", payload=bytes(900), result=None)

        swept_clean(storage)

        assert counts(storage, FEW_BYTES) == {State.COMPLETED: 1}


def _completed(storage: Storage, job_id: str, *, payload: bytes, result: bytes | None, **options: Any) -> str:
    return a_completed_job(storage, queue=FEW_BYTES, id=job_id, payload=payload, result=result, **options)


def _failed(storage: Storage, job_id: str, *, payload: bytes, error: JobFailure | None = None) -> str:
    return a_failed_job(storage, queue=FEW_BYTES, id=job_id, payload=payload, error=error)


def _cancelled(storage: Storage, job_id: str, *, payload: bytes) -> str:
    return a_cancelled_job(storage, queue=FEW_BYTES, id=job_id, payload=payload)
