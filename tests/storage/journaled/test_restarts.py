"""A scheduler ends, or is killed, while jobs run in other processes: these go on, once each."""

from contextlib import contextmanager, suppress

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError

from djqueue import models
from djqueue.core.durations import to_milliseconds
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy
from djqueue.core.states import State
from djqueue.storage.journaled import scheduler as scheduler_module
from djqueue.storage.journaled import unanswered
from djqueue.storage.journaled.journal import LeaseLost
from djqueue.storage.journaled.lease import TTL
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    QUEUE,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    emit,
    enqueue,
    enqueue_many,
    failing,
    finish,
    items_of,
    job,
    lease_of,
    releasing,
    report_of,
    request,
    retrying,
    state,
)
from tests.support import eventually

LEASE = 30_000


def renew(storage, *claimed):
    """Whether each claim still holds."""
    return [renewal.held for renewal in storage.renew(list(map(lease_of, claimed)))]


class Restarts:
    """Schedulers one after the other in this process, and a worker that claims over their sockets."""

    def __init__(self, make_storage, **options):
        self.clock = FakeClock()
        self._make = make_storage
        self._options = options
        self.worker = make_storage(clock=self.clock, **options)
        self.scheduler = None
        self.again()

    def again(self):
        """The present scheduler ends; the next one starts, and is returned."""
        if self.scheduler is not None:
            self.scheduler.close()
        self.scheduler = self._make(clock=self.clock, **self._options)
        self.scheduler.connect()
        return self.scheduler


@pytest.fixture
def restarts(make_storage):
    return Restarts(make_storage)


def test_job_of_client_stays_active_over_restart(restarts):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.worker)

    restarted = restarts.again()

    there = job(restarted, claimed.id)
    assert (there.state, there.attempts, there.stalls) == (State.ACTIVE, 1, 0)
    assert claim_ids(restarted, 5) == []
    assert renew(restarts.worker, claimed) == [True]
    assert finish(restarts.worker, completing(claimed, b"done")) == [True]
    there = job(restarts.again(), claimed.id)
    assert (there.state, there.result, there.attempts, there.stalls) == (State.COMPLETED, b"done", 1, 0)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [(failing, State.FAILED), (retrying, State.WAITING), (releasing, State.WAITING)],
)
def test_every_outcome_is_accepted_with_its_token_after_restart(restarts, ending, expected):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.worker)

    restarted = restarts.again()

    assert finish(restarts.worker, ending(claimed)) == [True]
    there = job(restarted, claimed.id)
    assert (there.state, there.stalls) == (expected, 0)


def test_job_of_schedulers_own_process_is_stalled_at_once(restarts):
    enqueue_many(restarts.scheduler, 2)
    [own], [other] = claim(restarts.scheduler), claim(restarts.worker)

    restarted = restarts.again()

    assert (job(restarted, own.id).state, job(restarted, own.id).stalls) == (State.WAITING, 1)
    assert (job(restarted, other.id).state, job(restarted, other.id).stalls) == (State.ACTIVE, 0)
    assert finish(restarted, completing(own)) == [False]


def test_worker_has_whole_lease_to_report_however_long_no_scheduler_ran(restarts):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.worker)
    restarts.scheduler.close()
    restarts.clock.advance(20 * LEASE)

    restarted = restarts.again()

    restarts.clock.advance(LEASE - 1)
    restarted.sweep()
    assert job(restarted, claimed.id).state is State.ACTIVE
    restarts.clock.advance(2)
    restarted.sweep()
    there = job(restarted, claimed.id)
    assert (there.state, there.stalls) == (State.WAITING, 1)


def test_lease_that_ended_while_its_scheduler_ran_is_stall(restarts):
    enqueue_many(restarts.scheduler, 2)
    silent, renewed = claim(restarts.worker, 2)
    restarts.clock.advance(LEASE - 1)
    assert renew(restarts.worker, renewed) == [True]
    restarts.clock.advance(2)
    restarts.scheduler.reads.counts(QUEUE)  # It was the scheduler until now, and has not looked at leases.

    restarted = restarts.again()

    assert [job(restarted, one.id).stalls for one in (silent, renewed)] == [1, 0]
    assert [job(restarted, one.id).state for one in (silent, renewed)] == [State.WAITING, State.ACTIVE]


