"""Bounds of a queue with pinned records, with emitted items, and with moved dead letters."""

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    RESULT,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    cancelling,
    claim_one,
    completing,
    counts,
    emit,
    enqueue,
    failing,
    finish,
    items_of,
    job,
    page_of,
    report_of,
    retrying,
    state,
)
from .case import (
    BRIEF_DETAILS,
    BRIEF_RESULTS,
    FEW_BYTES,
    FEW_RECORDS,
    FEW_RESULTS,
    LATER,
    SOON,
    StorageCase,
    bounded,
    swept_clean,
)

LONG = 10 * SOON


class PinnedBoundsContract(StorageCase):
    """Cases about bounds that meet what is kept for dependents, streams and moves."""

    # Records that are held.

    def test_bytes_of_pinned_record_count_only_after_it_is_unpinned(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        _held_child(storage, FEW_BYTES, payload=bytes(500), result=bytes(450))
        for number in range(4):
            self.advance(1)
            a_completed_job(
                storage, queue=FEW_BYTES, id=f"other {number}", payload=bytes(200), result=bytes(100)
            )
        swept_clean(storage)
        others = [f"other {number}" for number in range(4)]
        assert storage.reads.states(FEW_BYTES, others) == [None, *[State.COMPLETED] * 3]
        assert job(storage, "child", FEW_BYTES).result == bytes(450)

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        assert state(storage, "child", FEW_BYTES) is None
        assert counts(storage, FEW_BYTES) == {State.COMPLETED: 3}

    def test_bytes_of_pinned_cancelled_record_do_not_count(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        _parent(storage, FEW_BYTES, on_dependency_failure="ignore", payload=bytes(450))
        finish(storage, cancelling(claim_one(storage, queues=[FEW_BYTES])))
        self.advance(1)
        enqueue(storage, queue=FEW_BYTES, id="other", payload=bytes(450))
        storage.jobs.cancel(FEW_BYTES, ["other"])
        swept_clean(storage)
        assert counts(storage, FEW_BYTES) == {State.CANCELLED: 2}

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        assert storage.reads.states(FEW_BYTES, ["child", "other"]) == [None, State.CANCELLED]

    def test_record_pinned_after_its_end_does_not_count_its_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        a_completed_job(storage, queue=FEW_BYTES, id="child", payload=bytes(500), result=bytes(450))
        storage.enqueue([batch(ids=["slow"], delay=LATER)])
        enqueue(storage, id="parent", depends_on=((FEW_BYTES, "child"), (QUEUE, "slow")))
        self.advance(1)

        a_completed_job(storage, queue=FEW_BYTES, id="other", payload=bytes(500), result=bytes(450))
        swept_clean(storage)
        assert counts(storage, FEW_BYTES) == {State.COMPLETED: 2}

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)
        assert storage.reads.states(FEW_BYTES, ["child", "other"]) == [None, State.COMPLETED]

    @pytest.mark.parametrize("queue", [FEW_BYTES, FEW_RECORDS, FEW_RESULTS])
    def test_unpinned_record_is_kept_when_the_bounds_allow_it(self, storage: Storage, queue: str) -> None:
        bounded(storage, queue)
        _held_child(storage, queue, payload=bytes(150), result=bytes(250))
        for number in range(5):
            self.advance(1)
            a_completed_job(storage, queue=queue, id=f"other {number}", payload=bytes(200), result=bytes(100))
        swept_clean(storage)
        storage.jobs.remove(queue, [f"other {number}" for number in range(5)])

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        assert counts(storage, queue) == {State.COMPLETED: 1}
        assert job(storage, "child", queue).result == bytes(250)

        for number in range(3):
            self.advance(1)
            a_completed_job(storage, queue=queue, id=f"new {number}", payload=bytes(100), result=bytes(100))
        swept_clean(storage)

        [child] = storage.reads.jobs(queue, ["child"])
        assert (child is None) == (queue == FEW_RECORDS)
        assert child is None or (child.result is None) == (queue == FEW_RESULTS)

    def test_pinned_record_that_is_removed_leaves_no_counted_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        _held_child(storage, FEW_BYTES, payload=bytes(500), result=bytes(450))
        storage.jobs.remove(FEW_BYTES, ["child"])
        storage.jobs.cancel(QUEUE, ["parent"])

        a_completed_job(storage, queue=FEW_BYTES, id="a", payload=bytes(500), result=bytes(500))
        swept_clean(storage)
        assert counts(storage, FEW_BYTES) == {State.COMPLETED: 1}
        self.advance(1)
        a_completed_job(storage, queue=FEW_BYTES, id="b", payload=b"1", result=None)
        swept_clean(storage)

        assert storage.reads.states(FEW_BYTES, ["a", "b"]) == [None, State.COMPLETED]

    # Results that are held.

    def test_pinned_result_is_not_removed_by_maximum_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_RESULTS)
        _held_child(storage, FEW_RESULTS, result=bytes(290))
        for number in range(3):
            self.advance(1)
            a_completed_job(storage, queue=FEW_RESULTS, id=f"other {number}", result=bytes(140))
        swept_clean(storage)
        assert len(job(storage, "child", FEW_RESULTS).result or b"") == 290
        assert _sizes(storage, FEW_RESULTS) == [0, 140, 140]

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        child = job(storage, "child", FEW_RESULTS)
        assert (child.state, child.result) == (State.COMPLETED, None)
        assert _sizes(storage, FEW_RESULTS) == [0, 140, 140]

    @pytest.mark.parametrize("kept", [None, LATER])
    def test_pinned_result_is_kept_beyond_the_maximum_age(self, storage: Storage, kept: int | None) -> None:
        bounded(storage, BRIEF_RESULTS)
        _held_child(storage, BRIEF_RESULTS, result_ttl=kept)
        for _ in range(3):
            self.pass_time(storage, LONG)
        assert job(storage, "child", BRIEF_RESULTS).result == RESULT

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        child = job(storage, "child", BRIEF_RESULTS)
        assert (child.state, child.result) == (State.COMPLETED, None)

    def test_unpinned_result_expires_at_the_maximum_age(self, storage: Storage) -> None:
        bounded(storage, BRIEF_RESULTS)
        _held_child(storage, BRIEF_RESULTS)
        storage.jobs.cancel(QUEUE, ["parent"])
        assert job(storage, "child", BRIEF_RESULTS).result == RESULT

        self.pass_time(storage, SOON + 1)

        child = job(storage, "child", BRIEF_RESULTS)
        assert (child.state, child.result) == (State.COMPLETED, None)

    # Items.

    @pytest.mark.parametrize("result", [None, RESULT])
    def test_items_expire_at_the_maximum_age_of_results(self, storage: Storage, result: bytes | None) -> None:
        bounded(storage, BRIEF_RESULTS)
        run = an_active_job(storage, queue=BRIEF_RESULTS, result_ttl=LATER)
        emit(storage, run, b"one")
        finish(storage, completing(run, result))
        assert items_of(storage, run.id, BRIEF_RESULTS) == [b"one"]

        self.pass_time(storage, SOON + 1)

        page = page_of(storage, run.id, queue=BRIEF_RESULTS)
        assert (page.state, page.items, page.sent) == (State.COMPLETED, (), 1)

    def test_items_are_removed_with_results_beyond_the_maximum_bytes(self, storage: Storage) -> None:
        bounded(storage, FEW_RESULTS)
        for job_id, result in (("silent", None), ("old", bytes(200)), ("new", bytes(200))):
            run = an_active_job(storage, queue=FEW_RESULTS, id=job_id)
            emit(storage, run, b"one", b"two")
            finish(storage, completing(run, result))
            self.advance(1)

        swept_clean(storage)

        assert job(storage, "old", FEW_RESULTS).result is None
        assert items_of(storage, "old", FEW_RESULTS) == []
        for job_id in ("silent", "new"):
            assert items_of(storage, job_id, FEW_RESULTS) == [b"one", b"two"]

    def test_items_of_pinned_job_still_expire(self, storage: Storage) -> None:
        bounded(storage, BRIEF_RESULTS)
        _parent(storage, BRIEF_RESULTS, result_ttl=LATER)
        run = claim_one(storage, queues=[BRIEF_RESULTS])
        emit(storage, run, b"one")
        finish(storage, completing(run))

        self.pass_time(storage, SOON + 1)

        assert job(storage, "child", BRIEF_RESULTS).result == RESULT
        assert items_of(storage, "child", BRIEF_RESULTS) == []

    @pytest.mark.parametrize("queue", [FEW_RECORDS, FEW_BYTES])
    def test_records_with_items_are_bounded_by_count_and_bytes(self, storage: Storage, queue: str) -> None:
        bounded(storage, queue)
        for number in range(6):
            run = an_active_job(storage, queue=queue, id=f"done {number}", payload=bytes(200))
            emit(storage, run, b"one")
            finish(storage, completing(run, bytes(100)))
            self.advance(1)

        swept_clean(storage)

        ids = [f"done {number}" for number in range(6)]
        assert storage.reads.states(queue, ids) == [None] * 3 + [State.COMPLETED] * 3
        assert items_of(storage, "done 5", queue) == [b"one"]

    # Dead letters that come from another queue.

    def test_moved_dead_letter_counts_toward_maximum_bytes_of_the_other_queue(self, storage: Storage) -> None:
        bounded(storage, FEW_BYTES)
        for number in range(3):
            a_failed_job(storage, id=f"dead {number}", payload=bytes(400), error=None)
            assert storage.jobs.move(QUEUE, [f"dead {number}"], FEW_BYTES) == ["moved"]
            self.advance(1)

        swept_clean(storage)

        dead = [f"dead {number}" for number in range(3)]
        assert storage.reads.states(FEW_BYTES, dead) == [None, State.FAILED, State.FAILED]
        storage.jobs.move(FEW_BYTES, ["dead 1"], QUEUE)
        a_failed_job(storage, queue=FEW_BYTES, id="last", payload=bytes(500), error=None)
        swept_clean(storage)
        assert counts(storage, FEW_BYTES) == {State.FAILED: 2}

    def test_attempt_retention_applies_to_a_moved_dead_letter(self, storage: Storage) -> None:
        bounded(storage, BRIEF_DETAILS)
        run = an_active_job(storage, id="dead")
        storage.report([report_of(run, None, [(1, "line")])])
        finish(storage, retrying(run))
        finish(storage, failing(claim_one(storage)))
        storage.jobs.move(QUEUE, ["dead"], BRIEF_DETAILS)
        record = job(storage, "dead", BRIEF_DETAILS)
        assert (len(record.history), len(record.logs)) == (2, 1)

        self.pass_time(storage, 3 * SOON + 1)

        record = job(storage, "dead", BRIEF_DETAILS)
        assert (record.state, record.history, record.logs) == (State.FAILED, (), ())


def _parent(storage: Storage, queue: str, on_dependency_failure: str = "fail", **options: object) -> None:
    """Return a job that waits for a child in a queue, and for one that does not start."""
    a_waiting_job(storage, id="child", queue=queue, **options)
    storage.enqueue([batch(ids=["slow"], delay=LATER)])
    needs = ((queue, "child"), (QUEUE, "slow"))
    enqueue(storage, id="parent", depends_on=needs, on_dependency_failure=on_dependency_failure)


def _held_child(storage: Storage, queue: str, result: bytes = RESULT, **options: object) -> None:
    """One that has completed, and is kept for its parent."""
    _parent(storage, queue, **options)  # type: ignore[arg-type]
    assert finish(storage, completing(claim_one(storage, queues=[queue]), result)) == [True]


def _sizes(storage: Storage, queue: str) -> list[int]:
    """Bytes of the others' results."""
    return [len(job(storage, f"other {number}", queue).result or b"") for number in range(3)]
