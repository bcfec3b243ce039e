"""Durations keep their length when the wall clock is set."""

import pytest

from djqueue.core.clock import Clock
from djqueue.core.clocksteps import keep_lengths
from djqueue.core.deadletters import DeadLetterPolicy
from djqueue.core.engine import Engine
from djqueue.core.enginejob import EngineJob
from djqueue.core.job import Batch, ClaimRequest, EnqueueResult, Outcome
from djqueue.core.options import JobOptions
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State
from djqueue.testing.clock import FakeClock

HOUR = 3_600_000
STEPS = [-HOUR, HOUR]


class Site:
    """An engine and its clock."""

    def __init__(self, **policy) -> None:
        self.clock = FakeClock()
        clock: Clock = self.clock
        self.engine = Engine(clock=clock, default_policy=QueuePolicy(**policy))

    def enqueue(self, *, delay: int | None = None, run_at: int | None = None, **options) -> EnqueueResult:
        batch = Batch("q", "job", JobOptions(**options), [b""], delay=delay, run_at=run_at)
        return self.engine.enqueue([batch])[0]

    def state(self, result: EnqueueResult) -> State | None:
        self.engine.sweep(60_000)
        return self.engine.reads.states("q", [result.id])[0]

    def claim(self) -> list:
        return self.engine.claim(ClaimRequest("w", 10, frozenset({"job"}))).jobs


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.mark.parametrize("step", STEPS)
def test_a_delayed_job_waits_for_its_delay_and_no_longer(site, step):
    result = site.enqueue(delay=60_000)
    site.clock.advance(10_000)
    site.clock.jump(step)

    assert site.state(result) is State.DELAYED
    site.clock.advance(49_000)
    assert site.claim() == []
    site.clock.advance(1_000)
    assert [claimed.id for claimed in site.claim()] == [result.id]


@pytest.mark.parametrize("taken_in", [False, True], ids=["enqueued", "taken in"])
@pytest.mark.parametrize("step", STEPS)
def test_a_job_enqueued_right_after_a_step_waits_for_its_delay_and_no_longer(site, step, taken_in):
    site.enqueue()
    site.clock.jump(step)
    if taken_in:
        now = site.clock.now()
        options = JobOptions(delay=60_000)
        site.engine.persistence.accept(
            [EngineJob("late", "q", "job", b"", options, State.DELAYED, now, now + 60_000)]
        )
        late = EnqueueResult("late", "queued", "q")
    else:
        late = site.enqueue(delay=60_000)

    site.clock.advance(59_000)
    assert site.state(late) is State.DELAYED
    site.clock.advance(1_000)
    assert site.state(late) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_delayed_job_keeps_its_delay_when_the_clock_is_set_several_times(site, step):
    result = site.enqueue(delay=60_000)
    for _ in range(3):
        site.clock.jump(step)
        assert site.state(result) is State.DELAYED
        site.clock.advance(10_000)
        site.clock.jump(-2 * step)
        assert site.claim() == []
    site.clock.advance(30_000)

    assert [claimed.id for claimed in site.claim()] == [result.id]


def test_a_job_that_is_due_at_a_time_of_day_is_due_then(site):
    result = site.enqueue(run_at=site.clock.now() + HOUR)
    site.clock.jump(-HOUR)
    site.clock.advance(HOUR)
    assert site.state(result) is State.DELAYED

    site.clock.jump(HOUR)
    assert site.state(result) is State.WAITING


def test_rescheduled_job_is_due_at_the_given_time(site):
    result = site.enqueue(delay=60_000)
    site.engine.jobs.reschedule("q", [result.id], site.clock.now() + 2 * HOUR)
    site.clock.jump(HOUR)
    site.engine.sweep(60_000)
    site.clock.advance(HOUR)

    assert site.state(result) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_a_backoff_keeps_its_length(site, step):
    result = site.enqueue()
    [claimed] = site.claim()
    site.engine.finish([Outcome("q", claimed.id, claimed.token, "retry", delay=30_000)])
    site.clock.jump(step)
    assert site.state(result) is State.DELAYED

    site.clock.advance(30_000)

    assert site.state(result) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_a_ttl_keeps_its_length(site, step):
    result = site.enqueue(ttl=60_000)
    site.clock.jump(step)
    site.clock.advance(59_000)
    assert site.state(result) is State.WAITING

    site.clock.advance(1_000)

    assert site.state(result) is State.FAILED


