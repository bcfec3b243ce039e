"""A limiter that queues share, alone and in the engine."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from djqueue.core.engine import Engine
from djqueue.core.engine.limiters import TURN, SharedLimiter
from djqueue.core.job import Batch, ClaimRequest, Outcome
from djqueue.core.options import JobOptions
from djqueue.core.policies import LimiterPolicy, QueuePolicy, Rate
from djqueue.core.states import State
from djqueue.testing.clock import FakeClock

QUEUES = ("one", "two", "three")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def shared(clock):
    """Three permits, and no rate."""
    return SharedLimiter(LimiterPolicy(concurrency=3), clock)


def ask(shared, clock, queue, wanted=1, weight=1, woken=None):
    return shared.reserve(queue, wanted, weight, clock.monotonic(), set() if woken is None else woken)


def test_taken_slots_are_counted(shared, clock):
    assert ask(shared, clock, "one", 2) == 2
    assert ask(shared, clock, "two", 2) == 1
    state = shared.state()
    assert (state.used, state.free, state.waiting) == (3, 0, ("two",))


def test_rejected_queue_is_notified_when_capacity_is_free(shared, clock):
    ask(shared, clock, "one", 3)
    ask(shared, clock, "two")
    woken = set()
    shared.release(1, woken)

    assert woken == {"two"}
    assert ask(shared, clock, "one") == 0
    assert ask(shared, clock, "two") == 1


def test_turn_of_a_queue_lasts_for_a_limited_time(shared, clock):
    ask(shared, clock, "one", 3)
    ask(shared, clock, "two")
    shared.release(1, set())
    assert ask(shared, clock, "one") == 0
    assert shared.waits("one", clock.monotonic()) == [TURN]

    clock.advance(TURN)

    assert ask(shared, clock, "one") == 1
    assert shared.state().waiting == ()


def test_waiting_queues_are_notified_of_all_free_capacity(shared, clock):
    ask(shared, clock, "one", 3)
    ask(shared, clock, "two")
    ask(shared, clock, "three")
    woken = set()
    shared.release(1, woken)
    assert woken == {"two"}
    shared.release(1, woken)
    assert woken == {"two", "three"}
    assert [ask(shared, clock, queue) for queue in ("one", "three", "two")] == [0, 1, 1]


def test_served_queue_is_notified_without_a_reservation(shared, clock):
    ask(shared, clock, "one", 5)
    woken = set()
    shared.release(1, woken)

    assert woken == {"one"}
    assert ask(shared, clock, "two") == 1


def test_returned_capacity_goes_to_waiting_queues(shared, clock):
    ask(shared, clock, "one", 3)
    ask(shared, clock, "two")
    woken = set()
    shared.give_back("one", 2, 1, woken)

    assert woken == {"two"}
    assert shared.state().used == 1


def test_returned_tokens_are_available_again(clock):
    shared = SharedLimiter(LimiterPolicy(rate=Rate(2, 60_000)), clock)
    assert ask(shared, clock, "one", 5) == 2
    shared.give_back("one", 1, 1, set())

    assert shared.state().tokens == 1
    assert ask(shared, clock, "two", 5) == 1


def test_removed_queue_does_not_block_other_queues(shared, clock):
    ask(shared, clock, "one", 3)
    ask(shared, clock, "two")
    shared.forget("two", set())
    shared.release(1, set())

    assert ask(shared, clock, "one") == 1


def test_unconfigured_limiter_has_no_limits_until_set():
    engine = Engine(clock=FakeClock(), default_policy=QueuePolicy(limiter="new"))
    engine.limiters.set("new", None, 1)
    engine.enqueue([Batch(queue, "send", JobOptions(), [b""]) for queue in QUEUES])

    assert len(engine.claim(ClaimRequest("w", 9, frozenset({"send"}), None)).jobs) == 1


class SharingMachine(RuleBasedStateMachine):
    """Queues that share a limiter: never more than is allowed, and never nothing while there is room."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        policy = QueuePolicy(limiter="l", lease=500)
        self.engine = Engine(clock=self.clock, policies=dict.fromkeys(QUEUES, policy), cores=1)
        self.limits = (None, None)
        self.tokens = 0.0
        self.claims = []
        self.set_limits(None, 3)

    @rule(
        rate=st.sampled_from([None, Rate(2, 1_000), Rate(5, 1_000)]),
        concurrency=st.sampled_from([None, 1, 3, 5]),
    )
    def set_limits(self, rate, concurrency):
        if rate is not None and rate != self.limits[0]:
            self.tokens = float(rate.capacity)
        self.limits = (rate, concurrency)
        self.engine.limiters.set("l", rate, concurrency)

    @rule(queue=st.sampled_from(QUEUES), many=st.integers(1, 4), weight=st.sampled_from([1, 1, 1, 2, 4]))
    def enqueue(self, queue, many, weight):
        self.engine.enqueue([Batch(queue, "send", JobOptions(weight=weight, max_stalls=9), [b""] * many)])

    @rule(queues=st.none() | st.tuples(st.sampled_from(QUEUES)), slots=st.integers(1, 6))
    def claim(self, queues, slots):
        used = self.engine.limiters.state("l").used
        jobs = self.engine.claim(ClaimRequest("w", slots, frozenset({"send"}), queues)).jobs
        rate, most = self.limits
        for job in jobs:
            weight = job.options.weight
            assert most is None or used + min(weight, most) <= most
            used += weight
        if rate is not None:
            self.tokens -= len(jobs)
            assert self.tokens > -0.001
        self.claims += jobs

    @rule(number=st.integers(0, 20), kind=st.sampled_from(["complete", "retry", "release", "fail", "cancel"]))
    def finish(self, number, kind):
        if self.claims:
            job = self.claims.pop(number % len(self.claims))
            self.engine.finish([Outcome(job.queue, job.id, job.token, kind)])

    @rule(milliseconds=st.sampled_from([10, 100, TURN, 600]))
    def pass_time(self, milliseconds):
        self.clock.advance(milliseconds)
        if (rate := self.limits[0]) is not None:
            self.tokens = min(rate.capacity, self.tokens + rate.capacity * milliseconds / rate.per)
        self.engine.sweep(60_000)

    @rule(queue=st.sampled_from(QUEUES))
    def obliterate(self, queue):
        self.engine.queues.obliterate(queue, force=True)

    @rule()
    def something_runs_when_everybody_asks(self):
        """After a turn has expired, its capacity is free for other queues."""
        self.clock.advance(TURN)
        if (rate := self.limits[0]) is not None:
            self.tokens = min(rate.capacity, self.tokens + rate.capacity * TURN / rate.per)
            if self.tokens < 1:
                return
        waits = any(self.engine.reads.counts(queue)[State.WAITING] for queue in QUEUES)
        before = len(self.claims)
        idle = not self.engine.limiters.state("l").used
        self.claim(None, 1)
        assert not (waits and idle) or len(self.claims) == before + 1

    @invariant()
    def used_capacity_equals_active_weights(self):
        active = [record for queue in QUEUES for record in self.engine.reads.page(queue, State.ACTIVE, 1_000)]
        assert self.engine.limiters.state("l").used == sum(record.options.weight for record in active)


@pytest.mark.parametrize("examples", [40, pytest.param(150, marks=pytest.mark.thorough)])
def test_queues_share_the_capacity_of_a_limiter(examples):
    run_state_machine_as_test(
        SharingMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
