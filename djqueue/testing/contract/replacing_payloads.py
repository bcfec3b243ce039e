"""Replaced payloads: another payload in place of a known one, for a pending job or a dead letter."""

import pytest

from djqueue.core.job import Claimed, JobRecord
from djqueue.core.states import PENDING, State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    PAYLOAD,
    QUEUE,
    a_failed_job,
    a_waiting_job,
    batch,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    state,
)
from ..waiting import together
from .case import StorageCase, nothing_changes
from .transitions import shows


class ReplacingPayloadsContract(StorageCase):
    """Cases about `replace_payload`."""

    @pytest.mark.parametrize("there", sorted(PENDING))
    def test_replace_payload_updates_pending_job_with_the_known_payload(
        self, storage: Storage, there: State
    ) -> None:
        job_id = JOB_IN[there](storage, id="a", priority=3)
        before = job(storage, job_id)

        assert storage.jobs.replace_payload(QUEUE, job_id, b"new", before.payload) == "updated"

        assert job(storage, job_id) == before._replace(payload=b"new")

    @shows("retry_dead", State.FAILED, State.WAITING)
    def test_dead_letter_with_replaced_payload_is_retried(self, storage: Storage) -> None:
        a_failed_job(storage, id="a", priority=3, tags=("t",))
        before = job(storage, "a")

        assert storage.jobs.replace_payload(QUEUE, "a", b"new", before.payload, retry=True) == "retried"

        record = job(storage, "a")
        assert (record.state, record.payload, record.options) == (State.WAITING, b"new", before.options)
        assert (record.failures, record.reason, record.finished_at) == (0, "", 0)
        assert record.history == before.history
        assert storage.reads.dead_letters(QUEUE) == []
        assert counts(storage) == {State.WAITING: 1}
        claimed = claim_one(storage)
        assert (claimed.payload, claimed.attempts) == (b"new", 2)
        assert finish(storage, completing(claimed)) == [True]

    def test_replace_payload_is_rejected_when_the_payload_has_changed(self, storage: Storage) -> None:
        a_failed_job(storage, id="dead")
        enqueue(storage, id="pending")

        assert storage.jobs.replace_payload(QUEUE, "pending", b"mine", PAYLOAD) == "updated"
        with nothing_changes(storage):
            assert storage.jobs.replace_payload(QUEUE, "pending", b"yours", PAYLOAD) == "changed"
            assert storage.jobs.replace_payload(QUEUE, "dead", b"yours", b"never", retry=True) == "changed"
        assert job(storage, "pending").payload == b"mine"

    @pytest.mark.parametrize("there", sorted(set(State) - PENDING))
    def test_replace_payload_is_rejected_for_job_that_is_not_pending(
        self, storage: Storage, there: State
    ) -> None:
        job_id = JOB_IN[there](storage)

        with nothing_changes(storage):
            assert storage.jobs.replace_payload(QUEUE, job_id, b"new", job(storage, job_id).payload) == there

    @pytest.mark.parametrize("there", sorted(set(State) - {State.FAILED}))
    def test_replace_payload_with_retry_is_rejected_for_job_that_did_not_fail(
        self, storage: Storage, there: State
    ) -> None:
        job_id = JOB_IN[there](storage)

        with nothing_changes(storage):
            assert (
                storage.jobs.replace_payload(QUEUE, job_id, b"new", job(storage, job_id).payload, retry=True)
                == there
            )

    @pytest.mark.parametrize("retry", [False, True])
    def test_replace_payload_of_unknown_job_returns_not_found(self, storage: Storage, retry: bool) -> None:
        assert storage.jobs.replace_payload(QUEUE, "nobody", b"new", b"old", retry=retry) == "not_found"
        assert storage.jobs.replace_payload("nowhere", "nobody", b"new", b"old", retry=retry) == "not_found"

    def test_replace_payload_with_retry_does_not_take_a_unique_key(self, storage: Storage) -> None:
        a_failed_job(storage, id="old", unique_key="k")
        a_waiting_job(storage, id="new", unique_key="k")

        with nothing_changes(storage):
            assert (
                storage.jobs.replace_payload(QUEUE, "old", b"new", PAYLOAD, retry=True) == "unique_key_taken"
            )

    def test_dead_letter_retried_with_new_payload_has_its_unique_key(self, storage: Storage) -> None:
        a_failed_job(storage, id="old", unique_key="k")

        assert storage.jobs.replace_payload(QUEUE, "old", b"new", PAYLOAD, retry=True) == "retried"

        [answer] = storage.enqueue([batch(ids=["other"], unique_key="k")])
        assert (answer.status, answer.id) == ("duplicate", "old")

    def test_replaced_payload_keeps_the_position_in_the_queue(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3)

        assert storage.jobs.replace_payload(QUEUE, ids[0], b"new", PAYLOAD) == "updated"

        assert [(one.id, one.payload) for one in claim(storage, 3)] == [
            (ids[0], b"new"),
            (ids[1], PAYLOAD),
            (ids[2], PAYLOAD),
        ]

    @pytest.mark.parametrize("payload", [b"", b"\x00\xff" * 5_000])
    def test_replace_payload_accepts_any_bytes(self, storage: Storage, payload: bytes) -> None:
        a_failed_job(storage, id="b")
        enqueue(storage, id="a")

        assert storage.jobs.replace_payload(QUEUE, "a", payload, PAYLOAD) == "updated"
        assert storage.jobs.replace_payload(QUEUE, "a", b"back", payload) == "updated"
        assert storage.jobs.replace_payload(QUEUE, "b", payload, PAYLOAD, retry=True) == "retried"

        assert {one.id: one.payload for one in claim(storage, 3)} == {"a": b"back", "b": payload}

    def test_payload_can_be_replaced_after_each_failure(self, storage: Storage) -> None:
        a_failed_job(storage, id="a")
        old = PAYLOAD
        for new in (b"one", b"two, which is longer", b"3"):
            assert storage.jobs.replace_payload(QUEUE, "a", new, old, retry=True) == "retried"
            claimed = claim_one(storage)
            assert claimed.payload == new
            finish(storage, failing(claimed))
            old = new
        assert state(storage, "a") is State.FAILED
        assert len(storage.reads.dead_letters(QUEUE)) == 1

    def test_dead_letter_retried_with_new_payload_waits_for_its_group(self, storage: Storage) -> None:
        a_failed_job(storage, id="a", concurrency_key="g")
        enqueue(storage, id="b", concurrency_key="g")
        busy = claim_one(storage)

        assert storage.jobs.replace_payload(QUEUE, "a", b"new", PAYLOAD, retry=True) == "retried"

        assert claim(storage, 9) == []
        finish(storage, completing(busy))
        assert claim_one(storage).payload == b"new"

    def test_one_of_two_racing_payload_replacements_wins(self, storage: Storage) -> None:
        for round_ in range(20):
            job_id = f"job-{round_}"
            a_failed_job(storage, id=job_id)

            def replace_payload(payload: bytes, job_id: str = job_id) -> str:
                return storage.jobs.replace_payload(QUEUE, job_id, payload, PAYLOAD, retry=True)

            answers = together([lambda: replace_payload(b"mine"), lambda: replace_payload(b"yours")])

            assert sorted(answers) == ["retried", "waiting"]
            claimed = claim_one(storage)
            assert claimed.payload == (b"mine" if answers[0] == "retried" else b"yours")
            finish(storage, completing(claimed))

    def test_racing_claim_and_payload_replacement_agree_on_the_payload(self, storage: Storage) -> None:
        for round_ in range(20):
            job_id = enqueue(storage, id=f"job-{round_}")

            def replace_payload(job_id: str = job_id) -> str:
                return storage.jobs.replace_payload(QUEUE, job_id, b"new", PAYLOAD)

            def claim_soon() -> list[Claimed]:
                # A claim may pass over a job that another call is changing.
                return next(found for _ in range(1_000) if (found := claim(storage, 1)))

            word, [claimed] = together([replace_payload, claim_soon])

            assert (word, claimed.payload) in {("updated", b"new"), ("active", PAYLOAD)}
            record: JobRecord = job(storage, job_id)
            assert record.payload == claimed.payload
            finish(storage, completing(claimed))
