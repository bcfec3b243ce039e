"""Changes of single jobs by id, and their moves between queues."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from ..enginejob import EngineJob
from ..job import REJECTED, CancelResult, DeadLetterRecord
from ..options import JobKey
from ..policies import KEYED, PREDECESSOR
from ..states import PENDING, REUSABLE, TERMINAL, State
from .changes import PendingChanges, counted, counted_unless_empty
from .context import EngineContext
from .queue import JobQueue
from .settlement import Settlement
from .shard import Shard


class EngineJobs:
    """Changes of single jobs of one queue, made by the engine."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self.changes = context.changes
        self._context = context
        self._settlement = settlement

    @counted_unless_empty(1)
    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """Cancel jobs: a pending job never starts, an active one is asked to stop."""
        results = []
        with self._settlement.changing(queue) as (job_queue, changes):
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is None:
                    results.append(CancelResult(job_id, "not_found"))
                elif job.state in PENDING:
                    job_queue.cancel_pending(job, reason, changes)
                    results.append(CancelResult(job_id, "cancelled"))
                elif self._request_cancel(job_queue, job):
                    job_queue.note(job, "cancel_requested", changes)
                    results.append(CancelResult(job_id, "requested"))
                else:
                    results.append(CancelResult(job_id, str(job.state)))
        return results

    def _request_cancel(self, queue: JobQueue, job: EngineJob) -> bool:
        # A plain job completes under this lock alone; the journal must not record the request after the end.
        with self._context.processing_shard(job.id).lock:
            if job.state is not State.ACTIVE:
                return False
            job.cancel_requested = True
            queue.changed(job)
            return True

    @counted_unless_empty(1)
    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """Make delayed jobs claimable now; False for a job that is not delayed."""
        now = self._context.clock.now()
        return self._move(queue, ids, now, "promoted", frozenset({State.DELAYED}))

    @counted_unless_empty(1)
    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """Move waiting and delayed jobs to a time in UTC milliseconds; False for jobs in other states."""
        states = frozenset({State.DELAYED, State.WAITING})
        return self._move(queue, ids, run_at, "rescheduled", states)

    @counted_unless_empty(1)
    def update(
        self,
        queue: str,
        ids: Sequence[str],
        priority: int | None = None,
        payload: bytes | None = None,
    ) -> list[bool]:
        """Change the priority or payload of pending jobs, None leaves it as it is; False for other jobs."""
        updated = []
        with self._settlement.changing(queue) as (job_queue, changes):
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is None or job.state not in PENDING:
                    updated.append(False)
                    continue
                if payload is not None:
                    job.payload = payload
                if priority is not None and priority != job.options.priority:
                    job_queue.prioritize(job, priority, changes.now)
                    job_queue.changed(job)
                if self._context.journal is not None:
                    self._context.journal.updated(job)
                updated.append(True)
        return updated

    @counted
    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        """Replace the payload of a pending job or, with `retry`, of a dead letter, if it still is `old`.

        Returns updated | retried | not_found | changed | unique_key_taken, or the state of the job.
        """
        with self._settlement.changing(queue) as (job_queue, changes):
            job = job_queue.jobs.get(id)
            if job is None:
                return "not_found"
            if job.state is not State.FAILED if retry else job.state not in PENDING:
                return str(job.state)
            if job.payload != old:
                return "changed"
            if (
                retry
                and job.options.unique_key
                and job_queue.unique.owner(job.options.unique_key, changes.now)
            ):
                return "unique_key_taken"
            unmet = _unmet_of(job_queue, id)
            if retry:
                job_queue.revive(job, changes, by_itself=False, unmet=unmet)
            job.payload = payload
            if self._context.journal is not None:
                self._context.journal.updated(job)
        if retry and unmet:
            self._settlement.bind(job, job.options.depends_on)
        return "retried" if retry else "updated"

    def _move(
        self, queue: str, ids: Sequence[str], run_at: int, event: str, states: frozenset[State]
    ) -> list[bool]:
        moved = []
        with self._settlement.changing(queue) as (job_queue, changes):
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is not None and job.state in states:
                    job_queue.move(job, run_at, event, changes)
                    moved.append(True)
                else:
                    moved.append(False)
        return moved

    @counted_unless_empty(1)
    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """Move pending jobs to the end of another queue, and failed ones to its dead letters.

        Returns:
            For each job: moved | not_found | active | ended | duplicate | unique_key_taken |
            concurrency_key_needed.
        """
        if queue == to:
            raise ValueError(f"the jobs are already in queue {to!r}; pass a different queue")
        answers = []
        for job_id in ids:
            changes = PendingChanges(self._context.clock.now())
            answers.append(_move_job(self._context, (queue, job_id), to, changes))
            self._settlement.settle(changes)
        return answers

    @counted_unless_empty(1)
    def retry(
        self, queue: str, ids: Sequence[str], *, by_itself: bool = False, dry_run: bool = False
    ) -> list[str]:
        """Move dead letters back to waiting, or to blocked if dependencies have not completed.

        Args:
            by_itself: the retry is an automatic one. It is not refused if a dependency is gone: the job
                fails again.
            dry_run: only report what would happen to each job.

        Returns:
            For each job: retried | blocked_again | not_found | not_failed | unique_key_taken | rejected |
            dependency_gone.
        """
        states = {key: self._state_of(key) for key in self._unmet(queue, ids)}
        return self._retry(queue, ids, states, by_itself=by_itself, dry_run=dry_run)

    def _retry(
        self,
        queue: str,
        ids: Sequence[str],
        states: Mapping[JobKey, State | None],
        *,
        by_itself: bool,
        dry_run: bool,
    ) -> list[str]:
        answers = []
        bound: list[EngineJob] = []
        would_be: set[str] = set()
        """Ids and unique keys (these behind a NUL) of the jobs that a dry run would have retried."""
        with self._settlement.changing(queue) as (job_queue, changes):
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                unmet = _unmet_of(job_queue, job_id)
                ended = [states.get(key, State.FAILED) for key in unmet]
                if job is None:
                    answers.append("not_found")
                elif job.state is not State.FAILED or job_id in would_be:
                    answers.append("not_failed")
                elif by_itself and not job_queue.dead.is_due(job_id, changes.now):
                    answers.append("not_failed")  # It was retried and failed again in the meantime.
                elif job.reason == REJECTED:
                    answers.append("rejected")
                elif (unique_key := job.options.unique_key) is not None and (
                    job_queue.unique.owner(unique_key, changes.now) or f"\0{unique_key}" in would_be
                ):
                    answers.append("unique_key_taken")
                elif not by_itself and (None in ended or State.CANCELLED in ended):
                    answers.append("dependency_gone")
                else:
                    left = [
                        key for key, state in zip(unmet, ended, strict=True) if state is not State.COMPLETED
                    ]
                    if dry_run:
                        would_be |= {job_id, f"\0{unique_key}"}
                    else:
                        job_queue.revive(job, changes, by_itself=by_itself, unmet=left)
                        bound += [job] if unmet else []
                    answers.append("blocked_again" if left else "retried")
        for job in bound:
            # Completed dependencies are bound, too: the job reads their results.
            self._settlement.bind(job, job.options.depends_on)
        return answers

    def _unmet(self, queue: str, ids: Sequence[str]) -> list[JobKey]:
        """Return the unmet dependencies of dead letters with the reason `dependency_failed`."""
        shard = self._context.shard(queue)
        with shard.lock:
            job_queue = shard.find(queue)
            return [key for job_id in ids for key in _unmet_of(job_queue, job_id)]

    def _state_of(self, key: JobKey) -> State | None:
        """Return the state of a job, which may have been moved; None if it is gone."""
        while (new := self._context.shard(key[0]).whereabouts(key)) is not None:
            key = new
        shard = self._context.shard(key[0])
        with shard.lock:
            job = shard.find(key[0]).jobs.get(key[1])
            return None if job is None else job.state

    @counted_unless_empty(1)
    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        """Remove jobs; False for a job that is active or unknown.

        Args:
            ended_before: remove only jobs that ended before this time in UTC milliseconds.
        """
        removed = []
        with self._settlement.changing(queue) as (job_queue, changes):
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is None or self._context.is_active(job) or not _has_ended(job, ended_before):
                    removed.append(False)
                else:
                    job_queue.remove([job], changes)
                    removed.append(True)
        return removed


