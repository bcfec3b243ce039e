"""Updates: another priority or payload for a pending job."""

from collections.abc import Callable

import pytest

from djqueue.core.backoff import Backoff
from djqueue.core.job import Outcome
from djqueue.core.states import PENDING, State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    PAYLOAD,
    QUEUE,
    UPSTREAM,
    an_active_job,
    claim,
    claim_ids,
    claim_one,
    completing,
    enqueue,
    enqueue_many,
    finish,
    job,
    releasing,
    retrying,
    state,
)
from .case import LATER, SOON, StorageCase, nothing_changes

SETTLED = sorted(set(State) - PENDING)


class UpdatesContract(StorageCase):
    """Cases about `update`."""

    @pytest.mark.parametrize("there", sorted(PENDING))
    def test_update_replaces_payload_and_priority_of_pending_job(
        self, storage: Storage, there: State
    ) -> None:
        job_id = JOB_IN[there](storage, id="a")
        before = job(storage, job_id)

        assert storage.jobs.update(QUEUE, [job_id, "nowhere"], 7, b"other") == [True, False]

        record = job(storage, job_id)
        assert (record.payload, record.options.priority, record.state) == (b"other", 7, there)
        assert record.created_at == before.created_at

    @pytest.mark.parametrize("there", SETTLED)
    def test_update_is_rejected_for_job_that_is_not_pending(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage)

        with nothing_changes(storage):
            assert storage.jobs.update(QUEUE, [job_id], 7, b"other") == [False]

    def test_update_keeps_values_that_are_not_given(self, storage: Storage) -> None:
        backoff = Backoff(kind="linear", base=50, factor=1.5, jitter=0.25)
        options = {"tags": ("a", "b"), "backoff": backoff, "result_ttl": None, "unique_key": "k"}
        enqueue(storage, id="a", priority=3, **options)
        before = job(storage, "a").options

        storage.jobs.update(QUEUE, ["a"], payload=b"other")
        assert (job(storage, "a").options, job(storage, "a").payload) == (before, b"other")
        storage.jobs.update(QUEUE, ["a"], priority=0)
        storage.jobs.update(QUEUE, ["a"], priority=3)
        assert (job(storage, "a").options, job(storage, "a").payload) == (before, b"other")

    def test_update_accepts_an_empty_payload(self, storage: Storage) -> None:
        enqueue(storage, id="a")

        storage.jobs.update(QUEUE, ["a"], payload=b"")

        assert claim_one(storage).payload == b""

    def test_claim_returns_the_latest_update(self, storage: Storage) -> None:
        enqueue(storage, id="a")
        storage.jobs.update(QUEUE, ["a"], 2, b"first")
        storage.jobs.update(QUEUE, ["a"], 5, b"second")

        claimed = claim_one(storage)

        assert (claimed.payload, claimed.options.priority) == (b"second", 5)
        assert finish(storage, completing(claimed)) == [True]

    def test_updated_payload_keeps_the_position_in_the_queue(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3)

        assert storage.jobs.update(QUEUE, ids[:2], payload=b"other") == [True, True]

        assert [(one.id, one.payload) for one in claim(storage, 3)] == [
            (ids[0], b"other"),
            (ids[1], b"other"),
            (ids[2], PAYLOAD),
        ]

    def test_updated_priority_goes_behind_jobs_of_that_priority(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 4)
        enqueue(storage, id="high", priority=1)

        storage.jobs.update(QUEUE, [ids[2]], priority=1)
        storage.jobs.update(QUEUE, [ids[0]], priority=-1)

        assert claim_ids(storage, 9) == ["high", ids[2], ids[1], ids[3], ids[0]]

    def test_unchanged_priority_keeps_the_position_in_the_queue(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3)

        assert storage.jobs.update(QUEUE, [ids[0]], priority=0) == [True]

        assert claim_ids(storage, 3) == ids

    def test_priority_changed_and_restored_goes_behind_other_jobs(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3)

        storage.jobs.update(QUEUE, [ids[0]], priority=5)
        storage.jobs.update(QUEUE, [ids[0]], priority=0)

        assert claim_ids(storage, 3) == [ids[1], ids[2], ids[0]]

    def test_lifo_job_with_updated_priority_goes_behind_jobs_of_that_priority(self, storage: Storage) -> None:
        enqueue(storage, id="lifo", lifo=True)
        enqueue(storage, id="high", priority=1)

        storage.jobs.update(QUEUE, ["lifo"], priority=1)

        assert claim_ids(storage, 2) == ["high", "lifo"]

    def test_due_job_has_its_updated_priority(self, storage: Storage) -> None:
        enqueue(storage, id="delayed", delay=SOON)
        enqueue(storage, id="waiting")

        storage.jobs.update(QUEUE, ["delayed"], priority=1)
        assert state(storage, "delayed") is State.DELAYED
        self.pass_time(storage, SOON + 1)

        assert claim_ids(storage, 2) == ["delayed", "waiting"]

    def test_unblocked_job_has_its_updated_priority(self, storage: Storage) -> None:
        upstream = enqueue(storage, queue=UPSTREAM)
        enqueue(storage, id="blocked", depends_on=((UPSTREAM, upstream),))
        enqueue(storage, id="waiting")

        storage.jobs.update(QUEUE, ["blocked"], priority=1)
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))

        assert claim_ids(storage, 2) == ["blocked", "waiting"]

    def test_updated_priority_keeps_the_order_within_a_group(self, storage: Storage) -> None:
        for job_id in ("first", "second", "third"):
            enqueue(storage, id=job_id, concurrency_key="g")

        storage.jobs.update(QUEUE, ["third", "first"], priority=5)

        order = []
        for _ in range(3):
            [claimed] = claim(storage, 9)
            order.append(claimed.id)
            finish(storage, completing(claimed))
        assert order == ["first", "second", "third"]

    def test_job_without_handler_can_be_updated(self, storage: Storage) -> None:
        enqueue(storage, id="other", name="other")
        enqueue(storage, id="mine")
        assert claim_ids(storage, 9) == ["mine"]

        assert storage.jobs.update(QUEUE, ["other"], 3, b"new") == [True]

        claimed = claim_one(storage, names=["other"])
        assert (claimed.payload, claimed.options.priority) == (b"new", 3)

    @pytest.mark.parametrize("given_back", [retrying, releasing])
    def test_retried_or_released_job_can_be_updated(
        self, storage: Storage, given_back: Callable[..., Outcome]
    ) -> None:
        claimed = an_active_job(storage, id="a")
        finish(storage, given_back(claimed, delay=LATER))

        assert storage.jobs.update(QUEUE, ["a"], 2, b"new") == [True]
        storage.jobs.promote(QUEUE, ["a"])

        again = claim_one(storage)
        assert (again.payload, again.attempts) == (b"new", 2 if given_back is retrying else 1)

    def test_updated_job_can_be_cancelled_and_removed(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 4)
        storage.jobs.update(QUEUE, ids, 4, b"new")

        assert storage.jobs.cancel(QUEUE, ids[:1])[0].status == "cancelled"
        assert storage.jobs.remove(QUEUE, ids[1:2]) == [True]

        assert claim_ids(storage, 9) == ids[2:]
