"""Some of the queues under one lock, and the transitions of their jobs.

Methods that change a job expect the shard's lock to be held and, for an active job, that its claim
has been released from the processing shard. What has to happen after the lock is let go (telling
subscribers, waking workers, resolving dependents) is noted in `PendingChanges`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from .capacity import DROPPED
from .dependencies import DependencyTracker
from .job import REJECTED, AttemptRecord, DeadLetterRecord, EngineJob, Event, Incident, JobFailure
from .journal import Journal
from .options import JobKey
from .queue import JobQueue
from .sharing import SharedLimiter
from .states import State
from .unique import PREDECESSOR

REPLACED = "replaced"
"""Reason of a cancelled job in whose place another with its unique key is."""
MAX_MOVED = 1_000
"""Jobs that have left of which is known where they went."""


class PendingChanges:
    """What one operation leaves to be done once its locks are free."""

    __slots__ = ("ended", "events", "freed", "incidents", "unbound", "woken")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.incidents: list[Incident] = []
        self.ended: list[tuple[JobKey, State, list[EngineJob]]] = []
        """(job, its last state, the jobs that wait for it)."""
        self.unbound: list[tuple[EngineJob, tuple[JobKey, ...]]] = []
        """(job that lives no more, what it depended on)."""
        self.woken: set[str] = set()
        """Queues in which jobs may have become claimable."""
        self.freed: dict[SharedLimiter, int] | None = None
        """Permits of jobs that are active no more."""


class Succession(NamedTuple):
    """How a job comes to the unique key that another has."""

    replaced: EngineJob | None
    """The pending job that it ended."""
    behind: EngineJob | None
    """The active job whose end it waits for."""


NO_RIVAL = Succession(None, None)


class Shard:
    """Queues by name. Composed of the managers of each queue and the shard's own dependency index."""

    __slots__ = ("_journal", "_moved", "_new_queue", "dependencies", "lock", "queues")

    def __init__(self, journal: Journal | None, new_queue: Callable[[str], JobQueue]) -> None:
        self.lock = Lock()
        self.queues: dict[str, JobQueue] = {}
        self.dependencies = DependencyTracker()
        self._journal = journal
        self._new_queue = new_queue
        self._moved: OrderedDict[JobKey, JobKey] = OrderedDict()
        """Where the last jobs that left went, for those who have begun to wait for them meanwhile."""

    def queue(self, name: str) -> JobQueue:
        """The queue of this name, made on its first use."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = self._new_queue(name)
        return queue

    def find(self, name: str) -> JobQueue:
        """The queue of this name, to look into; an empty one, which nobody keeps, if it is not there."""
        return self.queues.get(name) or self._new_queue(name)

    # Every transition ends here.

    def tell(self, queue: JobQueue, job: EngineJob, event: str, at: int, changes: PendingChanges) -> None:
        """Note an event for the queue's subscribers, if there are any."""
        if queue.observed:
            changes.events.append(Event(queue.name, job.id, job.name, event, job.state, at))

    def incident(self, job: EngineJob, event: str, changes: PendingChanges) -> None:
        """Note what has happened to a job without a worker's word."""
        changes.incidents.append(incident_of(job, event))

    def changed(self, job: EngineJob) -> None:
        """Tell the journal of a change that is no ending."""
        if self._journal is not None:
            self._journal.changed(job)

    def stepped(self, job: EngineJob) -> None:
        """Tell the journal of a job that has followed a step of the wall clock."""
        if self._journal is not None:
            self._journal.stepped(job)

    def postponed(self, letter: DeadLetterRecord) -> None:
        """Tell the journal of a dead letter that has followed a step of the wall clock."""
        if self._journal is not None:
            self._journal.postponed(letter)

    def restart(self, job: EngineJob) -> None:
        """What a run has sent is dropped: there is to be another, whose items begin anew."""
        job.stream = None
        if self._journal is not None:
            self._journal.restarted(job)

    # Active jobs.

    def complete(
        self, queue: JobQueue, job: EngineJob, result: bytes | None, now: int, changes: PendingChanges
    ) -> None:
        """active → completed."""
        free_permits(queue, job, changes)
        job.result = result
        job.error = None
        job.finished_at = now
        # Last: who sees a completed job, without a lock, finds its result.
        job.state = State.COMPLETED
        queue.finished.add(job, 1)
        if self._journal is not None:
            self._journal.completed(job)
        if not job.options.plain or job.has_dependents:
            self._ended(queue, job, changes)
        elif queue.limiter.full and queue.ready.size:
            changes.woken.add(queue.name)
        if queue.observed:
            self.tell(queue, job, "completed", now, changes)

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
        """active → waiting | delayed: after a failure (`retried`), a stall, or unused (`released`)."""
        free_permits(queue, job, changes)
        note_attempt(job, outcome, now, error, queue.policy.retention.attempts.count)
        if outcome == "released":
            job.attempts -= 1
        elif outcome == "retried":
            job.failures += 1
        else:
            job.stalls += 1
        job.error = error or job.error
        if queue.unique.is_followed(job):
            # Of two that wait with one key the newer is kept.
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
        self.tell(queue, job, event, now, changes)

    def fail_active(
        self,
        queue: JobQueue,
        job: EngineJob,
        reason: str,
        error: JobFailure | None,
        now: int,
        changes: PendingChanges,
    ) -> None:
        """active → failed, with a dead letter."""
        free_permits(queue, job, changes)
        stalled = reason in ("stalled", "worker_lost")
        most = queue.policy.retention.attempts.count
        note_attempt(job, "stalled" if stalled else "failed", now, error, most)
        if stalled:
            job.stalls += 1
            queue.tally.stalled += 1
            job.state = State.FAILED
            self.tell(queue, job, "stalled", now, changes)
        else:
            job.failures += 1
        self._bury(queue, job, reason, error, now, changes)

    def cancel_active(
        self, queue: JobQueue, job: EngineJob, reason: str, now: int, changes: PendingChanges
    ) -> None:
        """active → cancelled."""
        free_permits(queue, job, changes)
        note_attempt(job, "cancelled", now, None, queue.policy.retention.attempts.count)
        self._cancel(queue, job, reason, now, changes)

    # Pending jobs.

    def cancel_pending(
        self, queue: JobQueue, job: EngineJob, reason: str, now: int, changes: PendingChanges
    ) -> None:
        """waiting | delayed | blocked → cancelled."""
        self._displace(queue, job, changes)
        self._cancel(queue, job, reason, now, changes, in_group=False)
        self.incident(job, "cancelled", changes)

    def fail_pending(
        self,
        queue: JobQueue,
        job: EngineJob,
        reason: str,
        error: JobFailure,
        now: int,
        changes: PendingChanges,
    ) -> None:
        """waiting | delayed | blocked → failed: its ttl is over, or a dependency failed."""
        unmet = (job.unmet or set()) - {PREDECESSOR}
        self._displace(queue, job, changes)
        # For the dead letter: what a retry puts the job behind again.
        job.unmet = unmet if reason == "dependency_failed" else None
        self._bury(queue, job, reason, error, now, changes, in_group=False)
        job.unmet = None
        self.incident(job, "failed", changes)

    def reject(self, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges) -> None:
        """A new job that is a dead letter from the start: see `JobOptions.rejected`."""
        assert job.options.rejected is not None
        queue.keep(job)
        self._bury(queue, job, REJECTED, JobFailure(*job.options.rejected), now, changes, in_group=False)
        self.incident(job, "failed", changes)

    def succeed(
        self, queue: JobQueue, job: EngineJob, owner: EngineJob, now: int, changes: PendingChanges
    ) -> Succession | None:
        """Make way for a new job whose unique key another has, as its `on_duplicate` says.

        None: the other is kept.
        """
        policy = job.options.on_duplicate
        if policy == "keep" or (owner.state is State.ACTIVE and policy != "keep_last_if_active"):
            return None
        rival = pending_rival(queue, owner)
        if rival is not None:
            if policy != "debounce" and rival.state is not State.BLOCKED:
                # Else one that is replaced again and again would never start.
                job.run_at = min(job.run_at, rival.run_at)
            self.cancel_pending(queue, rival, REPLACED, now, changes)
        return Succession(rival, owner if rival is not owner else None)

    def make_room(self, queue: JobQueue, priority: int, now: int, changes: PendingChanges) -> bool:
        """Drop a job, if need be, for one with this priority; False if none may be dropped."""
        most = queue.policy.max_size
        if queue.drops is None or most is None or queue.pending < most:
            return True
        job = queue.drops.first(priority)
        if job is None:
            return False
        self.cancel_pending(queue, job, DROPPED, now, changes)
        return True

    def move(
        self, queue: JobQueue, job: EngineJob, run_at: int, event: str, now: int, changes: PendingChanges
    ) -> None:
        """A pending job to another time: promoted, rescheduled, due or unblocked."""
        self._displace(queue, job, changes)
        job.run_at = run_at
        queue.place(job, now)
        changes.woken.add(queue.name)
        self.changed(job)
        self.tell(queue, job, event, now, changes)

    def unblock(
        self, queue: JobQueue, job: EngineJob, dependency: JobKey, now: int, changes: PendingChanges
    ) -> None:
        """blocked → waiting | delayed, if this was the last that the job waited for."""
        assert job.unmet is not None
        job.unmet.discard(dependency)
        if not job.unmet:
            queue.displace(job)
            job.unmet = None
            queue.place(job, now)
            changes.woken.add(queue.name)
            self.changed(job)
            self.tell(queue, job, "unblocked", now, changes)

    def promote_due(self, queue: JobQueue, now: int, changes: PendingChanges) -> None:
        """delayed → waiting, for all whose time has come."""
        for job in queue.delayed.pop_due(now):
            queue.place(job, now)
            changes.woken.add(queue.name)
            self.changed(job)
            self.tell(queue, job, "promoted", now, changes)

    # To another queue. The caller has the locks of both queues' shards, and of those of all that wait.

    def give(self, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges) -> int:
        """A pending job leaves, and goes on waiting for what it waits for; how often it retried itself."""
        if self._journal is not None:
            self._journal.removed([job])
        unmet, job.unmet = job.unmet, None
        self._displace(queue, job, changes)
        # Whom it follows stays behind.
        job.unmet = unmet and (unmet - {PREDECESSOR} or None)
        retries = queue.dead.retries_of(job.id)
        queue.unique.release(job, now)
        queue.drop(job)
        self.tell(queue, job, "removed", now, changes)
        return retries

    def take_in(
        self, queue: JobQueue, job: EngineJob, retries: int, now: int, changes: PendingChanges
    ) -> None:
        """A job that has left another queue, as it was; its id and its unique key are free here."""
        queue.keep(job)
        queue.dead.note_retries(job.id, retries)
        queue.unique.take(job)
        queue.watch_deadline(job)
        queue.place(job, now)
        queue.tally.enqueued += 1
        changes.woken.add(queue.name)
        if self._journal is not None:
            job.noted = 0
            self._journal.added([job])
            self._journal.changed(job)
            if job.progress is not None or job.logs:
                self._journal.reported(job, tuple(job.logs or ()))
        self.tell(queue, job, "queued", now, changes)

    def give_letter(
        self, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges
    ) -> DeadLetterRecord:
        """A failed job leaves, with its dead letter."""
        if self._journal is not None:
            self._journal.removed([job])
        letter = queue.dead.remove(job.id)
        assert letter is not None
        queue.drop(job)
        self.tell(queue, job, "removed", now, changes)
        return letter

    def take_letter(
        self, queue: JobQueue, job: EngineJob, letter: DeadLetterRecord, now: int, changes: PendingChanges
    ) -> list[DeadLetterRecord]:
        """A failed job that has left another queue, as it was; its id is free here. Returns which letters are
        too many now.
        """
        queue.keep(job)
        letter, evicted = queue.dead.receive(letter._replace(queue=queue.name), job, now)
        queue.finished.note_failed([job])
        if self._journal is not None:
            job.noted = 0
            self._journal.added([job])
            self._journal.died(job, letter)
            if job.progress is not None or job.logs:
                self._journal.reported(job, tuple(job.logs or ()))
        self.tell(queue, job, "failed", now, changes)
        return evicted

    def moved_on(self, old: JobKey, new: JobKey) -> None:
        """Note where a job has gone."""
        self._moved[old] = new
        if len(self._moved) > MAX_MOVED:
            self._moved.popitem(last=False)

    def is_at(self, key: JobKey) -> None:
        """Note that a job is here, whatever was noted."""
        self._moved.pop(key, None)

    def has_moved(self, key: JobKey) -> bool:
        """Whether it is known where a job that is not here has gone."""
        return key in self._moved

    def whereabouts(self, key: JobKey) -> JobKey | None:
        """Where a job that is not here has gone, if that is known."""
        if not self._moved:
            return None
        with self.lock:
            queue = self.queues.get(key[0])
            return None if queue is not None and key[1] in queue.jobs else self._moved.get(key)

    def wait_elsewhere(self, job: EngineJob, old: JobKey, new: JobKey) -> bool:
        """What a blocked job waits for is in another queue now; whether it does wait for it."""
        if not job.unmet or old not in job.unmet:
            return False
        depends_on = dict.fromkeys(new if key == old else key for key in job.options.depends_on)
        job.options = replace(job.options, depends_on=tuple(depends_on))
        job.unmet.discard(old)
        job.unmet.add(new)
        if self._journal is not None:
            self._journal.added([job])
            self._journal.changed(job)
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
        """failed → waiting | blocked, with its budget of failures and stalls renewed.

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
        if self._journal is not None:
            self._journal.revived(job)
        self.tell(queue, job, "retried", now, changes)

    def remove(self, queue: JobQueue, jobs: list[EngineJob], now: int, changes: PendingChanges) -> None:
        """Forget jobs that are not active, whatever their state, with everything that is theirs."""
        if self._journal is not None and jobs:
            self._journal.removed(jobs)
        for job in jobs:
            if job.state in (State.COMPLETED, State.CANCELLED):
                queue.finished.remove(job)
                if self.dependencies.holders:
                    self.dependencies.forget((job.queue, job.id))
            elif job.state is State.FAILED:
                queue.dead.remove(job.id)
                self.note_end(job, State.CANCELLED, changes)
            else:
                self._displace(queue, job, changes)
                queue.unique.release(job, now)
                self._unbind(job, changes)
                self.note_end(job, State.CANCELLED, changes)
            queue.drop(job)
            self.tell(queue, job, "removed", now, changes)

    def make_way(self, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges) -> bool:
        """Forget an ended job whose id is enqueued again; whether others wait for what has that id."""
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
        if self._journal is not None:
            self._journal.died(job, letter)
        self._ended(queue, job, changes, in_group=in_group)
        self.tell(queue, job, "failed", now, changes)
        self.bury_for_good(queue, evicted, changes, now)

    def bury_for_good(
        self, queue: JobQueue, letters: list[DeadLetterRecord], changes: PendingChanges, now: int
    ) -> None:
        """Dead letters that are over, with the jobs that they are about."""
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
        self.tell(queue, job, "cancelled", now, changes)

    def _displace(self, queue: JobQueue, job: EngineJob, changes: PendingChanges) -> None:
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
        """Note for those that wait for a job how it ended; its record is theirs to read."""
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
        """Keep the record of a job that has ended for one that depends on it."""
        self.dependencies.hold((job.queue, job.id), dependent)
        queue.finished.hold(job)

    def replaced(self, key: JobKey) -> None:
        """Another job has the id of one whose record was elsewhere: nobody holds that any more."""
        if key in self.dependencies.holders:
            self.dependencies.forget(key)
            if self._journal is not None:
                self._journal.let_go(key)

    def let_go(self, keys: Iterable[JobKey], dependent: EngineJob, now: int) -> None:
        """What a job that has ended depended on is not kept for it any more."""
        for key in keys:
            if self.dependencies.let_go(key, dependent):
                queue = self.queues.get(key[0])
                job = queue.jobs.get(key[1]) if queue is not None else None
                if queue is not None and job is not None:
                    queue.finished.let_go(job, now)
                if self._journal is not None:
                    self._journal.let_go(key)


def free_permits(queue: JobQueue, job: EngineJob, changes: PendingChanges) -> None:
    """A job is active no more: others are to have what it had of a shared limiter."""
    shared = queue.shared
    if shared is not None:
        if changes.freed is None:
            changes.freed = {}
        changes.freed[shared] = changes.freed.get(shared, 0) + job.options.weight


def pending_rival(queue: JobQueue, owner: EngineJob) -> EngineJob | None:
    """The one job that has not started of those with an owner's unique key."""
    if owner.state is not State.ACTIVE:
        return owner
    assert owner.options.unique_key is not None
    return queue.unique.waiting(owner.options.unique_key)


def incident_of(job: EngineJob, event: str) -> Incident:
    """What has happened to a job."""
    reason = job.reason if event != "stalled" else ""
    error = job.error if event == "failed" else None
    return Incident(job.queue, job.id, job.name, event, reason, error)


def note_attempt(job: EngineJob, outcome: str, now: int, error: JobFailure | None, most: int) -> None:
    """Keep the run that has just ended in the job's history, as one of so many at most."""
    if job.history is None:
        job.history = []
    job.history.append(AttemptRecord(job.attempts, job.worker, job.started_at, now, outcome, error))
    excess = len(job.history) - most
    if excess > 0:
        # A job may be put off for years.
        del job.history[:excess]
        job.noted = max(0, job.noted - excess)
