"""Jobs that are kept elsewhere, too: taken in, and forgotten."""

from collections.abc import Container, Iterable

from .base import EngineBase
from .capacity import DROPPED
from .job import DeadLetterRecord, EngineJob
from .options import JobKey
from .queue import JobQueue
from .shard import NO_RIVAL, REPLACED, PendingChanges, Shard, Succession, pending_rival
from .states import REUSABLE, TERMINAL, State
from .unique import PREDECESSOR


class PersistentEngine(EngineBase):
    """For a storage that has a journal."""

    def note_kept(self, queue_name: str, state: State, count: int) -> None:
        """So many records of jobs that ended so are kept elsewhere alone."""
        shard = self.shard(queue_name)
        with shard.lock:
            shard.queue(queue_name).finished.elsewhere[state] += count

    def restore(
        self,
        jobs: Iterable[EngineJob],
        letters: Iterable[DeadLetterRecord] = (),
        *,
        bind: bool = True,
        kept: bool = False,
    ) -> int:
        """Take in jobs as they were kept; one whose id is already here is passed over.

        Active jobs have the tokens of their claims, get a whole lease, and come before those that wait for
        them or for what they take of limits. A dependency that is not known any more has completed: had it
        ended otherwise, its dependent would have ended with it. Returns how many are new here.

        kept: whether those that have ended are among the records that are known to be kept elsewhere.
        """
        restored = []
        for job in jobs:
            shard = self.shard(job.queue)
            now = self.clock.now()
            with shard.lock:
                queue = shard.queue(job.queue)
                if job.id in queue.jobs:
                    continue
                restored.append(job)
                queue.keep(job)
                if job.state in TERMINAL:
                    if job.state is not State.FAILED:
                        queue.finished.add(job)
                        queue.finished.elsewhere[job.state] -= kept
                    continue
                if job.options.depends_on and job.state is State.BLOCKED:
                    job.unmet = set(job.options.depends_on)
                owner = queue.unique.owner(job.options.unique_key, now) if job.options.unique_key else None
                if owner is None:
                    queue.unique.take(job)
                elif owner.state is State.ACTIVE and job.state is State.BLOCKED:
                    job.unmet = {PREDECESSOR, *(job.unmet or ())}
                    queue.unique.wait(job, owner)
                if job.state is State.ACTIVE:
                    self._resume(queue, job)
                    continue
                queue.watch_deadline(job)
                kept_as = job.state
                if kept_as is State.WAITING:
                    job.run_at = min(job.run_at, now)  # The wall clock may have been set back.
                queue.place(job, now)
                if queue.drops is not None:
                    queue.drops.push(job, queue.pending)
                if job.state is not kept_as:
                    shard.changed(job)  # its time came meanwhile
        for letter in letters:
            shard = self.shard(letter.queue)
            with shard.lock:
                queue = shard.queue(letter.queue)
                if letter.id in queue.jobs:
                    queue.dead.restore(letter, queue.jobs[letter.id])
                    queue.finished.note_failed([queue.jobs[letter.id]])
        for job in restored:
            if bind and job.unmet:
                self.bind(job, tuple(job.unmet - {PREDECESSOR}), missing=State.COMPLETED)
        changes = PendingChanges()
        changes.woken.update({job.queue for job in restored})
        self.settle(changes)
        return len(restored)

    def _resume(self, queue: JobQueue, job: EngineJob) -> None:
        """Hold a claim that was made by another engine, and count it wherever claims count."""
        job.lease_until = self.clock.monotonic() + queue.policy.lease
        with self.place(job.id).lock:
            self.place(job.id).hold(job)
        self.outbid(job.token)
        if job.options.group is not None and queue.is_grouped:
            queue.groups.resume(job)
        if queue.shared is not None:
            queue.shared.take(job.options.weight)
        if self._journal is not None:
            self._journal.renewed(job)

    def accept(self, jobs: Iterable[EngineJob], replacing: Container[JobKey] = ()) -> int:
        """Take in new jobs that a producer has already written where the journal writes, ids and all.

        replacing: keys of those that took the place of a cancelled job's record there.

        One whose id is live here is passed over; one whose unique key is taken by now is cancelled, unless
        its `on_duplicate` says otherwise.
        Returns how many were taken in.
        """
        taken = 0
        self.notice_step(self.clock.now(), self.clock.monotonic())
        for job in jobs:
            changes = PendingChanges()
            shard = self.shard(job.queue)
            now = self.clock.now()
            with shard.lock:
                queue = shard.queue(job.queue)
                there = queue.jobs.get(job.id)
                if there is not None and there.state not in REUSABLE:
                    with self.place(there.id).lock:  # else it could complete meanwhile
                        self._keep_anew(there)
                    continue
                if there is not None:
                    job.has_dependents = shard.make_way(queue, there, now, changes)
                else:
                    shard.replaced((job.queue, job.id))
                    if (job.queue, job.id) in replacing and queue.finished.elsewhere[State.CANCELLED]:
                        queue.finished.elsewhere[State.CANCELLED] -= 1
                taken += 1
                if there is not None and self._journal is not None:
                    self._journal.added([job])
                if job.options.rejected is not None:
                    shard.reject(queue, job, now, changes)
                else:
                    self._accept(shard, queue, job, now, changes)
            self.settle(changes)
            if job.unmet:
                self.bind(job, tuple(job.unmet - {PREDECESSOR}), missing=State.COMPLETED)
        return taken

    def _accept(
        self, shard: Shard, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges
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
        shard.changed(job)
        event = "cancelled" if job.state is State.CANCELLED else "queued"
        shard.tell(queue, job, event, now, changes)
        if job.state is State.CANCELLED:
            shard.incident(job, "cancelled", changes)

    def _keep_anew(self, job: EngineJob) -> None:
        """Have the journal write all of a job: a producer may have put another in the place of its row."""
        journal = self._journal
        if journal is None:
            return
        journal.removed([job])
        job.noted = 0
        journal.added([job])
        if job.progress is not None or job.logs:
            journal.reported(job, tuple(job.logs or ()))
        if job.state is State.COMPLETED:
            journal.completed(job)
        else:
            journal.changed(job)

    def hold(self, job: EngineJob, there: Container[JobKey]) -> None:
        """A live job that waits no more holds the records of what it depends on, of which `there` are kept
        elsewhere.
        """
        for key in job.options.depends_on:
            if key in there:
                shard = self.shard(key[0])
                with shard.lock:
                    shard.dependencies.hold(key, job)

    def put_off(self, queue_name: str, ids: Iterable[str] | None = None) -> set[str]:
        """Those of some ended jobs (None: of all) whose records are held, which is noted, and are to stay."""
        shard = self.shard(queue_name)
        with shard.lock:
            holders = shard.dependencies.holders
            if ids is None:
                ids = [key[1] for key in holders if key[0] == queue_name]
            held = {job_id for job_id in ids if (queue_name, job_id) in holders} if holders else set()
            if self._journal is not None:
                for job_id in held:
                    self._journal.put_off((queue_name, job_id))
        return held

    def forget_belongings(self, queue_name: str, ids: Iterable[str], *, logs: bool) -> list[str]:
        """Forget the attempts, or log lines, of those of the jobs that are dead letters; which they are."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.find(queue_name)
            dead = [job_id for job_id in ids if queue.dead.get(job_id) is not None]
            for job in map(queue.jobs.__getitem__, dead):
                if logs:
                    job.logs = None
                else:
                    job.history, job.noted = None, 0
        return dead

    def evict(self, jobs: Iterable[EngineJob]) -> None:
        """Forget completed and cancelled jobs that are kept elsewhere; the others stay."""
        for job in jobs:
            shard = self.shard(job.queue)
            with shard.lock:
                queue = shard.find(job.queue)
                ended = job.state is State.COMPLETED or job.state is State.CANCELLED
                if ended and queue.jobs.get(job.id) is job:
                    queue.finished.remove(job)
                    queue.finished.elsewhere[job.state] += 1
                    queue.drop(job)


def _rivals(
    shard: Shard, queue: JobQueue, job: EngineJob, now: int, changes: PendingChanges
) -> Succession | str:
    """How a job comes to its unique key, or why it does not."""
    key = job.options.unique_key
    owner = queue.unique.owner(key, now) if key is not None else None
    if owner is None:
        return NO_RIVAL if shard.make_room(queue, job.options.priority, now, changes) else DROPPED
    rival = pending_rival(queue, owner)
    if rival is not None and rival.created_at > job.created_at and job.options.on_duplicate != "keep":
        return REPLACED  # enqueued before it, and taken in after it
    succession = shard.succeed(queue, job, owner, now, changes)
    if succession is None:
        return "duplicate"
    if succession.replaced is None and not shard.make_room(queue, job.options.priority, now, changes):
        return DROPPED
    return succession
