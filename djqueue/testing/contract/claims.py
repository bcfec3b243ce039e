"""Claims: workers take waiting jobs, in one step and never more than they can start."""

import asyncio

from djqueue.core.job import Claims
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    NAME,
    QUEUE,
    WORKER,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    request,
    retrying,
    state,
)
from .case import LATER, SOON, StorageCase
from .transitions import shows


class ClaimsContract(StorageCase):
    """Cases about taking jobs to run."""

    @shows("claim", State.WAITING, State.ACTIVE)
    def test_claim_makes_waiting_job_active(self, storage: Storage) -> None:
        job_id = enqueue(storage)

        claimed = claim_one(storage, worker="w1")

        assert claimed.id == job_id
        record = job(storage, job_id)
        assert (record.state, record.worker, record.attempts) == (State.ACTIVE, "w1", 1)
        assert record.started_at >= record.created_at
        assert counts(storage) == {State.ACTIVE: 1}
        assert storage.reads.waiting_names(QUEUE) == {}

    def test_claim_returns_everything_a_worker_needs(self, storage: Storage) -> None:
        [answer] = storage.enqueue([batch(payloads=[b"\0\xff"], timeout=5, max_attempts=2)])
        finish(storage, retrying(claim_one(storage)))
        record = job(storage, answer.id)

        claimed = claim_one(storage)

        assert (claimed.id, claimed.queue, claimed.name) == (answer.id, QUEUE, NAME)
        assert (claimed.payload, claimed.options) == (b"\0\xff", record.options)
        assert (claimed.attempts, claimed.failures, claimed.stalls) == (2, 1, 0)
        assert claimed.created_at == record.created_at
        assert claimed.lease > 0

    def test_claim_takes_at_most_the_requested_number_of_jobs(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 5)

        assert claim(storage, 0) == []
        assert claim_ids(storage, 3) == ids[:3]
        assert counts(storage) == {State.WAITING: 2, State.ACTIVE: 3}
        assert claim_ids(storage, 3) == ids[3:]
        assert claim_ids(storage, 3) == []

    def test_claim_takes_thousands_of_jobs(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3_000)

        claimed = claim(storage, 5_000)

        assert [one.id for one in claimed] == ids
        assert len({one.token for one in claimed}) == 3_000
        assert finish(storage, *map(completing, claimed)) == [True] * 3_000
        assert counts(storage) == {State.COMPLETED: 3_000}

    def test_claimed_job_is_not_claimed_again(self, storage: Storage) -> None:
        enqueue(storage)
        claim_one(storage, worker="w1")

        assert claim(storage, 10, worker="w2") == []
        assert claim(storage, 10, worker="w1") == []

    def test_job_without_handler_keeps_waiting_and_is_listed(self, storage: Storage) -> None:
        unknown = enqueue(storage, name="not.here.yet")
        known = enqueue(storage)

        assert claim_ids(storage, 10) == [known]
        assert claim_ids(storage, 10, names=[]) == []
        assert state(storage, unknown) is State.WAITING
        assert job(storage, unknown).attempts == 0
        assert storage.reads.waiting_names(QUEUE) == {"not.here.yet": 1}
        assert claim_ids(storage, 10, names=["not.here.yet"]) == [unknown]

    def test_job_names_are_compared_exactly(self, storage: Storage) -> None:
        enqueue(storage, name="Jobs.Pay")

        assert claim(storage, 1, names=["jobs.pay", "Jobs.Pay ", "Jobs.Pa", "Jobs_Pay"]) == []
        assert len(claim(storage, 1, names=["Jobs.Pay"])) == 1

    def test_unhandled_jobs_at_the_head_do_not_block_the_queue(self, storage: Storage) -> None:
        enqueue_many(storage, 2_000, name="not.here.yet", priority=9)
        known = enqueue(storage)

        assert claim_ids(storage, 1) == [known]

    def test_claim_takes_only_from_the_requested_queues(self, storage: Storage) -> None:
        for queue in ("a", "b", "c"):
            enqueue(storage, queue=queue, id=f"in {queue}")

        assert claim_ids(storage, 10, queues=[]) == []
        assert sorted(claim_ids(storage, 10, queues=["a", "c", "empty"])) == ["in a", "in c"]
        assert claim_ids(storage, 10) == ["in b"]

    def test_claim_combines_jobs_of_several_queues(self, storage: Storage) -> None:
        for number in range(7):
            enqueue(storage, queue=f"q{number}")

        assert len(claim(storage, 5)) == 5
        assert len(claim(storage, 5)) == 2

    def test_claims_serve_every_queue(self, storage: Storage) -> None:
        queues = ["a", "b", "c", "d"]
        for queue in queues:
            enqueue_many(storage, 40, queue=queue)

        served = [claim_one(storage, queues=queues).queue for _ in range(40)]

        assert set(served) == set(queues)

    def test_finish_can_claim_in_the_same_call(self, storage: Storage) -> None:
        first, second, third = enqueue_many(storage, 3)
        claimed = claim_one(storage)

        answer = storage.finish([completing(claimed)], request(2))

        assert answer.accepted == [True]
        assert [one.id for one in answer.claims.jobs] == [second, third]
        assert state(storage, first) is State.COMPLETED

    def test_rejected_outcome_does_not_prevent_the_claim_in_the_same_call(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 2)
        done = claim_one(storage)
        finish(storage, completing(done))

        answer = storage.finish([completing(done)], request(1))

        assert answer.accepted == [False]
        assert [one.id for one in answer.claims.jobs] == [ids[1]]

    def test_finish_without_claim_request_claims_nothing(self, storage: Storage) -> None:
        enqueue_many(storage, 2)

        answer = storage.finish([completing(claim_one(storage))])

        assert answer.claims == Claims([], None)
        assert counts(storage) == {State.WAITING: 1, State.COMPLETED: 1}

    def test_empty_claim_without_delayed_jobs_has_no_wait(self, storage: Storage) -> None:
        assert storage.claim(request()) == Claims([], None)
        enqueue(storage, name="not.here.yet")
        assert storage.claim(request()) == Claims([], None)

    def test_claim_has_no_wait_for_delayed_jobs_of_another_queue(self, storage: Storage) -> None:
        enqueue(storage, queue="elsewhere", delay=SOON)

        assert storage.claim(request(1, queues=[QUEUE])).wait is None

    def test_empty_claim_returns_time_until_a_delayed_job_is_due(self, storage: Storage) -> None:
        enqueue(storage, delay=LATER)
        enqueue(storage, delay=SOON)
        enqueue(storage, queue="elsewhere", delay=1)

        claims = storage.claim(request(queues=[QUEUE]))

        assert claims.jobs == []
        assert claims.wait is not None
        assert 0 < claims.wait <= SOON

    def test_claim_with_jobs_also_returns_time_until_the_next_due_job(self, storage: Storage) -> None:
        enqueue(storage)
        enqueue(storage, delay=SOON)

        claims = storage.claim(request(5))

        assert len(claims.jobs) == 1
        assert claims.wait is not None
        assert 0 < claims.wait <= SOON

    def test_expired_jobs_do_not_count_toward_a_claim(self, storage: Storage) -> None:
        enqueue_many(storage, 5, ttl=SOON)
        fresh = enqueue_many(storage, 5)
        self.advance(SOON + 1)

        assert claim_ids(storage, 5) == fresh

    def test_worker_id_may_contain_any_characters(self, storage: Storage) -> None:
        enqueue(storage)

        claim_one(storage, worker="höst:1 {a}")

        assert storage.reads.page(QUEUE, State.ACTIVE, 1)[0].worker == "höst:1 {a}"

    def test_async_finish_and_claim_match_sync_calls(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 2)

        async def work() -> list[str]:
            first = (await storage.afinish([], request())).claims.jobs
            answer = await storage.afinish([completing(first[0])], request())
            assert answer.accepted == [True]
            records = await storage.reads.ajobs(QUEUE, [ids[0], "nobody"])
            assert records[0] is not None
            assert records[0].state is State.COMPLETED
            assert records[1] is None
            return [first[0].id, answer.claims.jobs[0].id]

        assert asyncio.run(work()) == ids
        assert job(storage, ids[1]).worker == WORKER