def test_changes_without_scheduler_keep_active_jobs(restarts):
    enqueue_many(restarts.scheduler, 2)
    cancelled, other = claim(restarts.worker, 2)
    restarts.scheduler.close()
    restarts.clock.advance(20 * LEASE)
    restarts.worker.queues.pause(QUEUE)
    assert restarts.worker.jobs.cancel(QUEUE, [cancelled.id])[0].status == "requested"

    restarted = restarts.again()

    assert [job(restarted, one.id).state for one in (cancelled, other)] == [State.ACTIVE] * 2
    renewals = restarts.worker.renew([lease_of(cancelled), lease_of(other)])
    assert [(renewal.held, renewal.cancel_requested) for renewal in renewals] == [(True, True), (True, False)]


def test_row_of_version_without_tokens_is_stall(restarts):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.worker)
    restarts.scheduler.close()
    models.Job.objects.filter(job_id=claimed.id).update(token=0, process="", leased_until=None)

    restarted = restarts.again()

    assert (job(restarted, claimed.id).state, job(restarted, claimed.id).stalls) == (State.WAITING, 1)


def test_new_tokens_are_higher_than_those_of_jobs_that_still_run(restarts):
    enqueue(restarts.scheduler)
    first = claim_one(restarts.worker)
    restarts.scheduler.close()
    restarts.clock.jump(-LEASE)

    enqueue(restarts.again())

    assert claim_one(restarts.worker).token > first.token


# While no scheduler runs.


def test_worker_writes_outcome_without_scheduler(restarts):
    enqueue(restarts.scheduler)
    running = claim_one(restarts.worker)
    dependent = enqueue(restarts.scheduler, depends_on=[(QUEUE, running.id)])
    restarts.scheduler.close()

    assert finish(restarts.worker, completing(running, b"done")) == [True]

    assert state(restarts.worker, running.id) is State.COMPLETED
    # Told again, as one whose answer was lost: it counts, and counts once.
    assert finish(restarts.worker, completing(running, b"again")) == [True]
    restarted = restarts.again()
    there = job(restarted, running.id)
    assert (there.state, there.result, there.attempts, there.stalls) == (State.COMPLETED, b"done", 1, 0)
    assert claim_ids(restarted, 5) == [dependent]


def test_worker_writes_outcomes_of_several_queues_without_scheduler(restarts):
    queues = ("a", "b")
    for queue in queues:
        restarts.scheduler.enqueue([batch(queue=queue)])
    done, failed = sorted(claim(restarts.worker, 2, queues=queues), key=lambda one: one.queue)
    restarts.scheduler.close()

    assert finish(restarts.worker, completing(done), retrying(failed)) == [True, True]

    restarted = restarts.again()
    assert state(restarted, done.id, "a") is State.COMPLETED
    there = job(restarted, failed.id, "b")
    assert (there.state, there.failures, len(there.history)) == (State.WAITING, 1, 1)


def test_outcome_with_stale_token_is_rejected_without_scheduler(restarts):
    enqueue(restarts.scheduler)
    running = claim_one(restarts.worker)
    restarts.scheduler.close()

    assert finish(restarts.worker, completing(running._replace(token=running.token + 1))) == [False]
    assert state(restarts.again(), running.id) is State.ACTIVE


def test_outcome_raises_error_if_scheduler_is_unreachable(restarts, monkeypatch):
    enqueue(restarts.scheduler)
    running = claim_one(restarts.worker)
    restarts.scheduler._server.close()

    with pytest.raises(StorageUnavailableError):
        finish(restarts.worker, completing(running))

    assert state(restarts.scheduler, running.id) is State.ACTIVE


# Limits count what still runs.


def test_concurrency_counts_jobs_that_run_over_restart(make_storage):
    restarts = Restarts(make_storage, policies={QUEUE: QueuePolicy(concurrency=2)})
    enqueue_many(restarts.scheduler, 5)
    running = claim(restarts.worker, 5)
    assert len(running) == 2

    restarted = restarts.again()

    assert claim_ids(restarted, 5) == []
    finish(restarts.worker, completing(running[0]))
    assert len(claim_ids(restarted, 5)) == 1


