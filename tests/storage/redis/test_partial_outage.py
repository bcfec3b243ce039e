"""A cluster node that is away stops only the queues that it has."""

import asyncio
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest

from djqueue import Worker
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Finished, Outcome
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import NAME, batch, claim_one, completing, enqueue, request, state
from tests import servers
from tests.clocks import AheadClock
from tests.proxies import SlowProxy
from tests.support import eventually

pytestmark = pytest.mark.redis

SHORT = {"TIMEOUT": 1}


class Split:
    """Queues on two nodes: `lost` is on the one that will be frozen, `live` on another."""

    def __init__(self, cluster: servers.RedisCluster, node: servers.RedisServer) -> None:
        names = [f"queue-{number}" for number in range(100)]
        self.node = node
        self.lost = next(name for name in names if cluster.node_of(f"{{q:{name}}}") is node)
        self.live = next(name for name in names if cluster.node_of(f"{{q:{name}}}") is not node)


@pytest.fixture
def storage(cluster_options: dict[str, Any]) -> Iterator[RedisStorage]:
    made = RedisStorage(**{**cluster_options, **SHORT})
    yield made
    made.close()


@pytest.fixture
def split(redis_cluster: servers.RedisCluster) -> Split:
    """The lost node has the names of the queues and the workers, too."""
    return Split(redis_cluster, redis_cluster.node_of("{djqueue}"))


def report(storage: RedisStorage, *outcomes: Outcome, slots: int = 0) -> Finished:
    """Report as a worker does."""
    return asyncio.run(storage.afinish(outcomes, request(slots) if slots else None))


def test_claim_from_all_queues_finds_the_jobs_of_the_live_nodes(storage: RedisStorage, split: Split) -> None:
    for queue in (split.lost, split.live):
        enqueue(storage, queue=queue)
    assert claim_one(storage, queues=None).queue in (split.lost, split.live)
    enqueue(storage, queue=split.live)

    with split.node.frozen():
        assert [job.queue for job in report(storage, slots=1).claims.jobs] == [split.live]


def test_outcomes_for_a_lost_node_do_not_delay_the_others(storage: RedisStorage, split: Split) -> None:
    claimed = {}
    for queue in (split.lost, split.live):
        enqueue(storage, queue=queue)
        claimed[queue] = claim_one(storage, queues=(queue,))
    waiting = enqueue(storage, queue=split.live)
    outcomes = [completing(claimed[split.lost]), completing(claimed[split.live])]
    assert sorted(storage.queues.names()) == sorted(claimed)

    with split.node.frozen():
        finished = report(storage, *outcomes, slots=1)

        assert finished.accepted == [None, True]
        assert [job.id for job in finished.claims.jobs] == [waiting]
        with pytest.raises(StorageUnavailableError):
            report(storage, outcomes[0])
    eventually(lambda: report_when_back(storage, outcomes[0]))


def report_when_back(storage: RedisStorage, outcome: Outcome) -> bool:
    try:
        return report(storage, outcome).accepted == [True]
    except StorageUnavailableError:
        return False


def test_sweep_reaches_the_queues_of_the_live_nodes(
    storage: RedisStorage, split: Split, cluster_options: dict[str, Any]
) -> None:
    enqueue(storage, queue=split.lost)
    job_id = enqueue(storage, queue=split.live)
    assert claim_one(storage, queues=(split.live,)).id == job_id
    clock = AheadClock()
    later = RedisStorage(**{**cluster_options, **SHORT}, clock=clock)
    try:
        later.sweep()
        clock.ahead = 600_000

        with split.node.frozen():
            with pytest.raises(StorageUnavailableError):
                later.sweep()

            assert state(storage, job_id, split.live) is State.WAITING
    finally:
        later.close()


def test_worker_of_all_queues_goes_on_while_a_node_is_lost(storage: RedisStorage, split: Split) -> None:
    done = Event()
    for queue in (split.lost, split.live):
        enqueue(storage, queue=queue, name="warm up")
    handlers = {"warm up": lambda job: None, NAME: lambda job: done.set()}
    with Worker(storage, handlers=handlers, concurrency=2, maintain=False):
        eventually(lambda: storage.reads.counts(split.live)[State.COMPLETED] == 1)
        with split.node.frozen():
            enqueue(storage, queue=split.live)
            eventually(done.is_set)


def test_outcome_is_accepted_while_the_queue_of_a_dependent_is_lost(
    storage: RedisStorage, split: Split
) -> None:
    needed = enqueue(storage, queue=split.live)
    dependent = enqueue(storage, queue=split.lost, depends_on=((split.live, needed),))
    claimed = claim_one(storage, queues=(split.live,))

    with split.node.frozen():
        for _ in range(2):
            finished = report(storage, completing(claimed))
        assert state(storage, needed, split.live) is State.COMPLETED
        assert finished.accepted == [False]  # the first report was accepted

    def is_freed() -> bool:
        try:
            storage.sweep()
            return state(storage, dependent, split.lost) is State.WAITING
        except StorageUnavailableError:
            return False

    eventually(is_freed)


def test_job_with_thousands_of_dependencies_is_enqueued_over_a_slow_line(
    redis_options: dict[str, Any], redis_server: servers.RedisServer
) -> None:
    with SlowProxy(redis_server.port) as proxy:
        near = RedisStorage(**redis_options)
        far = RedisStorage(**{**redis_options, **SHORT, "URL": proxy.url})
        try:
            needed = [result.id for result in near.enqueue([batch(3_000, queue="first")])]
            far.connect()
            proxy.slow_down(0.02)

            [result] = far.enqueue(
                [batch(queue="last", depends_on=tuple(("first", job_id) for job_id in needed))]
            )

            assert result.status == "queued"
            near.sweep()
            assert state(near, result.id, "last") is State.BLOCKED
        finally:
            far.close()
            near.close()