def test_a_claim_after_a_step_forward_finds_jobs_with_a_ttl(site):
    result = site.enqueue(ttl=60_000)
    site.clock.jump(HOUR)

    assert [claimed.id for claimed in site.claim()] == [result.id]


@pytest.mark.parametrize("step", STEPS)
def test_unique_key_is_released_when_its_ttl_ends(site, step):
    site.enqueue(unique_key="k", unique_ttl=60_000)
    site.clock.jump(step)
    site.engine.sweep(60_000)
    site.clock.advance(59_000)
    assert site.enqueue(unique_key="k").status == "duplicate"

    site.clock.advance(1_000)

    assert site.enqueue(unique_key="k").status == "queued"


def test_a_step_is_logged_once(site, caplog):
    site.enqueue(delay=60_000)
    site.clock.jump(-HOUR)
    for _ in range(3):
        site.engine.sweep(60_000)

    assert caplog.text.count("set back by 3600.0 s") == 1


def test_clock_drift_is_not_treated_as_a_step(site, caplog):
    result = site.enqueue(delay=60_000)
    for _ in range(100):
        site.clock.jump(500)
        site.engine.sweep(60_000)

    assert "clock" not in caplog.text
    assert site.state(result) is State.DELAYED


@pytest.mark.parametrize("step", STEPS)
def test_delay_given_right_after_a_step_keeps_its_length(site, step):
    site.clock.jump(step)
    result = site.enqueue(delay=60_000)
    site.clock.advance(59_000)
    assert site.state(result) is State.DELAYED

    site.clock.advance(1_000)

    assert site.state(result) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_backoff_that_begins_right_after_a_step_keeps_its_length(site, step):
    result = site.enqueue()
    [claimed] = site.claim()
    site.clock.jump(step)
    site.engine.finish([Outcome("q", claimed.id, claimed.token, "retry", delay=30_000)])
    site.clock.advance(29_000)
    assert site.state(result) is State.DELAYED

    site.clock.advance(1_000)

    assert site.state(result) is State.WAITING


def test_a_blocked_job_is_not_late_after_a_step_back(site):
    first = site.enqueue()
    plain = site.enqueue(depends_on=(("q", first.id),))
    delayed = site.enqueue(depends_on=(("q", first.id),), delay=60_000)
    site.clock.jump(-HOUR)
    [claimed] = site.claim()
    site.engine.finish([Outcome("q", claimed.id, claimed.token, "complete")])

    assert site.state(plain) is State.WAITING
    assert site.state(delayed) is State.DELAYED
    site.clock.advance(60_000)
    assert site.state(delayed) is State.WAITING


@pytest.mark.parametrize("step", STEPS)
def test_a_dead_letter_is_retried_after_its_delay(step):
    site = Site(dead_letters=DeadLetterPolicy(auto_retries=1, auto_retry_delay=60_000))
    result = site.enqueue()
    [claimed] = site.claim()
    site.engine.finish([Outcome("q", claimed.id, claimed.token, "fail")])
    site.clock.jump(step)
    site.clock.advance(59_000)
    assert site.state(result) is State.FAILED

    site.clock.advance(1_000)

    assert site.state(result) is State.WAITING


def test_time_passes_while_the_machine_is_suspended(site, caplog):
    result = site.enqueue(delay=60_000)
    site.clock.suspend(HOUR)

    assert site.state(result) is State.WAITING
    assert "clock" not in caplog.text
    site.clock.jump(-HOUR)
    site.engine.sweep(60_000)
    assert "set back by 3600.0 s" in caplog.text


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", [State.DELAYED, State.BLOCKED])
def test_a_job_that_was_due_when_it_was_enqueued_follows_the_clock(state, step):
    """Its producer's clock can be ahead of the scheduler's, so it may be delayed for a moment."""
    job = EngineJob("a", "q", "job", b"", JobOptions(), state, created_at=1_000, run_at=1_000)

    assert keep_lengths(job, step)
    assert job.run_at == 1_000 + step
    assert keep_lengths(job, -step)
    assert job.run_at == 1_000


def test_a_job_that_is_due_at_a_time_of_day_does_not_follow_the_clock():
    job = EngineJob("a", "q", "job", b"", JobOptions(), State.DELAYED, created_at=1_000, run_at=1_001)

    assert not keep_lengths(job, HOUR)
    assert job.run_at == 1_001