def test_shared_limiter_counts_jobs_that_run_over_restart(make_storage):
    policies = {"a": QueuePolicy(limiter="api"), "b": QueuePolicy(limiter="api")}
    restarts = Restarts(make_storage, policies=policies, limiters={"api": LimiterPolicy(concurrency=3)})
    for queue in policies:
        restarts.scheduler.enqueue([batch(4, queue=queue)])
    running = claim(restarts.worker, 9, queues=["a"])
    assert len(running) == 3

    restarted = restarts.again()

    assert restarted.limiters.state("api").used == 3
    assert claim_ids(restarted, 9, queues=["a", "b"]) == []
    finish(restarts.worker, completing(running[0]))
    assert len(claim_ids(restarted, 9, queues=["a", "b"])) == 1


def test_group_counts_jobs_that_run_over_restart(restarts):
    ids = [enqueue(restarts.scheduler, group=group) for group in ("a", "a", "b")]
    first = claim_one(restarts.worker)

    restarted = restarts.again()

    assert claim_ids(restarted, 9) == [ids[2]]
    finish(restarts.worker, completing(first))
    assert claim_ids(restarted, 9) == [ids[1]]


def test_unique_key_is_held_by_job_that_runs_over_restart(restarts):
    enqueue(restarts.scheduler, unique_key="k")
    running = claim_one(restarts.worker)
    follower = enqueue(restarts.scheduler, unique_key="k", on_duplicate="keep_last_if_active")

    restarted = restarts.again()

    [again] = restarted.enqueue([batch(unique_key="k")])
    assert (again.status, again.id, again.existing_state) == ("duplicate", running.id, State.ACTIVE)
    assert state(restarted, follower) is State.BLOCKED
    assert claim_ids(restarted, 5) == []
    finish(restarts.worker, completing(running))
    assert claim_ids(restarted, 5) == [follower]


def test_dependent_waits_for_job_that_runs_over_restart(restarts):
    enqueue(restarts.scheduler)
    running = claim_one(restarts.worker)
    dependent = enqueue(restarts.scheduler, depends_on=[(QUEUE, running.id)])

    restarted = restarts.again()

    assert state(restarted, dependent) is State.BLOCKED
    finish(restarts.worker, completing(running))
    assert claim_ids(restarted, 5) == [dependent]


def test_items_of_job_that_runs_over_restart_go_on(restarts):
    enqueue(restarts.scheduler)
    running = claim_one(restarts.worker)
    emit(restarts.worker, running, b"1", b"2")

    restarted = restarts.again()

    assert emit(restarts.worker, running, b"3", start=2)
    assert items_of(restarted, running.id) == [b"1", b"2", b"3"]
    assert finish(restarts.worker, completing(running)) == [True]
    assert items_of(restarts.again(), running.id) == [b"1", b"2", b"3"]


def test_progress_of_job_that_runs_over_restart_continues(restarts):
    enqueue(restarts.scheduler)
    running = claim_one(restarts.worker)
    restarts.worker.report([report_of(running, 1, [(1, "first")])])

    restarts.again()

    assert restarts.worker.report([report_of(running, 2, [(2, "second")])]) == [True]
    there = job(restarts.again(), running.id)
    assert (there.state, there.progress, [line for _, line in there.logs]) == (
        State.ACTIVE,
        2,
        ["first", "second"],
    )


# Schedulers that are killed.


@pytest.fixture
def start_scheduler(start_child):
    """Starts a scheduler in a process of its own."""

    def start():
        child = start_child("scheduler")
        child.hears_until("ready")
        return child

    return start


def test_jobs_claimed_from_killed_scheduler_are_not_claimed_again(start_scheduler, client, make_storage):
    ids = enqueue_many(client, 20)
    first = start_scheduler()
    claimed = []
    eventually(lambda: claimed.extend(claim(client, 20 - len(claimed))) or len(claimed) == 20)
    first.kill()

    storage = make_storage()
    storage.connect()

    assert {one.id for one in claimed} == set(ids)
    assert claim_ids(storage, 99) == []
    assert renew(client, *claimed) == [True] * 20
    assert finish(client, *map(completing, claimed)) == [True] * 20
    assert {job(storage, job_id).stalls for job_id in ids} == {0}


