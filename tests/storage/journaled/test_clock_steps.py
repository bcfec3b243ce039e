"""The wall clock is set while a scheduler runs, or while none does, and another scheduler starts."""

from contextlib import suppress

import pytest

from djqueue import models
from djqueue.core.deadletters import DeadLetterPolicy
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State
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
    enqueue,
    failing,
    finish,
    job,
    lease_of,
    retrying,
    state,
)

HOUR = 3_600_000
STEPS = [-HOUR, HOUR]
LEASE = 30_000
POLICY = QueuePolicy(dead_letters=DeadLetterPolicy(auto_retries=1, auto_retry_delay=60_000))


class Site:
    """Schedulers one after the other in this process, and the clock that they share."""

    def __init__(self, make_storage, when):
        self.clock = FakeClock()
        self._make = make_storage
        self._when = when
        self.worker = self._new()
        self.scheduler = self._new()
        self.scheduler.connect()

    def step(self, milliseconds):
        """Set the wall clock, and start the next scheduler."""
        if self._when == "while a scheduler runs":
            self.clock.jump(milliseconds)
            self.scheduler.sweep()
        self.scheduler.close()
        if self._when == "while no scheduler runs":
            self.clock.jump(milliseconds)
        self.scheduler = self._new()
        self.scheduler.connect()

    def after(self, milliseconds, job_id):
        """The state of a job when so much time has passed."""
        self.clock.advance(milliseconds)
        self.scheduler.sweep()
        return state(self.scheduler, job_id)

    def _new(self):
        return self._make(clock=self.clock, policies={QUEUE: POLICY})


@pytest.fixture(params=["while a scheduler runs", "while no scheduler runs"])
def site(request, make_storage):
    return Site(make_storage, request.param)


@pytest.mark.parametrize("step", STEPS)
def test_delay_keeps_its_length_over_restart(site, step):
    delayed = enqueue(site.scheduler, delay=60_000)
    site.clock.advance(10_000)

    site.step(step)

    assert site.after(49_000, delayed) is State.DELAYED
    assert site.after(1_000, delayed) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_delay_keeps_its_length_over_several_steps_and_restarts(site, step):
    delayed = enqueue(site.scheduler, delay=60_000)
    for direction in (1, -2, 1, 1):
        site.clock.advance(10_000)
        site.step(direction * step)

    assert site.after(19_000, delayed) is State.DELAYED
    assert site.after(1_000, delayed) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_backoff_keeps_its_length_over_restart(site, step):
    retried = enqueue(site.scheduler)
    finish(site.scheduler, retrying(claim_one(site.scheduler), delay=60_000))

    site.step(step)

    assert site.after(59_000, retried) is State.DELAYED
    assert site.after(1_000, retried) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_ttl_keeps_its_length_over_restart(site, step):
    expiring = enqueue(site.scheduler, ttl=60_000)
    site.clock.advance(10_000)

    site.step(step)

    assert site.after(49_000, expiring) is State.WAITING
    assert site.after(1_000, expiring) is State.FAILED


@pytest.mark.parametrize("step", STEPS)
def test_unique_key_is_free_after_its_time_over_restart(site, step):
    enqueue(site.scheduler, unique_key="k", unique_ttl=60_000)

    site.step(step)

    again = batch(unique_key="k")
    site.clock.advance(59_000)
    assert [result.status for result in site.scheduler.enqueue([again])] == ["duplicate"]
    site.clock.advance(1_000)
    assert [result.status for result in site.scheduler.enqueue([again])] == ["queued"]


@pytest.mark.parametrize("step", STEPS)
def test_dead_letter_is_retried_after_its_delay_over_restart(site, step):
    dead = enqueue(site.scheduler)
    finish(site.scheduler, failing(claim_one(site.scheduler)))

    site.step(step)

    assert site.after(59_000, dead) is State.FAILED
    assert site.after(1_000, dead) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_job_that_is_due_at_time_of_day_is_due_then_over_restart(site, step):
    due = enqueue(site.scheduler, run_at=site.clock.now() + 2 * HOUR)

    site.step(step)

    assert site.after(2 * HOUR - step - 1_000, due) is State.DELAYED
    assert site.after(1_000, due) is State.WAITING


