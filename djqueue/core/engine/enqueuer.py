"""Enqueues: duplicates, unique keys, and the room that a queue has."""

from collections.abc import Sequence
from dataclasses import replace

from ..enginejob import EngineJob
from ..errors import OptionError, QueueFullError
from ..flow import Substitutes, outside
from ..job import Batch, EnqueueResult
from ..policies import DEFAULT_POLICY, full_error, succession
from ..states import REUSABLE, State
from ..threads import gc_paused
from .changes import PendingChanges
from .context import EngineContext
from .queue import JobQueue
from .settlement import Settlement


class Enqueuer:
    """Adds jobs to the queues of an engine."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self._context = context
        self._settlement = settlement

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs: see `Engine.enqueue`."""
        self._check(batches)
        with gc_paused(sum(len(batch.payloads) for batch in batches)):
            if len(batches) == 1:
                return self._enqueue(batches[0])
            results: list[EnqueueResult] = []
            substitutes = Substitutes()
            for batch in batches:
                answers = self._enqueue(substitutes.in_(batch))
                substitutes.note(batch, answers)
                results += answers
        return results

    def _check(self, batches: Sequence[Batch]) -> None:
        context = self._context
        for batch in batches:
            batch.check_ids()
            if batch.queue in context.policies or context.default_policy is not DEFAULT_POLICY:
                context.policy(batch.queue).check_batch(batch)
        for name, job_id in outside(batches):
            queue = context.existing(name)
            if queue is None or job_id not in queue.jobs:
                raise OptionError(f"depends_on: queue {name!r} has no job {job_id!r}")

    def _enqueue(self, batch: Batch) -> list[EnqueueResult]:
        shard = self._context.shard(batch.queue)
        changes = PendingChanges(self._context.clock.now())
        added: list[EngineJob] = []
        with shard.lock:
            queue = shard.queue(batch.queue)
            if queue.policy.max_size is not None and queue.drops is None and batch.options.rejected is None:
                _check_room(queue, batch, changes.now)
            if _is_uniform(batch, queue) and queue.drops is None:
                answers = self._enqueue_uniform(queue, batch, changes)
            else:
                answers, added = self._enqueue_each(queue, batch, changes)
        self._settlement.settle(changes)
        if batch.options.depends_on:
            for job in added:
                self._settlement.bind(job, batch.options.depends_on)
        return answers

    def _enqueue_uniform(self, queue: JobQueue, batch: Batch, changes: PendingChanges) -> list[EnqueueResult]:
        name, options, label, now = batch.name, batch.options, queue.name, changes.now
        ids = batch.ids or self._context.ids.many(len(batch.payloads), now)
        jobs = [
            EngineJob(job_id, label, name, payload, options, State.WAITING, now, now)
            for job_id, payload in zip(ids, batch.payloads, strict=True)
        ]
        queue.jobs.update(zip(ids, jobs, strict=True))
        if options.subject is not None:
            queue.subjects.add(jobs, options.subject)
        queue.ready.extend(jobs, name, options.priority)
        queue.tally.enqueued += len(jobs)
        if self._context.journal is not None:
            self._context.journal.added(jobs)
        if queue.observed:
            for job in jobs:
                queue.note(job, "enqueued", changes)
        changes.woken.add(label)
        new = tuple.__new__
        return [new(EnqueueResult, (job_id, "queued", label, None, None, None)) for job_id in ids]

    def _enqueue_each(
        self, queue: JobQueue, batch: Batch, changes: PendingChanges
    ) -> tuple[list[EnqueueResult], list[EngineJob]]:
        options = batch.options if not batch.delay else replace(batch.options, delay=batch.delay)
        now = changes.now
        run_at = batch.run_at if batch.run_at is not None else now + (batch.delay or 0)
        ids = batch.ids if batch.ids is not None else self._context.ids.many(len(batch.payloads), now)
        results: list[EnqueueResult] = []
        added: list[EngineJob] = []
        for job_id, payload in zip(ids, batch.payloads, strict=True):
            existing = queue.jobs.get(job_id)
            # Read once: a job that is active now may have completed a moment later.
            state = existing.state if existing is not None else None
            if existing is not None and options.rejected is not None:
                results.append(EnqueueResult(job_id, "rejected", queue.name, state))
                continue
            # The same generated id is the same enqueue, whose answer was lost.
            if existing is not None and (batch.fresh or state not in REUSABLE):
                done = state is State.COMPLETED
                status, result = ("completed", existing.result) if done else ("duplicate", None)
                results.append(EnqueueResult(job_id, status, queue.name, state, result))
                continue
            job = EngineJob(job_id, queue.name, batch.name, payload, options, State.WAITING, now, run_at)
            if options.rejected is not None:
                if self._context.journal is not None:
                    self._context.journal.added([job])
                queue.reject(job, changes)
                results.append(EnqueueResult(job_id, "rejected", queue.name))
                continue
            replaced = behind = None
            if options.unique_key is not None:
                owner = queue.unique.owner(options.unique_key, now)
                if owner is not None:
                    handover = queue.hand_over_key(job, owner, changes)
                    if handover is None:
                        results.append(EnqueueResult(owner.id, "duplicate", queue.name, owner.state))
                        continue
                    replaced, behind = handover.replaced, handover.behind
            grows = queue.drops is not None and replaced is None
            if grows and not queue.make_room(options.priority, changes):
                # This is the first job of the batch: an earlier one could be dropped for it.
                raise _full(queue, len(batch.payloads))
            if existing is not None:
                job.has_dependents = queue.make_way(existing, changes)
            queue.admit(job, now, behind=behind)
            queue.tally.enqueued += 1
            added.append(job)
            queue.note(job, "enqueued", changes)
            replaced_id = replaced.id if replaced is not None else None
            results.append(EnqueueResult(job_id, "queued", queue.name, replaced=replaced_id))
        if added:
            changes.woken.add(queue.name)
            if self._context.journal is not None:
                self._context.journal.added(added)
        return results, added