def test_outcome_accepted_by_killed_scheduler_is_kept(start_scheduler, client, make_storage):
    ids = enqueue_many(client, 20)
    first = start_scheduler()
    claimed = []
    eventually(lambda: claimed.extend(claim(client, 20 - len(claimed))) or len(claimed) == 20)
    assert finish(client, *map(completing, claimed)) == [True] * 20
    first.kill()

    storage = make_storage()
    storage.connect()

    assert {state(storage, job_id) for job_id in ids} == {State.COMPLETED}
    # Told again, since the answer may have been lost with the scheduler: it counts, and counts once.
    assert finish(client, *map(completing, claimed)) == [True] * 20
    assert finish(client, *(one._replace(token=one.token + 1) for one in map(completing, claimed))) == (
        [False] * 20
    )


def test_outcome_after_stall_is_rejected(restarts):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.worker)
    restarts.clock.advance(LEASE + 1)
    restarts.scheduler.sweep()

    assert finish(restarts.worker, completing(claimed)) == [False]
    assert finish(restarts.worker, retrying(claimed)) == [False]


def test_jobs_of_killed_worker_wait_again_at_once_with_stall(start_scheduler, start_child, make_storage):
    first = start_scheduler()
    first.tell("enqueue 3")
    first.hears_until("done")
    helper = start_child("client")
    helper.hears_until("ready")
    helper.tell("claim 3")
    held = helper.hears_until("done")
    assert len(held) == 3
    first.kill()
    helper.kill()

    storage = make_storage()
    storage.connect()

    assert [job(storage, job_id).stalls for job_id in held] == [1, 1, 1]
    # Jobs with a stall are claimed alone: each worker gets one.
    claimed = [claim_ids(storage, 9, worker=f"worker-{number}") for number in range(3)]
    assert sorted(claimed) == sorted([job_id] for job_id in held)


def test_job_of_scheduler_that_was_only_frozen_keeps_its_lease(restarts, make_storage):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.scheduler)
    frozen = restarts.scheduler
    frozen.reads.counts(QUEUE)  # what it has said is written
    restarts.clock.advance(TTL)

    restarts.scheduler = None
    restarted = restarts.again()

    assert job(restarted, claimed.id).state is State.ACTIVE
    assert claim_ids(restarted, 5) == []
    restarts.clock.advance(LEASE + 1)
    restarted.sweep()
    assert (job(restarted, claimed.id).state, job(restarted, claimed.id).stalls) == (State.WAITING, 1)
    with pytest.raises(StorageUnavailableError):
        frozen.close()


def test_successor_changed_without_scheduler_still_waits_for_owner_of_its_key(restarts):
    enqueue(restarts.scheduler, unique_key="k", on_duplicate="keep_last_if_active")
    claimed = claim_one(restarts.worker)
    later = enqueue(restarts.scheduler, unique_key="k", on_duplicate="keep_last_if_active")
    restarts.scheduler.close()

    assert restarts.worker.jobs.update(QUEUE, [later], priority=5) == [True]

    restarts.scheduler = None
    restarted = restarts.again()
    assert state(restarted, later) is State.BLOCKED
    assert finish(restarts.worker, completing(claimed)) == [True]
    assert claim_ids(restarted, 5) == [later]


@pytest.mark.parametrize(
    "steer",
    [
        lambda storage, job_id: storage.jobs.update(QUEUE, [job_id], priority=5),
        lambda storage, job_id: storage.jobs.promote(QUEUE, [job_id]),
    ],
    ids=["update", "promote"],
)
def test_job_that_is_changed_without_scheduler_replaces_rival_with_its_unique_key(restarts, steer):
    earlier = enqueue(restarts.scheduler, unique_key="k", delay=60_000)
    restarts.scheduler.close()
    restarts.scheduler = None
    later = enqueue(restarts.worker, unique_key="k", on_duplicate="replace", delay=60_000)

    steer(restarts.worker, later)

    restarted = restarts.again()
    replaced = job(restarted, earlier)
    assert (replaced.state, replaced.reason) == (State.CANCELLED, "replaced")
    assert state(restarted, later) in (State.WAITING, State.DELAYED)
    restarts.clock.advance(60_000)
    restarted.sweep()
    assert claim_ids(restarted, 5) == [later]


