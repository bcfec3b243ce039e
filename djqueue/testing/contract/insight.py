"""Insight: overviews, explanations, totals and metrics agree with the operations."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError
from djqueue.core.explain import BlockingJob, Dependency, Explanation
from djqueue.core.job import ProgressReport
from djqueue.core.metrics import HOUR, MINUTE, PARTS, Histogram, RunStats, part_of
from djqueue.core.options import DAY
from djqueue.core.overview import QueueOverview, Totals
from djqueue.core.pages import JobPage
from djqueue.core.policies import Rate
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    NAME,
    QUEUE,
    a_cancelled_job,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    cancelling,
    claim,
    claim_one,
    completing,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    releasing,
    retrying,
    worker,
)
from ..waiting import PATIENCE
from .case import KEYED_ONLY, LATER, LIMITER, SHARING, SOON, UNGROUPED, StorageCase, recorded, so_far


def overview(storage: Storage, queue: str = QUEUE) -> QueueOverview:
    """Return the overview of one queue."""
    [found] = storage.reads.overview([queue]).queues
    return found


def totals(storage: Storage, queue: str = QUEUE) -> Totals:
    """Return the totals of one queue."""
    return overview(storage, queue).totals


def histogram(*times: int) -> Histogram:
    """Return a histogram of these times, in milliseconds."""
    counts = [0] * PARTS
    for time in times:
        counts[part_of(time)] += 1
    return Histogram(tuple(counts), sum(times))


def stats(
    name: str, queue: str = QUEUE, wait: Sequence[int] = (), run: Sequence[int] = (), failed: int = 0
) -> RunStats:
    """Return the statistics of a worker about runs that completed, and some that failed."""
    completed = 0 if failed else max(1, len(run))
    return RunStats(queue, name, completed, 0, failed, 0, histogram(*wait), histogram(*run))


def explain(storage: Storage, job_id: str, queue: str = QUEUE) -> Explanation:
    """Why a job that must be there is not running."""
    found = storage.reads.explain(queue, job_id)
    assert found is not None
    return found


class InsightContract(StorageCase):
    """Cases about dashboards' reads."""

    forgets_metrics = True
    """True if old buckets go by the clock that the tests move."""

    # Overview.

    def test_overview_of_empty_storage_is_empty(self, storage: Storage) -> None:
        found = storage.reads.overview()

        assert found.queues == []
        assert abs(found.at - self.now(storage)) < 60_000

    def test_overview_of_unused_queue_is_empty(self, storage: Storage) -> None:
        nothing = dict.fromkeys(State, 0)
        assert storage.reads.overview(["nobodys"]).queues == [
            QueueOverview(
                "nobodys", nothing, False, None, None, None, None, None, 0, "optional", 0, {}, Totals()
            )
        ]
        assert "nobodys" not in storage.queues.names()

    def test_overview_lists_queues_by_name_or_in_the_requested_order(self, storage: Storage) -> None:
        for queue in ("b", "a", "c"):
            enqueue(storage, queue=queue)

        assert [one.name for one in storage.reads.overview().queues] == ["a", "b", "c"]
        assert [one.name for one in storage.reads.overview(["c", "a"]).queues] == ["c", "a"]
        assert storage.reads.overview([]).queues == []

    @pytest.mark.parametrize("there", sorted(State))
    def test_overview_and_counts_agree(self, storage: Storage, there: State) -> None:
        JOB_IN[there](storage)

        found = overview(storage)

        assert found.counts == storage.reads.counts(QUEUE) == {**dict.fromkeys(State, 0), there: 1}
        assert found.names == ({NAME: 1} if there is State.WAITING else {})

    def test_counts_of_finished_jobs_follow_removals(self, storage: Storage) -> None:
        done = [a_completed_job(storage) for _ in range(3)]
        gone = [a_cancelled_job(storage) for _ in range(2)]
        storage.jobs.remove(QUEUE, [done[0], gone[0]])
        enqueue(storage, id=gone[1])
        storage.reads.jobs(QUEUE, done)
        storage.jobs.retry(QUEUE, done)

        found = overview(storage).counts

        assert (found[State.COMPLETED], found[State.CANCELLED], found[State.WAITING]) == (2, 0, 1)
        assert found == storage.reads.counts(QUEUE)

    def test_overview_counts_claimable_jobs_by_name_and_waiting_jobs_of_keys(self, storage: Storage) -> None:
        enqueue_many(storage, 3, name="a")
        enqueue_many(storage, 2, name="b")
        enqueue_many(storage, 4, name="c", concurrency_key="g")

        found = overview(storage)

        assert found.names == {"a": 3, "b": 2, "c": 1}
        assert found.key_waiting == 3
        assert found.counts[State.WAITING] == 9

    def test_oldest_waiting_job_is_the_first_to_arrive(self, storage: Storage) -> None:
        first = a_waiting_job(storage)
        self.advance(50)
        second = a_waiting_job(storage)
        assert overview(storage).oldest_at == job(storage, first).created_at

        claim(storage)
        assert overview(storage).oldest_at == job(storage, second).created_at
        claim(storage)
        assert overview(storage).oldest_at is None

    def test_oldest_waiting_job_may_have_low_priority(self, storage: Storage) -> None:
        low = a_waiting_job(storage, priority=-5)
        for priority in (0, 7, -1):
            self.advance(20)
            a_waiting_job(storage, priority=priority)

        assert overview(storage).oldest_at == job(storage, low).created_at

    def test_oldest_waiting_job_may_have_no_handler(self, storage: Storage) -> None:
        strange = a_waiting_job(storage, name="strange")
        self.advance(50)
        a_waiting_job(storage)
        later = a_waiting_job(storage)

        claim_one(storage)

        assert overview(storage).oldest_at == job(storage, strange).created_at
        storage.jobs.remove(QUEUE, [strange])
        assert overview(storage).oldest_at == job(storage, later).created_at

    def test_lifo_jobs_do_not_hide_the_oldest_waiting_job(self, storage: Storage) -> None:
        first = a_waiting_job(storage)
        for _ in range(3):
            self.advance(20)
            a_waiting_job(storage, lifo=True)
        assert overview(storage).oldest_at == job(storage, first).created_at

        storage.jobs.remove(QUEUE, [first])
        lifo = storage.reads.page(QUEUE, State.WAITING, 1)[0]
        assert overview(storage).oldest_at == lifo.created_at

    @pytest.mark.parametrize("place", [{}, {"priority": 3}, {"lifo": True}], ids=str)
    def test_oldest_waiting_job_is_not_held(self, storage: Storage, place: dict[str, Any]) -> None:
        enqueue_many(storage, 3, name="mail", **place)
        storage.queues.hold(QUEUE, "mail", None, "")
        assert overview(storage).oldest_at is None
        self.advance(50)
        free = a_waiting_job(storage, **place)
        self.advance(50)
        a_waiting_job(storage, **place)
        since = job(storage, free).created_at

        assert overview(storage).oldest_at == since
        assert claim(storage, names=["other", "mail"]) == []
        assert overview(storage).oldest_at == since
        storage.queues.release(QUEUE, "mail")
        assert (overview(storage).oldest_at or since) < since

    def test_released_job_waits_from_its_release(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        self.advance(50)
        finish(storage, releasing(claimed))

        assert overview(storage).oldest_at == job(storage, claimed.id).run_at > claimed.created_at

    def test_delayed_job_waits_from_the_time_it_became_due(self, storage: Storage) -> None:
        delayed = a_delayed_job(storage, delay=SOON)
        a_delayed_job(storage, delay=LATER)
        due = job(storage, delayed).run_at
        assert (overview(storage).oldest_at, overview(storage).due_at) == (None, due)

        self.pass_time(storage, SOON + 50)

        found = overview(storage)
        assert found.oldest_at == due
        assert found.due_at is not None
        assert found.due_at > due

    def test_oldest_waiting_job_is_found_behind_removed_jobs(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 200)
        self.advance(30)
        last = a_waiting_job(storage)
        storage.jobs.remove(QUEUE, ids)

        assert overview(storage).oldest_at == job(storage, last).created_at

    def test_overview_shows_whether_a_queue_is_paused(self, storage: Storage) -> None:
        a_waiting_job(storage)
        storage.queues.pause(QUEUE)
        assert overview(storage).paused
        storage.queues.resume(QUEUE)
        assert not overview(storage).paused

    def test_overview_shows_queue_limits_and_what_is_left(self, storage: Storage) -> None:
        enqueue_many(storage, 5, weight=2)
        storage.queues.set_limits(QUEUE, Rate(3, 60_000), 8)
        assert overview(storage).tokens == 3
        claim(storage, 2)

        found = overview(storage)

        assert (found.rate, found.tokens) == (Rate(3, 60_000), 1)
        assert (found.concurrency, found.used) == (8, 4)
        storage.queues.set_limits(QUEUE, None, None)
        found = overview(storage)
        assert (found.rate, found.tokens, found.concurrency, found.used) == (None, None, None, 4)

    def test_overview_shows_refilled_rate_tokens(self, storage: Storage) -> None:
        enqueue_many(storage, 3)
        storage.queues.set_limits(QUEUE, Rate(2, SOON), None)
        claim(storage, 2)
        self.advance(SOON)

        assert overview(storage).tokens == 2

    def test_overview_shows_the_key_mode(self, storage: Storage) -> None:
        enqueue(storage, queue=KEYED_ONLY, concurrency_key="g")

        assert overview(storage, KEYED_ONLY).key_mode == "keyed"

    @pytest.mark.parametrize("is_used", [True, False])
    def test_key_modes_of_several_queues_are_read_together(self, storage: Storage, is_used: bool) -> None:
        if is_used:
            enqueue(storage, queue=KEYED_ONLY, concurrency_key="g")
            enqueue(storage, queue=UNGROUPED)

        found = storage.reads.key_modes([KEYED_ONLY, UNGROUPED, QUEUE])

        assert found == {KEYED_ONLY: "keyed", UNGROUPED: "global", QUEUE: "optional"}
        assert storage.reads.key_modes([]) == {}

    # Totals.

    def test_totals_count_each_transition_once(self, storage: Storage) -> None:
        enqueue_many(storage, 6)
        one, two, three, four, *_ = claim(storage, 5)
        finish(storage, completing(one), retrying(two), failing(three), releasing(four))
        storage.jobs.cancel(QUEUE, [storage.reads.page(QUEUE, State.WAITING, 1)[0].id])

        assert totals(storage) == Totals(
            enqueued=6, started=5, completed=1, retried=1, failed=1, cancelled=1, stalled=0
        )

    def test_totals_do_not_fall_when_records_are_removed(self, storage: Storage) -> None:
        ids = [a_completed_job(storage), a_failed_job(storage), a_cancelled_job(storage)]
        a_completed_job(storage, result_ttl=SOON)
        before = totals(storage)

        storage.jobs.remove(QUEUE, ids)
        self.pass_time(storage, SOON + 1)

        assert totals(storage) == before
        assert before == Totals(4, 3, 2, 0, 1, 1, 0)

    def test_totals_count_an_id_enqueued_again_as_another_job(self, storage: Storage) -> None:
        cancelled = a_cancelled_job(storage)
        enqueue(storage, id=cancelled)
        assert storage.enqueue([batch(ids=[cancelled])])[0].status == "duplicate"

        assert totals(storage)[:1] == (2,)
        assert totals(storage).cancelled == 1

    def test_totals_count_stalls(self, storage: Storage) -> None:
        claimed = an_active_job(storage, max_stalls=1)
        self.lose_lease(storage, claimed.lease)
        assert totals(storage) == Totals(1, 1, 0, 0, 0, 0, 1)

        claimed = claim_one(storage)
        self.lose_lease(storage, claimed.lease)
        assert totals(storage) == Totals(1, 2, 0, 0, 1, 0, 2)

    def test_totals_count_jobs_with_requested_cancel_as_cancelled(self, storage: Storage) -> None:
        one, two = an_active_job(storage), an_active_job(storage)
        storage.jobs.cancel(QUEUE, [one.id, two.id])
        finish(storage, cancelling(one), retrying(two))

        assert totals(storage) == Totals(2, 2, 0, 0, 0, 2, 0)

    def test_totals_count_a_moved_job_as_enqueued_in_both_queues(self, storage: Storage) -> None:
        moved = a_waiting_job(storage)
        storage.jobs.move(QUEUE, [moved], "other")

        assert (totals(storage).enqueued, totals(storage, "other").enqueued) == (1, 1)

    def test_obliterate_resets_totals(self, storage: Storage) -> None:
        a_completed_job(storage)
        an_active_job(storage)
        storage.queues.obliterate(QUEUE, force=True)
        assert totals(storage) == Totals()

        a_completed_job(storage)
        assert totals(storage) == Totals(1, 1, 1, 0, 0, 0, 0)

    def test_totals_match_the_events(self, storage: Storage) -> None:
        with recorded(storage) as recorder:
            a_completed_job(storage)
            a_completed_job(storage, concurrency_key="g", retention=LATER)
            storage.jobs.retry(QUEUE, [a_failed_job(storage)])
            claimed = claim_one(storage)
            finish(storage, retrying(claimed))
            claimed = claim_one(storage)
            self.lose_lease(storage, claimed.lease)
            storage.jobs.promote(QUEUE, [a_delayed_job(storage)])
            enqueue(storage, unique_key="k")
            enqueue(storage, unique_key="k", on_duplicate="replace")
            enqueue(storage, ttl=SOON)
            self.pass_time(storage, SOON + 1)
            for one in claim(storage, 9):
                finish(storage, completing(one))
            events = so_far(storage, recorder)

        told = dict.fromkeys(Totals._fields, 0)
        for event in events:
            if event.event in Totals._fields:
                told[event.event] += 1
        # The fence behind the events is one more job.
        told["enqueued"] += 1
        assert totals(storage) == Totals(**told)

    # Why a job is not running.

    def test_explanation_of_unknown_job_is_none(self, storage: Storage) -> None:
        assert storage.reads.explain(QUEUE, "nobody") is None

    @pytest.mark.parametrize("there", sorted(set(State) - {State.WAITING, State.DELAYED, State.BLOCKED}))
    def test_explanation_of_active_or_finished_job_is_not_pending(
        self, storage: Storage, there: State
    ) -> None:
        storage.workers.register(worker())
        job_id = JOB_IN[there](storage)

        found = explain(storage, job_id)

        assert (found.verdict, found.state) == ("not_pending", there)
        assert (found.queue, found.id, found.name) == (QUEUE, job_id, NAME)

    def test_explanation_of_job_of_dead_worker_has_the_end_of_its_lease(self, storage: Storage) -> None:
        claimed = an_active_job(storage, worker="gone")

        found = explain(storage, claimed.id)

        assert (found.verdict, found.worker) == ("lease_of_dead_worker", "gone")
        assert found.until is not None
        assert 0 < found.until - found.at <= claimed.lease

    def test_explanation_names_paused_queue_and_key(self, storage: Storage) -> None:
        grouped, other = enqueue(storage, concurrency_key="g"), enqueue(storage)
        storage.queues.pause_key(QUEUE, "g")
        found = explain(storage, grouped)
        assert (found.verdict, found.concurrency_key) == ("key_paused", "g")

        storage.queues.pause(QUEUE)
        assert explain(storage, grouped).verdict == explain(storage, other).verdict == "paused"

    def test_explanation_of_held_job_has_end_and_reason_of_the_hold(self, storage: Storage) -> None:
        held, other = enqueue(storage), enqueue(storage, name="other")
        until = self.now(storage) + LATER
        storage.queues.hold(QUEUE, NAME, until, "the provider is down")

        found = explain(storage, held)

        assert (found.verdict, found.until, found.reason) == ("held", until, "the provider is down")
        assert explain(storage, other).verdict == "no_worker"
        assert explain(storage, a_delayed_job(storage, delay=2 * LATER)).verdict == "delayed"

    def test_explanation_of_delayed_job_has_its_run_time(self, storage: Storage) -> None:
        delayed = a_delayed_job(storage)

        found = explain(storage, delayed)

        assert (found.verdict, found.until) == ("delayed", job(storage, delayed).run_at)

    def test_explanation_of_blocked_job_lists_unmet_dependencies_of_all_queues(
        self, storage: Storage
    ) -> None:
        here, there = enqueue(storage), enqueue(storage, queue="other", delay=LATER)
        done = a_completed_job(storage, queue="third")
        keys = ((QUEUE, here), ("other", there), ("third", done))
        blocked = enqueue(storage, depends_on=keys)

        found = explain(storage, blocked)

        assert found.verdict == "blocked"
        assert set(found.unmet) == {
            Dependency(QUEUE, here, State.WAITING),
            Dependency("other", there, State.DELAYED),
        }

    def test_explanation_of_successor_names_the_active_job(self, storage: Storage) -> None:
        claimed = an_active_job(storage, unique_key="k")
        follower = enqueue(storage, unique_key="k", on_duplicate="keep_last_if_active")

        found = explain(storage, follower)

        assert found.unmet == (Dependency(QUEUE, claimed.id, State.ACTIVE),)

    def test_explanation_names_missing_workers_and_handlers(self, storage: Storage) -> None:
        waiting = a_waiting_job(storage)
        storage.workers.register(worker("elsewhere", queues=("other",)))
        storage.workers.register(worker("ending", state="stopping"))
        assert explain(storage, waiting).verdict == "no_worker"

        storage.workers.register(worker("unable", names=("x",)))
        found = explain(storage, waiting)
        assert (found.verdict, found.workers) == ("no_handler", ("unable",))

    def test_explanation_of_busy_key_names_the_active_jobs(self, storage: Storage) -> None:
        storage.workers.register(worker(concurrency=9))
        first, *others = [enqueue(storage, concurrency_key="g") for _ in range(3)]
        enqueue(storage, concurrency_key="h")
        claim(storage, 9)

        found = explain(storage, others[1])

        assert (found.verdict, found.concurrency_key, found.limit) == ("key_busy", "g", 1)
        assert found.holders == (BlockingJob(first, worker().id),)
        assert found.before == 1

    def test_explanation_of_second_job_of_idle_key_is_waiting_turn(self, storage: Storage) -> None:
        storage.workers.register(worker())
        _, second = enqueue(storage, concurrency_key="g"), enqueue(storage, concurrency_key="g")

        found = explain(storage, second)

        assert (found.verdict, found.before) == ("waiting_turn", 1)

    def test_explanation_of_used_up_queue_rate_has_the_next_start(self, storage: Storage) -> None:
        storage.workers.register(worker())
        _, second, third = enqueue_many(storage, 3)
        storage.queues.set_limits(QUEUE, Rate(1, 60_000), None)
        claim(storage, 3)
        self.advance(20_000)

        found = explain(storage, third)

        assert (found.verdict, found.before) == ("behind_rate", 1)
        assert found.until is not None
        assert 39_000 <= found.until - found.at <= 40_000
        assert explain(storage, second).before == 0

    def test_explanation_of_full_queue_concurrency_names_the_active_jobs(self, storage: Storage) -> None:
        storage.workers.register(worker(concurrency=9))
        ids = enqueue_many(storage, 8)
        storage.queues.set_limits(QUEUE, None, 7)
        claimed = claim(storage, 9)

        found = explain(storage, ids[7])

        assert (found.verdict, found.limit, found.before) == ("concurrency_full", 7, 0)
        assert len(found.holders) == 5
        assert set(found.holders) < {BlockingJob(one.id, worker().id) for one in claimed}

    def test_explanation_of_heavy_job_has_the_free_queue_concurrency(self, storage: Storage) -> None:
        storage.workers.register(worker(concurrency=9))
        light, heavy = enqueue(storage, weight=2), enqueue(storage, weight=3)
        storage.queues.set_limits(QUEUE, None, 4)
        claim(storage, 9)

        found = explain(storage, heavy)

        assert (found.verdict, found.weight, found.free) == ("too_heavy", 3, 2)
        assert found.holders == (BlockingJob(light, worker().id),)

    def test_explanation_of_used_up_limiter_rate_has_the_next_start(self, storage: Storage) -> None:
        charges, refunds, _ = SHARING
        storage.workers.register(worker(concurrency=9))
        storage.limiters.set(LIMITER, Rate(1, 60_000), None)
        enqueue(storage, queue=charges)
        claim(storage, 1, queues=[charges])
        _, second = enqueue_many(storage, 2, queue=refunds)
        self.advance(20_000)

        found = explain(storage, second, refunds)

        assert (found.verdict, found.limiter, found.before) == ("limiter_rate", LIMITER, 1)
        assert found.until is not None
        assert 39_000 <= found.until - found.at <= 40_000
        self.advance(60_000)
        storage.workers.register(worker(concurrency=9))
        assert explain(storage, second, refunds).verdict == "waiting_turn"

    def test_explanation_of_full_limiter_names_active_jobs_of_all_queues(self, storage: Storage) -> None:
        charges, refunds, _ = SHARING
        storage.workers.register(worker(concurrency=9))
        storage.limiters.set(LIMITER, None, 3)
        there, here = enqueue(storage, queue=charges, weight=2), enqueue(storage, queue=refunds)
        claimed = claim(storage, 1, queues=[charges]) + claim(storage, 1, queues=[refunds])
        waiting = enqueue(storage, queue=refunds)

        found = explain(storage, waiting, refunds)

        assert (found.verdict, found.limiter, found.limit, found.free) == ("limiter_full", LIMITER, 3, 0)
        assert (found.weight, found.before) == (1, 0)
        assert set(found.holders) == {
            BlockingJob(there, worker().id, charges),
            BlockingJob(here, worker().id),
        }
        finish(storage, completing(claimed[1]))
        assert explain(storage, waiting, refunds).verdict == "waiting_turn"

    def test_explanation_of_heavy_job_has_the_free_permits_of_its_limiter(self, storage: Storage) -> None:
        charges, refunds, _ = SHARING
        storage.workers.register(worker(concurrency=9))
        storage.limiters.set(LIMITER, None, 3)
        enqueue(storage, queue=charges, weight=2)
        claim(storage, 1, queues=[charges])
        heavy, light = enqueue(storage, queue=refunds, weight=9), enqueue(storage, queue=refunds)

        found = explain(storage, heavy, refunds)

        assert (found.verdict, found.limit, found.weight, found.free) == ("limiter_full", 3, 9, 1)
        assert explain(storage, light, refunds).verdict == "waiting_turn"

    def test_explanation_names_busy_workers(self, storage: Storage) -> None:
        waiting = a_waiting_job(storage)
        storage.workers.register(worker("w", active=1))
        found = explain(storage, waiting)
        assert (found.verdict, found.workers) == ("workers_busy", ("w",))

        storage.workers.register(worker("idle"))
        assert explain(storage, waiting).verdict == "waiting_turn"

    def test_explanation_counts_jobs_ahead_in_claim_order(self, storage: Storage) -> None:
        storage.workers.register(worker())
        enqueue_many(storage, 2, priority=1)
        first = enqueue_many(storage, 3)
        enqueue(storage, name="other")
        mine, after = enqueue_many(storage, 2)
        low = enqueue(storage, priority=-1)
        lifo = enqueue(storage, lifo=True)

        def before(job_id: str) -> int | None:
            found = explain(storage, job_id)
            assert found.verdict == "waiting_turn"
            return found.before

        assert [before(one) for one in (first[0], mine, after, low, lifo)] == [3, 7, 8, 9, 2]
        storage.jobs.remove(QUEUE, [first[1]])
        assert [before(one) for one in (first[0], mine, low)] == [3, 6, 8]
        claim(storage, 3)
        assert before(mine) == 3

    def test_explanation_counts_jobs_ahead_whatever_their_handler(self, storage: Storage) -> None:
        """Also those that a worker has met and left for others."""
        storage.workers.register(worker())
        enqueue_many(storage, 3, name="other")
        one, two = enqueue_many(storage, 2)
        claim_one(storage)

        found = explain(storage, two)

        assert (found.verdict, found.before) == ("waiting_turn", 3)
        assert explain(storage, one).state is State.ACTIVE

    # Metrics.

    def test_sums_of_all_buckets_are_the_totals(self, storage: Storage) -> None:
        start = self.now(storage)
        for number in range(4):
            a_completed_job(storage)
            claimed = an_active_job(storage)
            finish(storage, retrying(claimed, delay=LATER) if number % 2 else failing(claimed))
            storage.sweep()
            storage.sweep()
            self.advance(25_000)
        claimed = an_active_job(storage)
        self.lose_lease(storage, claimed.lease)

        for step in (MINUTE, 2 * MINUTE, HOUR, DAY):
            buckets = storage.reads.series([QUEUE], start, self.now(storage) + 1, step)
            assert Totals(*map(sum, zip(*(one[4:11] for one in buckets), strict=True))) == totals(storage)
            assert [one.start for one in buckets] == list(
                range(buckets[0].start, buckets[-1].start + 1, step)
            )
            assert buckets[0].start <= start < buckets[0].start + step
        assert totals(storage) == Totals(9, 9, 4, 2, 2, 0, 1)

    def test_transitions_are_counted_in_the_bucket_of_their_minute(self, storage: Storage) -> None:
        first = self._whole_minute(storage)
        enqueue_many(storage, 3)
        storage.sweep()
        self.advance(MINUTE)
        enqueue_many(storage, 2)
        storage.sweep()

        buckets = storage.reads.series([QUEUE], first, first + 3 * MINUTE, MINUTE)

        assert [(one.start - first, one.enqueued) for one in buckets] == [
            (0, 3),
            (MINUTE, 2),
            (2 * MINUTE, 0),
        ]
        assert {(one.queue, one.name, one.step) for one in buckets} == {(QUEUE, "", MINUTE)}

    def test_series_are_read_per_queue_or_summed_over_all_queues(self, storage: Storage) -> None:
        first = self._whole_minute(storage)
        enqueue_many(storage, 2, queue="a")
        enqueue_many(storage, 3, queue="b")
        storage.sweep()
        span = (first, first + 2 * MINUTE, MINUTE)

        found = storage.reads.series(["b", "nobodys", "a"], *span)
        assert [(one.queue, one.enqueued) for one in found] == [
            *[("b", 3), ("b", 0), ("nobodys", 0), ("nobodys", 0)],
            *[("a", 2), ("a", 0)],
        ]
        together = storage.reads.series(None, *span)
        assert [(one.queue, one.enqueued) for one in together] == [("", 5), ("", 0)]

    def test_run_statistics_are_read_by_queue_and_by_job_name(self, storage: Storage) -> None:
        first = self._whole_minute(storage)
        enqueue(storage)
        storage.workers.record_runs([stats("a", wait=[30], run=[100, 7_000]), stats("b", run=[1_000_000])])
        storage.workers.record_runs([stats("a", wait=[30], failed=1), stats("b", queue="nobodys")])
        span = (first, first + MINUTE, MINUTE)

        [bucket] = storage.reads.series([QUEUE], *span)
        assert bucket.wait == histogram(30, 30)
        assert bucket.run == histogram(100, 7_000, 1_000_000)
        assert bucket.completed == bucket.started == 0  # nothing has told the totals so

        a, b = storage.reads.series([QUEUE], *span, by_name=True)
        assert (a.name, a.completed, a.failed, a.started) == ("a", 2, 1, 3)
        assert (a.wait, a.run) == (histogram(30, 30), histogram(100, 7_000))
        assert (b.name, b.completed, b.run) == ("b", 1, histogram(1_000_000))
        assert storage.reads.series(["nobodys"], *span, by_name=True) == []

    def test_series_keep_two_hundred_job_names_and_sum_the_rest(self, storage: Storage) -> None:
        first = self._whole_minute(storage)
        enqueue(storage)
        storage.workers.record_runs([stats(f"job-{number:03}", run=[5]) for number in range(198)])
        storage.workers.record_runs([stats(f"late-{number:03}", run=[5]) for number in range(5)])

        found = storage.reads.series([QUEUE], first, first + MINUTE, HOUR, by_name=True)

        assert len(found) == 201
        assert {one.name: one.completed for one in found}["…"] == 3

    def test_cumulative_metrics_never_fall(self, storage: Storage) -> None:
        enqueue_many(storage, 3)
        enqueue(storage, queue="b")
        storage.sweep()
        storage.workers.record_runs([stats("a", wait=[30], run=[100, 7_000]), stats("b", run=[5])])
        storage.workers.record_runs([stats("x", queue="nobodys")])

        queue, a, b = storage.reads.cumulative([QUEUE, "nobodys"])
        assert (queue.queue, queue.name, queue.start, queue.step) == (QUEUE, "", 0, 0)
        assert (queue.enqueued, queue.completed) == (3, 0)
        assert (queue.wait, queue.run) == (histogram(30), histogram(100, 7_000, 5))
        assert (a.name, a.completed, a.wait, a.run) == ("a", 2, histogram(30), histogram(100, 7_000))
        assert (b.name, b.completed, b.run) == ("b", 1, histogram(5))

        self.advance(500 * DAY)
        enqueue(storage)
        for _ in range(3):
            storage.sweep()
        storage.workers.record_runs([stats("a", run=[9])])
        every = {(one.queue, one.name): one for one in storage.reads.cumulative()}
        assert every.keys() == {(QUEUE, ""), (QUEUE, "a"), (QUEUE, "b"), ("b", "")}
        assert every[QUEUE, ""].enqueued == 4
        assert every[QUEUE, "a"].run == histogram(100, 7_000, 9)

        storage.queues.obliterate(QUEUE)
        storage.sweep()
        assert [(one.queue, one.enqueued) for one in storage.reads.cumulative()] == [("b", 1)]
        assert storage.reads.cumulative([]) == []

    def test_minute_buckets_are_dropped_before_hour_buckets(self, storage: Storage) -> None:
        first = self._whole_minute(storage)
        enqueue_many(storage, 3)
        storage.sweep()
        self.advance(8 * DAY)
        enqueue(storage)
        for _ in range(3):
            storage.sweep()
        if self.forgets_metrics:
            assert storage.reads.series([QUEUE], first, first + MINUTE, MINUTE)[0].enqueued == 0

        [bucket] = storage.reads.series([QUEUE], first, first + 1, HOUR)

        assert bucket.enqueued == 3

    def test_obliterated_queue_has_no_metrics(self, storage: Storage) -> None:
        first = self._whole_minute(storage)
        enqueue(storage)
        storage.workers.record_runs([stats(NAME, run=[5])])
        storage.sweep()
        storage.queues.obliterate(QUEUE)
        storage.sweep()

        for step in (MINUTE, HOUR, DAY):
            [bucket] = storage.reads.series([QUEUE], first, first + 1, step)
            assert (bucket.enqueued, bucket.run) == (0, histogram())
            assert storage.reads.series([QUEUE], first, first + 1, step, by_name=True) == []

    @pytest.mark.parametrize("step", [0, -MINUTE, 1_000, MINUTE + 1])
    def test_series_step_must_be_a_multiple_of_a_minute(self, storage: Storage, step: int) -> None:
        with pytest.raises(OptionError, match="step"):
            storage.reads.series(None, 0, 1, step)

    def test_series_with_too_many_buckets_is_rejected(self, storage: Storage) -> None:
        with pytest.raises(OptionError, match="step"):
            storage.reads.series(None, 0, 50_001 * MINUTE, MINUTE)

    def test_claim_returns_how_long_each_job_has_waited(self, storage: Storage) -> None:
        enqueue(storage)
        enqueue(storage, priority=-1)
        delayed = a_delayed_job(storage, delay=SOON)
        self.pass_time(storage, SOON + 100)

        waited = {one.id: one.waited for one in claim(storage, 3)}

        assert 100 <= waited.pop(delayed) < SOON
        assert all(SOON + 100 <= one < 60_000 for one in waited.values())

    def _whole_minute(self, storage: Storage) -> int:
        """Return the beginning of the minute that the storage is in now."""
        self.advance(-self.now(storage) % MINUTE)
        return self.now(storage) // MINUTE * MINUTE

    # Pages.

    @pytest.mark.parametrize("there", sorted(State))
    def test_cursor_pages_go_forward_and_back_in_every_state(self, storage: Storage, there: State) -> None:
        ids = []
        for number in range(7):
            maker = {State.DELAYED: {"delay": LATER + 10_000 * number}}.get(there, {})
            ids.append(JOB_IN[there](storage, **maker))
            self.advance(5)
        for other in set(State) - {there, State.ACTIVE, State.COMPLETED, State.FAILED}:
            JOB_IN[other](storage)

        for newest_first in (True, False):
            expected = ids[::-1] if newest_first else ids
            pages = [storage.reads.cursor_page(QUEUE, there, 3, newest_first=newest_first)]
            while pages[-1].next is not None:
                pages.append(storage.reads.cursor_page(QUEUE, there, 3, pages[-1].next, newest_first))
            shown = [[record.id for record in page.jobs] for page in pages]
            if there is State.BLOCKED:
                assert sorted(one for some in shown for one in some) == sorted(ids)
            else:
                assert shown == [expected[:3], expected[3:6], expected[6:]]
            assert {record.state for page in pages for record in page.jobs} == {there}

            assert pages[0].previous is None
            for before, after in pairwise(pages):
                back = storage.reads.cursor_page(QUEUE, there, 3, after.previous, newest_first)
                assert [record.id for record in back.jobs] == [record.id for record in before.jobs]
                assert (back.previous is None) == (before is pages[0])
                assert back.next is not None

    def test_cursor_page_continues_after_removed_jobs(self, storage: Storage) -> None:
        ids = []
        for _ in range(6):
            ids.append(a_waiting_job(storage))
            self.advance(5)
        first = storage.reads.cursor_page(QUEUE, State.WAITING, 2, newest_first=False)
        storage.jobs.remove(QUEUE, ids[:3])
        last = a_waiting_job(storage)

        second = storage.reads.cursor_page(QUEUE, State.WAITING, 10, first.next, newest_first=False)

        assert [record.id for record in second.jobs] == [*ids[3:], last]
        assert second.next is None

    def test_cursor_pages_contain_all_waiting_jobs(self, storage: Storage) -> None:
        ids = [*enqueue_many(storage, 3), *enqueue_many(storage, 2, priority=5)]
        ids += [
            *enqueue_many(storage, 3, concurrency_key="g"),
            *enqueue_many(storage, 2, name="other", priority=9),
        ]
        ids.append(enqueue(storage, lifo=True))
        claimed = claim(storage, 1)
        ids.remove(claimed[0].id)

        seen: list[str] = []
        cursor = None
        while True:
            page = storage.reads.cursor_page(QUEUE, State.WAITING, 2, cursor)
            seen += [record.id for record in page.jobs]
            cursor = page.next
            if cursor is None:
                break

        assert sorted(seen) == sorted(ids)

    def test_cursor_page_of_empty_state_has_no_neighbors(self, storage: Storage) -> None:
        a_waiting_job(storage)

        assert storage.reads.cursor_page(QUEUE, State.FAILED, 5) == JobPage([], None, None)
        assert storage.reads.cursor_page("nobodys", State.WAITING, 5) == JobPage([], None, None)

    @pytest.mark.parametrize("cursor", ["", "x", ">", "<nothing", ">1"])
    def test_invalid_page_cursor_is_rejected(self, storage: Storage, cursor: str) -> None:
        with pytest.raises(OptionError, match="cursor"):
            storage.reads.cursor_page(QUEUE, State.WAITING, 5, cursor)

    def test_id_is_found_in_every_queue_that_has_it(self, storage: Storage) -> None:
        enqueue(storage, id="x", queue="b")
        a_completed_job(storage, id="x", queue="a")
        a_delayed_job(storage, id="x", queue="c")
        enqueue(storage, id="y", queue="d")

        everywhere = [("a", State.COMPLETED), ("b", State.WAITING), ("c", State.DELAYED)]
        assert storage.reads.find("x") == everywhere
        assert storage.reads.find("x", ["c", "d", "b"]) == [everywhere[2], everywhere[1]]
        assert storage.reads.find("z") == storage.reads.find("x", []) == []

    # Diagnostics.

    def test_diagnostics_have_unique_complete_lines(self, storage: Storage) -> None:
        a_waiting_job(storage)
        storage.sweep()

        found = storage.reads.diagnostics()

        keys = [line.key for line in found.lines]
        assert len(set(keys)) == len(keys)
        assert {"storage.where", "storage.queues", "workers.alive"} <= set(keys)
        assert {line.level for line in found.lines} <= {"ok", "warn", "bad"}
        assert all(line.group and line.label and line.value for line in found.lines)
        assert abs(found.at - self.now(storage)) < 60_000
        by_key = {line.key: line for line in found.lines}
        assert by_key["storage.queues"].value == "1"
        assert by_key["storage.where"].value == storage.describe()
        assert (by_key["workers.alive"].value, by_key["workers.alive"].level) == ("0", "warn")

    # Versions.

    def test_every_operation_changes_the_change_version(self, storage: Storage) -> None:
        seen = [storage.reads.change_version()]
        if seen == [None]:
            return  # it need not know; pages are then compared by their content

        def differs() -> None:
            now = storage.reads.change_version()
            assert now not in seen
            seen.append(now)

        enqueue(storage, ids=["a"])
        differs()
        claimed = claim_one(storage)
        differs()
        storage.report([ProgressReport(QUEUE, "a", claimed.token, 0.5)])
        differs()
        storage.report([ProgressReport(QUEUE, "a", claimed.token, None, ((1, "a line"),))])
        differs()
        finish(storage, completing(claimed))
        differs()
        enqueue(storage, ids=["b"], delay=LATER)
        differs()
        storage.jobs.reschedule(QUEUE, ["b"], 2 * LATER)
        differs()
        storage.jobs.promote(QUEUE, ["b"])
        differs()
        storage.jobs.update(QUEUE, ["b"], priority=3)
        differs()
        storage.jobs.cancel(QUEUE, ["b"])
        differs()
        storage.queues.pause(QUEUE)
        differs()
        storage.queues.resume(QUEUE)
        differs()
        storage.queues.set_limits(QUEUE, None, 3)
        differs()
        storage.queues.hold(QUEUE, "held", None, "")
        differs()
        storage.queues.release(QUEUE, "held")
        differs()
        storage.workers.register(worker("w-version"))
        differs()
        storage.workers.unregister("w-version")
        now = storage.reads.change_version()
        assert now != seen[-1]
        storage.queues.obliterate(QUEUE)
        assert storage.reads.change_version() != now

    def test_reads_and_idle_operations_do_not_change_the_change_version(self, storage: Storage) -> None:
        enqueue(storage, ids=["a"], delay=LATER)
        storage.sweep()
        storage.sweep()

        def look() -> str | None:
            claim(storage)
            storage.sweep()
            storage.reads.overview()
            storage.reads.jobs(QUEUE, ["a"])
            storage.reads.cursor_page(QUEUE, State.DELAYED, 10)
            return storage.reads.change_version()

        # Earlier operations may still be on their way to the tables.
        versions = [look()]
        until = SYSTEM_CLOCK.monotonic() + PATIENCE * 1_000
        while len(set(versions[-20:])) > 1 or len(versions) < 20:
            assert SYSTEM_CLOCK.monotonic() < until, versions[-20:]
            versions.append(look())
