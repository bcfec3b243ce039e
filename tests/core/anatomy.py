"""The insides of an engine: every job in exactly one place, and nothing left of those that are gone."""

from collections import Counter

from djqueue.core.engine import Engine
from djqueue.core.engine.groups import GROUP_WAITING
from djqueue.core.engine.queue import JobQueue
from djqueue.core.enginejob import EngineJob, size_of
from djqueue.core.policies import PREDECESSOR
from djqueue.core.states import LIVE, State


def check_engine(engine: Engine) -> None:
    """Assert that all structures of the engine agree."""
    active = [job for place in engine.context.processing for job in place.active.values()]
    for place in engine.context.processing:
        assert place.counts == Counter(job.queue for job in place.active.values())
        for token, job in place.active.items():
            assert job.token == token
            assert engine.context.processing_shard(job.id) is place
    for limiter in engine.context.limiters.values():
        assert limiter.state().used == sum(
            job.options.weight for job in active if engine.context.existing(job.queue).shared is limiter
        )
    for shard in engine.context.shards:
        for name, queue in shard.queues.items():
            assert engine.context.shard(name) is shard
            check_queue(queue, [job for job in active if job.queue == name])
        for key, dependents in shard.dependencies._dependents.items():
            there = shard.queues[key[0]].jobs[key[1]]
            assert there.has_dependents
            assert there.state in LIVE or there.state is State.FAILED
            for job in dependents:
                assert job.state is State.BLOCKED
                assert key in job.unmet
                assert engine.context.shard(job.queue).queues[job.queue].jobs[job.id] is job
        for key, holders in shard.dependencies.holders.items():
            there = shard.queues[key[0]].jobs[key[1]]
            assert there in shard.queues[key[0]].finished.held[there.state]
            for job in holders:
                assert job.state in LIVE
                assert key in job.options.depends_on
                assert engine.context.shard(job.queue).queues[job.queue].jobs[job.id] is job
        held = [queue.finished.held for queue in shard.queues.values()]
        assert sum(len(some) for both in held for some in both.values()) == len(shard.dependencies.holders)
    for shard in engine.context.shards:
        for queue in shard.queues.values():
            for job in queue.jobs.values():
                for key in (job.unmet or set()) - {PREDECESSOR}:
                    assert job in engine.context.shard(key[0]).dependencies.of(key)


def check_queue(queue: JobQueue, active: list[EngineJob]) -> None:
    named = [job for jobs in queue.subjects._jobs.values() for job in jobs.values()]
    assert sorted(job.id for job in named) == sorted(
        job.id for job in queue.jobs.values() if job.options.subject is not None
    )
    assert all(queue.is_there(job) for job in named)
    assert all(queue.subjects._jobs.values())
    ready = [
        job
        for named in queue.ready._by_name.values()
        for fifo in named._fifos.values()
        for generation, job in zip(*fifo, strict=True)
        if job.generation == generation
    ]
    delayed = [job for _, number, job in queue.delayed._heap if job.generation == number]
    group_waiting = [job for group in queue.groups._groups.values() for job in group.group_waiting]
    places = {
        State.WAITING: ready + group_waiting,
        State.DELAYED: delayed,
        State.ACTIVE: active,
        State.BLOCKED: [job for job in queue.jobs.values() if job.state is State.BLOCKED],
        State.FAILED: [queue.jobs[letter.id] for letter in queue.dead.letters()],
    }
    for state, jobs in places.items():
        assert {id(job) for job in jobs} == {id(job) for job in queue.jobs.values() if job.state is state}
        assert len(jobs) == len({id(job) for job in jobs})
    assert queue.ready.size == len(ready)
    assert queue.delayed.size == len(delayed)
    assert queue.groups.group_waiting == len(group_waiting)
    assert queue.blocked == len(places[State.BLOCKED])
    ended = Counter(job.state for job in queue.jobs.values())
    assert queue.finished.completed == ended[State.COMPLETED]
    assert queue.finished.cancelled == ended[State.CANCELLED]
    check_sizes(queue)
    for job_id, job in queue.jobs.items():
        assert (job.id, job.queue) == (job_id, queue.name)
        assert bool(job.unmet) == (job.state is State.BLOCKED)
        assert (job.token != 0) == (job.state is State.ACTIVE)
        assert (job.generation == GROUP_WAITING) == (job in group_waiting)
    check_groups(queue, ready + active, group_waiting)
    for key, (job, _) in queue.unique._owners.items():
        assert job.options.unique_key == key
        assert job.state in LIVE
        assert queue.jobs[job.id] is job
    successors = [job for job in queue.jobs.values() if PREDECESSOR in (job.unmet or ())]
    assert {id(job) for job, _ in queue.unique._successors.values()} == {id(job) for job in successors}
    for key, (job, behind) in queue.unique._successors.items():
        assert job.options.unique_key == behind.options.unique_key == key
        assert behind in active
    assert queue.dead._retries.keys() <= queue.jobs.keys()