def test_job_that_is_cancelled_without_scheduler_has_replaced_its_rivals_before(restarts):
    earlier = enqueue(restarts.scheduler, unique_key="k")
    waiting = enqueue(restarts.scheduler, depends_on=((QUEUE, earlier),))
    restarts.scheduler.close()
    restarts.scheduler = None
    between = enqueue(restarts.worker, unique_key="k", on_duplicate="replace")
    later = enqueue(restarts.worker, unique_key="k", on_duplicate="replace")

    assert restarts.worker.jobs.cancel(QUEUE, [later])[0].status == "cancelled"

    restarted = restarts.again()
    states = [state(restarted, job_id) for job_id in (earlier, between, later)]
    assert states == [State.CANCELLED] * 3
    assert job(restarted, waiting).reason == "dependency_failed"
    assert claim_ids(restarted, 5) == []


def test_successor_in_inbox_that_is_changed_without_scheduler_waits_for_its_key(restarts):
    enqueue(restarts.scheduler, unique_key="k")
    claimed = claim_one(restarts.worker)
    restarts.scheduler.close()
    restarts.scheduler = None
    later = enqueue(restarts.worker, unique_key="k", on_duplicate="keep_last_if_active")

    assert restarts.worker.jobs.update(QUEUE, [later], priority=5) == [True]

    restarted = restarts.again()
    assert state(restarted, later) is State.BLOCKED
    assert finish(restarts.worker, completing(claimed)) == [True]
    assert claim_ids(restarted, 5) == [later]


def test_change_of_job_replaces_rivals_of_its_dependency_without_scheduler(restarts):
    earlier = enqueue(restarts.scheduler, unique_key="k")
    restarts.scheduler.close()
    restarts.scheduler = None
    later = enqueue(restarts.worker, unique_key="k", on_duplicate="replace")
    waiting = enqueue(restarts.worker, depends_on=((QUEUE, later),))

    assert restarts.worker.jobs.update(QUEUE, [waiting], priority=5) == [True]

    restarted = restarts.again()
    assert state(restarted, earlier) is State.CANCELLED
    assert state(restarted, waiting) is State.BLOCKED
    assert claim_ids(restarted, 5) == [later]


def test_dead_letter_is_not_retried_without_scheduler_if_its_unique_key_is_taken(restarts):
    dead = enqueue(restarts.scheduler, unique_key="k", max_attempts=1)
    finish(restarts.worker, failing(claim_one(restarts.worker)))
    other = enqueue(restarts.scheduler, unique_key="k")
    restarts.scheduler.close()
    restarts.scheduler = None

    assert restarts.worker.jobs.retry(QUEUE, [dead]) == ["unique_key_taken"]

    restarted = restarts.again()
    assert state(restarted, dead) is State.FAILED
    assert claim_ids(restarted, 5) == [other]


# Claims are on the disk before anybody acts on them.


def row_of(job_id):
    return models.Job.objects.get(job_id=job_id)


def test_claim_of_another_process_is_written_when_answered(restarts, monkeypatch):
    monkeypatch.setattr("djqueue.storage.journaled.journal.WINDOW", 60)
    enqueue(restarts.scheduler)

    claimed = claim_one(restarts.worker)

    row = row_of(claimed.id)
    assert (row.state, row.token, row.attempts) == ("active", claimed.token, 1)
    assert row.process
    assert to_milliseconds(row.leased_until) == restarts.clock.now() + LEASE
    assert finish(restarts.worker, completing(claimed)) == [True]
    assert (row_of(claimed.id).state, row_of(claimed.id).leased_until) == ("completed", None)


def test_renewed_lease_is_written(restarts):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.worker)
    restarts.clock.advance(1_000)
    renew(restarts.worker, claimed)
    restarts.scheduler.reads.counts(QUEUE)

    assert to_milliseconds(row_of(claimed.id).leased_until) == restarts.clock.now() + LEASE


