"""Shared limiters: what several queues may start and have active together."""

from collections.abc import Callable
from functools import partial
from threading import Event as ThreadEvent
from threading import Lock

import pytest

from djqueue.core.job import Claimed, Outcome
from djqueue.core.policies import Rate
from djqueue.core.states import PENDING, State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    QUEUE,
    an_active_job,
    batch,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    lease_of,
    releasing,
    request,
    retrying,
)
from ..waiting import PATIENCE, Wakes, together
from .case import LATER, LIMITER, SHARING, SOON, StorageCase

CHARGES, REFUNDS, PAYOUTS = SHARING


def used(storage: Storage) -> int:
    """Return what is used of the limiter."""
    return storage.limiters.state(LIMITER).used


def active(storage: Storage) -> int:
    """Active jobs of the queues that share it."""
    return sum(counts(storage, queue).get(State.ACTIVE, 0) for queue in SHARING)


class LimitersContract(StorageCase):
    """Cases about limiters that queues share."""

    @pytest.mark.parametrize("many", [2, 3])
    def test_active_jobs_of_all_queues_never_exceed_the_shared_limiter(
        self, storage: Storage, many: int
    ) -> None:
        storage.limiters.set(LIMITER, None, 4)
        for queue in SHARING[:many]:
            enqueue_many(storage, 5, queue=queue)

        claimed = claim(storage, 100)
        assert len(claimed) == 4
        for queue in SHARING[:many]:
            assert claim(storage, 100, queues=[queue]) == []
        ended = 0
        while claimed:
            assert active(storage) == used(storage) == len(claimed) <= 4
            finish(storage, completing(claimed.pop()))
            ended += 1
            claimed += claim(storage, 100)
        assert ended == 5 * many
        assert used(storage) == 0

    def test_queue_without_the_limiter_is_not_limited(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        enqueue_many(storage, 3, queue=CHARGES)
        enqueue_many(storage, 3)

        claimed = claim(storage, 100)

        assert sorted(one.queue for one in claimed) == [CHARGES, *[QUEUE] * 3]

    def test_limiter_without_limits_does_not_limit(self, storage: Storage) -> None:
        enqueue_many(storage, 3, queue=CHARGES)
        enqueue_many(storage, 3, queue=REFUNDS)

        assert len(claim(storage, 100)) == 6
        state = storage.limiters.state(LIMITER)
        assert (state.rate, state.concurrency, state.used, state.free, state.tokens) == (
            None,
            None,
            6,
            None,
            None,
        )

    def test_queue_limits_apply_besides_the_shared_limiter(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 4)
        storage.queues.set_limits(CHARGES, None, 1)
        enqueue_many(storage, 5, queue=CHARGES)
        enqueue_many(storage, 5, queue=REFUNDS)

        claimed = claim(storage, 100, queues=[CHARGES]) + claim(storage, 100)

        assert sorted(one.queue for one in claimed) == [CHARGES, *[REFUNDS] * 3]
        assert used(storage) == 4

    def test_claim_takes_permits_only_for_claimed_jobs(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, Rate(4, 1_000 * LATER), 4)
        enqueue(storage, queue=CHARGES)
        enqueue(storage, queue=CHARGES, name="another")
        enqueue_many(storage, 5, queue=REFUNDS)

        assert len(claim(storage, 100, queues=[CHARGES])) == 1
        assert claim(storage, 100, queues=[CHARGES]) == []
        assert claim(storage, 100, queues=[CHARGES], names=["nobody"]) == []
        assert len(claim(storage, 100, queues=[REFUNDS])) == 3
        state = storage.limiters.state(LIMITER)
        assert (state.used, state.free, state.tokens) == (4, 0, 0)

    @pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
    def test_every_outcome_frees_the_permit(
        self, storage: Storage, end: Callable[[Claimed], Outcome]
    ) -> None:
        storage.limiters.set(LIMITER, None, 1)
        claimed = an_active_job(storage, queue=CHARGES)
        enqueue_many(storage, 2, queue=REFUNDS)
        assert claim(storage, 5, queues=[REFUNDS]) == []

        assert finish(storage, end(claimed)) == [True]

        assert used(storage) == 0
        assert len(claim(storage, 5, queues=[REFUNDS])) == 1
        assert finish(storage, end(claimed)) == [False]
        assert used(storage) == 1

    def test_delayed_retry_frees_the_permit(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        for end in (retrying, releasing):
            finish(storage, end(an_active_job(storage, queue=CHARGES), delay=LATER))
            assert used(storage) == 0

    def test_cancelled_active_job_frees_its_permit_when_it_finishes(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        claimed = an_active_job(storage, queue=CHARGES)
        storage.jobs.cancel(CHARGES, [claimed.id])
        assert used(storage) == 1

        finish(storage, releasing(claimed))
        assert used(storage) == 0

    def test_stalled_job_frees_its_permit_once(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        lost = an_active_job(storage, queue=CHARGES)
        enqueue(storage, queue=REFUNDS)
        self.lose_lease(storage, lost.lease)

        assert used(storage) == 0
        assert len(claim(storage, 5, queues=[REFUNDS])) == 1
        assert finish(storage, completing(lost)) == [False]
        assert claim(storage, 5, queues=[CHARGES]) == []

    def test_renewed_lease_keeps_the_permit(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        claimed = an_active_job(storage, queue=CHARGES)
        enqueue(storage, queue=REFUNDS)
        for _ in range(4):
            self.pass_time(storage, claimed.lease // 2)
            assert storage.renew([lease_of(claimed)])[0].held
            assert claim(storage, 5, queues=[REFUNDS]) == []
        assert used(storage) == 1

    def test_obliterate_frees_permits(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 2)
        enqueue_many(storage, 3, queue=CHARGES)
        claim(storage, 5, queues=[CHARGES])
        enqueue(storage, queue=REFUNDS)
        assert claim(storage, 5, queues=[REFUNDS]) == []

        storage.queues.obliterate(CHARGES, force=True)

        assert used(storage) == 0
        assert len(claim(storage, 5, queues=[REFUNDS])) == 1

    def test_expired_jobs_use_no_permit(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, Rate(2, 1_000 * LATER), 2)
        enqueue_many(storage, 4, queue=CHARGES, ttl=SOON)
        self.advance(SOON)
        enqueue_many(storage, 2, queue=CHARGES)

        claimed = claim(storage, 5, queues=[CHARGES])

        assert counts(storage, CHARGES) == {State.ACTIVE: 2, State.FAILED: 4}
        assert (len(claimed), used(storage)) == (2, 2)

    def test_finish_passes_the_permit_to_the_claim_in_the_same_call(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 2)
        ids = enqueue_many(storage, 6, queue=CHARGES)
        claimed = claim(storage, 5, queues=[CHARGES])
        done = [one.id for one in claimed]
        while claimed:
            answer = storage.finish([completing(claimed.pop(0))], request(5, queues=[CHARGES]))
            assert answer.accepted == [True]
            claimed += answer.claims.jobs
            done += [one.id for one in answer.claims.jobs]
            assert used(storage) == len(claimed)

        assert done == ids

    def test_job_uses_permits_by_its_weight(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 5)
        heavy = enqueue_many(storage, 2, queue=CHARGES, weight=3)
        enqueue_many(storage, 5, queue=REFUNDS)

        first = claim(storage, 1, queues=[CHARGES])
        assert [one.id for one in first] == heavy[:1]
        assert claim(storage, 5, queues=[CHARGES]) == []
        assert used(storage) == 3
        finish(storage, completing(first[0]))
        assert used(storage) == 0
        second = claim(storage, 1, queues=[CHARGES])
        assert [one.id for one in second] == heavy[1:]
        assert len(claim(storage, 5, queues=[REFUNDS])) == 2
        assert used(storage) == 5

    def test_light_jobs_of_other_queues_do_not_starve_a_heavy_job(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 3)
        light = enqueue_many(storage, 9, queue=REFUNDS)
        claimed = claim(storage, 5, queues=[REFUNDS])
        heavy = enqueue(storage, queue=CHARGES, weight=3)
        assert claim(storage, 5, queues=[CHARGES]) == []

        for _ in range(2):
            assert finish(storage, completing(claimed.pop())) == [True]
            assert claim(storage, 5, queues=[REFUNDS]) == []
            assert claim(storage, 5, queues=[CHARGES]) == []
        finish(storage, completing(claimed.pop()))

        assert claim_one(storage, queues=[CHARGES]).id == heavy
        assert counts(storage, REFUNDS)[State.WAITING] == len(light) - 3

    @pytest.mark.parametrize("was_in_line", [True, False])
    def test_heavy_job_waits_for_the_turn_of_its_queue(self, storage: Storage, was_in_line: bool) -> None:
        storage.limiters.set(LIMITER, None, 3)
        enqueue_many(storage, 2, queue=PAYOUTS)
        running = claim(storage, 2, queues=[PAYOUTS])
        heavy = {queue: enqueue(storage, queue=queue, weight=2) for queue in (CHARGES, REFUNDS)}
        assert claim(storage, 5, queues=[CHARGES]) == []
        if was_in_line:
            assert claim(storage, 5, queues=[REFUNDS]) == []
        finish(storage, *map(completing, running))

        assert claim(storage, 5, queues=[REFUNDS]) == []
        claimed = claim_one(storage, queues=[CHARGES])
        assert claimed.id == heavy[CHARGES]
        finish(storage, completing(claimed))
        assert claim_one(storage, queues=[REFUNDS]).id == heavy[REFUNDS]

    def test_job_heavier_than_the_limiter_runs_alone(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 3)
        enqueue(storage, queue=CHARGES, weight=50)
        enqueue(storage, queue=REFUNDS)

        claimed = claim_one(storage, queues=[CHARGES])
        assert claim(storage, 5, queues=[REFUNDS]) == []
        finish(storage, completing(claimed))
        assert len(claim(storage, 5, queues=[REFUNDS])) == 1

    @pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
    def test_every_outcome_frees_all_permits_of_a_heavy_job(
        self, storage: Storage, end: Callable[[Claimed], Outcome]
    ) -> None:
        storage.limiters.set(LIMITER, None, 4)
        finish(storage, end(an_active_job(storage, queue=CHARGES, weight=4)))
        assert used(storage) == 0
        storage.queues.clean(CHARGES, PENDING, self.now(storage) + LATER)

        enqueue_many(storage, 6, queue=CHARGES)
        assert len(claim(storage, 10, queues=[CHARGES])) == 4

    def test_starts_of_all_queues_never_exceed_the_limiter_rate(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, Rate(4, 20 * SOON), None)
        enqueue_many(storage, 3, queue=CHARGES)
        enqueue_many(storage, 9, queue=REFUNDS)

        assert len(claim(storage, 100)) == 4
        assert claim(storage, 100) == []
        self.advance(5 * SOON)
        assert len(claim(storage, 100)) == 1
        self.advance(200 * SOON)
        assert len(claim(storage, 100)) == 4

    def test_limiter_rate_counts_starts_and_not_ends(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, Rate(2, 1_000 * LATER), 2)
        enqueue_many(storage, 9, queue=CHARGES, weight=2)
        for _ in range(2):
            finish(storage, *map(completing, claim(storage, 5)))

        assert claim(storage, 5) == []
        state = storage.limiters.state(LIMITER)
        assert (state.rate, state.tokens, state.used) == (Rate(2, 1_000 * LATER), 0, 0)

    def test_empty_claim_returns_time_until_the_limiter_rate_allows_a_start(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, Rate(1, 10 * SOON), None)
        enqueue_many(storage, 2, queue=CHARGES)
        claim_one(storage, queues=[CHARGES])

        claims = storage.claim(request(5, queues=[CHARGES]))
        assert claims.jobs == []
        assert claims.wait is not None
        assert 0 < claims.wait <= 10 * SOON
        self.advance(claims.wait)
        assert len(claim(storage, 5, queues=[CHARGES])) == 1

    def test_finished_job_wakes_the_next_queue_of_its_limiter(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        claimed = an_active_job(storage, queue=CHARGES)
        enqueue(storage, queue=REFUNDS)
        wakes, others = Wakes(), Wakes()
        storage.listen([REFUNDS], wakes)
        storage.listen([QUEUE], others)
        assert claim(storage, 5, queues=[REFUNDS]) == []
        wakes.forget()

        finish(storage, completing(claimed))

        assert wakes.arrived()
        assert len(claim(storage, 5, queues=[REFUNDS])) == 1
        assert others.count == 0

    @pytest.mark.parametrize("how", ["lost", "obliterated", "given back", "raised"])
    def test_refused_queue_is_woken_by_every_freed_permit(self, storage: Storage, how: str) -> None:
        storage.limiters.set(LIMITER, None, 1)
        claimed = an_active_job(storage, queue=CHARGES)
        enqueue(storage, queue=REFUNDS)
        wakes = Wakes()
        storage.listen([REFUNDS], wakes)
        assert claim(storage, 5, queues=[REFUNDS]) == []
        wakes.forget()

        if how == "lost":
            self.lose_lease(storage, claimed.lease)
        elif how == "obliterated":
            storage.queues.obliterate(CHARGES, force=True)
        elif how == "given back":
            finish(storage, releasing(claimed, delay=LATER))
        else:
            storage.limiters.set(LIMITER, None, 2)

        assert wakes.arrived()
        assert len(claim(storage, 5, queues=[REFUNDS])) == 1

    def test_refused_queue_has_its_turn_before_the_queue_of_the_finished_job(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        enqueue_many(storage, 9, queue=CHARGES)
        enqueue_many(storage, 9, queue=REFUNDS)
        running = claim(storage, 5, queues=[CHARGES])
        assert claim(storage, 5, queues=[REFUNDS]) == []

        order = []
        for queue, other in [(CHARGES, REFUNDS), (REFUNDS, CHARGES)] * 3:
            [ended] = running
            order.append(ended.queue)
            answer = storage.finish([completing(ended)], request(5, queues=[queue]))
            assert answer.claims.jobs == []
            running = claim(storage, 5, queues=[other])

        assert order == [CHARGES, REFUNDS] * 3

    def test_unused_turn_passes_to_other_queues(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        claimed = an_active_job(storage, queue=CHARGES)
        enqueue_many(storage, 2, queue=REFUNDS)
        enqueue_many(storage, 2, queue=CHARGES)
        assert claim(storage, 5, queues=[REFUNDS]) == []

        answer = storage.finish([completing(claimed)], request(5, queues=[CHARGES]))

        assert answer.claims.jobs == []
        assert answer.claims.wait is not None
        assert 0 < answer.claims.wait <= 1_000
        self.advance(answer.claims.wait)
        assert len(claim(storage, 5, queues=[CHARGES])) == 1

    def test_next_queue_is_woken_after_an_unused_turn(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        claimed = an_active_job(storage, queue=CHARGES)
        wakes = {queue: Wakes() for queue in (REFUNDS, PAYOUTS)}
        for queue, woken in wakes.items():
            enqueue(storage, queue=queue)
            storage.listen([queue], woken)
            assert claim(storage, 5, queues=[queue]) == []
            woken.forget()
        finish(storage, completing(claimed))
        assert wakes[REFUNDS].arrived()
        if self.wakes_exactly:
            assert wakes[PAYOUTS].count == 0

        self.pass_time(storage, 1_000)

        assert wakes[PAYOUTS].arrived()
        assert len(claim(storage, 5, queues=[PAYOUTS])) == 1

    def test_limiter_can_change_while_jobs_run(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        enqueue_many(storage, 5, queue=CHARGES)
        enqueue_many(storage, 5, queue=REFUNDS)
        claimed = claim(storage, 100)

        storage.limiters.set(LIMITER, None, 3)
        claimed += claim(storage, 100)
        assert len(claimed) == 3
        storage.limiters.set(LIMITER, None, 2)
        finish(storage, completing(claimed.pop()))
        assert claim(storage, 100) == []
        storage.limiters.set(LIMITER, Rate(1, 1_000 * LATER), None)
        claimed += claim(storage, 100)
        assert len(claimed) == 3
        storage.limiters.set(LIMITER, None, None)
        claimed += claim(storage, 100)
        assert len(claimed) == used(storage) == 9

    def test_setting_the_same_limiter_rate_again_keeps_used_starts(self, storage: Storage) -> None:
        enqueue_many(storage, 5, queue=CHARGES)
        for _ in range(3):
            storage.limiters.set(LIMITER, Rate(1, 1_000 * LATER), None)
            claim(storage, 100)

        assert active(storage) == 1

    def test_moved_jobs_use_the_limiter_of_their_new_queue(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        here, there = enqueue_many(storage, 2), enqueue_many(storage, 2, queue=CHARGES)
        storage.jobs.move(QUEUE, here, CHARGES)
        storage.jobs.move(CHARGES, there, QUEUE)

        claimed = claim(storage, 100)

        assert sorted(one.queue for one in claimed) == [CHARGES, QUEUE, QUEUE]
        assert used(storage) == 1

    def test_dependent_in_another_queue_starts_with_the_freed_permit(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, None, 1)
        first = an_active_job(storage, queue=CHARGES)
        second = enqueue(storage, queue=REFUNDS, depends_on=((CHARGES, first.id),))

        answer = storage.finish([completing(first)], request(5))

        found = [*answer.claims.jobs, *claim(storage, 5)]
        assert [one.id for one in found] == [second]

    def test_idle_limiter_has_all_permits_free(self, storage: Storage) -> None:
        storage.limiters.set(LIMITER, Rate(100), 5)
        for queue in SHARING:
            enqueue_many(storage, 10, queue=queue)
        while claimed := claim(storage, 100):
            finish(storage, *map(completing, claimed))
            self.advance(1_000)
        self.advance(1_000)

        assert storage.limiters.state(LIMITER) == (Rate(100), 5, 0, 100, ())

    def test_limiter_of_one_holds_across_queues_under_load(self, storage: Storage) -> None:
        many, queues = 30, SHARING[:2]
        storage.limiters.set(LIMITER, None, 1)
        lock, running, limit, left = Lock(), [0], [0], [2 * many]
        over, wake_events = ThreadEvent(), [ThreadEvent() for _ in range(4)]

        def produce(queue: str) -> None:
            for _ in range(many // 10):
                storage.enqueue([batch(10, queue=queue)])

        def work(queue: str, wake_event: ThreadEvent) -> None:
            stop = storage.listen([queue], wake_event.set)
            done: list[Claimed] = []
            while not over.is_set():
                wake_event.clear()
                if done:
                    with lock:
                        running[0] -= len(done)
                        left[0] -= len(done)
                        if not left[0]:
                            for event in (over, *wake_events):
                                event.set()
                answer = storage.finish([completing(one) for one in done], request(3, queues=[queue]))
                assert all(answer.accepted)
                done = answer.claims.jobs
                with lock:
                    running[0] += len(done)
                    limit[0] = max(limit[0], running[0])
                if not done:
                    assert wake_event.wait(PATIENCE), "a wake-up was lost"
            stop()

        together(
            [
                *(partial(produce, queue) for queue in queues),
                *map(partial, [work] * 4, 2 * queues, wake_events),
            ]
        )

        assert (limit[0], left[0]) == (1, 0)
        assert [counts(storage, queue) for queue in queues] == [{State.COMPLETED: many}] * 2
        assert used(storage) == 0
