"""The wall clock is set while a scheduler runs, or while none does, and another scheduler starts."""

from contextlib import closing, suppress

import pytest

from djqueue.core.states import State
from djqueue.storage.journaled import JournaledStorage
from djqueue.storage.journaled.journal import LeaseLost
from djqueue.storage.journaled.lease import TTL
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    QUEUE,
    claim,
    claim_ids,
    claim_one,
    completing,
    enqueue,
    finish,
    job,
    lease_of,
    state,
)
from tests.storage.setclocks import SET_CLOCK_POLICIES, MonotonicCase, SetClocksCase

HOUR = 3_600_000
STEPS = [-HOUR, HOUR]
LEASE = 30_000


class TestSetClocks(SetClocksCase, MonotonicCase):
    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        with closing(JournaledStorage(clock=self.clock, policies=SET_CLOCK_POLICIES)) as storage:
            storage.connect()
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class Site:
    """Schedulers one after the other in this process, and the clock that they share."""

    def __init__(self, make_storage, when):
        self.clock = FakeClock()
        self._make = make_storage
        self._when = when
        self.worker = self.new()
        self.scheduler = self.new()
        self.scheduler.connect()

    def step(self, milliseconds):
        """Set the wall clock, and start the next scheduler."""
        if self._when == "while a scheduler runs":
            self.clock.jump(milliseconds)
            self.scheduler.sweep()
        self.scheduler.close()
        if self._when == "while no scheduler runs":
            self.clock.jump(milliseconds)
        self.scheduler = self.new()
        self.scheduler.connect()

    def after(self, milliseconds, job_id):
        """The state of a job when so much time has passed."""
        self.clock.advance(milliseconds)
        self.scheduler.sweep()
        return state(self.scheduler, job_id)

    def new(self):
        return self._make(clock=self.clock)


@pytest.fixture(params=["while a scheduler runs", "while no scheduler runs"])
def site(request, make_storage):
    return Site(make_storage, request.param)


def test_step_back_and_restart_keep_no_waiting_job_back(site):
    first = enqueue(site.scheduler)

    site.step(-HOUR)

    assert state(site.scheduler, first) is State.WAITING
    assert claim_ids(site.scheduler) == [first]


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

    successor = site.new()
    successor.connect()

    there = job(successor, claimed.id)
    with suppress(LeaseLost):
        site.scheduler.close()
    assert (there.state, there.stalls) == (State.ACTIVE, 0)