def test_own_claims_are_written_first_for_minute_after_kill(restarts, monkeypatch):
    monkeypatch.setattr("djqueue.storage.journaled.journal.WINDOW", 60)
    enqueue_many(restarts.scheduler, 3)
    restarts.scheduler.close()
    models.SchedulerLease.objects.update(expires_at=1)  # as one that was killed leaves it

    restarted = restarts.again()

    assert row_of(claim_one(restarted).id).state == "active"
    restarts.clock.advance(60_000)
    assert row_of(claim_one(restarted).id).state == "waiting"


def test_own_claims_are_not_written_first_after_clean_shutdown(restarts, monkeypatch):
    monkeypatch.setattr("djqueue.storage.journaled.journal.WINDOW", 60)
    enqueue(restarts.scheduler)

    restarted = restarts.again()

    assert row_of(claim_one(restarted).id).state == "waiting"


def test_changes_without_scheduler_do_not_hide_kill_of_last_scheduler(restarts, monkeypatch):
    monkeypatch.setattr("djqueue.storage.journaled.journal.WINDOW", 60)
    enqueue(restarts.scheduler)
    restarts.scheduler.close()
    models.SchedulerLease.objects.update(expires_at=1)
    restarts.worker.queues.pause("other")

    restarted = restarts.again()

    assert row_of(claim_one(restarted).id).state == "active"


@contextmanager
def full_disk(scheduler, monkeypatch):
    """The scheduler's journal cannot write while this lasts."""

    @contextmanager
    def transaction(**_):
        raise OperationalError("the disk is full")
        yield

    with monkeypatch.context() as patch:
        patch.setattr("djqueue.storage.journaled.journal.FIRST_RETRY", 0.01)
        patch.setattr(scheduler._dialect, "transaction", transaction)
        yield