def test_step_back_and_restart_keep_no_waiting_job_back(site):
    first = enqueue(site.scheduler)
    dependent = enqueue(site.scheduler, depends_on=((QUEUE, first),))

    site.step(-HOUR)

    assert state(site.scheduler, first) is State.WAITING
    finish(site.scheduler, completing(claim_one(site.scheduler)))
    assert claim_ids(site.scheduler) == [dependent]


@pytest.mark.parametrize("step", STEPS)
def test_job_of_another_process_continues_over_step_and_restart(site, step):
    running = enqueue(site.scheduler, ttl=60_000)
    silent = enqueue(site.scheduler)
    claimed, lost = claim(site.worker, 2)

    site.step(step)

    site.clock.advance(LEASE - 1_000)
    assert [renewal.held for renewal in site.worker.renew([lease_of(claimed)])] == [True]
    assert site.after(2_000, silent) is State.WAITING
    assert job(site.scheduler, silent).stalls == 1
    assert finish(site.worker, completing(lost)) == [False]
    assert finish(site.worker, completing(claimed)) == [True]
    assert job(site.scheduler, running).stalls == 0


@pytest.mark.parametrize("step", STEPS)
def test_changes_without_scheduler_apply_clock_step_once(make_storage, step):
    site = Site(make_storage, "while no scheduler runs")
    expiring, delayed = enqueue(site.scheduler, ttl=60_000), enqueue(site.scheduler, delay=60_000)
    site.scheduler.close()
    site.clock.jump(step)

    site.worker.queues.pause(QUEUE)
    site.worker.jobs.update(QUEUE, [delayed], priority=3)
    site.worker.queues.resume(QUEUE)

    site.step(0)
    assert site.after(59_000, expiring) is State.WAITING
    assert state(site.scheduler, delayed) is State.DELAYED
    assert site.after(1_000, delayed) is State.WAITING
    assert state(site.scheduler, expiring) is State.FAILED


def test_delay_that_was_given_while_no_scheduler_ran_is_no_longer_after_step_back(make_storage):
    site = Site(make_storage, "while no scheduler runs")
    site.scheduler.close()
    delayed = enqueue(site.worker, delay=60_000)

    site.step(-HOUR)

    assert site.after(60_000, delayed) is State.WAITING


def test_time_passes_while_machine_is_suspended(site):
    delayed = enqueue(site.scheduler, delay=60_000)
    site.clock.suspend(HOUR)

    site.step(0)

    assert site.after(0, delayed) is State.WAITING


def test_clock_of_another_boot_is_ignored(make_storage):
    site = Site(make_storage, "while no scheduler runs")
    delayed = enqueue(site.scheduler, delay=60_000)
    site.scheduler.close()
    lease = models.SchedulerLease.objects.get()
    models.SchedulerLease.objects.update(host=f"elsewhere/00000000/{lease.host.split('/')[-1]}")

    site.step(HOUR)

    assert state(site.scheduler, delayed) is State.WAITING


def test_tokens_rise_over_step_back_and_restart(site):
    enqueue(site.scheduler)
    first = claim_one(site.worker)
    assert finish(site.worker, completing(first)) == [True]
    enqueue(site.scheduler)

    site.step(-HOUR)
    site.step(-HOUR)

    assert claim_one(site.worker).token > first.token
    # Its answer may have been lost with its scheduler.
    assert finish(site.worker, completing(first)) == [True]


def test_job_of_frozen_scheduler_is_not_run_again_after_step_back(make_storage):
    site = Site(make_storage, "while no scheduler runs")
    site.step(-HOUR)
    enqueue(site.scheduler)
    claimed = claim_one(site.scheduler)
    site.scheduler.reads.counts(QUEUE)  # Both are in the tables.
    site.clock.advance(TTL)  # It is frozen, with the job.

    successor = site._new()
    successor.connect()

    there = job(successor, claimed.id)
    with suppress(LeaseLost):
        site.scheduler.close()
    assert (there.state, there.stalls) == (State.ACTIVE, 0)
