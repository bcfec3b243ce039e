"""Concurrency keys: the jobs of one key, a group, run one after another and do not delay other groups."""

from collections import Counter
from collections.abc import Callable

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.job import Claimed, Outcome
from djqueue.core.policies import KeyLimit, Rate
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    QUEUE,
    a_failed_job,
    an_active_job,
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
    releasing,
    request,
    retrying,
    state,
)
from ..waiting import Wakes
from .case import KEYED_ONLY, LATER, PAIRS, RATED, SOON, UNGROUPED, WEIGHTED, StorageCase

SLOW = Rate(1, LATER)


class ConcurrencyKeysContract(StorageCase):
    """Cases about keyed concurrency."""

    def test_at_most_one_job_of_a_group_is_active(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3, concurrency_key="g")

        assert claim_ids(storage, 10) == ids[:1]
        assert claim(storage, 10) == []
        assert counts(storage) == {State.WAITING: 2, State.ACTIVE: 1}

    # What is told of groups.

    def test_keys_with_most_waiting_jobs_are_listed_first(self, storage: Storage) -> None:
        for group, many in (("b", 2), ("a", 2), ("most", 4), ("few", 1)):
            enqueue_many(storage, many, concurrency_key=group)
        enqueue_many(storage, 3)
        enqueue(storage, concurrency_key="later", delay=LATER)
        claim(storage, 2)

        found = storage.reads.concurrency_keys(QUEUE, 3)

        assert [(one.name, one.waiting, one.active) for one in found.busiest] == [
            ("most", 4, 0),
            ("a", 1, 1),
            ("b", 1, 1),
        ]
        assert (found.mode, found.limit, found.rate, found.overrides) == ("optional", 1, None, KeyLimit())
        assert (found.named, found.whole) == ([], True)

    def test_named_keys_are_listed_with_or_without_jobs(self, storage: Storage) -> None:
        enqueue_many(storage, 2, concurrency_key="g")
        storage.queues.pause_key(QUEUE, "idle")

        found = storage.reads.concurrency_keys(QUEUE, 0, ["nobody", "g", "idle"])

        assert [(one.name, one.waiting, one.paused) for one in found.named] == [
            ("nobody", 0, False),
            ("g", 2, False),
            ("idle", 0, True),
        ]
        assert found.busiest == []
        assert storage.reads.concurrency_keys("nobodys", 5, ["g"]).named[0].waiting == 0
        assert "nobodys" not in storage.queues.names()

    def test_key_overview_has_effective_limits_and_overrides(self, storage: Storage) -> None:
        storage.queues.set_key_limit(QUEUE, None, concurrency=3, rate=SLOW)
        storage.queues.set_key_limit(QUEUE, "g", concurrency=5, weight=2)
        storage.queues.set_key_limit(WEIGHTED, "b", rate=SLOW)

        found = storage.reads.concurrency_keys(QUEUE, 5, ["g", "h"])
        assert (found.limit, found.rate, found.overrides) == (3, SLOW, KeyLimit(3, rate=SLOW))
        one, other = found.named
        assert (one.limit, one.rate, one.weight, one.overrides) == (5, SLOW, 2, KeyLimit(5, weight=2))
        assert (other.limit, other.rate, other.weight, other.overrides) == (3, SLOW, 1, KeyLimit())
        [one] = storage.reads.concurrency_keys(WEIGHTED, 5, ["b"]).named
        assert (one.limit, one.rate, one.weight) == (4, SLOW, 2)

    def test_key_overview_of_queue_with_keys_off_has_no_limits(self, storage: Storage) -> None:
        enqueue(storage, queue=UNGROUPED, concurrency_key="g")

        found = storage.reads.concurrency_keys(UNGROUPED, 5, ["g"])

        assert (found.mode, found.limit, found.busiest) == ("global", 0, [])
        assert (found.named[0].limit, found.named[0].waiting) == (0, 0)

    def test_busiest_of_many_keys_are_found(self, storage: Storage) -> None:
        storage.enqueue([batch(1, concurrency_key=f"g{number:04}") for number in range(600)])
        for group in ("g0599", "y", "z"):
            enqueue_many(storage, 40, concurrency_key=group)
        claim(storage, 1)

        found = storage.reads.concurrency_keys(QUEUE, 3)

        assert {one.name for one in found.busiest} == {"g0599", "y", "z"}
        assert found.busiest[0].waiting == 41

    # Order.

    def test_jobs_of_a_group_run_in_order(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 5, concurrency_key="g")
        served = []
        for _ in ids:
            claimed = claim_one(storage)
            served.append(claimed.id)
            finish(storage, completing(claimed))

        assert served == ids

    def test_groups_and_jobs_without_keys_run_concurrently(self, storage: Storage) -> None:
        enqueue_many(storage, 3, concurrency_key="a")
        enqueue_many(storage, 3, concurrency_key="b")
        free = enqueue_many(storage, 3)

        claimed = claim(storage, 10)

        assert len(claimed) == 5
        assert {one.id for one in claimed} >= set(free)
        assert sorted(str(one.options.concurrency_key) for one in claimed) == ["None"] * 3 + ["a", "b"]

    def test_busy_group_does_not_starve_other_groups(self, storage: Storage) -> None:
        enqueue_many(storage, 2_000, concurrency_key="big", priority=9)
        claim_one(storage)
        small = enqueue(storage, concurrency_key="small")
        free = enqueue(storage)

        assert claim_ids(storage, 10) == [small, free]

    @pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
    def test_every_outcome_frees_the_group(self, storage: Storage, end: Callable[[Claimed], Outcome]) -> None:
        enqueue_many(storage, 2, concurrency_key="g")
        finish(storage, end(claim_one(storage)))

        assert len(claim(storage, 10)) == 1
        assert claim(storage, 10) == []

    def test_finish_frees_the_group_for_the_claim_in_the_same_call(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 2, concurrency_key="g")

        answer = storage.finish([completing(claim_one(storage))], request(5))

        assert [one.id for one in answer.claims.jobs] == ids[1:]

    def test_stalled_job_frees_its_group(self, storage: Storage) -> None:
        first, second = enqueue_many(storage, 2, concurrency_key="g")
        claimed = claim_one(storage)
        self.lose_lease(storage, claimed.lease)

        assert claim_ids(storage, 10) == [first]
        assert finish(storage, completing(claimed)) == [False]
        assert claim(storage, 10) == []
        assert state(storage, second) is State.WAITING

    @pytest.mark.parametrize("times", [1, 3])
    def test_released_job_runs_before_later_jobs_of_its_group(self, storage: Storage, times: int) -> None:
        first, second, third = enqueue_many(storage, 3, concurrency_key="g")
        for _ in range(times):
            claimed = claim_one(storage)
            assert claimed.id == first
            finish(storage, releasing(claimed))

        for expected in (first, second, third):
            claimed = claim_one(storage)
            assert claimed.id == expected
            finish(storage, completing(claimed))

    def test_lifo_job_goes_before_waiting_jobs_of_its_group(self, storage: Storage) -> None:
        active = an_active_job(storage, concurrency_key="g")
        behind = enqueue(storage, concurrency_key="g")
        before = enqueue(storage, concurrency_key="g", lifo=True)

        finish(storage, completing(active))
        first = claim_one(storage)
        finish(storage, completing(first))

        assert [first.id, *claim_ids(storage, 10)] == [before, behind]

    def test_job_waiting_for_retry_does_not_block_its_group(self, storage: Storage) -> None:
        first, second = enqueue_many(storage, 2, concurrency_key="g")
        finish(storage, retrying(claim_one(storage), delay=SOON))

        claimed = claim_one(storage)
        assert claimed.id == second
        self.pass_time(storage, SOON + 1)
        assert claim(storage) == []
        finish(storage, completing(claimed))
        assert claim_ids(storage) == [first]

    def test_cancelled_jobs_do_not_block_their_group(self, storage: Storage) -> None:
        first, second, third = enqueue_many(storage, 3, concurrency_key="g")

        storage.jobs.cancel(QUEUE, [first, third])

        assert claim_ids(storage, 10) == [second]
        assert counts(storage) == {State.ACTIVE: 1, State.CANCELLED: 2}

    def test_removed_and_rescheduled_jobs_do_not_block_their_group(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 4, concurrency_key="g")
        later = self.now(storage) + LATER
        storage.jobs.remove(QUEUE, ids[:1])
        storage.jobs.reschedule(QUEUE, ids[1:2], later)
        storage.jobs.reschedule(QUEUE, ids[3:], later)

        assert claim_ids(storage, 10) == ids[2:3]
        assert counts(storage) == {State.ACTIVE: 1, State.DELAYED: 2}

    def test_expired_jobs_do_not_block_their_group(self, storage: Storage) -> None:
        enqueue_many(storage, 2, concurrency_key="g", ttl=SOON)
        kept = enqueue(storage, concurrency_key="g")
        self.advance(SOON + 1)

        assert claim_ids(storage, 3) == [kept]

    def test_due_jobs_wait_for_their_group(self, storage: Storage) -> None:
        enqueue_many(storage, 2, concurrency_key="g", delay=SOON)
        active = an_active_job(storage, concurrency_key="g")
        self.pass_time(storage, SOON + 1)

        assert claim(storage, 10) == []
        finish(storage, completing(active))
        assert len(claim(storage, 10)) == 1

    def test_retried_dead_letter_waits_for_its_group(self, storage: Storage) -> None:
        dead = a_failed_job(storage, concurrency_key="g")
        active = an_active_job(storage, concurrency_key="g")
        storage.jobs.retry(QUEUE, [dead])

        assert claim(storage, 10) == []
        finish(storage, completing(active))
        assert claim_ids(storage, 10) == [dead]

    def test_unhandled_job_keeps_its_position_in_its_group(self, storage: Storage) -> None:
        unhandled = enqueue(storage, concurrency_key="g", name="not.here.yet")
        handled = enqueue(storage, concurrency_key="g")

        assert claim(storage, 10) == []
        assert claim_ids(storage, 10, names=["not.here.yet"]) == [unhandled]
        assert state(storage, handled) is State.WAITING

    def test_groups_belong_to_their_queue(self, storage: Storage) -> None:
        enqueue(storage, queue="left", concurrency_key="g")
        enqueue(storage, queue="right", concurrency_key="g")

        assert len(claim(storage, 10)) == 2

    def test_concurrency_keys_are_compared_exactly(self, storage: Storage) -> None:
        for group in ("g", "G", "g ", "g:1", "{g}", "ğ"):
            enqueue(storage, concurrency_key=group)

        assert len(claim(storage, 10)) == 6

    def test_queue_policy_sets_key_concurrency(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 4, queue=PAIRS, concurrency_key="g")

        first, second = claim(storage, 10)
        assert [first.id, second.id] == ids[:2]
        finish(storage, completing(second))
        assert claim_ids(storage, 10) == ids[2:3]

    def test_hundreds_of_groups_run_to_the_end(self, storage: Storage) -> None:
        storage.enqueue([batch(2, concurrency_key=f"customer:{number}") for number in range(300)])

        first = claim(storage, 1_000)
        second = storage.finish([completing(one) for one in first], request(1_000)).claims.jobs
        finish(storage, *map(completing, second))

        assert [len(first), len(second)] == [300, 300]
        assert [one.options.concurrency_key for one in first] == [
            one.options.concurrency_key for one in second
        ]
        assert counts(storage) == {State.COMPLETED: 600}

    # Turns.

    def test_large_group_delays_a_job_of_another_group_by_one_turn_at_most(self, storage: Storage) -> None:
        many = enqueue_many(storage, 100, queue=PAIRS, concurrency_key="many")
        one = enqueue(storage, queue=PAIRS, concurrency_key="one")

        first, second = claim_one(storage, queues=[PAIRS]), claim_one(storage, queues=[PAIRS])

        assert [first.id, second.id] == [many[0], one]
        assert claim_ids(storage, 10) == many[1:2]

    def test_groups_take_turns(self, storage: Storage) -> None:
        for group in ("a", "b", "c"):
            enqueue_many(storage, 3, queue=PAIRS, concurrency_key=group)
        served = []
        for _ in range(9):
            claimed = claim_one(storage)
            served.append(claimed.options.concurrency_key)
            finish(storage, completing(claimed))

        assert served == ["a", "b", "c"] * 3

    def test_one_claim_takes_as_many_jobs_as_key_concurrency_allows(self, storage: Storage) -> None:
        storage.queues.set_key_limit(QUEUE, None, concurrency=5)
        ids = enqueue_many(storage, 8, concurrency_key="g")
        free = enqueue(storage)

        assert claim_ids(storage, 10) == [ids[0], free, *ids[1:5]]

    @pytest.mark.parametrize("between", ["a removed job", "a job of another name"])
    def test_claim_takes_ready_jobs_before_the_next_job_of_a_group_that_it_lets_in(
        self, storage: Storage, between: str
    ) -> None:
        enqueue(storage, queue=PAIRS, concurrency_key="earlier")
        assert len(claim(storage, 2)) == 1
        removed = enqueue(storage, queue=PAIRS)
        first = enqueue(storage, queue=PAIRS, concurrency_key="g")
        let_in = enqueue(storage, queue=PAIRS, concurrency_key="g", priority=1)
        if between == "a job of another name":
            enqueue(storage, queue=PAIRS, name="another")
        ready = enqueue(storage, queue=PAIRS)
        storage.jobs.remove(PAIRS, [removed])

        assert claim_ids(storage, 2) == [first, ready]
        assert claim_ids(storage, 2) == [let_in]

    # What is said to groups.

    def test_concurrency_of_one_key_can_change_while_its_jobs_run(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 8, concurrency_key="g")
        enqueue_many(storage, 3, concurrency_key="h")
        first, other = claim(storage, 10)

        storage.queues.set_key_limit(QUEUE, "g", concurrency=3)
        more = claim(storage, 10)
        assert [one.id for one in more] == ids[1:3]
        storage.queues.set_key_limit(QUEUE, "g", concurrency=2)
        finish(storage, completing(first))
        assert claim(storage, 10) == []
        finish(storage, completing(more[0]))
        assert claim_ids(storage, 10) == ids[3:4]
        assert other.options.concurrency_key == "h"

    def test_default_key_concurrency_does_not_override_limits_of_single_keys(self, storage: Storage) -> None:
        for group in ("a", "b", "c"):
            enqueue_many(storage, 5, concurrency_key=group)
        storage.queues.set_key_limit(QUEUE, "c", concurrency=1)
        assert len(claim(storage, 20)) == 3

        storage.queues.set_key_limit(QUEUE, None, concurrency=3)
        assert sorted(str(one.options.concurrency_key) for one in claim(storage, 20)) == ["a", "a", "b", "b"]
        assert storage.queues.key_limits(QUEUE) == {"c": KeyLimit(1), None: KeyLimit(3)}

    def test_removed_key_limit_restores_the_queue_policy(self, storage: Storage) -> None:
        enqueue_many(storage, 5, concurrency_key="g")
        storage.queues.set_key_limit(QUEUE, "g", concurrency=2)
        storage.queues.set_key_limit(QUEUE, "g", concurrency=None)
        storage.queues.set_key_limit(QUEUE, None, concurrency=4)
        storage.queues.set_key_limit(QUEUE, None, concurrency=None)

        assert len(claim(storage, 10)) == 1
        assert storage.queues.key_limits(QUEUE) == {}

    def test_paused_key_does_not_affect_other_keys(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3, concurrency_key="g")
        others = enqueue_many(storage, 2, concurrency_key="h")
        storage.queues.pause_key(QUEUE, "g")

        assert claim_ids(storage, 10) == others[:1]
        assert storage.queues.key_limits(QUEUE) == {"g": KeyLimit(paused=True)}
        storage.queues.resume_key(QUEUE, "g")
        assert claim_ids(storage, 10) == ids[:1]
        assert storage.queues.key_limits(QUEUE) == {}

    def test_key_can_be_paused_before_it_has_jobs(self, storage: Storage) -> None:
        storage.queues.pause_key(QUEUE, "g")
        ids = enqueue_many(storage, 2, concurrency_key="g")

        assert claim(storage, 10) == []
        assert counts(storage) == {State.WAITING: 2}
        assert storage.reads.waiting_names(QUEUE) == {}
        storage.queues.resume_key(QUEUE, "g")
        assert claim_ids(storage, 10) == ids[:1]

    def test_paused_key_lets_active_jobs_finish_and_keeps_its_order(self, storage: Storage) -> None:
        storage.queues.set_key_limit(QUEUE, "g", concurrency=2)
        ids = enqueue_many(storage, 4, concurrency_key="g")
        first, second = claim(storage, 10)
        storage.queues.pause_key(QUEUE, "g")

        assert finish(storage, releasing(first), completing(second)) == [True, True]
        assert claim(storage, 10) == []
        storage.queues.resume_key(QUEUE, "g")
        served = []
        for _ in range(3):
            claimed = claim_one(storage)
            served.append(claimed.id)
            finish(storage, completing(claimed))
        assert served == [ids[0], *ids[2:]]

    @pytest.mark.parametrize("priority", [0, 5])
    def test_ready_job_of_a_paused_key_keeps_its_position(self, storage: Storage, priority: int) -> None:
        ids = enqueue_many(storage, 2, concurrency_key="g", priority=priority)
        claim(storage, 10, names=["another"])
        storage.queues.pause_key(QUEUE, "g")
        last = enqueue(storage, concurrency_key="g", priority=priority)

        assert storage.reads.waiting_names(QUEUE) == {}
        assert storage.jobs.cancel(QUEUE, ids[1:])[0].status == "cancelled"
        storage.queues.resume_key(QUEUE, "g")
        claimed = claim_one(storage)
        finish(storage, completing(claimed))
        assert [claimed.id, *claim_ids(storage, 10)] == [ids[0], last]

    def test_resumed_key_wakes_listeners(self, storage: Storage) -> None:
        storage.queues.pause_key(QUEUE, "g")
        enqueue(storage, concurrency_key="g")
        wakes = Wakes()
        stop = storage.listen([QUEUE], wakes)
        storage.queues.resume_key(QUEUE, "g")

        assert wakes.arrived()
        stop()

    def test_key_limits_outlive_jobs_and_are_obliterated_with_the_queue(self, storage: Storage) -> None:
        storage.queues.set_key_limit(QUEUE, "g", concurrency=2)
        storage.queues.pause_key(QUEUE, "h")
        enqueue(storage, concurrency_key="g")
        finish(storage, completing(claim_one(storage)))
        enqueue_many(storage, 3, concurrency_key="g")
        assert len(claim(storage, 10)) == 2

        storage.queues.obliterate(QUEUE, force=True)
        enqueue_many(storage, 3, concurrency_key="g")
        enqueue_many(storage, 3, concurrency_key="h")
        assert storage.queues.key_limits(QUEUE) == {}
        assert len(claim(storage, 10)) == 2

    def test_new_default_key_concurrency_applies_to_hundreds_of_keys(self, storage: Storage) -> None:
        storage.enqueue([batch(2, concurrency_key=f"customer:{number}") for number in range(230)])
        assert len(claim(storage, 1_000)) == 230

        storage.queues.set_key_limit(QUEUE, None, concurrency=2)

        assert len(claim(storage, 1_000)) == 230

    # Rates: RATED lets two of a key start at once, and then one each SOON.

    def test_key_rate_allows_a_burst_and_then_steady_starts(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 5, queue=RATED, concurrency_key="g")

        assert claim_ids(storage, 10) == ids[:2]
        assert claim(storage, 10) == []
        self.advance(SOON)
        assert claim_ids(storage, 10) == ids[2:3]
        self.advance(2 * SOON)
        assert claim_ids(storage, 10) == ids[3:]
        assert counts(storage, RATED) == {State.ACTIVE: 5}

    def test_group_at_its_rate_does_not_block_other_groups(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 2_000, queue=RATED, concurrency_key="g", priority=9)
        assert claim_ids(storage, 10) == ids[:2]
        other = enqueue(storage, queue=RATED, concurrency_key="h")
        free = enqueue(storage, queue=RATED)

        assert claim_ids(storage, 10) == [other, free]
        assert storage.reads.waiting_names(RATED) == {}
        assert counts(storage, RATED) == {State.ACTIVE: 4, State.WAITING: 1_998}

    def test_empty_claim_returns_time_until_the_key_rate_allows_a_start(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3, queue=RATED, concurrency_key="g")
        first = storage.claim(request(10))
        claims = storage.claim(request(10))

        assert first.wait is not None
        assert claims.jobs == []
        assert claims.wait is not None
        assert 0 < claims.wait <= first.wait <= SOON
        self.advance(claims.wait)
        assert claim_ids(storage, 10) == ids[2:]
        assert storage.claim(request(10)).wait is None

    def test_finish_does_not_start_the_next_job_before_the_key_rate_allows(self, storage: Storage) -> None:
        storage.queues.set_key_limit(QUEUE, "g", rate=Rate(1, 2 * SOON))
        ids = enqueue_many(storage, 2, concurrency_key="g")
        answer = storage.finish([completing(claim_one(storage))], request(5))

        assert answer.claims.jobs == []
        assert answer.claims.wait is not None
        assert 0 < answer.claims.wait <= 2 * SOON
        self.advance(2 * SOON)
        assert claim_ids(storage) == ids[1:]

    def test_claim_that_uses_up_the_rate_of_a_key_says_when_its_next_job_may_start(
        self, storage: Storage
    ) -> None:
        storage.queues.set_key_limit(QUEUE, "g", rate=Rate(1, SOON), concurrency=3)
        first, _second = enqueue_many(storage, 2, concurrency_key="g")
        claims = storage.claim(request(2))

        assert [job.id for job in claims.jobs] == [first]
        assert claims.wait is not None
        assert 0 < claims.wait <= SOON

    def test_sweep_wakes_listeners_when_the_key_rate_allows_a_start(self, storage: Storage) -> None:
        enqueue_many(storage, 3, queue=RATED, concurrency_key="g")
        claim(storage, 10)
        wakes = Wakes()
        stop = storage.listen([RATED], wakes)
        self.pass_time(storage, SOON)

        assert wakes.arrived()
        stop()
        assert storage.reads.waiting_names(RATED) == {"handler": 1}
        assert len(claim(storage, 10)) == 1

    def test_new_job_does_not_overtake_rate_limited_jobs_of_its_group(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3, queue=RATED, concurrency_key="g")
        claim(storage, 10)
        self.advance(10 * SOON)
        last = enqueue(storage, queue=RATED, concurrency_key="g")

        assert claim_ids(storage, 10) == [ids[2], last]

    def test_groups_continue_in_the_order_in_which_their_rates_allow_a_start(self, storage: Storage) -> None:
        first = enqueue_many(storage, 3, queue=RATED, concurrency_key="z")
        claim(storage, 10)
        self.advance(SOON // 2)
        second = enqueue_many(storage, 3, queue=RATED, concurrency_key="a")
        claim(storage, 10)
        self.advance(2 * SOON)

        assert claim_ids(storage, 10) == [first[2], second[2]]

    def test_new_job_of_a_group_does_not_delay_its_turn(self, storage: Storage) -> None:
        first = enqueue_many(storage, 3, queue=RATED, concurrency_key="a")
        claim(storage, 10)
        self.advance(SOON // 2)
        second = enqueue_many(storage, 3, queue=RATED, concurrency_key="z")
        claim(storage, 10)
        self.advance(2 * SOON)
        last = enqueue(storage, queue=RATED, concurrency_key="a")

        assert claim_ids(storage, 10) == [first[2], second[2], last]

    def test_due_job_goes_behind_a_group_whose_rate_allowed_a_start_earlier(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3, queue=RATED, concurrency_key="g")
        claim(storage, 10)
        late = enqueue(storage, queue=RATED, delay=2 * SOON)
        soon = enqueue(storage, queue=RATED, delay=SOON // 2)
        self.advance(3 * SOON)

        assert claim_ids(storage, 10) == [soon, ids[2], late]

    def test_unused_key_rate_accumulates_to_one_burst_at_most(self, storage: Storage) -> None:
        first = enqueue(storage, queue=RATED, concurrency_key="g")
        assert claim_ids(storage) == [first]
        self.pass_time(storage, 20 * SOON)
        enqueue_many(storage, 5, queue=RATED, concurrency_key="g")

        assert len(claim(storage, 10)) == 2

    def test_released_job_keeps_its_position_and_uses_the_key_rate(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3, queue=RATED, concurrency_key="g")
        one, two = claim(storage, 10)
        finish(storage, releasing(two), releasing(one))

        assert claim(storage, 10) == []
        self.advance(2 * SOON)
        assert claim_ids(storage, 10) == ids[:2]

    def test_key_rate_can_be_set_changed_and_removed_while_jobs_wait(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 9, concurrency_key="g")
        enqueue_many(storage, 2, concurrency_key="h")
        storage.queues.set_key_limit(QUEUE, "g", concurrency=9, rate=SLOW)
        assert len(claim(storage, 10)) == 2
        assert storage.queues.key_limits(QUEUE) == {"g": KeyLimit(9, rate=SLOW)}

        storage.queues.set_key_limit(QUEUE, "g", rate=Rate(3, LATER))
        assert claim_ids(storage, 10) == ids[1:4]
        storage.queues.set_key_limit(QUEUE, "g", rate=None)
        assert claim_ids(storage, 10) == ids[4:]
        assert storage.queues.key_limits(QUEUE) == {"g": KeyLimit(9)}

    def test_new_key_rate_applies_to_ready_jobs(self, storage: Storage) -> None:
        storage.queues.set_key_limit(QUEUE, "g", concurrency=3, weight=3)
        ids = enqueue_many(storage, 5, concurrency_key="g")
        assert storage.reads.waiting_names(QUEUE) == {"handler": 3}
        storage.queues.set_key_limit(QUEUE, "g", rate=SLOW)

        assert storage.reads.waiting_names(QUEUE) == {"handler": 1}
        assert claim_ids(storage, 10) == ids[:1]
        storage.queues.set_key_limit(QUEUE, "g", rate=None)
        assert claim_ids(storage, 10) == ids[1:3]

    def test_default_key_rate_does_not_override_rates_of_single_keys(self, storage: Storage) -> None:
        storage.queues.set_key_limit(QUEUE, None, concurrency=5, rate=SLOW)
        storage.queues.set_key_limit(QUEUE, "c", rate=Rate(3, LATER))
        for group in ("a", "b", "c"):
            enqueue_many(storage, 5, concurrency_key=group)

        served = Counter(one.options.concurrency_key for one in claim(storage, 20))
        assert served == {"a": 1, "b": 1, "c": 3}
        assert storage.queues.key_limits(QUEUE) == {
            None: KeyLimit(5, rate=SLOW),
            "c": KeyLimit(rate=Rate(3, LATER)),
        }
        storage.queues.set_key_limit(QUEUE, None, rate=None)
        assert Counter(one.options.concurrency_key for one in claim(storage, 20)) == {"a": 4, "b": 4}

    def test_paused_key_does_not_start_jobs_when_its_rate_allows(self, storage: Storage) -> None:
        enqueue_many(storage, 3, queue=RATED, concurrency_key="g")
        claim(storage, 10)
        storage.queues.pause_key(RATED, "g")

        assert storage.claim(request(5, queues=[RATED])).wait is None
        self.pass_time(storage, 5 * SOON)
        assert claim(storage, 10) == []
        storage.queues.resume_key(RATED, "g")
        assert len(claim(storage, 10)) == 1

    def test_claim_has_no_wait_for_a_group_without_waiting_jobs(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 4, queue=RATED, concurrency_key="g")
        claim(storage, 10)
        storage.jobs.cancel(RATED, ids[2:3])
        storage.jobs.move(RATED, ids[3:], QUEUE)

        assert storage.claim(request(5, queues=[RATED])).wait is None
        assert counts(storage, RATED) == {State.ACTIVE: 2, State.CANCELLED: 1}

    def test_rate_limited_groups_do_not_count_as_delayed_jobs(self, storage: Storage) -> None:
        enqueue_many(storage, 3, queue=RATED, concurrency_key="g")
        enqueue(storage, queue=RATED, delay=LATER)
        claim(storage, 10)

        assert counts(storage, RATED) == {State.ACTIVE: 2, State.WAITING: 1, State.DELAYED: 1}
        self.advance(SOON)
        assert storage.sweep().promoted == 0

    def test_obliterate_resets_key_rates(self, storage: Storage) -> None:
        enqueue_many(storage, 3, queue=RATED, concurrency_key="g")
        claim(storage, 10)
        storage.queues.obliterate(RATED, force=True)
        ids = enqueue_many(storage, 3, queue=RATED, concurrency_key="g")

        assert claim_ids(storage, 10) == ids[:2]

    # Weights: WEIGHTED has b weigh two, c three.

    def shares(self, storage: Storage, groups: str, at_once: int = 1) -> Counter[str | None]:
        """Return how many of 600 claims each group has, with long backlogs."""
        for group in groups:
            enqueue_many(storage, 600, queue=WEIGHTED, concurrency_key=group)
        served: Counter[str | None] = Counter()
        claimed: list[Claimed] = []
        while served.total() < 600:
            many = min(at_once, 600 - served.total())
            claimed = storage.finish([completing(one) for one in claimed], request(many)).claims.jobs
            served.update(one.options.concurrency_key for one in claimed)
        return served

    @pytest.mark.parametrize("at_once", [1, 3])
    def test_busy_groups_get_turns_by_weight(self, storage: Storage, at_once: int) -> None:
        served = self.shares(storage, "abc", at_once)

        for group, weight in (("a", 1), ("b", 2), ("c", 3)):
            assert abs(served[group] - 100 * weight) <= 5 * weight

    def test_groups_of_equal_weight_get_equal_turns(self, storage: Storage) -> None:
        assert self.shares(storage, "axyz") == dict.fromkeys("axyz", 150)

    def test_key_concurrency_below_its_weight_applies(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 9, queue=WEIGHTED, concurrency_key="heavy")

        assert storage.reads.waiting_names(WEIGHTED) == {"handler": 4}
        first = claim(storage, 10)
        assert [one.id for one in first] == ids[:4]
        finish(storage, completing(first[1]))
        assert claim_ids(storage, 10) == ids[4:5]

    def test_key_weight_can_change_while_jobs_wait_and_keeps_the_order(self, storage: Storage) -> None:
        heavy = enqueue_many(storage, 6, queue=WEIGHTED, concurrency_key="a")
        light = enqueue_many(storage, 3, queue=WEIGHTED, concurrency_key="d")
        storage.queues.set_key_limit(WEIGHTED, "a", weight=2)

        assert storage.queues.key_limits(WEIGHTED) == {"a": KeyLimit(weight=2)}
        served = []
        for _ in range(9):
            claimed = claim_one(storage, queues=[WEIGHTED])
            served.append(claimed.id)
            finish(storage, completing(claimed))
        a, d = iter(heavy), iter(light)
        assert served == [next(a), next(d), next(a), next(a), next(d), next(a), next(a), next(d), next(a)]
        storage.queues.set_key_limit(WEIGHTED, "a", weight=None)
        assert storage.queues.key_limits(WEIGHTED) == {}
        enqueue_many(storage, 3, queue=WEIGHTED, concurrency_key="a")
        assert storage.reads.waiting_names(WEIGHTED) == {"handler": 1}

    def test_key_rate_limits_a_weighted_key(self, storage: Storage) -> None:
        storage.queues.set_key_limit(WEIGHTED, "c", rate=Rate(2, LATER))
        ids = enqueue_many(storage, 9, queue=WEIGHTED, concurrency_key="c")

        assert storage.reads.waiting_names(WEIGHTED) == {"handler": 2}
        assert claim_ids(storage, 10) == ids[:2]

    # Modes.

    def test_queue_with_required_keys_rejects_jobs_without_keys(self, storage: Storage) -> None:
        with pytest.raises(OptionError, match=r"concurrency_key: required .*'keyed-only'"):
            storage.enqueue([batch(queue=KEYED_ONLY, concurrency_key="g"), batch(queue=KEYED_ONLY)])

        assert counts(storage, KEYED_ONLY) == {}
        ids = enqueue_many(storage, 2, queue=KEYED_ONLY, concurrency_key="g")
        assert claim_ids(storage, 10) == ids[:1]

    def test_queue_with_keys_off_ignores_keys_of_jobs(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 4, queue=UNGROUPED, concurrency_key="g")
        first, second, _ = claim(storage, 3)
        finish(storage, completing(first), releasing(second))

        assert claim_ids(storage, 10) == [second.id, ids[3]]
        assert job(storage, ids[3], UNGROUPED).options.concurrency_key == "g"
        storage.jobs.cancel(UNGROUPED, [enqueue(storage, queue=UNGROUPED, concurrency_key="g")])
        assert counts(storage, UNGROUPED) == {State.COMPLETED: 1, State.ACTIVE: 3, State.CANCELLED: 1}
