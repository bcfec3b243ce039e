"""Groups against a model: one of each ready, so many out at once, the others in order of arrival."""

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.groups import PARKED, GroupLimit, Groups
from tests.core.making import make_job

VERBS = ["admit", "front", "claim", "leave", "readmit", "displace", "remove", "limit", "pause"]
steps = st.lists(
    st.tuples(st.sampled_from(["admit", "claim", *VERBS]), st.sampled_from(["g", "h"]), st.integers(0, 100)),
    max_size=60,
)


class Model:
    """One group as lists."""

    def __init__(self):
        self.active, self.ready, self.parked = [], [], []
        self.own = GroupLimit()

    def has_room(self):
        limit = self.own.concurrency or 2
        return not self.own.paused and len(self.active) + len(self.ready) < limit

    def expect(self, freed):
        if self.parked and not self.ready and self.has_room():
            assert freed is self.parked.pop(0)
            assert freed.generation == 0
            self.ready.append(freed)
        else:
            assert freed is None


def regroup(groups, name, model):
    room = 0 if model.own.paused else max(0, (model.own.concurrency or 2) - len(model.active))
    held = groups.hold_back(name)
    assert held == model.ready[room:][::-1]
    for job in held:
        groups.park(job)
        model.ready.remove(job)
        model.parked.insert(0, job)
    model.expect(groups.advance(name))


@given(steps)
@settings(max_examples=300, deadline=None)
def test_one_is_ready_no_more_than_the_limit_are_out_and_the_rest_wait_in_order(steps):
    groups = Groups(2)
    models = {"g": Model(), "h": Model()}
    for verb, name, pick in steps:
        model = models[name]
        if verb in ("admit", "front"):
            job, front = make_job(group=name), verb == "front"
            may = not model.ready and model.has_room()
            assert groups.admit(job, front=front) == may
            (model.ready if may else model.parked).insert(0 if front else 1_000, job)
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
            may = model.has_room()
            assert groups.readmit(job) == may
            (model.ready if may else model.parked).insert(0, job)
        elif verb == "remove" and model.parked:
            job = model.parked.pop(pick % len(model.parked))
            groups.remove(job)
            assert job.generation == 0
        elif verb == "limit":
            model.own = model.own._replace(concurrency=pick % 4 or None)
            groups.set_own(name, model.own)
            regroup(groups, name, model)
        elif verb == "pause":
            model.own = model.own._replace(paused=pick % 2 == 0)
            groups.set_own(name, model.own)
            regroup(groups, name, model)
        assert groups.parked == sum(len(each.parked) for each in models.values())
        there = {name for name, each in models.items() if each.active or each.ready or each.parked}
        assert groups._groups.keys() == there
        assert groups.said() == {name: each.own for name, each in models.items() if each.own != GroupLimit()}
        for each in there:
            assert groups._groups[each].active == len(models[each].active)
            assert groups._groups[each].ready == models[each].ready
            assert list(groups._groups[each].parked) == models[each].parked
            assert all(job.generation == PARKED for job in models[each].parked)