def _unmet_of(queue: JobQueue, job_id: str) -> tuple[JobKey, ...]:
    letter = queue.dead.get(job_id)
    return () if letter is None else letter.unmet


def _has_ended(job: EngineJob, before: int | None) -> bool:
    return before is None or (job.state in TERMINAL and job.finished_at < before)


def _move_job(context: EngineContext, key: JobKey, to: str, changes: PendingChanges) -> str:
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
    if job.options.concurrency_key is None and context.policy(to).key_mode == KEYED:
        return "concurrency_key_needed"
    existing = target.find(to).jobs.get(job.id)
    if existing is not None and existing.state not in REUSABLE:
        return "duplicate"
    unique_key = job.options.unique_key
    if unique_key is not None and target.find(to).unique.owner(unique_key, changes.now) is not None:
        return "unique_key_taken"
    old = (job.queue, job.id)
    retries = _give(source.find(job.queue), job, changes)
    queue = target.queue(to)
    job.has_dependents = existing is not None and queue.make_way(existing, changes)
    job.queue = to
    _take(queue, job, retries, changes)
    _rename(context, source, target, old, job)
    return "moved"


def _give(queue: JobQueue, job: EngineJob, changes: PendingChanges) -> int:
    """Take a pending job out of its queue; return its number of automatic retries."""
    if queue.journal is not None:
        queue.journal.removed([job])
    unmet, job.unmet = job.unmet, None
    queue.displace(job, changes)
    # The job whose unique key it waits for stays behind.
    job.unmet = unmet and (unmet - {PREDECESSOR} or None)
    retries = queue.dead.retries_of(job.id)
    queue.unique.release(job, changes.now)
    queue.drop(job)
    queue.note(job, "removed", changes)
    return retries


