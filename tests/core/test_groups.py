"""Groups against a model: so many of each out at once, the others in order of arrival."""

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.groups import PARKED, Groups
from tests.core.making import make_job

steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "front", "leave", "step back", "remove", "resize"]),
        st.sampled_from(["g", "h"]),
        st.integers(0, 100),
    ),
    max_size=60,
)


@given(st.integers(1, 3), steps)
@settings(max_examples=200, deadline=None)
def test_no_more_than_the_limit_are_out_and_the_rest_wait_in_order(limit, steps):
    groups = Groups(limit)
    out: dict[str, list] = {"g": [], "h": []}
    parked: dict[str, list] = {"g": [], "h": []}
    for verb, name, pick in steps:
        if verb in ("admit", "front"):
            admit(groups, make_job(group=name), out[name], parked[name], front=verb == "front")
        elif verb == "leave" and out[name]:
            freed = groups.leave(out[name].pop(pick % len(out[name])))
            expect(freed, out[name], parked[name], groups.limit)
        elif verb == "step back" and out[name]:
            job = out[name].pop(pick % len(out[name]))
            groups.step_back(job)
            admit(groups, job, out[name], parked[name], front=True)
        elif verb == "remove" and parked[name]:
            job = parked[name].pop(pick % len(parked[name]))
            groups.remove(job)
            assert job.generation == 0
        elif verb == "resize":
            freed = groups.resize(pick % 4 + 1)
            for each in ("g", "h"):
                while parked[each] and len(out[each]) < groups.limit:
                    assert parked[each][0] in freed
                    out[each].append(parked[each].pop(0))
            assert all(job.generation == 0 for job in freed)
        assert groups.parked == len(parked["g"]) + len(parked["h"])
        assert groups._groups.keys() == {each for each in out if out[each] or parked[each]}
        for each, group in groups._groups.items():
            assert group.out == len(out[each])
            assert list(group.parked) == parked[each]


def admit(groups, job, out, parked, *, front):
    may = len(out) < groups.limit
    assert groups.admit(job, front=front) == may
    if may:
        out.append(job)
    else:
        parked.insert(0 if front else len(parked), job)
        assert job.generation == PARKED


def expect(freed, out, parked, limit):
    if parked and len(out) < limit:
        assert freed is parked.pop(0)
        assert freed.generation == 0
        out.append(freed)
    else:
        assert freed is None
