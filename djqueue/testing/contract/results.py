"""Results: each is kept for its TTL."""

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    a_cancelled_job,
    a_completed_job,
    batch,
    claim_one,
    completing,
    counts,
    enqueue,
    finish,
    job,
    retrying,
    state,
)
from .case import LATER, SOON, StorageCase, recorded, swept_clean


class ResultsContract(StorageCase):
    """Cases about what a job returned, and how long that can be read."""

    @pytest.mark.parametrize("result", [b"", b"\0", bytes(range(256)), b"x" * 1_048_576, None])
    def test_result_bytes_are_stored_unchanged(self, storage: Storage, result: bytes | None) -> None:
        done = a_completed_job(storage, result=result)

        assert job(storage, done).result == result
        assert state(storage, done) is State.COMPLETED

    def test_each_result_has_its_own_ttl(self, storage: Storage) -> None:
        a_completed_job(storage, id="long", result=b"long", result_ttl=LATER)
        a_completed_job(storage, id="short", result=b"short", result_ttl=SOON)
        a_completed_job(storage, id="longer", result=b"longer", result_ttl=LATER)
        a_completed_job(storage, id="kept", result=b"kept", result_ttl=None)

        self.pass_time(storage, SOON + 1)

        assert state(storage, "short") is None
        assert [job(storage, name).result for name in ("long", "longer", "kept")] == [
            b"long",
            b"longer",
            b"kept",
        ]
        [answer] = storage.enqueue([batch(ids=["long"])])
        assert (answer.status, answer.result) == ("completed", b"long")

    def test_expired_result_leaves_nothing_behind(self, storage: Storage) -> None:
        a_completed_job(storage, id="order:1", result_ttl=SOON)
        self.advance(SOON + 1)

        swept_clean(storage)

        assert storage.reads.jobs(QUEUE, ["order:1"]) == [None]
        assert counts(storage) == {}
        assert storage.reads.page(QUEUE, None, 10) == []
        enqueue(storage, id="order:1")
        assert claim_one(storage).id == "order:1"

    def test_result_ttl_starts_when_the_job_finishes(self, storage: Storage) -> None:
        enqueue(storage, id="slow", result_ttl=SOON)
        self.pass_time(storage, SOON * 2)
        claimed = claim_one(storage)
        finish(storage, completing(claimed))

        assert state(storage, "slow") is State.COMPLETED
        self.pass_time(storage, SOON + 1)
        assert state(storage, "slow") is None

    def test_first_accepted_enqueue_sets_result_ttl(self, storage: Storage) -> None:
        enqueue(storage, id="order:1", result_ttl=SOON)
        storage.enqueue([batch(ids=["order:1"], result_ttl=LATER)])
        finish(storage, completing(claim_one(storage)))
        storage.enqueue([batch(ids=["order:1"], result_ttl=None)])

        self.pass_time(storage, SOON + 1)

        assert state(storage, "order:1") is None

    def test_record_outlives_its_expired_result(self, storage: Storage) -> None:
        a_completed_job(storage, id="order:1", result_ttl=SOON, retention=LATER)
        assert job(storage, "order:1").result is not None

        self.pass_time(storage, SOON + 1)

        record = job(storage, "order:1")
        assert (record.state, record.result) == (State.COMPLETED, None)

    def test_retention_shorter_than_result_ttl_has_no_effect(self, storage: Storage) -> None:
        a_completed_job(storage, id="order:1", result_ttl=LATER, retention=SOON)

        self.pass_time(storage, SOON + 1)

        assert job(storage, "order:1").result is not None

    def test_record_of_cancelled_job_expires(self, storage: Storage) -> None:
        a_cancelled_job(storage, id="order:1", result_ttl=SOON)
        assert state(storage, "order:1") is State.CANCELLED

        self.pass_time(storage, SOON + 1)

        assert state(storage, "order:1") is None
        assert counts(storage) == {}

    def test_live_job_does_not_expire_by_result_ttl(self, storage: Storage) -> None:
        enqueue(storage, id="again", result_ttl=SOON)
        enqueue(storage, id="waiting", result_ttl=SOON, priority=-1)
        finish(storage, retrying(claim_one(storage), delay=LATER))

        self.pass_time(storage, SOON * 2)

        assert state(storage, "again") is State.DELAYED
        assert state(storage, "waiting") is State.WAITING

    def test_expiry_of_removed_job_does_not_delete_new_job_with_same_id(self, storage: Storage) -> None:
        a_completed_job(storage, id="order:1", result_ttl=SOON)
        storage.jobs.remove(QUEUE, ["order:1"])
        a_completed_job(storage, id="order:1", result=b"new", result_ttl=LATER)

        self.pass_time(storage, SOON + 1)

        assert job(storage, "order:1").result == b"new"
        assert counts(storage) == {State.COMPLETED: 1}

    def test_expired_record_sends_removed_event(self, storage: Storage) -> None:
        with recorded(storage) as recorder:
            a_completed_job(storage, id="order:1", result_ttl=SOON)
            self.pass_time(storage, SOON + 1)

            assert recorder.until("removed", "order:1").state is State.COMPLETED