def _take(queue: JobQueue, job: EngineJob, retries: int, changes: PendingChanges) -> None:
    """Add a job that has left another queue, as it was; its id and its unique key are free here."""
    queue.keep(job)
    queue.dead.note_retries(job.id, retries)
    queue.unique.take(job)
    queue.watch_deadline(job)
    queue.place(job, changes.now)
    queue.tally.enqueued += 1
    changes.woken.add(queue.name)
    if queue.journal is not None:
        job.noted = 0
        queue.journal.added([job])
        queue.journal.changed(job)
        if job.progress is not None or job.logs:
            queue.journal.reported(job, tuple(job.logs or ()))
    queue.note(job, "enqueued", changes)


def _move_letter(
    context: EngineContext, source: Shard, target: Shard, job: EngineJob, to: str, changes: PendingChanges
) -> str:
    if job.id in target.find(to).jobs:
        # Unlike for a new job, an ended one does not make way: its dead letter would be lost unread.
        return "duplicate"
    old = (job.queue, job.id)
    letter = _give_letter(source.find(job.queue), job, changes)
    queue = target.queue(to)
    job.has_dependents = False
    job.queue = to
    evicted = _take_letter(queue, job, letter, changes)
    _rename(context, source, target, old, job)
    queue.remove_dead_letters(evicted, changes)
    return "moved"


def _give_letter(queue: JobQueue, job: EngineJob, changes: PendingChanges) -> DeadLetterRecord:
    """Take a failed job out of its queue, with its dead letter."""
    if queue.journal is not None:
        queue.journal.removed([job])
    letter = queue.dead.remove(job.id)
    assert letter is not None
    queue.drop(job)
    queue.note(job, "removed", changes)
    return letter


def _take_letter(
    queue: JobQueue,
    job: EngineJob,
    letter: DeadLetterRecord,
    changes: PendingChanges,
) -> list[DeadLetterRecord]:
    """Add a failed job that has left another queue; return the dead letters that exceed the limit now."""
    queue.keep(job)
    letter, evicted = queue.dead.receive(letter._replace(queue=queue.name), job, changes.now)
    queue.finished.note_failed([job])
    if queue.journal is not None:
        job.noted = 0
        queue.journal.added([job])
        queue.journal.died(job, letter)
        if job.progress is not None or job.logs:
            queue.journal.reported(job, tuple(job.logs or ()))
    queue.note(job, "failed", changes)
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
