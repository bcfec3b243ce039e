"""One queue of the engine: its jobs, each in the structure of its state, and its totals.

Active jobs and their leases are in separate shards, so that claims do not wait for finishes.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Lock
from typing import Protocol

from ..enginejob import EngineJob, note_attempt
from ..job import REJECTED, DeadLetterRecord, Event, JobFailure
from ..options import JobKey
from ..policies import (
    DROPPED,
    PREDECESSOR,
    REPLACED,
    Succession,
    succession,
)
from ..states import State
from .changes import Journal, PendingChanges
from .indexes import DependencyTracker
from .queue import JobQueue


class ProcessingShard:
    """Some of the active jobs, by fencing token, under their own lock."""

    __slots__ = ("active", "counts", "extra", "lock")

    def __init__(self) -> None:
        self.lock = Lock()
        self.active: dict[int, EngineJob] = {}
        self.counts: Counter[str] = Counter()
        """Number of active jobs by queue."""
        self.extra: Counter[str] = Counter()
        """By queue: by how much the weights of its active jobs exceed their number."""

    def hold(self, job: EngineJob) -> None:
        """Add a claim. The caller holds the lock, as for `release`."""
        self.active[job.token] = job
        self.counts[job.queue] += 1
        if job.options.weight > 1:
            self.extra[job.queue] += job.options.weight - 1

    def release(self, token: int, queue: str, job_id: str) -> EngineJob | None:
        """End a claim; return its job, or None if the token no longer holds it."""
        job = self.active.get(token)
        if job is None or job.id != job_id or job.queue != queue:
            return None
        del self.active[token]
        left = self.counts[queue] - 1
        if left:
            self.counts[queue] = left
        else:
            del self.counts[queue]
        if job.options.weight > 1:
            self.extra[queue] -= job.options.weight - 1
            if not self.extra[queue]:
                del self.extra[queue]
        job.token, job.last_token = 0, token
        return job

    def overdue(self, tick: int) -> list[tuple[int, EngineJob]]:
        """Return (token, job) of the expired leases."""
        return [(token, job) for token, job in self.active.items() if job.lease_until <= tick]


MAX_MOVED = 1_000
"""Moved jobs whose new queue is remembered."""

EventHandler = Callable[[Event], None]
Subscribers = dict[str | None, list[EventHandler]]
"""Event handlers of one queue, by the job that they are for; None: of all jobs."""


class NewQueue(Protocol):
    """Makes a queue; one that is not kept is for reading."""

    def __call__(self, name: str, *, is_kept: bool) -> JobQueue: ...


class Shard:
    """Queues by name. Composed of the managers of each queue and the shard's own dependency index."""

    __slots__ = ("_moved", "_new_queue", "dependencies", "journal", "lock", "queues", "subscribers")

    def __init__(self, journal: Journal | None, new_queue: NewQueue) -> None:
        self.lock = Lock()
        self.queues: dict[str, JobQueue] = {}
        self.subscribers: dict[str, Subscribers] = {}
        """By queue, whether it exists or not."""
        self.dependencies = DependencyTracker()
        self.journal = journal
        self._new_queue = new_queue
        self._moved: OrderedDict[JobKey, JobKey] = OrderedDict()
        """New keys of the jobs that were moved last, for jobs that begin to wait for them meanwhile."""

    def queue(self, name: str) -> JobQueue:
        """Return the queue of this name, created on first use."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = self._new_queue(name, is_kept=True)
            queue.observed = name in self.subscribers
        return queue

    def find(self, name: str) -> JobQueue:
        """Return the queue of this name for reading; if there is none, an empty one, which is not kept."""
        return self.queues.get(name) or self._new_queue(name, is_kept=False)

    def replace(self, other: "Shard") -> None:
        """Take over the queues and dependencies of a shard that nothing else uses, instead of its own."""
        self.queues = other.queues
        for name, queue in self.queues.items():
            queue.observed = name in self.subscribers
        self.dependencies = other.dependencies
        self._moved.clear()

    def changed(self, job: EngineJob) -> None:
        """Record a change in the journal that does not end the job."""
        if self.journal is not None:
            self.journal.changed(job)

    def restart(self, job: EngineJob) -> None:
        """Drop the streamed items of an attempt: those of the next one start anew."""
        job.stream = None
        if self.journal is not None:
            self.journal.restarted(job)

    # Active jobs.

    def complete(
        self, queue: JobQueue, job: EngineJob, result: bytes | None, now: int, changes: PendingChanges
    ) -> None:
        """Complete a job: active → completed."""
        changes.free_permits(queue, job)
        job.result = result
        job.error = None
        job.finished_at = now
        # Last: readers without a lock that see a completed job find its result.
        job.state = State.COMPLETED
        queue.finished.add(job, 1)
        if self.journal is not None:
            self.journal.completed(job)
        if not job.options.plain or job.has_dependents:
            self._ended(queue, job, changes)
        elif queue.limiter.full and queue.ready.size:
            changes.woken.add(queue.name)
        if queue.observed:
            changes.note(queue, job, "completed", now)

    def put_back(
        self,
        queue: JobQueue,
        job: EngineJob,
        outcome: str,
        delay: int,
        error: JobFailure | None,
        now: int,
        changes: PendingChanges,
    ) -> None:
        """Make a job wait again after a failure (`retried`), stall or release: active → waiting | delayed."""
        changes.free_permits(queue, job)
        note_attempt(job, outcome, now, error, queue.policy.retention.attempts.count)
        if outcome == "released":
            job.attempts -= 1
        elif outcome == "retried":
            job.failures += 1
        else:
            job.stalls += 1
        job.error = error or job.error
        if queue.unique.is_followed(job):
            # Of two waiting jobs with one key, the newer is kept.
            self._cancel(queue, job, REPLACED, now, changes)
            return
        if job.stream is not None:
            self.restart(job)
        job.worker = ""
        job.run_at = now + delay
        queue.put_back(job, now, front=outcome != "retried")
        if outcome == "retried":
            queue.tally.retried += 1
        elif outcome == "stalled":
            queue.tally.stalled += 1
        changes.woken.add(queue.name)
        self.changed(job)
        event = {"retried": "failing", "released": "released", "stalled": "stalled"}[outcome]
        changes.note(queue, job, event, now)

    def fail_active(
        self,
        queue: JobQueue,
        job: EngineJob,
        reason: str,
        error: JobFailure | None,
        now: int,
        changes: PendingChanges,
    ) -> None:
        """Fail a job, which becomes a dead letter: active → failed."""
        changes.free_permits(queue, job)
        stalled = reason in ("stalled", "worker_lost")
        outcome = "stalled" if stalled else "failed"
        note_attempt(job, outcome, now, error, queue.policy.retention.attempts.count)
        if stalled:
            job.stalls += 1
            queue.tally.stalled += 1
            job.state = State.FAILED
            changes.note(queue, job, "stalled", now)
        else:
            job.failures += 1
        self._bury(queue, job, reason, error, now, changes)

    def cancel_active(
        self, queue: JobQueue, job: EngineJob, reason: str, now: int, changes: PendingChanges
    ) -> None:
        """Cancel a job: active → cancelled."""
        changes.free_permits(queue, job)
        note_attempt(job, "cancelled", now, None, queue.policy.retention.attempts.count)
        self._cancel(queue, job, reason, now, changes)

    # Pending jobs.

    def cancel_pending(
        self, queue: JobQueue, job: EngineJob, reason: str, now: int, changes: PendingChanges
    ) -> None:
        """Cancel a job that has not started: waiting | delayed | blocked → cancelled."""
        self.displace(queue, job, changes)
        self._cancel(queue, job, reason, now, changes, in_group=False)
        changes.note_incident(job, "cancelled")

    def fail_pending(
        self,
        queue: JobQueue,
        job: EngineJob,
        reason: str,
        error: JobFailure,
        now: int,
        changes: PendingChanges,
    ) -> None:
        """Fail a job whose ttl or dependency has ended: waiting | delayed | blocked → failed."""
        unmet = (job.unmet or set()) - {PREDECESSOR}
        self.displace(queue, job, changes)
        # For the dead letter: a retried job waits for these again.
        job.unmet = unmet if reason == "dependency_failed" else None
        self._bury(queue, job, reason, error, now, changes, in_group=False)
        job.unmet = None
        changes.note_incident(job, "failed")

    def reject(self, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges) -> None:
        """Add a new job as a dead letter: see `JobOptions.rejected`."""
        assert job.options.rejected is not None
        queue.keep(job)
        self._bury(queue, job, REJECTED, JobFailure(*job.options.rejected), now, changes, in_group=False)
        changes.note_incident(job, "failed")

    def succeed(
        self, queue: JobQueue, job: EngineJob, owner: EngineJob, now: int, changes: PendingChanges
    ) -> Succession[EngineJob] | None:
        """Give a new job the unique key that another has, if its `on_duplicate` says so; None if not."""
        is_active = owner.state is State.ACTIVE
        found = succession(
            job.options.on_duplicate, owner if is_active else None, pending_rival(queue, owner)
        )
        if found is not None and found.replaced is not None:
            if found.keeps_time and found.replaced.state is not State.BLOCKED:
                job.run_at = min(job.run_at, found.replaced.run_at)
            self.cancel_pending(queue, found.replaced, REPLACED, now, changes)
        return found

    def make_room(self, queue: JobQueue, priority: int, now: int, changes: PendingChanges) -> bool:
        """Drop a job if a new one with this priority needs room; False if none may be dropped."""
        limit = queue.policy.max_size
        if queue.drops is None or limit is None or queue.pending < limit:
            return True
        job = queue.drops.first(priority)
        if job is None:
            return False
        self.cancel_pending(queue, job, DROPPED, now, changes)
        return True

    def move(
        self, queue: JobQueue, job: EngineJob, run_at: int, event: str, now: int, changes: PendingChanges
    ) -> None:
        """Move a pending job to another time: promoted, rescheduled, due or unblocked."""
        self.displace(queue, job, changes)
        job.run_at = run_at
        queue.place(job, now)
        changes.woken.add(queue.name)
        self.changed(job)
        changes.note(queue, job, event, now)

    def unblock(
        self, queue: JobQueue, job: EngineJob, dependency: JobKey, now: int, changes: PendingChanges
    ) -> None:
        """Release a job from one dependency: blocked → waiting | delayed after the last one."""
        assert job.unmet is not None
        job.unmet.discard(dependency)
        if not job.unmet:
            queue.displace(job)
            job.unmet = None
            queue.place(job, now)
            changes.woken.add(queue.name)
            self.changed(job)
            changes.note(queue, job, "unblocked", now)

    def promote_due(self, queue: JobQueue, now: int, tick: int, changes: PendingChanges) -> None:
        """Promote the jobs that are due: delayed → waiting. Groups that could continue before them do so."""
        for job in queue.delayed.pop_due(now):
            if queue.groups.rests:
                queue.end_rests(tick - (now - job.run_at))
            queue.place(job, now)
            changes.woken.add(queue.name)
            self.changed(job)
            changes.note(queue, job, "promoted", now)

    def moved_on(self, old: JobKey, new: JobKey) -> None:
        """Record the new key of a job that was moved."""
        self._moved[old] = new
        if len(self._moved) > MAX_MOVED:
            self._moved.popitem(last=False)

    def is_at(self, key: JobKey) -> None:
        """Record that a job is here, whatever was recorded before."""
        self._moved.pop(key, None)

    def has_moved(self, key: JobKey) -> bool:
        """Return whether the new key of a job that is not here is known."""
        return key in self._moved

    def whereabouts(self, key: JobKey) -> JobKey | None:
        """Return the new key of a job that was moved; None if it is here, or unknown."""
        if not self._moved:
            return None
        with self.lock:
            queue = self.queues.get(key[0])
            return None if queue is not None and key[1] in queue.jobs else self._moved.get(key)

    def wait_elsewhere(self, job: EngineJob, old: JobKey, new: JobKey) -> bool:
        """Replace the key of a dependency that was moved; return whether the job waits for it."""
        if not job.unmet or old not in job.unmet:
            return False
        depends_on = dict.fromkeys(new if key == old else key for key in job.options.depends_on)
        job.options = replace(job.options, depends_on=tuple(depends_on))
        job.unmet.discard(old)
        job.unmet.add(new)
        if self.journal is not None:
            self.journal.added([job])
            self.journal.changed(job)
        return True

    # Ended jobs.

    def revive(
        self,
        queue: JobQueue,
        job: EngineJob,
        now: int,
        changes: PendingChanges,
        *,
        by_itself: bool,
        unmet: Iterable[JobKey] = (),
    ) -> None:
        """Retry a dead letter with a new budget of failures and stalls: failed → waiting | blocked.

        Args:
            unmet: dependencies that it waits for again; the caller binds it to them.
        """
        queue.dead.remove(job.id, by_itself=by_itself)
        if job.stream is not None:
            self.restart(job)
        job.failures = job.stalls = 0
        job.finished_at = 0
        job.reason = job.worker = ""
        job.run_at = now
        job.unmet = set(unmet) or None
        queue.unique.take(job)
        queue.place(job, now)
        changes.woken.add(queue.name)
        if self.journal is not None:
            self.journal.revived(job)
        changes.note(queue, job, "retried", now)

    def remove(self, queue: JobQueue, jobs: list[EngineJob], now: int, changes: PendingChanges) -> None:
        """Remove jobs that are not active, with everything that belongs to them."""
        if self.journal is not None and jobs:
            self.journal.removed(jobs)
        for job in jobs:
            if job.state in (State.COMPLETED, State.CANCELLED):
                queue.finished.remove(job)
                if self.dependencies.holders:
                    self.dependencies.forget((job.queue, job.id))
            elif job.state is State.FAILED:
                queue.dead.remove(job.id)
                self.note_end(job, State.CANCELLED, changes)
            else:
                self.displace(queue, job, changes)
                queue.unique.release(job, now)
                self._unbind(job, changes)
                self.note_end(job, State.CANCELLED, changes)
            queue.drop(job)
            changes.note(queue, job, "removed", now)

    def make_way(self, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges) -> bool:
        """Remove an ended job whose id is enqueued again; return whether others wait for this id."""
        waited_for, job.has_dependents = job.has_dependents, False
        self.remove(queue, [job], now, changes)
        return waited_for

    def _bury(
        self,
        queue: JobQueue,
        job: EngineJob,
        reason: str,
        error: JobFailure | None,
        now: int,
        changes: PendingChanges,
        *,
        in_group: bool = True,
    ) -> None:
        job.state = State.FAILED
        job.reason = reason
        job.error = error
        job.finished_at = now
        queue.tally.failed += 1
        letter, evicted = queue.dead.add(job, now)
        queue.finished.note_failed([job])
        if self.journal is not None:
            self.journal.died(job, letter)
        self._ended(queue, job, changes, in_group=in_group)
        changes.note(queue, job, "failed", now)
        self.remove_dead_letters(queue, evicted, changes, now)

    def remove_dead_letters(
        self, queue: JobQueue, letters: list[DeadLetterRecord], changes: PendingChanges, now: int
    ) -> None:
        """Remove dead letters with their jobs."""
        jobs = [job for letter in letters if (job := queue.jobs.get(letter.id)) is not None]
        self.remove(queue, jobs, now, changes)

    def _cancel(
        self,
        queue: JobQueue,
        job: EngineJob,
        reason: str,
        now: int,
        changes: PendingChanges,
        *,
        in_group: bool = True,
    ) -> None:
        job.state = State.CANCELLED
        job.reason = reason
        job.finished_at = now
        queue.tally.cancelled += 1
        queue.finished.add(job)
        self.changed(job)
        self._ended(queue, job, changes, in_group=in_group)
        changes.note(queue, job, "cancelled", now)

    def displace(self, queue: JobQueue, job: EngineJob, changes: PendingChanges) -> None:
        job.unmet = None
        waiting = queue.ready.size
        queue.displace(job)
        if job.options.group is not None and queue.ready.size >= waiting:
            changes.woken.add(queue.name)

    def _ended(
        self, queue: JobQueue, job: EngineJob, changes: PendingChanges, *, in_group: bool = True
    ) -> None:
        successor = queue.unique.release(job, job.finished_at)
        if in_group and job.options.group is not None:
            queue.leave_group(job)
            changes.woken.add(queue.name)
        elif queue.limiter.full and queue.ready.size:
            changes.woken.add(queue.name)
        if successor is not None:
            self.unblock(queue, successor, PREDECESSOR, job.finished_at, changes)
        self._unbind(job, changes)
        self.note_end(job, job.state, changes)

    @staticmethod
    def _unbind(job: EngineJob, changes: PendingChanges) -> None:
        if job.options.depends_on:
            changes.unbound.append((job, job.options.depends_on))

    def note_end(self, job: EngineJob, state: State, changes: PendingChanges) -> None:
        """Add the end of a job for its dependents, which may read its record."""
        if job.has_dependents:
            key = (job.queue, job.id)
            job.has_dependents = False
            if job.state is state and state is not State.FAILED:
                dependents = self.dependencies.keep(key)
                if dependents:
                    self.queues[job.queue].finished.hold(job)
            else:
                dependents = self.dependencies.pop(key)
            changes.ended.append((key, state, dependents))

    # Records that others may read.

    def hold(self, queue: JobQueue, job: EngineJob, dependent: EngineJob) -> None:
        """Keep the record of an ended job for one that depends on it."""
        self.dependencies.hold((job.queue, job.id), dependent)
        queue.finished.hold(job)

    def let_go(self, keys: Iterable[JobKey], dependent: EngineJob, now: int) -> None:
        """Release the records that an ended job depended on."""
        for key in keys:
            if self.dependencies.let_go(key, dependent):
                queue = self.queues.get(key[0])
                job = queue.jobs.get(key[1]) if queue is not None else None
                if queue is not None and job is not None:
                    queue.finished.let_go(job, now)
                if self.journal is not None:
                    self.journal.let_go(key)


def pending_rival(queue: JobQueue, owner: EngineJob) -> EngineJob | None:
    """Return the job with an owner's unique key that has not started: the owner itself, or its successor."""
    if owner.state is not State.ACTIVE:
        return owner
    assert owner.options.unique_key is not None
    return queue.unique.waiting(owner.options.unique_key)