def _check_room(queue: JobQueue, batch: Batch, now: int) -> None:
    """Raise QueueFullError if the queue has no room for a batch's new jobs."""
    limit = queue.policy.max_size
    assert limit is not None
    room = limit - queue.pending
    if len(batch.payloads) > room and _growth(queue, batch, now) > max(0, room):
        raise _full(queue, len(batch.payloads))


def _growth(queue: JobQueue, batch: Batch, now: int) -> int:
    """Return how many more jobs would wait after a batch, without duplicates and replacements."""
    key = batch.options.unique_key
    new = len(batch.payloads)
    if batch.ids is not None:
        known = ((job_id, queue.jobs.get(job_id)) for job_id in batch.ids)
        new = len({id for id, job in known if job is None or (not batch.fresh and job.state in REUSABLE)})
    if key is None or not new:
        return new
    owner = queue.unique.owner(key, now)
    if owner is None:
        return 1
    active = owner if owner.state is State.ACTIVE else None
    handover = succession(batch.options.on_duplicate, active, queue.pending_rival(owner))
    return int(handover is not None and handover.replaced is None)


def _full(queue: JobQueue, count: int) -> QueueFullError:
    """Return the error for jobs that the queue has no room for."""
    return full_error(queue.name, queue.policy.max_size, count)


def _is_uniform(batch: Batch, queue: JobQueue) -> bool:
    """Return whether all jobs of a batch are new and go, as they are, to the end of one list."""
    options = batch.options
    return (
        # A caller that has made the ids may send the batch again.
        (batch.ids is None or (batch.fresh and queue.jobs.keys().isdisjoint(batch.ids)))
        and not batch.delay
        and batch.run_at is None
        and options.plain
        and options.weight == 1
        and not options.lifo
        and options.ttl is None
        and not options.depends_on
    )
