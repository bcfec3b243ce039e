"""Groups: jobs of one group run one after the other, and hold up nobody else."""

from collections.abc import Callable

import pytest

from djqueue.core.job import Claimed, Outcome
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    QUEUE,
    a_failed_job,
    an_active_job,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    releasing,
    request,
    retrying,
    state,
)
from .case import LATER, PAIRS, SOON, StorageCase


class GroupsContract(StorageCase):
    """Cases about keyed concurrency."""

    def test_one_job_of_a_group_is_active_at_once(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3, group="g")

        assert claim_ids(storage, 10) == ids[:1]
        assert claim(storage, 10) == []
        assert counts(storage) == {State.WAITING: 2, State.ACTIVE: 1}

    def test_a_group_is_served_in_order(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 5, group="g")
        served = []
        for _ in ids:
            claimed = claim_one(storage)
            served.append(claimed.id)
            finish(storage, completing(claimed))

        assert served == ids

    def test_groups_and_jobs_without_one_run_beside_each_other(self, storage: Storage) -> None:
        enqueue_many(storage, 3, group="a")
        enqueue_many(storage, 3, group="b")
        free = enqueue_many(storage, 3)

        claimed = claim(storage, 10)

        assert len(claimed) == 5
        assert {one.id for one in claimed} >= set(free)
        assert sorted(str(one.options.group) for one in claimed) == ["None"] * 3 + ["a", "b"]

    def test_a_blocked_group_does_not_starve_the_others(self, storage: Storage) -> None:
        enqueue_many(storage, 2_000, group="big", priority=9)
        claim_one(storage)
        small = enqueue(storage, group="small")
        free = enqueue(storage)

        assert claim_ids(storage, 10) == [small, free]

    @pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
    def test_every_end_of_a_run_frees_its_group(
        self, storage: Storage, end: Callable[[Claimed], Outcome]
    ) -> None:
        enqueue_many(storage, 2, group="g")
        finish(storage, end(claim_one(storage)))

        assert len(claim(storage, 10)) == 1
        assert claim(storage, 10) == []

    def test_a_finish_frees_its_group_for_the_claim_in_the_same_call(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 2, group="g")

        answer = storage.finish([completing(claim_one(storage))], request(5))

        assert [one.id for one in answer.claims.jobs] == ids[1:]

    def test_a_lost_run_frees_its_group(self, storage: Storage) -> None:
        first, second = enqueue_many(storage, 2, group="g")
        claimed = claim_one(storage)
        self.lose_lease(storage, claimed.lease)

        assert claim_ids(storage, 10) == [first]
        assert finish(storage, completing(claimed)) == [False]
        assert claim(storage, 10) == []
        assert state(storage, second) is State.WAITING

    @pytest.mark.parametrize("times", [1, 3])
    def test_a_job_given_back_runs_before_those_behind_it_in_its_group(
        self, storage: Storage, times: int
    ) -> None:
        first, second, third = enqueue_many(storage, 3, group="g")
        for _ in range(times):
            claimed = claim_one(storage)
            assert claimed.id == first
            finish(storage, releasing(claimed))

        for expected in (first, second, third):
            claimed = claim_one(storage)
            assert claimed.id == expected
            finish(storage, completing(claimed))

    def test_a_lifo_job_goes_before_those_that_wait_in_its_group(self, storage: Storage) -> None:
        active = an_active_job(storage, group="g")
        behind = enqueue(storage, group="g")
        before = enqueue(storage, group="g", lifo=True)

        finish(storage, completing(active))
        first = claim_one(storage)
        finish(storage, completing(first))

        assert [first.id, *claim_ids(storage, 10)] == [before, behind]

    def test_a_job_waiting_for_its_retry_does_not_hold_its_group(self, storage: Storage) -> None:
        first, second = enqueue_many(storage, 2, group="g")
        finish(storage, retrying(claim_one(storage), delay=SOON))

        claimed = claim_one(storage)
        assert claimed.id == second
        self.pass_time(storage, SOON + 1)
        assert claim(storage) == []
        finish(storage, completing(claimed))
        assert claim_ids(storage) == [first]

    def test_a_job_cancelled_in_its_group_makes_way(self, storage: Storage) -> None:
        first, second, third = enqueue_many(storage, 3, group="g")

        storage.cancel(QUEUE, [first, third])

        assert claim_ids(storage, 10) == [second]
        assert counts(storage) == {State.ACTIVE: 1, State.CANCELLED: 2}

    def test_a_job_removed_or_put_off_makes_way(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 4, group="g")
        later = self.now(storage) + LATER
        storage.remove(QUEUE, ids[:1])
        storage.reschedule(QUEUE, ids[1:2], later)
        storage.reschedule(QUEUE, ids[3:], later)

        assert claim_ids(storage, 10) == ids[2:3]
        assert counts(storage) == {State.ACTIVE: 1, State.DELAYED: 2}

    def test_a_job_that_expires_makes_way(self, storage: Storage) -> None:
        enqueue_many(storage, 2, group="g", ttl=SOON)
        kept = enqueue(storage, group="g")
        self.advance(SOON + 1)

        assert claim_ids(storage, 3) == [kept]

    def test_delayed_jobs_join_their_group_when_they_are_due(self, storage: Storage) -> None:
        enqueue_many(storage, 2, group="g", delay=SOON)
        active = an_active_job(storage, group="g")
        self.pass_time(storage, SOON + 1)

        assert claim(storage, 10) == []
        finish(storage, completing(active))
        assert len(claim(storage, 10)) == 1

    def test_a_dead_letter_retried_joins_its_group(self, storage: Storage) -> None:
        dead = a_failed_job(storage, group="g")
        active = an_active_job(storage, group="g")
        storage.retry(QUEUE, [dead])

        assert claim(storage, 10) == []
        finish(storage, completing(active))
        assert claim_ids(storage, 10) == [dead]

    def test_an_unhandled_job_of_a_group_holds_its_place(self, storage: Storage) -> None:
        unhandled = enqueue(storage, group="g", name="not.here.yet")
        handled = enqueue(storage, group="g")

        assert claim(storage, 10) == []
        assert claim_ids(storage, 10, names=["not.here.yet"]) == [unhandled]
        assert state(storage, handled) is State.WAITING

    def test_groups_are_of_their_queue(self, storage: Storage) -> None:
        enqueue(storage, queue="left", group="g")
        enqueue(storage, queue="right", group="g")

        assert len(claim(storage, 10)) == 2

    def test_group_names_are_compared_exactly(self, storage: Storage) -> None:
        for group in ("g", "G", "g ", "g:1", "{g}", "ğ"):
            enqueue(storage, group=group)

        assert len(claim(storage, 10)) == 6

    def test_a_queue_may_let_more_of_a_group_run_at_once(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 4, queue=PAIRS, group="g")

        first, second = claim(storage, 10)
        assert [first.id, second.id] == ids[:2]
        finish(storage, completing(second))
        assert claim_ids(storage, 10) == ids[2:3]

    def test_many_groups_are_served_and_forgotten(self, storage: Storage) -> None:
        for number in range(300):
            enqueue_many(storage, 2, group=f"customer:{number}")

        first = claim(storage, 1_000)
        second = storage.finish([completing(one) for one in first], request(1_000)).claims.jobs
        finish(storage, *map(completing, second))

        assert [len(first), len(second)] == [300, 300]
        assert [one.options.group for one in first] == [one.options.group for one in second]
        assert counts(storage) == {State.COMPLETED: 600}