def test_claims_that_cannot_be_written_are_released_without_attempt(restarts, monkeypatch):
    enqueue_many(restarts.scheduler, 2)
    held = claim_one(restarts.worker)

    refused = pytest.raises(StorageUnavailableError, match="the disk is full")
    with full_disk(restarts.scheduler, monkeypatch), refused:
        restarts.worker.finish([completing(held)], request(5))

    # The worker tells it again, having heard of an error only: it was accepted the first time.
    assert finish(restarts.worker, completing(held)) == [True]
    # The answer to that may be lost, too.
    assert finish(restarts.worker, completing(held)) == [True]
    again = claim_one(restarts.worker)
    assert (again.id != held.id, again.attempts, again.stalls) == (True, 1, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_outcome_is_accepted_although_next_claim_cannot_be_written(restarts, monkeypatch, is_async):
    enqueue_many(restarts.scheduler, 2)
    held = claim_one(restarts.scheduler)
    active = restarts.scheduler.active
    active._careful_until = active._clock.monotonic() + 60_000
    call = async_to_sync(restarts.scheduler.afinish) if is_async else restarts.scheduler.finish

    with full_disk(restarts.scheduler, monkeypatch):
        finished = call([completing(held)], request(5))

    assert (finished.accepted, finished.claims.jobs) == ([True], [])
    [again] = restarts.scheduler.finish([], request(5)).claims.jobs
    assert (again.id != held.id, again.attempts, again.stalls) == (True, 1, 0)
    assert state(restarts.scheduler, held.id) is State.COMPLETED


@pytest.mark.parametrize("is_async", [False, True])
def test_claim_that_cannot_be_written_raises_error(restarts, monkeypatch, is_async):
    enqueue(restarts.scheduler)
    active = restarts.scheduler.active
    active._careful_until = active._clock.monotonic() + 60_000
    call = async_to_sync(restarts.scheduler.afinish) if is_async else restarts.scheduler.finish

    refused = pytest.raises(StorageUnavailableError, match="the disk is full")
    with full_disk(restarts.scheduler, monkeypatch), refused:
        call([], request(5))


def unanswered_ends(restarts, monkeypatch, count):
    """End as many jobs while the journal cannot be written, one call each; return their claims."""
    enqueue_many(restarts.scheduler, count)
    held = claim(restarts.worker, count)
    with full_disk(restarts.scheduler, monkeypatch):
        for one in held:
            with pytest.raises(StorageUnavailableError, match="the disk is full"):
                restarts.worker.finish([completing(one)])
            restarts.clock.advance(1)
    return held


def test_failed_lookup_of_outcomes_keeps_rest_of_request(restarts, monkeypatch):
    enqueue_many(restarts.scheduler, 2)
    held = claim_one(restarts.worker)
    # As told by a worker that was frozen while this scheduler took over.
    late = completing(held)._replace(id="gone", token=1)

    def no_connection(*_):
        raise OperationalError("too many connections")

    with monkeypatch.context() as patch:
        patch.setattr("djqueue.storage.journaled.recovery.ended_claims", no_connection)
        with pytest.raises(StorageUnavailableError, match="too many connections"):
            restarts.worker.finish([completing(held), late], request(5))

    # The worker heard of an error only: it reports both again, and knows of no claim.
    assert finish(restarts.worker, completing(held), late) == [True, False]
    again = claim_one(restarts.worker)
    assert (again.id != held.id, again.attempts, again.stalls) == (True, 1, 0)


def test_unanswered_outcomes_are_bounded_by_number(restarts, monkeypatch):
    monkeypatch.setattr(unanswered, "LIMIT", 2)

    held = unanswered_ends(restarts, monkeypatch, 3)

    assert list(restarts.scheduler.active.unanswered.claims) == [lease_of(one) for one in held[1:]]


def test_unanswered_outcomes_are_forgotten_after_their_ttl(restarts, monkeypatch):
    unanswered_ends(restarts, monkeypatch, 1)
    restarts.clock.advance(unanswered.TTL)

    [late] = unanswered_ends(restarts, monkeypatch, 1)

    assert list(restarts.scheduler.active.unanswered.claims) == [lease_of(late)]


def test_scheduler_that_dies_during_takeover_costs_no_lease(restarts, make_storage, monkeypatch):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.worker)
    restarts.scheduler.close()
    restarts.clock.advance(2 * LEASE)

    def dies(*_args, **_options):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("djqueue.storage.journaled.recovery.take_over", dies)
        patch.setattr("djqueue.storage.journaled.lease.SchedulerLease.release_unserved", lambda _: None)
        dying = make_storage(clock=restarts.clock)
        with pytest.raises(SystemExit):
            dying.connect()
    # Its claim runs out, as nobody gave it back.
    restarts.clock.advance(2 * TTL)
    restarts.scheduler = None
    models.SchedulerLease.objects.update(expires_at=1)
    restarted = restarts.again()

    there = job(restarted, claimed.id)
    assert (there.state, there.stalls) == (State.ACTIVE, 0)
    assert finish(restarts.worker, completing(claimed)) == [True]


def test_scheduler_that_fails_to_start_costs_no_lease(restarts, make_storage, monkeypatch):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.worker)
    restarts.scheduler.close()
    restarts.clock.advance(2 * LEASE)

    with monkeypatch.context() as patch:
        patch.setattr("djqueue.storage.journaled.recovery.note_kept", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_storage(clock=restarts.clock).connect()
    restarts.scheduler = None
    restarted = restarts.again()

    assert (job(restarted, claimed.id).state, job(restarted, claimed.id).stalls) == (State.ACTIVE, 0)


def test_scheduler_that_fails_to_start_leaves_jobs_of_silent_one_to_its_successor(
    restarts, make_storage, monkeypatch
):
    enqueue(restarts.scheduler)
    claimed = claim_one(restarts.scheduler)
    restarts.scheduler.reads.counts(QUEUE)  # Both are in the tables.
    restarts.clock.advance(TTL)  # It is frozen, with the job.
    broken = make_storage(clock=restarts.clock)

    def fail(*_, **__):
        raise OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(scheduler_module.recovery, "note_kept", fail)
        with pytest.raises((OperationalError, StorageUnavailableError)):
            broken.connect()
    successor = make_storage(clock=restarts.clock)
    successor.connect()

    there = job(successor, claimed.id)
    with suppress(LeaseLost):
        restarts.scheduler.close()
    assert (there.state, there.stalls) == (State.ACTIVE, 0)
