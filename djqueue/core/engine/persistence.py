"""Jobs that the tables of a storage hold, too: loaded, accepted, evicted."""

from collections.abc import Container, Iterable

from ..capacity import DROPPED
from ..changes import PendingChanges
from ..enginejob import EngineJob
from ..job import Claimed, DeadLetterRecord
from ..options import JobKey
from ..queue import JobQueue
from ..shard import Shard, pending_rival
from ..states import REUSABLE, TERMINAL, State
from ..unique import PREDECESSOR, REPLACED, Succession
from ..versions import counted, counted_if_answered, counted_unless_empty
from .context import EngineContext
from .finisher import Settlement


class PersistentEngine:
    """The operations of an engine whose jobs are in tables, too: those of a storage with a journal."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self.changes = context.changes
        self._context = context
        self._settlement = settlement

    @counted
    def add_stored(self, queue: str, state: State, count: int) -> None:
        """Add the number of ended jobs in one state whose records only the tables have."""
        shard = self._context.shard(queue)
        with shard.lock:
            shard.queue(queue).finished.stored[state] += count

    @counted
    def restore(
        self,
        jobs: Iterable[EngineJob],
        letters: Iterable[DeadLetterRecord] = (),
        *,
        bind: bool = True,
        stored: bool = False,
    ) -> int:
        """Load jobs as they were stored, except those that the engine has; return the number of loaded jobs.

        Active jobs have the tokens of their claims, get a full lease, and come before the jobs that wait for
        them or for their share of a limit. A dependency without a record has completed: its dependent would
        have ended with it otherwise.

        Args:
            bind: whether to bind the jobs to their dependencies.
            stored: whether the ended ones were counted by `add_stored`.
        """
        restored = 0
        names = set()
        unbound = []
        now = self._context.clock.now()
        for job in jobs:
            shard = self._context.shard(job.queue)
            with shard.lock:
                queue = shard.queue(job.queue)
                if job.id in queue.jobs:
                    continue
                restored += 1
                names.add(job.queue)
                queue.keep(job)
                if job.state in TERMINAL:
                    if job.state is not State.FAILED:
                        queue.finished.add(job)
                        queue.finished.stored[job.state] -= stored
                    continue
                if job.options.depends_on and job.state is State.BLOCKED:
                    job.unmet = set(job.options.depends_on)
                if job.options.unique_key is None:
                    pass
                elif (owner := queue.unique.owner(job.options.unique_key, now)) is None:
                    queue.unique.take(job)
                elif owner.state is State.ACTIVE and job.state is State.BLOCKED:
                    job.unmet = {PREDECESSOR, *(job.unmet or ())}
                    queue.unique.wait(job, owner)
                if job.state is State.ACTIVE:
                    self._resume(queue, job)
                    continue
                queue.watch_deadline(job)
                stored_state = job.state
                if stored_state is State.WAITING:
                    job.run_at = min(job.run_at, now)  # The wall clock may have been set back.
                queue.place(job, now)
                if queue.drops is not None:
                    queue.drops.push(job, queue.pending)
                if job.state is not stored_state:
                    shard.changed(job)  # It is due by now.
                if job.unmet:
                    unbound.append(job)
        for letter in letters:
            shard = self._context.shard(letter.queue)
            with shard.lock:
                queue = shard.queue(letter.queue)
                if letter.id in queue.jobs:
                    queue.dead.restore(letter, queue.jobs[letter.id])
                    queue.finished.note_failed([queue.jobs[letter.id]])
        for job in unbound if bind else ():
            self._settlement.bind(job, tuple((job.unmet or set()) - {PREDECESSOR}), missing=State.COMPLETED)
        changes = PendingChanges()
        changes.woken.update(names)
        self._settlement.settle(changes)
        return restored

    def _resume(self, queue: JobQueue, job: EngineJob) -> None:
        """Continue a claim that another engine made, and count it against all limits."""
        self._hold(queue, job)
        if job.options.group is not None and queue.is_grouped:
            queue.groups.resume(job)
        if queue.shared is not None:
            queue.shared.take(job.options.weight)
        if self._context.journal is not None:
            self._context.journal.renewed(job)

    def _hold(self, queue: JobQueue, job: EngineJob) -> None:
        job.lease_until = self._context.clock.monotonic() + queue.policy.lease
        processing = self._context.processing_shard(job.id)
        with processing.lock:
            processing.hold(job)
        self._context.start_tokens_above(job.token)

    @counted
    def adopt(self, claimed: Claimed, worker: str, process: str) -> bool:
        """Continue a claim that a worker has, whatever the tables know of it; return whether it holds.

        It does not if the job has been claimed again, or if the attempt has ended.
        """
        context = self._context
        changes = PendingChanges()
        shard, processing = context.shard(claimed.queue), context.processing_shard(claimed.id)
        with shard.lock:
            queue = shard.queue(claimed.queue)
            job = queue.jobs.get(claimed.id)
            if job is None:
                job = self._claimed_job(queue, claimed)
            elif job.state in TERMINAL or max(job.token, job.last_token) >= claimed.token:
                return job.state is State.ACTIVE and job.token == claimed.token
            elif job.state is State.ACTIVE:
                with processing.lock:
                    processing.release(job.token, job.queue, job.id)
            else:
                shard.displace(queue, job, changes)
            is_counted = job.state is State.ACTIVE
            job.state = State.ACTIVE
            job.token, job.attempts = claimed.token, claimed.attempts
            job.failures, job.stalls = claimed.failures, claimed.stalls
            job.worker, job.process = worker, process
            job.started_at = context.clock.now()
            job.cancel_requested = False
            if is_counted:
                self._hold(queue, job)
            else:
                self._resume(queue, job)
            shard.changed(job)
        self._settlement.settle(changes)
        return True

    def _claimed_job(self, queue: JobQueue, claimed: Claimed) -> EngineJob:
        """Add the job of a claim whose row was never written."""
        at = claimed.created_at
        job = EngineJob(
            claimed.id, queue.name, claimed.name, claimed.payload, claimed.options, State.WAITING, at, at
        )
        queue.keep(job)
        key = job.options.unique_key
        if key is not None and queue.unique.owner(key, self._context.clock.now()) is None:
            queue.unique.take(job)
        if self._context.journal is not None:
            self._context.journal.added([job])
        return job

    @counted
    def accept(self, jobs: Iterable[EngineJob], replacing: Container[JobKey] = ()) -> int:
        """Add new jobs that a producer has written to the tables; return how many were added.

        A job whose id is live in the engine is left out. A job whose unique key was taken in the meantime is
        cancelled, unless its `on_duplicate` says otherwise.

        Args:
            replacing: keys of the jobs whose rows replaced those of cancelled jobs.
        """
        accepted = 0
        for job in jobs:
            changes = PendingChanges()
            shard = self._context.shard(job.queue)
            now = self._context.clock.now()
            written = job.state, job.run_at
            with shard.lock:
                queue = shard.queue(job.queue)
                existing = queue.jobs.get(job.id)
                if existing is not None and existing.state not in REUSABLE:
                    with self._context.processing_shard(existing.id).lock:  # It must not complete meanwhile.
                        self._rewrite(existing)
                    continue
                if existing is not None:
                    job.has_dependents = shard.make_way(queue, existing, now, changes)
                else:
                    shard.replaced((job.queue, job.id))
                    if (job.queue, job.id) in replacing and queue.finished.stored[State.CANCELLED]:
                        queue.finished.stored[State.CANCELLED] -= 1
                accepted += 1
                if existing is not None and self._context.journal is not None:
                    self._context.journal.added([job])
                if job.options.rejected is not None:
                    shard.reject(queue, job, now, changes)
                else:
                    is_new = existing is None and (job.queue, job.id) not in replacing
                    self._accept(shard, queue, job, now, changes, written if is_new else None)
            self._settlement.settle(changes)
            if job.unmet:
                self._settlement.bind(job, tuple(job.unmet - {PREDECESSOR}), missing=State.COMPLETED)
        return accepted

    def _accept(
        self,
        shard: Shard,
        queue: JobQueue,
        job: EngineJob,
        now: int,
        changes: PendingChanges,
        written: tuple[State, int] | None,
    ) -> None:
        rivals = _rivals(shard, queue, job, now, changes)
        if isinstance(rivals, str):
            queue.keep(job)
            job.state = State.CANCELLED
            job.reason = rivals
            job.finished_at = now
            queue.tally.cancelled += 1
            queue.finished.add(job)
            shard.note_end(job, job.state, changes)
        else:
            queue.admit(job, now, behind=rivals.behind)
            queue.tally.enqueued += 1
            changes.woken.add(queue.name)
        if written == (job.state, job.run_at) and shard.journal is not None:
            shard.journal.accepted(job)
        else:
            shard.changed(job)
        event = "cancelled" if job.state is State.CANCELLED else "queued"
        changes.note(queue, job, event, now)
        if job.state is State.CANCELLED:
            changes.note_incident(job, "cancelled")

    def _rewrite(self, job: EngineJob) -> None:
        """Write a job to the journal again, entirely: a producer may have replaced its row."""
        journal = self._context.journal
        if journal is None:
            return
        if (payloads := job.unloaded) is not None:
            payloads.load([job])
        journal.removed([job])
        job.noted = 0
        journal.added([job])
        if job.progress is not None or job.logs:
            journal.reported(job, tuple(job.logs or ()))
        if job.state is State.COMPLETED:
            journal.completed(job)
        else:
            journal.changed(job)

    @counted
    def hold(self, job: EngineJob, stored: Container[JobKey]) -> None:
        """Hold the records of a live job's dependencies that only the tables have; `stored` are these."""
        for key in job.options.depends_on:
            if key in stored:
                shard = self._context.shard(key[0])
                with shard.lock:
                    shard.dependencies.hold(key, job)

    @counted_if_answered
    def put_off(self, queue: str, ids: Iterable[str] | None = None) -> set[str]:
        """Return the ended jobs (of these ids, None: of all) whose records others hold, and postpone their
        removal.
        """
        shard = self._context.shard(queue)
        with shard.lock:
            holders = shard.dependencies.holders
            if ids is None:
                ids = [key[1] for key in holders if key[0] == queue]
            held = {job_id for job_id in ids if (queue, job_id) in holders} if holders else set()
            if self._context.journal is not None:
                for job_id in held:
                    self._context.journal.put_off((queue, job_id))
        return held

    @counted_if_answered
    def drop_details(self, queue: str, ids: Iterable[str], *, logs: bool) -> list[str]:
        """Drop the attempts, or the log lines, of dead letters; return the ids that are dead letters."""
        shard = self._context.shard(queue)
        with shard.lock:
            job_queue = shard.find(queue)
            dead = [job_id for job_id in ids if job_queue.dead.get(job_id) is not None]
            for job in map(job_queue.jobs.__getitem__, dead):
                if logs:
                    job.logs = None
                else:
                    job.history, job.noted = None, 0
        return dead

    @counted_unless_empty(0)
    def evict(self, jobs: Iterable[EngineJob]) -> None:
        """Drop completed and cancelled jobs that the tables have from memory; others stay."""
        for job in jobs:
            shard = self._context.shard(job.queue)
            with shard.lock:
                queue = shard.find(job.queue)
                ended = job.state is State.COMPLETED or job.state is State.CANCELLED
                if ended and queue.jobs.get(job.id) is job:
                    queue.finished.remove(job)
                    queue.finished.stored[job.state] += 1
                    queue.drop(job)


def _rivals(
    shard: Shard, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges
) -> Succession[EngineJob] | str:
    """Return how a job comes to its unique key, or the reason for which it is cancelled."""
    key = job.options.unique_key
    owner = queue.unique.owner(key, now) if key is not None else None
    if owner is None:
        return Succession() if shard.make_room(queue, job.options.priority, now, changes) else DROPPED
    rival = pending_rival(queue, owner)
    if rival is not None and rival.created_at > job.created_at and job.options.on_duplicate != "keep":
        return REPLACED  # It was enqueued earlier, and accepted later.
    succession = shard.succeed(queue, job, owner, now, changes)
    if succession is None:
        return "duplicate"
    if succession.replaced is None and not shard.make_room(queue, job.options.priority, now, changes):
        return DROPPED
    return succession