def check_sizes(queue: JobQueue) -> None:
    """The counters are the sums."""
    finished = queue.finished
    assert queue.dead.bytes == sum(size_of(queue.jobs[letter.id]) for letter in queue.dead.letters())
    assert queue.dead._sizes.keys() <= {letter.id for letter in queue.dead.letters()}
    sums: Counter[State] = Counter()
    results = 0
    for job in queue.jobs.values() if finished.retention.measures else ():
        if job not in finished.held.get(job.state, ()):
            sums[job.state] += size_of(job)
            results += len(job.result or b"")
    assert (finished.completed_bytes, finished.cancelled_bytes) == (
        sums[State.COMPLETED],
        sums[State.CANCELLED],
    )
    assert finished.result_bytes == results
    assert finished._listed == sum(map(len, finished._results.values()))
    assert finished._postponed.keys() | finished._postponed_results.keys() <= {
        job for held in finished.held.values() for job in held
    }


def check_groups(queue: JobQueue, out: list[EngineJob], group_waiting: list[EngineJob]) -> None:
    counts = Counter(job.options.concurrency_key for job in out if job.options.concurrency_key is not None)
    names = {job.options.concurrency_key for job in out + group_waiting} - {None}
    assert queue.groups._groups.keys() == names
    for name, group in queue.groups._groups.items():
        own = queue.groups.own(name)
        limit = own.concurrency or queue.groups.limit
        weight = own.weight or queue.groups.weights.get(name, 1)
        assert group.active + len(group.ready) == counts[name]
        has_turn = not own.paused and counts[name] < limit and len(group.ready) < weight
        rests = name in queue.groups.rests
        assert rests or not has_turn or not group.group_waiting or is_at_most(queue, name, len(group.ready))
        assert not rests or (group.group_waiting and has_turn and (own.rate or queue.groups.rate))
    assert {name for _, name in queue.groups.rests._heap} >= queue.groups.rests._at.keys()
    assert queue.groups.rests._at.keys() <= names


def is_at_most(queue: JobQueue, name: str, ready: int) -> bool:
    """Whether the rate of a group never lets more of its jobs be ready."""
    rate = queue.groups.own(name).rate or queue.groups.rate
    return rate is not None and ready >= rate.capacity


def check_empty(engine: Engine) -> None:
    """Assert that an engine without jobs remembers nothing of those that it had."""
    for place in engine.context.processing:
        assert not place.active
        assert not place.counts
    for shard in engine.context.shards:
        assert len(shard.dependencies) == 0
        assert all(subscribers.keys() == {None} for subscribers in shard.subscribers.values())
        for queue in shard.queues.values():
            assert not queue.jobs
            assert not queue.ready._by_name
            assert not queue.ready.size
            assert not queue.delayed.size
            assert queue.delayed.next_due() is None
            assert len(queue.groups) == 0
            assert len(queue.groups.rests) == 0
            assert len(queue.groups._buckets) == 0
            assert len(queue.unique) == 0
            assert len(queue.dead) == 0
            assert not queue.dead._retries
            assert not queue._deadlines
            assert queue.finished.completed == queue.finished.cancelled == 0
            assert not queue.finished._records
            assert not queue.finished._results
            assert not queue.finished._postponed
            assert not queue.finished._postponed_results
            assert queue.finished.completed_bytes == queue.finished.cancelled_bytes == 0
            assert queue.finished.result_bytes == queue.dead.bytes == 0
