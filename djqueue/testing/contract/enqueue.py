"""Enqueue: new jobs, and the results for ids that already exist."""

import asyncio

import pytest

from djqueue.core.backoff import Backoff
from djqueue.core.errors import OptionError
from djqueue.core.job import EnqueueResult
from djqueue.core.options import JobOptions
from djqueue.core.states import LIVE, REUSABLE, State
from djqueue.storage.base import Storage

from ..factories import (
    ERROR,
    JOB_IN,
    NAME,
    PAYLOAD,
    QUEUE,
    a_blocked_job,
    a_cancelled_job,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    finish,
    job,
    retrying,
    state,
)
from .case import LATER, StorageCase, nothing_changes
from .transitions import shows


class EnqueueContract(StorageCase):
    """Cases about adding jobs."""

    def test_new_job_is_waiting_with_the_given_values(self, storage: Storage) -> None:
        options = JobOptions(priority=3, max_attempts=7, tags=("red", "größer"))
        given = batch(payloads=[b"\0\xff"], name="shop.jobs.pay", ids=["order:1"])

        [answer] = storage.enqueue([given._replace(options=options)])

        assert answer == EnqueueResult("order:1", "queued", QUEUE)
        record = job(storage, "order:1")
        assert (record.id, record.queue, record.name) == ("order:1", QUEUE, "shop.jobs.pay")
        assert (record.payload, record.options) == (b"\0\xff", options)
        assert record.state is State.WAITING
        assert record.run_at == record.created_at > 0
        assert (record.attempts, record.failures, record.stalls) == (0, 0, 0)
        assert (record.started_at, record.finished_at) == (0, 0)
        assert (record.result, record.error, record.reason, record.worker) == (None, None, "", "")
        assert (record.progress, record.history, record.logs) == (None, (), ())

    def test_options_are_stored_unchanged(self, storage: Storage) -> None:
        enqueue(storage, queue="upstream", id="first")
        options = JobOptions(
            priority=-4,
            max_attempts=9,
            max_stalls=0,
            backoff=Backoff(kind="linear", base=250, factor=1.5, cap=9_000, jitter=0.25),
            timeout=1_500,
            ttl=LATER,
            unique_key="clé",
            unique_ttl=LATER,
            concurrency_key="g",
            depends_on=(("upstream", "first"),),
            on_dependency_failure="ignore",
            lifo=True,
            durable=True,
            result_ttl=None,
            retention=LATER,
            tags=("a", "b"),
            content_type="application/json",
        )

        [answer] = storage.enqueue([batch()._replace(options=options)])

        assert job(storage, answer.id).options == options
        storage.finish([completing(claim_one(storage, queues=["upstream"]))])
        assert claim_one(storage).options == options

    def test_enqueue_results_follow_the_order_of_jobs_across_batches(self, storage: Storage) -> None:
        enqueue(storage, id="b")

        answers = storage.enqueue([batch(ids=["c", "b", "a"]), batch(queue="other", ids=["b"]), batch(2)])

        assert [answer.status for answer in answers] == [
            *("queued", "duplicate", "queued"),
            *("queued", "queued", "queued"),
        ]
        assert [answer.id for answer in answers[:4]] == ["c", "b", "a", "b"]
        assert [answer.queue for answer in answers] == [QUEUE] * 3 + ["other"] + [QUEUE] * 2

    def test_enqueue_of_no_jobs_returns_no_results(self, storage: Storage) -> None:
        assert storage.enqueue([]) == []
        assert storage.enqueue([batch(0)]) == []
        assert storage.enqueue([batch(ids=[])]) == []

    @pytest.mark.parametrize("there", sorted(LIVE))
    def test_enqueue_of_live_id_returns_duplicate_with_its_state(
        self, storage: Storage, there: State
    ) -> None:
        job_id = JOB_IN[there](storage, id="order:1")

        with nothing_changes(storage):
            [answer] = storage.enqueue([batch(ids=["order:1"], payloads=[b"other"], priority=9)])

        assert answer == EnqueueResult(job_id, "duplicate", QUEUE, there)

    def test_enqueue_of_id_waiting_for_retry_returns_duplicate(self, storage: Storage) -> None:
        enqueue(storage, id="order:1")
        finish(storage, retrying(claim_one(storage), delay=LATER))

        [answer] = storage.enqueue([batch(ids=["order:1"])])

        assert answer == EnqueueResult("order:1", "duplicate", QUEUE, State.DELAYED)
        assert job(storage, "order:1").failures == 1

    @pytest.mark.parametrize("result", [b"bytes \xff\0", b"", None])
    def test_enqueue_of_completed_id_returns_its_result(self, storage: Storage, result: bytes | None) -> None:
        a_completed_job(storage, id="order:1", result=result)

        with nothing_changes(storage):
            [answer] = storage.enqueue([batch(ids=["order:1"])])

        assert answer == EnqueueResult("order:1", "completed", QUEUE, State.COMPLETED, result)
        assert claim(storage) == []

    @shows("enqueue", sorted(REUSABLE), [State.WAITING, State.DELAYED, State.BLOCKED])
    @pytest.mark.parametrize("then", [State.WAITING, State.DELAYED, State.BLOCKED])
    @pytest.mark.parametrize("ended", sorted(REUSABLE))
    def test_failed_or_cancelled_id_can_be_enqueued_again(
        self, storage: Storage, ended: State, then: State
    ) -> None:
        JOB_IN[ended](storage, id="order:1", payload=b"old")

        JOB_IN[then](storage, id="order:1", payload=b"new")

        record = job(storage, "order:1")
        assert (record.state, record.payload) == (then, b"new")
        assert (record.attempts, record.failures, record.stalls) == (0, 0, 0)
        assert (record.started_at, record.finished_at) == (0, 0)
        assert (record.error, record.reason, record.history) == (None, "", ())
        assert storage.reads.dead_letters(QUEUE) == []
        assert counts(storage) == {then: 1}

    def test_job_enqueued_after_cancel_of_its_id_runs_once(self, storage: Storage) -> None:
        a_cancelled_job(storage, id="order:1", payload=b"old")
        a_waiting_job(storage, id="order:1", payload=b"new")

        claimed = claim(storage, 10)

        assert [(one.id, one.payload) for one in claimed] == [("order:1", b"new")]
        assert finish(storage, completing(claimed[0])) == [True]
        assert claim(storage, 10) == []

    def test_job_enqueued_after_failure_of_its_id_starts_clean(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1", error=ERROR)
        a_waiting_job(storage, id="order:1")

        finish(storage, completing(claim_one(storage), b"new result"))

        record = job(storage, "order:1")
        assert (record.state, record.attempts, record.result) == (State.COMPLETED, 1, b"new result")
        assert (record.error, record.history) == (None, ())
        assert counts(storage) == {State.COMPLETED: 1}

    def test_same_id_twice_in_one_batch_is_one_job(self, storage: Storage) -> None:
        answers = storage.enqueue([batch(ids=["same", "same"], payloads=[b"first", b"second"])])

        assert [answer.status for answer in answers] == ["queued", "duplicate"]
        assert job(storage, "same").payload == b"first"
        assert counts(storage) == {State.WAITING: 1}

    def test_same_id_in_two_queues_is_two_jobs(self, storage: Storage) -> None:
        enqueue(storage, queue="left", id="same", payload=b"l")
        enqueue(storage, queue="right", id="same", payload=b"r")

        finish(storage, completing(claim_one(storage, queues=["left"]), b"done"))

        assert state(storage, "same", "left") is State.COMPLETED
        assert state(storage, "same", "right") is State.WAITING
        assert storage.jobs.remove("left", ["same"]) == [True]
        assert job(storage, "same", "right").payload == b"r"
        assert claim_one(storage).payload == b"r"

    def test_active_jobs_with_same_id_in_two_queues_finish_independently(self, storage: Storage) -> None:
        enqueue(storage, queue="left", id="same")
        enqueue(storage, queue="right", id="same")
        left = claim_one(storage, queues=["left"])
        right = claim_one(storage, queues=["right"])

        crossed = [completing(left)._replace(queue="right"), completing(right)._replace(queue="left")]
        assert finish(storage, *crossed) == [False, False]
        assert finish(storage, completing(left, b"l"), completing(right, b"r")) == [True, True]
        assert job(storage, "same", "left").result == b"l"
        assert job(storage, "same", "right").result == b"r"

    def test_batch_of_thousands_keeps_its_order(self, storage: Storage) -> None:
        payloads = [b"%d" % number for number in range(5_000)]

        answers = storage.enqueue([batch(payloads=payloads)])

        assert {answer.status for answer in answers} == {"queued"}
        ids = [answer.id for answer in answers]
        assert len(set(ids)) == 5_000
        assert counts(storage) == {State.WAITING: 5_000}
        records = storage.reads.jobs(QUEUE, ids)
        assert [record.payload for record in records if record is not None] == payloads
        assert claim_ids(storage, 5_000) == ids

    def test_batch_of_thousands_with_ids_returns_a_result_for_each(self, storage: Storage) -> None:
        ids = [f"row:{number}" for number in range(3_000)]
        storage.enqueue([batch(ids=ids[::3])])

        answers = storage.enqueue([batch(ids=ids)])

        expected = ["queued" if number % 3 else "duplicate" for number in range(3_000)]
        assert [answer.status for answer in answers] == expected
        assert [answer.id for answer in answers] == ids
        assert counts(storage) == {State.WAITING: 3_000}

    @pytest.mark.parametrize("ids", [[], ["a"], ["a", "b", "c"]])
    def test_number_of_ids_must_match_number_of_payloads(self, storage: Storage, ids: list[str]) -> None:
        with pytest.raises(ValueError, match=rf"one id per payload \(2\), got {len(ids)}"):
            storage.enqueue([batch(2), batch(2)._replace(ids=ids)])

        assert counts(storage) == {}

    def test_missing_dependency_rejects_the_whole_enqueue(self, storage: Storage) -> None:
        before = storage.queues.names()

        with pytest.raises(OptionError, match=r"depends_on.*'nowhere'.*'ghost'"):
            storage.enqueue([batch(2), batch(depends_on=(("nowhere", "ghost"),))])

        assert counts(storage) == {}
        assert storage.reads.page(QUEUE, None, 10) == []
        assert set(storage.queues.names()) <= {*before, QUEUE}

    def test_blocked_id_enqueued_again_after_cancel_waits_only_for_its_new_dependency(
        self, storage: Storage
    ) -> None:
        a_blocked_job(storage, id="order:1")
        storage.jobs.cancel(QUEUE, ["order:1"])
        enqueue(storage, queue="other", id="second")
        enqueue(storage, id="order:1", depends_on=(("other", "second"),))

        finish(storage, completing(claim_one(storage, queues=["upstream"])))
        assert state(storage, "order:1") is State.BLOCKED
        finish(storage, completing(claim_one(storage, queues=["other"])))
        assert state(storage, "order:1") is State.WAITING

    def test_async_enqueue_matches_sync_enqueue(self, storage: Storage) -> None:
        answers = asyncio.run(storage.aenqueue([batch(ids=["a", "a"])]))

        assert [answer.status for answer in answers] == ["queued", "duplicate"]
        assert job(storage, "a").payload == PAYLOAD
        assert storage.reads.waiting_names(QUEUE) == {NAME: 1}
