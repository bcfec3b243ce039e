"""The facts that explain why a job is not running: see `core.explain`."""

from collections.abc import Set

from ..enginejob import EngineJob
from ..explain import MAX_BEFORE, SHOWN, BlockingJob, Dependency, Facts
from ..groups import GROUP_WAITING
from ..options import JobKey
from ..queue import JobQueue
from ..states import PENDING, State
from ..unique import PREDECESSOR
from .context import EngineContext


class FactFinder:
    """Reads one job and everything that may keep it waiting."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def facts(self, queue: str, job_id: str) -> Facts | None:
        """Return what is known of a job; None if it is unknown."""
        shard = self._context.shard(queue)
        with shard.lock:
            job_queue = shard.find(queue)
            job = job_queue.jobs.get(job_id)
            if job is None:
                return None
            now, tick = self._context.clock.now(), self._context.clock.monotonic()
            with self._context.processing_shard(job_id).lock:
                # A plain job completes under this lock alone.
                facts = Facts(now, queue, job_id, job.name, job.state, job.run_at, worker=job.worker)
                if job.state is State.ACTIVE:
                    return facts._replace(lease_until=now + max(0, job.lease_until - tick))
            if facts.state not in PENDING:
                return facts
            unmet = sorted(job.unmet or ())
            facts = self._grouped(job_queue, job, self._limits(job_queue, job, facts, tick))
            predecessor = self._predecessor(job_queue, job, now) if PREDECESSOR in unmet else ()
        # Jobs of other queues are read a moment later, without this lock.
        others = tuple(self._dependency(key) for key in unmet if key != PREDECESSOR)
        return facts._replace(unmet=(*predecessor, *others))

    def _limits(self, queue: JobQueue, job: EngineJob, facts: Facts, tick: int) -> Facts:
        bucket = queue.limiter.bucket
        wait = bucket.wait(tick) if bucket is not None else 0
        active = self._active_of({queue.name})
        extra = self._context.extra_in(queue.name)
        is_ready = job.state is State.WAITING and job.generation != GROUP_WAITING
        return self._shared(queue, facts)._replace(
            paused=queue.paused,
            next_token_at=facts.at + wait if wait else None,
            weight=job.options.weight,
            concurrency=queue.limiter.concurrency,
            used=len(active) + extra,
            holders=_first(active),
            before=queue.ready.before(job, MAX_BEFORE) if is_ready else None,
        )

    def _shared(self, queue: JobQueue, facts: Facts) -> Facts:
        shared = queue.shared
        if shared is None:
            return facts
        state, wait = shared.state(), shared.next_token()
        facts = facts._replace(
            limiter=queue.policy.limiter,
            limiter_next_at=facts.at + wait if wait else None,
            limiter_limit=state.concurrency,
            limiter_used=state.used,
        )
        if state.free is None:
            return facts
        every = [one for shard in self._context.shards for one in list(shard.queues.values())]
        active = self._active_of({one.name for one in every if one.shared is shared})
        return facts._replace(limiter_holders=_first(active, queue.name))

    def _grouped(self, queue: JobQueue, job: EngineJob, facts: Facts) -> Facts:
        group = job.options.group
        if group is None or not queue.is_grouped:
            return facts
        active = [other for other in self._active_of({queue.name}) if other.options.group == group]
        facts = facts._replace(
            group=group,
            group_paused=queue.groups.own(group).paused,
            group_limit=queue.groups.limit_of(group),
            group_active=len(active),
            group_holders=_first(active),
        )
        if job.state is not State.WAITING or job.generation != GROUP_WAITING:
            return facts
        rests = queue.groups.rests.of(group)
        if rests is not None:
            facts = facts._replace(group_next_at=facts.at + max(0, rests - self._context.clock.monotonic()))
        return facts._replace(is_group_waiting=True, before=min(MAX_BEFORE, queue.groups.before(job)))

    def _active_of(self, names: Set[str]) -> list[EngineJob]:
        found: list[EngineJob] = []
        for processing in self._context.processing:
            with processing.lock:
                found += [job for job in processing.active.values() if job.queue in names]
        return found

    def _predecessor(self, queue: JobQueue, job: EngineJob, now: int) -> tuple[Dependency, ...]:
        key = job.options.unique_key
        owner = queue.unique.owner(key, now) if key is not None else None
        return () if owner is None else (Dependency(queue.name, owner.id, owner.state),)

    def _dependency(self, key: JobKey) -> Dependency:
        queue = self._context.existing(key[0])
        job = queue.jobs.get(key[1]) if queue is not None else None
        return Dependency(*key, job.state if job is not None else None)


def _first(jobs: list[EngineJob], here: str | None = None) -> tuple[BlockingJob, ...]:
    """Return the jobs that were claimed first, without their queue if it is `here` or `here` is None."""
    jobs.sort(key=lambda job: job.token)
    return tuple(
        BlockingJob(job.id, job.worker, "" if here in (None, job.queue) else job.queue)
        for job in jobs[:SHOWN]
    )
