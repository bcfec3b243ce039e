"""Queue limits: starts per time, and active jobs over all workers."""

from collections.abc import Callable

import pytest

from djqueue.core.job import Claimed, Outcome
from djqueue.core.policies import Rate
from djqueue.core.states import PENDING, State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    QUEUE,
    an_active_job,
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
    state,
)
from .case import LATER, LIMITED, SOON, StorageCase, nothing_changes


class LimitsContract(StorageCase):
    """Cases about rate and concurrency."""

    def test_active_jobs_never_exceed_queue_concurrency(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 2)
        ids = enqueue_many(storage, 5)

        assert claim_ids(storage, 10, worker="w1") == ids[:2]
        assert claim(storage, 10, worker="w2") == []
        assert counts(storage) == {State.WAITING: 3, State.ACTIVE: 2}

    @pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
    def test_every_outcome_frees_queue_concurrency(
        self, storage: Storage, end: Callable[[Claimed], Outcome]
    ) -> None:
        storage.queues.set_limits(QUEUE, None, 1)
        enqueue_many(storage, 2)
        finish(storage, end(claim_one(storage)))

        assert len(claim(storage, 10)) == 1
        assert claim(storage, 10) == []

    def test_stalled_job_frees_queue_concurrency_once(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 1)
        enqueue_many(storage, 3)
        lost = claim_one(storage)
        self.lose_lease(storage, lost.lease)

        assert len(claim(storage, 10)) == 1
        assert finish(storage, completing(lost)) == [False]
        assert claim(storage, 10) == []

    def test_rejected_outcome_does_not_free_queue_concurrency(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 1)
        enqueue_many(storage, 4)
        done = claim_one(storage)
        finish(storage, completing(done))
        claim_one(storage)

        for _ in range(3):
            assert finish(storage, completing(done)) == [False]
        assert claim(storage, 10) == []

    def test_obliterate_frees_queue_concurrency(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 1)
        an_active_job(storage)
        storage.queues.obliterate(QUEUE, force=True)
        storage.queues.set_limits(QUEUE, None, 1)
        enqueue_many(storage, 2)

        assert len(claim(storage, 10)) == 1

    def test_finish_frees_queue_concurrency_for_the_claim_in_the_same_call(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 1)
        ids = enqueue_many(storage, 3)
        claimed = claim_one(storage)

        for expected in ids[1:]:
            answer = storage.finish([completing(claimed)], request(5))
            [claimed] = answer.claims.jobs
            assert claimed.id == expected

    def test_queue_concurrency_can_be_raised_and_removed_while_jobs_run(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 1)
        enqueue_many(storage, 10)
        claim(storage, 10)

        storage.queues.set_limits(QUEUE, None, 3)
        assert len(claim(storage, 10)) == 2
        storage.queues.set_limits(QUEUE, None, None)
        assert len(claim(storage, 10)) == 7

    def test_lowered_queue_concurrency_lets_active_jobs_finish(self, storage: Storage) -> None:
        enqueue_many(storage, 5)
        first, second, third = claim(storage, 3)
        storage.queues.set_limits(QUEUE, None, 1)

        assert finish(storage, completing(first), completing(second)) == [True, True]
        assert claim(storage, 10) == []
        finish(storage, completing(third))
        assert len(claim(storage, 10)) == 1

    def test_queue_limits_belong_to_their_queue(self, storage: Storage) -> None:
        storage.queues.set_limits("limited", None, 1)
        enqueue_many(storage, 3, queue="limited")
        enqueue_many(storage, 3, queue="free")

        claimed = claim(storage, 10)

        assert sorted(one.queue for one in claimed) == ["free"] * 3 + ["limited"]

    def test_starts_never_exceed_the_queue_rate(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(3, 20 * SOON), None)
        ids = enqueue_many(storage, 10)

        assert claim_ids(storage, 10) == ids[:3]
        assert claim(storage, 10) == []
        self.advance(20 * SOON // 3 + 1)
        assert claim_ids(storage, 10) == ids[3:4]

    def test_queue_rate_refills_to_its_capacity_at_most(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(3, SOON), None)
        enqueue_many(storage, 20)
        claim(storage, 10)

        self.advance(5 * SOON)

        assert len(claim(storage, 10)) == 3

    def test_empty_claim_returns_time_until_the_queue_rate_allows_a_start(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(1, 10 * SOON), None)
        enqueue_many(storage, 2)
        claim_one(storage)

        claims = storage.claim(request())
        assert claims.jobs == []
        assert claims.wait is not None
        assert 0 < claims.wait <= 10 * SOON

        self.advance(claims.wait)
        assert len(claim(storage)) == 1

    def test_claim_of_the_last_token_returns_time_until_the_next_if_jobs_are_left(
        self, storage: Storage
    ) -> None:
        storage.queues.set_limits(QUEUE, Rate(1, 10 * SOON), None)
        enqueue_many(storage, 2)

        claims = storage.claim(request())
        assert len(claims.jobs) == 1
        assert claims.wait is not None
        assert 0 < claims.wait <= 10 * SOON

        self.advance(10 * SOON)
        assert storage.claim(request()).wait is None

    def test_claim_refused_by_the_queue_rate_changes_nothing(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(1, 1_000 * SOON), None)
        enqueue_many(storage, 2)
        claim_one(storage)

        with nothing_changes(storage):
            for _ in range(5):
                assert claim(storage, 10) == []

    def test_queue_rate_counts_starts_and_not_ends(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(2, 1_000 * SOON), None)
        enqueue_many(storage, 5)
        finish(storage, *map(completing, claim(storage, 1)))
        finish(storage, *map(completing, claim(storage, 1)))

        assert claim(storage, 10) == []

    def test_queue_rate_and_concurrency_apply_together(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(3, 1_000 * SOON), 2)
        enqueue_many(storage, 10)

        first = claim(storage, 10)
        assert len(first) == 2
        finish(storage, *map(completing, first))
        assert len(claim(storage, 10)) == 1

    def test_setting_the_same_queue_rate_again_keeps_used_starts(self, storage: Storage) -> None:
        enqueue_many(storage, 5)
        for _ in range(3):
            storage.queues.set_limits(QUEUE, Rate(1, 1_000 * SOON), None)
            claim(storage, 10)

        assert counts(storage) == {State.WAITING: 4, State.ACTIVE: 1}

    def test_setting_queue_concurrency_keeps_the_rate(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(3, 1_000 * SOON), 1)
        enqueue_many(storage, 10)

        storage.queues.set_limits(QUEUE, concurrency=5)

        assert len(claim(storage, 10)) == 3
        overview = storage.reads.overview([QUEUE]).queues[0]
        assert (overview.rate, overview.concurrency) == (Rate(3, 1_000 * SOON), 5)

    def test_setting_queue_rate_keeps_the_concurrency(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, concurrency=2)
        enqueue_many(storage, 10)

        storage.queues.set_limits(QUEUE, rate=Rate(5, 1_000 * SOON))

        assert len(claim(storage, 10)) == 2
        overview = storage.reads.overview([QUEUE]).queues[0]
        assert (overview.rate, overview.concurrency) == (Rate(5, 1_000 * SOON), 2)

    def test_queue_concurrency_can_be_removed_without_the_rate(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(3, 1_000 * SOON), 2)
        enqueue_many(storage, 10)

        storage.queues.set_limits(QUEUE, concurrency=None)

        assert len(claim(storage, 10)) == 3
        overview = storage.reads.overview([QUEUE]).queues[0]
        assert (overview.rate, overview.concurrency) == (Rate(3, 1_000 * SOON), None)

    def test_setting_one_limit_keeps_the_other_limit_of_the_policy(self, storage: Storage) -> None:
        storage.queues.set_limits(LIMITED, rate=Rate(40, 600_000))
        enqueue_many(storage, 10, queue=LIMITED)

        assert len(claim(storage, 10, queues=[LIMITED])) == 2
        overview = storage.reads.overview([LIMITED]).queues[0]
        assert (overview.rate, overview.concurrency) == (Rate(40, 600_000), 2)

    def test_setting_one_limit_of_a_limiter_keeps_the_other(self, storage: Storage) -> None:
        storage.limiters.set("shared", Rate(3, 1_000 * SOON), 1)

        storage.limiters.set("shared", concurrency=5)
        state = storage.limiters.state("shared")
        assert (state.rate, state.concurrency) == (Rate(3, 1_000 * SOON), 5)

        storage.limiters.set("shared", rate=None)
        state = storage.limiters.state("shared")
        assert (state.rate, state.concurrency) == (None, 5)

    def test_limited_queue_does_not_block_other_queues(self, storage: Storage) -> None:
        storage.queues.set_limits("limited", Rate(1, 1_000 * SOON), 1)
        enqueue_many(storage, 2_000, queue="limited", priority=9)
        claim(storage, 1, queues=["limited"])
        free = enqueue(storage, queue="free")

        assert claim_ids(storage, 10, queues=["limited", "free"]) == [free]

    def test_job_uses_queue_concurrency_by_its_weight(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 5)
        heavy = enqueue_many(storage, 2, weight=2)
        light = enqueue_many(storage, 5)

        claimed = claim(storage, 10)
        assert [one.id for one in claimed] == [*heavy, light[0]]
        assert claim(storage, 10) == []
        finish(storage, completing(claimed[0]))
        assert claim_ids(storage, 10) == light[1:3]

    def test_no_job_overtakes_a_heavy_job_waiting_for_queue_concurrency(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 3)
        first, second = enqueue_many(storage, 2)
        claimed = claim(storage, 10)
        heavy = enqueue(storage, weight=3)
        light = enqueue_many(storage, 2)

        assert finish(storage, completing(claimed[0])) == [True]
        assert claim(storage, 10) == []
        answer = storage.finish([completing(claimed[1])], request(10))
        assert [one.id for one in answer.claims.jobs] == [heavy]
        assert claim(storage, 10) == []
        finish(storage, completing(answer.claims.jobs[0]))
        assert claim_ids(storage, 10) == light
        assert [one.id for one in claimed] == [first, second]

    def test_jobs_waiting_for_queue_concurrency_keep_their_order(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 2)
        active = an_active_job(storage)
        ids = {
            "low": enqueue(storage, priority=-1),
            "second": enqueue(storage),
            "first": enqueue(storage, weight=2, priority=1),
            "third": enqueue(storage, name="another"),
        }
        claim(storage, 10, names=["nobody"])

        for _ in range(3):
            assert claim(storage, 10) == []
        storage.queues.set_limits(QUEUE, None, None)
        finish(storage, completing(active))

        order = [ids[who] for who in ("first", "second", "third", "low")]
        assert claim_ids(storage, 10, names=["handler", "another"]) == order

    def test_job_heavier_than_queue_concurrency_runs_alone(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 3)
        first = enqueue(storage)
        heavy = enqueue(storage, weight=100)
        last = enqueue(storage)

        [claimed] = claim(storage, 10)
        assert claimed.id == first
        finish(storage, completing(claimed))
        [claimed] = claim(storage, 10)
        assert claimed.id == heavy
        assert claim(storage, 10) == []
        finish(storage, completing(claimed))
        assert claim_ids(storage, 10) == [last]

    def test_weight_is_ignored_without_queue_concurrency(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3, weight=50)

        assert claim_ids(storage, 2) == ids[:2]
        storage.queues.set_limits(QUEUE, None, 101)
        assert claim_ids(storage, 2) == []
        storage.queues.set_limits(QUEUE, None, 150)
        assert claim_ids(storage, 2) == ids[2:]

    @pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
    def test_every_outcome_frees_the_whole_weight_of_queue_concurrency(
        self, storage: Storage, end: Callable[[Claimed], Outcome]
    ) -> None:
        storage.queues.set_limits(QUEUE, None, 4)
        enqueue(storage, weight=4)
        finish(storage, end(claim_one(storage)))
        storage.queues.clean(QUEUE, PENDING, self.now(storage) + LATER)

        enqueue_many(storage, 6)
        assert len(claim(storage, 10)) == 4

    def test_stalled_job_frees_its_weight_once(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 4)
        enqueue_many(storage, 2, weight=3)
        lost = claim_one(storage)
        self.lose_lease(storage, lost.lease)

        assert len(claim(storage, 10)) == 1
        assert finish(storage, completing(lost)) == [False]
        assert claim(storage, 10) == []

    def test_weight_is_stored_with_the_job(self, storage: Storage) -> None:
        assert job(storage, enqueue(storage, weight=7)).options.weight == 7

    def test_rate_may_be_far_above_what_any_queue_does(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(1_000_000_000, 1_000), None)
        ids = enqueue_many(storage, 3)

        assert [*claim_ids(storage, 2), *claim_ids(storage, 2)] == ids

    @pytest.mark.parametrize(("rate", "concurrency"), [(None, 1), (Rate(1, LATER), None)])
    def test_claim_expires_no_job_that_the_limits_hold_back(
        self, storage: Storage, rate: Rate | None, concurrency: int | None
    ) -> None:
        storage.queues.set_limits(QUEUE, rate, concurrency)
        first, expired = enqueue(storage), enqueue(storage, ttl=SOON)
        self.advance(SOON + 1)

        assert claim_ids(storage, 10) == [first]

        assert state(storage, expired) is State.WAITING
        storage.sweep()
        assert state(storage, expired) is State.FAILED

    def test_claim_expires_jobs_in_their_order(self, storage: Storage) -> None:
        first, second = enqueue_many(storage, 2, ttl=SOON, lifo=True)
        self.advance(SOON + 1)

        assert claim(storage, 10) == []

        assert [letter.id for letter in storage.reads.dead_letters(QUEUE)] == [second, first]

    def test_expired_job_does_not_use_the_queue_rate(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(3, 1_000 * SOON), 3)
        enqueue_many(storage, 3, ttl=SOON)
        kept = enqueue_many(storage, 2)
        self.advance(SOON + 1)

        assert claim_ids(storage, 5) == kept
        third = enqueue(storage)
        assert claim_ids(storage, 5) == [third]
        enqueue(storage)
        assert claim(storage, 5) == []
