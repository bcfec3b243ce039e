"""Moves of jobs between queues, with everything that belongs to them and waits for them."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from ..changes import PendingChanges
from ..enginejob import EngineJob
from ..job import DeadLetterRecord
from ..options import JobKey
from ..queue import KEYED, JobQueue
from ..shard import Shard
from ..states import PENDING, REUSABLE, State
from ..unique import PREDECESSOR
from .context import EngineContext


def move_job(context: EngineContext, key: JobKey, to: str, changes: PendingChanges) -> str:
    """Move a pending job, or a dead letter, to the end of another queue; return what became of it."""
    with _held(context, key, to) as (source, target):
        job = source.find(key[0]).jobs.get(key[1])
        if job is None:
            return "not_found"
        if job.state is State.FAILED:
            return _move_letter(context, source, target, job, to, changes)
        if job.state not in PENDING:
            return "active" if context.is_active(job) else "ended"
        return _move_pending(context, source, target, job, to, changes)


@contextmanager
def _held(context: EngineContext, key: JobKey, to: str) -> Iterator[tuple[Shard, Shard]]:
    """Hold the locks of both queues' shards, and of the shards of the jobs that wait for the job."""
    source, target = context.shard(key[0]), context.shard(to)
    wanted = {source, target}
    while True:
        with _all_held(context, wanted):
            waiting = {context.shard(job.queue) for job in source.dependencies.of(key)}
            if waiting <= wanted:
                yield source, target
                return
        wanted |= waiting


@contextmanager
def _all_held(context: EngineContext, shards: Iterable[Shard]) -> Iterator[None]:
    # Always in the same order, so that two moves never wait for each other.
    with ExitStack() as held:
        for shard in sorted(shards, key=context.shards.index):
            held.enter_context(shard.lock)
        yield


def _move_pending(
    context: EngineContext, source: Shard, target: Shard, job: EngineJob, to: str, changes: PendingChanges
) -> str:
    now = context.clock.now()
    if job.options.group is None and context.policy(to).group_mode == KEYED:
        return "group_needed"
    existing = target.find(to).jobs.get(job.id)
    if existing is not None and existing.state not in REUSABLE:
        return "duplicate"
    unique_key = job.options.unique_key
    if unique_key is not None and target.find(to).unique.owner(unique_key, now) is not None:
        return "unique_key_taken"
    old = (job.queue, job.id)
    retries = _give(source, source.find(job.queue), job, now, changes)
    queue = target.queue(to)
    job.has_dependents = existing is not None and target.make_way(queue, existing, now, changes)
    job.queue = to
    _take(target, queue, job, retries, now, changes)
    _rename(context, source, target, old, job)
    return "moved"


def _give(source: Shard, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges) -> int:
    """Take a pending job out of its queue; return its number of automatic retries."""
    if source.journal is not None:
        source.journal.removed([job])
    unmet, job.unmet = job.unmet, None
    source.displace(queue, job, changes)
    # The job whose unique key it waits for stays behind.
    job.unmet = unmet and (unmet - {PREDECESSOR} or None)
    retries = queue.dead.retries_of(job.id)
    queue.unique.release(job, now)
    queue.drop(job)
    changes.note(queue, job, "removed", now)
    return retries


def _take(
    target: Shard, queue: JobQueue, job: EngineJob, retries: int, now: int, changes: PendingChanges
) -> None:
    """Add a job that has left another queue, as it was; its id and its unique key are free here."""
    queue.keep(job)
    queue.dead.note_retries(job.id, retries)
    queue.unique.take(job)
    queue.watch_deadline(job)
    queue.place(job, now)
    queue.tally.enqueued += 1
    changes.woken.add(queue.name)
    if target.journal is not None:
        job.noted = 0
        target.journal.added([job])
        target.journal.changed(job)
        if job.progress is not None or job.logs:
            target.journal.reported(job, tuple(job.logs or ()))
    changes.note(queue, job, "queued", now)


def _move_letter(
    context: EngineContext, source: Shard, target: Shard, job: EngineJob, to: str, changes: PendingChanges
) -> str:
    now = context.clock.now()
    if job.id in target.find(to).jobs:
        # Unlike for a new job, an ended one does not make way: its dead letter would be lost unread.
        return "duplicate"
    old = (job.queue, job.id)
    letter = _give_letter(source, source.find(job.queue), job, now, changes)
    queue = target.queue(to)
    job.has_dependents = False
    job.queue = to
    evicted = _take_letter(target, queue, job, letter, now, changes)
    _rename(context, source, target, old, job)
    target.remove_dead_letters(queue, evicted, changes, now)
    return "moved"


def _give_letter(
    source: Shard, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges
) -> DeadLetterRecord:
    """Take a failed job out of its queue, with its dead letter."""
    if source.journal is not None:
        source.journal.removed([job])
    letter = queue.dead.remove(job.id)
    assert letter is not None
    queue.drop(job)
    changes.note(queue, job, "removed", now)
    return letter


def _take_letter(
    target: Shard,
    queue: JobQueue,
    job: EngineJob,
    letter: DeadLetterRecord,
    now: int,
    changes: PendingChanges,
) -> list[DeadLetterRecord]:
    """Add a failed job that has left another queue; return the dead letters that exceed the limit now."""
    queue.keep(job)
    letter, evicted = queue.dead.receive(letter._replace(queue=queue.name), job, now)
    queue.finished.note_failed([job])
    if target.journal is not None:
        job.noted = 0
        target.journal.added([job])
        target.journal.died(job, letter)
        if job.progress is not None or job.logs:
            target.journal.reported(job, tuple(job.logs or ()))
    changes.note(queue, job, "failed", now)
    return evicted


def _rename(context: EngineContext, source: Shard, target: Shard, old: JobKey, job: EngineJob) -> None:
    """Make the jobs that wait for a job, or will, wait for it under its new key."""
    new = (job.queue, job.id)
    for dependent in source.dependencies.pop(old):
        if context.shard(dependent.queue).wait_elsewhere(dependent, old, new):
            target.dependencies.add(new, dependent)
            job.has_dependents = True
    target.is_at(new)
    source.moved_on(old, new)
