"""Flows over several queues: no job waits forever, whichever process dies between two commands."""

import asyncio
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djqueue.core.states import State
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.flows import FLOW, a_flow, worked_off
from djqueue.testing.factories import UPSTREAM, batch, enqueue_many, state

from .graphs import Graph
from .mortal import Place

EXAMPLES = 20


@pytest.fixture(params=["redis_server", pytest.param("redis_cluster", marks=pytest.mark.thorough)])
def place(request):
    servers = request.getfixturevalue(request.param)
    servers.clean()
    with closing(Place(servers, FakeClock())) as made:
        yield made


def states(storage):
    return [state(storage, job_id, queue) for queue, job_id in FLOW]


# Deaths of producers.


def test_flow_of_a_dead_producer_contains_no_job_without_its_dependencies(place):
    found = []
    for storage, _, died in place.deaths(lambda _: None, lambda storage, _: storage.enqueue(a_flow())):
        storage.sweep()

        there = states(storage)
        found.append(sum(one is not None for one in there))
        assert there[: found[-1]] == [State.WAITING, State.WAITING, State.BLOCKED, State.BLOCKED][: found[-1]]
        assert died or found[-1] == 4
    assert found == sorted(found)
    assert set(found) == {0, 2, 3, 4}


def test_partial_flow_of_a_dead_producer_completes(place):
    for storage, _, _ in place.deaths(lambda _: None, lambda storage, _: storage.enqueue(a_flow())):
        storage.sweep()
        there = sum(one is not None for one in states(storage))

        done = [job_id for some in worked_off(storage) for job_id in some]

        assert sorted(done) == sorted(["a", "b", "c", "d"][:there])


@pytest.mark.parametrize("meanwhile", [worked_off, lambda _: []], ids=["worked off", "left alone"])
def test_repeated_enqueue_completes_a_partial_flow(place, meanwhile):
    for storage, _, _ in place.deaths(lambda _: None, lambda storage, _: storage.enqueue(a_flow())):
        done = meanwhile(storage)

        storage.enqueue(a_flow())

        assert done + worked_off(storage) == [{"a", "b"}, {"c"}, {"d"}]


def test_async_enqueue_keeps_the_order_of_a_flow(place):
    storage = place.storage()

    answers = asyncio.run(storage.aenqueue(a_flow()))

    assert [(answer.queue, answer.id) for answer in answers] == FLOW
    assert worked_off(storage) == [{"a", "b"}, {"c"}, {"d"}]


def test_job_with_many_dependencies_waits_for_all_whenever_its_producer_dies(place):
    def prepare(storage):
        return enqueue_many(storage, 150, queue=UPSTREAM)

    def act(storage, ids):
        needs = tuple((UPSTREAM, job_id) for job_id in ids)
        storage.enqueue([batch(ids=["parent"], depends_on=needs)])

    for storage, ids, died in place.deaths(prepare, act):
        storage.sweep()

        there = state(storage, "parent")
        assert there is State.BLOCKED or (died and there is None)
        assert worked_off(storage, 150) == [set(ids), *([{"parent"}] if there else [])]


# Random graphs.


def test_no_job_of_a_random_graph_waits_forever_when_processes_die(place):
    storage, mortal = place.storage(), place.mortal()
    examples = EXAMPLES // len(getattr(place.servers, "nodes", [place.servers]))

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=True))
    def run(random):
        Graph(place.clock, mortal, storage, random).run()

    run()
