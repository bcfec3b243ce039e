"""Groups compared with a model: weights, limits, rates and order."""

from fractions import Fraction
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.engine.groups import GROUP_WAITING, GroupBuckets, Groups, Times
from djqueue.core.policies import KeyLimit, Rate
from djqueue.testing.clock import FakeClock
from tests.core.making import make_job

VERBS = ["admit", "front", "claim", "leave", "readmit", "displace", "remove", "limit", "weigh", "pause"]
steps = st.lists(
    st.tuples(st.sampled_from(["admit", "claim", *VERBS]), st.sampled_from(["g", "h"]), st.integers(0, 100)),
    max_size=60,
)


class Model:
    """One group as lists."""

    def __init__(self):
        self.active, self.ready, self.group_waiting = [], [], []
        self.own = KeyLimit()

    def room(self):
        return 0 if self.own.paused else (self.own.concurrency or 2) - len(self.active)

    def has_turn(self):
        return len(self.ready) < min(self.room(), self.own.weight or 1)

    def expect(self, freed):
        expected = []
        while self.group_waiting and self.has_turn():
            expected.append(self.group_waiting.pop(0))
            self.ready.append(expected[-1])
        assert freed == expected
        assert not any(job.generation for job in freed)


def regroup(groups, name, model):
    room = max(0, model.room())
    held = groups.hold_back(name)
    assert held == model.ready[room:][::-1]
    for job in held:
        groups.park(job)
        model.ready.remove(job)
        model.group_waiting.insert(0, job)
    model.expect(groups.advance(name))


@given(steps)
@settings(max_examples=300, deadline=None)
def test_groups_respect_weight_and_limit_and_keep_order(steps):
    groups = Groups(FakeClock().monotonic, 2)
    models = {"g": Model(), "h": Model()}
    for verb, name, pick in steps:
        model = models[name]
        if verb in ("admit", "front"):
            job, front = make_job(concurrency_key=name), verb == "front"
            may = not model.group_waiting and model.has_turn()
            assert groups.admit(job, front=front) == may
            (model.ready if may else model.group_waiting).insert(0 if front else 1_000, job)
        elif verb == "claim" and model.ready:
            job = model.ready.pop(0)
            model.active.append(job)
            model.expect(groups.claimed(job))
        elif verb == "leave" and model.active:
            model.expect(groups.leave(model.active.pop(pick % len(model.active)), was_ready=False))
        elif verb == "displace" and model.ready:
            model.expect(groups.leave(model.ready.pop(pick % len(model.ready)), was_ready=True))
        elif verb == "readmit" and model.active:
            job = model.active.pop(pick % len(model.active))
            may = len(model.ready) < model.room()
            assert groups.readmit(job) == may
            (model.ready if may else model.group_waiting).insert(0, job)
        elif verb == "remove" and model.group_waiting:
            job = model.group_waiting.pop(pick % len(model.group_waiting))
            groups.remove(job)
            assert job.generation == 0
        elif verb == "limit":
            model.own = model.own._replace(concurrency=pick % 4 or None)
            groups.set_own(name, model.own)
            regroup(groups, name, model)
        elif verb == "weigh":
            model.own = model.own._replace(weight=pick % 4 or None)
            groups.set_own(name, model.own)
            regroup(groups, name, model)
        elif verb == "pause":
            model.own = model.own._replace(paused=pick % 2 == 0)
            groups.set_own(name, model.own)
            regroup(groups, name, model)
        assert groups.group_waiting == sum(len(each.group_waiting) for each in models.values())
        there = {name for name, each in models.items() if each.active or each.ready or each.group_waiting}
        assert groups._groups.keys() == there
        assert groups.overrides() == {
            name: each.own for name, each in models.items() if each.own != KeyLimit()
        }
        for each in there:
            assert groups._groups[each].active == len(models[each].active)
            assert list(groups._groups[each].ready) == models[each].ready
            assert list(groups._groups[each].group_waiting) == models[each].group_waiting
            assert all(job.generation == GROUP_WAITING for job in models[each].group_waiting)


rates = st.builds(Rate, st.integers(1, 5), st.sampled_from([1, 7, 300, 1_000]))


@given(rates, st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=40))
@settings(max_examples=200, deadline=None)
def test_token_bucket_allows_a_burst_and_refills_evenly(rate, steps):
    buckets, tick = GroupBuckets(), 1_000
    tokens, capacity = Fraction(rate.capacity), Fraction(rate.capacity)
    for elapsed, wants in steps:
        tick += elapsed
        tokens = min(capacity, tokens + Fraction(elapsed * rate.capacity, rate.per))
        buckets.forget_full(tick)
        assert buckets.available("g", rate, tick) == int(tokens)
        for wanted in range(1, rate.capacity + 1):
            missing = max(Fraction(0), (wanted - tokens) * rate.per / rate.capacity)
            assert buckets.available_at("g", rate, wanted, tick) == tick + ceil(missing)
        if wants and tokens >= 1:
            buckets.consume("g", rate, tick)
            tokens -= 1
        assert len(buckets) == (tokens < capacity)


def test_each_group_and_rate_has_its_own_token_bucket():
    buckets, rate = GroupBuckets(), Rate(1, 1_000)
    buckets.consume("g", rate, 0)

    assert buckets.available("g", rate, 0) == 0
    assert buckets.available("h", rate, 0) == 1
    assert buckets.available("g", Rate(3, 1_000), 0) == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 50)), max_size=200))
def test_group_wait_times_are_ordered_and_leave_nothing_behind(steps):
    times, model = Times(), {}
    for name, at in steps:
        if at is None:
            times.drop(name)
            model.pop(name, None)
        else:
            times.set(name, at)
            model[name] = at
        assert (len(times), name in times) == (len(model), at is not None)
        assert times.next() == min(model.values(), default=None)
        assert len(times._heap) <= 2 * len(model) + 64
    due = times.due(25)
    assert sorted(due) == sorted(name for name, at in model.items() if at <= 25)
    assert due == sorted(due, key=lambda name: (model[name], name))
    assert times.next() == min((at for at in model.values() if at > 25), default=None)
