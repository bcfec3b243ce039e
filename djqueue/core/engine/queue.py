"""One queue of the engine: its jobs, each in the structure of its state, and the transitions between states.

Active jobs and their leases are in processing shards, so that claims do not wait for finishes.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from ..enginejob import EngineJob, note_attempt
from ..job import REJECTED, DeadLetterRecord, Event, JobFailure
from ..options import JobKey
from ..overview import NO_TOTALS, Totals
from ..policies import (
    DROPPED,
    GLOBAL,
    NO_LIMIT,
    PREDECESSOR,
    REPLACED,
    Hold,
    KeyLimit,
    QueuePolicy,
    Succession,
    succession,
)
from ..states import PENDING, State
from .changes import Journal, PendingChanges
from .deadletters import DeadLetters
from .finished import FinishedJobs
from .groups import GROUP_WAITING, Groups
from .indexes import DependencyTracker, SubjectIndex, UniqueKeys
from .joblists import DelayedJobs, DropOrder, ReadyJobs
from .limiters import QueueLimiter, SharedLimiter


class Tally:
    """Counters for `Totals`, guarded by the lock of the queue's shard.

    Completions are counted by the finished records, because a plain job completes without that lock.
    """

    __slots__ = ("cancelled", "enqueued", "failed", "noted", "retried", "stalled", "started")

    def __init__(self) -> None:
        self.enqueued = 0
        self.started = 0
        self.retried = 0
        self.failed = 0
        self.cancelled = 0
        self.stalled = 0
        self.noted = NO_TOTALS
        """Totals that the metrics have."""

    def totals(self, completed: int) -> Totals:
        """Return the current totals."""
        return Totals(
            self.enqueued,
            self.started,
            completed,
            self.retried,
            self.failed,
            self.cancelled,
            self.stalled,
        )


class JobQueue:
    """Jobs of one queue, each in the structure of its state. Guarded by the lock of its shard.

    Methods that change a job expect the caller to hold the shard's lock and, for an active job, to have
    released its claim from the processing shard. Everything that follows after the lock is released (events,
    wake-ups, dependents) is added to `PendingChanges`.
    """

    __slots__ = (
        "_deadlines",
        "_numbers",
        "blocked",
        "dead",
        "delayed",
        "dependencies",
        "drops",
        "finished",
        "groups",
        "holds",
        "is_grouped",
        "jobs",
        "journal",
        "key_limit",
        "limiter",
        "name",
        "observed",
        "paused",
        "policy",
        "ready",
        "shared",
        "subjects",
        "tally",
        "unique",
    )

    def __init__(
        self,
        name: str,
        policy: QueuePolicy,
        monotonic: Callable[[], int],
        *,
        random: Random,
        shared: SharedLimiter | None,
        journal: Journal | None,
        dependencies: DependencyTracker,
    ) -> None:
        self.name = name
        self.policy = policy
        self.jobs: dict[str, EngineJob] = {}
        """Every job that has a record, by id."""
        self.subjects = SubjectIndex()
        self.ready = ReadyJobs()
        self.delayed = DelayedJobs()
        self.blocked = 0
        self.unique = UniqueKeys()
        self.groups = Groups(monotonic)
        self.groups.weights = policy.key_weights
        self.is_grouped = policy.key_mode != GLOBAL
        """True if groups hold jobs back."""
        self.limit_groups(NO_LIMIT)
        self.limiter = QueueLimiter()
        self.limiter.set(policy.rate, policy.concurrency, monotonic())
        self.shared = shared
        """Limiter shared with other queues, whose permits its jobs need, too."""
        self.journal = journal
        self.dependencies = dependencies
        """Jobs that wait for jobs of the shard."""
        self.dead = DeadLetters(policy.dead_letters, random)
        self.finished = FinishedJobs(retention=policy.retention, jobs=self.jobs)
        self.paused = False
        self.holds: dict[str, Hold] = {}
        """Holds by job name, among them some that have ended."""
        self.tally = Tally()
        self.observed = False
        """True if events have subscribers."""
        self.drops: DropOrder | None = None
        if policy.max_size is not None and policy.when_full in ("drop_oldest", "drop_lowest"):
            self.drops = DropOrder(self.is_there, by_priority=policy.when_full == "drop_lowest")
        self._deadlines: list[tuple[int, int, EngineJob]] = []
        """Heap of (expiry, number, job) of jobs with a ttl."""
        self._numbers = count()

    def is_there(self, job: EngineJob) -> bool:
        """Return whether the job still has its id."""
        return self.jobs.get(job.id) is job

    @property
    def pending(self) -> int:
        """Number of pending jobs."""
        return self.waiting + self.delayed.size + self.blocked

    @property
    def waiting(self) -> int:
        """Number of waiting jobs, ready or held back by their group."""
        return self.ready.size + self.groups.group_waiting

    def keep(self, job: EngineJob) -> None:
        """Add the record of a job whose id is free."""
        self.jobs[job.id] = job
        if job.options.subject is not None:
            self.subjects.add([job], job.options.subject)

    def drop(self, job: EngineJob) -> None:
        """Remove the record of a job that is in no structure."""
        del self.jobs[job.id]
        if job.options.subject is not None:
            self.subjects.drop(job, job.options.subject)
        self.dead.forget(job.id)

    def hold(self, job: EngineJob, dependent: EngineJob) -> None:
        """Keep the record of an ended job for one that depends on it."""
        self.dependencies.hold((job.queue, job.id), dependent)
        self.finished.hold(job)

    # New jobs.

    def admit(self, job: EngineJob, now: int, *, behind: EngineJob | None = None) -> None:
        """Add a new job whose id is free, with its unique key unless it waits `behind` the owner."""
        if job.options.depends_on:
            job.unmet = set(job.options.depends_on)
        self.keep(job)
        if behind is None:
            self.unique.take(job)
        else:
            job.unmet = {PREDECESSOR, *(job.unmet or ())}
            self.unique.wait(job, behind)
        self.watch_deadline(job)
        self.place(job, now)
        if self.drops is not None:
            self.drops.push(job, self.pending)

    def reject(self, job: EngineJob, changes: PendingChanges) -> None:
        """Add a new job as a dead letter: see `JobOptions.rejected`."""
        assert job.options.rejected is not None
        self.keep(job)
        self._bury(job, REJECTED, JobFailure(*job.options.rejected), changes, in_group=False)
        changes.note_incident(job, "failed")

    def hand_over_key(
        self, job: EngineJob, owner: EngineJob, changes: PendingChanges
    ) -> Succession[EngineJob] | None:
        """Give a new job the unique key that another has, if its `on_duplicate` says so; None if not."""
        is_active = owner.state is State.ACTIVE
        handover = succession(
            job.options.on_duplicate, owner if is_active else None, self.pending_rival(owner)
        )
        if handover is not None and handover.replaced is not None:
            if handover.keeps_time and handover.replaced.state is not State.BLOCKED:
                job.run_at = min(job.run_at, handover.replaced.run_at)
            self.cancel_pending(handover.replaced, REPLACED, changes)
        return handover

    def pending_rival(self, owner: EngineJob) -> EngineJob | None:
        """Return the job with an owner's unique key that has not started: the owner, or its successor."""
        if owner.state is not State.ACTIVE:
            return owner
        assert owner.options.unique_key is not None
        return self.unique.waiting(owner.options.unique_key)

    def make_room(self, priority: int, changes: PendingChanges) -> bool:
        """Drop a job if a new one with this priority needs room; False if none may be dropped."""
        limit = self.policy.max_size
        if self.drops is None or limit is None or self.pending < limit:
            return True
        job = self.drops.first(priority)
        if job is None:
            return False
        self.cancel_pending(job, DROPPED, changes)
        return True

    def make_way(self, job: EngineJob, changes: PendingChanges) -> bool:
        """Remove an ended job whose id is enqueued again; return whether others wait for this id."""
        waited_for, job.has_dependents = job.has_dependents, False
        self.remove([job], changes)
        return waited_for

    # Active jobs.

    def note_claimed(self, job: EngineJob) -> None:
        """Record that a ready job of a group became active; the group's next job may be ready."""
        self._push(self.groups.claimed(job))

    def complete(self, job: EngineJob, result: bytes | None, changes: PendingChanges) -> None:
        """Complete a job: active → completed."""
        self._free_permits(job, changes)
        job.result = result
        job.error = None
        job.finished_at = changes.now
        # Last: readers without a lock that see a completed job find its result.
        job.state = State.COMPLETED
        self.finished.add(job, 1)
        if self.journal is not None:
            self.journal.completed(job)
        if not job.options.plain or job.has_dependents:
            self._ended(job, changes)
        elif self.limiter.full and self.ready.size:
            changes.woken.add(self.name)
        if self.observed:
            self.note(job, "completed", changes)

    def put_back(
        self,
        job: EngineJob,
        outcome: str,
        delay: int,
        error: JobFailure | None,
        changes: PendingChanges,
    ) -> None:
        """Make a job wait again after a failure (`retried`), stall or release: active → waiting | delayed."""
        self._free_permits(job, changes)
        note_attempt(job, outcome, changes.now, error, self.policy.retention.attempts.count)
        if outcome == "released":
            job.attempts -= 1
        elif outcome == "retried":
            job.failures += 1
        else:
            job.stalls += 1
        job.error = error or job.error
        if self.unique.is_followed(job):
            # Of two waiting jobs with one key, the newer is kept.
            self._cancel(job, REPLACED, changes)
            return
        if job.stream is not None:
            self.restart(job)
        job.worker = ""
        job.run_at = changes.now + delay
        self._take_back(job, changes.now, front=outcome != "retried")
        if outcome == "retried":
            self.tally.retried += 1
        elif outcome == "stalled":
            self.tally.stalled += 1
        changes.woken.add(self.name)
        self.changed(job)
        self.note(job, outcome, changes)

    def fail_active(
        self,
        job: EngineJob,
        reason: str,
        error: JobFailure | None,
        changes: PendingChanges,
    ) -> None:
        """Fail a job, which becomes a dead letter: active → failed."""
        self._free_permits(job, changes)
        stalled = reason in ("stalled", "worker_lost")
        outcome = "stalled" if stalled else "failed"
        note_attempt(job, outcome, changes.now, error, self.policy.retention.attempts.count)
        if stalled:
            job.stalls += 1
            self.tally.stalled += 1
            job.state = State.FAILED
            self.note(job, "stalled", changes)
        else:
            job.failures += 1
        self._bury(job, reason, error, changes)

    def cancel_active(self, job: EngineJob, reason: str, changes: PendingChanges) -> None:
        """Cancel a job: active → cancelled."""
        self._free_permits(job, changes)
        note_attempt(job, "cancelled", changes.now, None, self.policy.retention.attempts.count)
        self._cancel(job, reason, changes)

    # Pending jobs.

    def place(self, job: EngineJob, now: int, *, front: bool = False) -> None:
        """Put a pending job into the structure for its dependencies, time and group."""
        if job.unmet:
            job.state = State.BLOCKED
            self.blocked += 1
        elif job.run_at > now:
            job.state = State.DELAYED
            self.delayed.push(job)
        else:
            job.state = State.WAITING
            front = front or job.options.lifo
            if (
                job.options.concurrency_key is None
                or not self.is_grouped
                or self.groups.admit(job, front=front)
            ):
                self.ready.push(job, front=front)

    def displace(self, job: EngineJob, changes: PendingChanges) -> None:
        """Take a pending job out of its structure; the caller puts it elsewhere, or ends it."""
        job.unmet = None
        waiting = self.ready.size
        self._take_out(job)
        if job.options.concurrency_key is not None and self.ready.size >= waiting:
            changes.woken.add(self.name)

    def cancel_pending(self, job: EngineJob, reason: str, changes: PendingChanges) -> None:
        """Cancel a job that has not started: waiting | delayed | blocked → cancelled."""
        self.displace(job, changes)
        self._cancel(job, reason, changes, in_group=False)
        changes.note_incident(job, "cancelled")

    def fail_pending(
        self,
        job: EngineJob,
        reason: str,
        error: JobFailure,
        changes: PendingChanges,
    ) -> None:
        """Fail a job whose ttl or dependency has ended: waiting | delayed | blocked → failed."""
        unmet = (job.unmet or set()) - {PREDECESSOR}
        self.displace(job, changes)
        # For the dead letter: a retried job waits for these again.
        job.unmet = unmet if reason == "dependency_failed" else None
        self._bury(job, reason, error, changes, in_group=False)
        job.unmet = None
        changes.note_incident(job, "failed")

    def move(self, job: EngineJob, run_at: int, event: str, changes: PendingChanges) -> None:
        """Move a pending job to another time: promoted, rescheduled, due or unblocked."""
        self.displace(job, changes)
        job.run_at = run_at
        self.place(job, changes.now)
        changes.woken.add(self.name)
        self.changed(job)
        self.note(job, event, changes)

    def prioritize(self, job: EngineJob, priority: int, now: int) -> None:
        """Change the priority of a pending job; a ready job goes behind those that have this priority."""
        is_ready = job.state is State.WAITING and job.generation != GROUP_WAITING
        if is_ready:
            self.ready.remove(job)
        job.options = replace(job.options, priority=priority)
        if self.drops is not None:
            self.drops.push(job, self.pending)
        if is_ready:
            job.run_at = now  # Its turn in the group, like a new job.
            self.ready.push(job)

    def unblock(self, job: EngineJob, dependency: JobKey, changes: PendingChanges) -> None:
        """Release a job from one dependency: blocked → waiting | delayed after the last one."""
        assert job.unmet is not None
        job.unmet.discard(dependency)
        if not job.unmet:
            self._take_out(job)
            job.unmet = None
            self.place(job, changes.now)
            changes.woken.add(self.name)
            self.changed(job)
            self.note(job, "unblocked", changes)

    def promote_due(self, tick: int, changes: PendingChanges) -> None:
        """Promote the jobs that are due: delayed → waiting. Groups that could continue before them do so."""
        for job in self.delayed.pop_due(changes.now):
            if self.groups.rests:
                self.end_rests(tick - (changes.now - job.run_at))
            self.place(job, changes.now)
            changes.woken.add(self.name)
            self.changed(job)
            self.note(job, "promoted", changes)

    def watch_deadline(self, job: EngineJob) -> None:
        """Add a job with a ttl to the deadlines."""
        if job.options.ttl is not None:
            heapq.heappush(self._deadlines, (expiry(job), next(self._numbers), job))

    def pop_expired(self, now: int) -> list[EngineJob]:
        """Remove the jobs past their ttl from the deadlines, and return those that have not started."""
        jobs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heapq.heappop(self._deadlines)[2]
            if self._may_expire(job) and is_expired(job, now):
                jobs.append(job)
        # A job that was moved away and back has two entries.
        jobs = list(dict.fromkeys(jobs))
        # Jobs that have started or ended leave stale entries behind.
        if len(self._deadlines) > 2 * self.pending:
            self._deadlines = [entry for entry in self._deadlines if self._may_expire(entry[2])]
            heapq.heapify(self._deadlines)
        return jobs

    def _may_expire(self, job: EngineJob) -> bool:
        return job.state in PENDING and not job.started_at and self.jobs.get(job.id) is job

    # Ended jobs.

    def revive(
        self,
        job: EngineJob,
        changes: PendingChanges,
        *,
        by_itself: bool,
        unmet: Iterable[JobKey] = (),
    ) -> None:
        """Retry a dead letter with a new budget of failures and stalls: failed → waiting | blocked.

        Args:
            unmet: dependencies that it waits for again; the caller binds it to them.
        """
        self.dead.remove(job.id, by_itself=by_itself)
        if job.stream is not None:
            self.restart(job)
        job.failures = job.stalls = 0
        job.finished_at = 0
        job.reason = job.worker = ""
        job.run_at = changes.now
        job.unmet = set(unmet) or None
        self.unique.take(job)
        self.place(job, changes.now)
        changes.woken.add(self.name)
        if self.journal is not None:
            self.journal.revived(job)
        self.note(job, "requeued", changes)

    def remove(self, jobs: list[EngineJob], changes: PendingChanges) -> None:
        """Remove jobs that are not active, with everything that belongs to them."""
        if self.journal is not None and jobs:
            self.journal.removed(jobs)
        for job in jobs:
            if job.state in (State.COMPLETED, State.CANCELLED):
                self.finished.remove(job)
                if self.dependencies.holders:
                    self.dependencies.forget((job.queue, job.id))
            elif job.state is State.FAILED:
                self.dead.remove(job.id)
                self.note_end(job, State.CANCELLED, changes)
            else:
                self.displace(job, changes)
                self.unique.release(job, changes.now)
                self._unbind(job, changes)
                self.note_end(job, State.CANCELLED, changes)
            self.drop(job)
            self.note(job, "removed", changes)

    def remove_dead_letters(self, letters: list[DeadLetterRecord], changes: PendingChanges) -> None:
        """Remove dead letters with their jobs."""
        jobs = [job for letter in letters if (job := self.jobs.get(letter.id)) is not None]
        self.remove(jobs, changes)

    # Groups.

    def limit_groups(self, overrides: KeyLimit) -> None:
        """Set the default for groups without overrides; `regroup` applies it to their jobs."""
        self.key_limit = overrides
        self.groups.limit = overrides.concurrency or self.policy.key_concurrency
        self.groups.rate = overrides.rate or self.policy.key_rate

    def regroup(self, names: list[str]) -> None:
        """Apply changed limits of groups to their jobs."""
        for name in names:
            for job in self.groups.hold_back(name):
                self.ready.remove(job)
                self.groups.park(job)
            self._push(self.groups.advance(name))

    def end_rests(self, tick: int) -> bool:
        """Resume groups whose next token was available at a time; return whether a job became ready."""
        waiting = self.ready.size
        for name in self.groups.rests.due(tick):
            self._push(self.groups.advance(name))
        return self.ready.size > waiting

    def leave_group(self, job: EngineJob, *, was_ready: bool = False) -> None:
        """Record that a job of a group is no longer active or ready; the group's next job may be ready."""
        if job.options.concurrency_key is not None and self.is_grouped:
            self._push(self.groups.leave(job, was_ready=was_ready))

    def _push(self, freed: Sequence[EngineJob]) -> None:
        for job in freed:
            self.ready.push(job)

    # Parts of several transitions.

    def changed(self, job: EngineJob) -> None:
        """Record a change in the journal that does not end the job."""
        if self.journal is not None:
            self.journal.changed(job)

    def restart(self, job: EngineJob) -> None:
        """Drop the streamed items of an attempt: those of the next one start anew."""
        job.stream = None
        if self.journal is not None:
            self.journal.restarted(job)

    def note(self, job: EngineJob, event: str, changes: PendingChanges) -> None:
        """Add an event for the subscribers of the queue, if it has any."""
        if self.observed:
            changes.events.append(Event(self.name, job.id, job.name, event, job.state, changes.now))

    def note_end(self, job: EngineJob, state: State, changes: PendingChanges) -> None:
        """Add the end of a job for its dependents, which may read its record."""
        if job.has_dependents:
            key = (job.queue, job.id)
            job.has_dependents = False
            if job.state is state and state is not State.FAILED:
                dependents = self.dependencies.keep(key)
                if dependents:
                    self.finished.hold(job)
            else:
                dependents = self.dependencies.pop(key)
            changes.ended.append((key, state, dependents))

    def _take_out(self, job: EngineJob) -> None:
        """Take a pending job out of its structure."""
        if job.state is State.BLOCKED:
            self.blocked -= 1
        elif job.state is State.DELAYED:
            self.delayed.remove(job)
        elif job.generation == GROUP_WAITING:
            self._push(self.groups.remove(job))
        else:
            self.ready.remove(job)
            self.leave_group(job, was_ready=True)

    def _take_back(self, job: EngineJob, now: int, *, front: bool) -> None:
        """Put an active job into the structure for its time and group again."""
        if front and job.options.concurrency_key is not None and job.run_at <= now and self.is_grouped:
            # The group's next job must not overtake it.
            job.state = State.WAITING
            if self.groups.readmit(job):
                self.ready.push(job, front=True)
            return
        self.leave_group(job)
        self.place(job, now, front=front)

    def _bury(
        self,
        job: EngineJob,
        reason: str,
        error: JobFailure | None,
        changes: PendingChanges,
        *,
        in_group: bool = True,
    ) -> None:
        """Make a job a dead letter; remove those above the maximum."""
        job.state = State.FAILED
        job.reason = reason
        job.error = error
        job.finished_at = changes.now
        self.tally.failed += 1
        letter, evicted = self.dead.add(job, changes.now)
        self.finished.note_failed([job])
        if self.journal is not None:
            self.journal.died(job, letter)
        self._ended(job, changes, in_group=in_group)
        self.note(job, "failed", changes)
        self.remove_dead_letters(evicted, changes)

    def _cancel(
        self,
        job: EngineJob,
        reason: str,
        changes: PendingChanges,
        *,
        in_group: bool = True,
    ) -> None:
        """Record that a job is cancelled."""
        job.state = State.CANCELLED
        job.reason = reason
        job.finished_at = changes.now
        self.tally.cancelled += 1
        self.finished.add(job)
        self.changed(job)
        self._ended(job, changes, in_group=in_group)
        self.note(job, "cancelled", changes)

    def _ended(self, job: EngineJob, changes: PendingChanges, *, in_group: bool = True) -> None:
        """Release what an ended job held: key, group and dependencies."""
        successor = self.unique.release(job, job.finished_at)
        if in_group and job.options.concurrency_key is not None:
            self.leave_group(job)
            changes.woken.add(self.name)
        elif self.limiter.full and self.ready.size:
            changes.woken.add(self.name)
        if successor is not None:
            self.unblock(successor, PREDECESSOR, changes)
        self._unbind(job, changes)
        self.note_end(job, job.state, changes)

    @staticmethod
    def _unbind(job: EngineJob, changes: PendingChanges) -> None:
        if job.options.depends_on:
            changes.unbound.append((job, job.options.depends_on))

    def _free_permits(self, job: EngineJob, changes: PendingChanges) -> None:
        """Return the permits that an active job took of the queue's shared limiter."""
        if self.shared is not None:
            if changes.freed is None:
                changes.freed = {}
            changes.freed[self.shared] = changes.freed.get(self.shared, 0) + job.options.weight


def expiry(job: EngineJob) -> int:
    """Return when a job with a ttl expires, in UTC milliseconds."""
    return job.created_at + (job.options.ttl or 0)


def is_expired(job: EngineJob, now: int) -> bool:
    """Return whether a pending job is past its ttl; a job that has started, or was retried, never is."""
    ttl = job.options.ttl
    if ttl is None or job.created_at + ttl > now:
        return False
    return not job.started_at and job.error is None
