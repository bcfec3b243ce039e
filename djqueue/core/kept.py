"""Jobs that are kept elsewhere, too: taken in, and forgotten."""

from collections.abc import Iterable

from .base import EngineBase
from .job import DeadLetter, Job
from .shard import Changes
from .states import REUSABLE, TERMINAL, State


class KeptElsewhere(EngineBase):
    """For a storage that has a journal."""

    def restore(self, jobs: Iterable[Job], letters: Iterable[DeadLetter] = (), *, bind: bool = True) -> int:
        """Take in jobs as they were kept; one whose id is already here is passed over.

        The caller has given every job a state that is not active. A dependency that is not known any
        more has completed: had it ended otherwise, its dependent would have ended with it. Returns how
        many are new here.
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
                queue.jobs[job.id] = job
                if job.state in TERMINAL:
                    if job.state is not State.FAILED:
                        queue.finished.add(job)
                    continue
                if job.options.depends_on and job.state is State.BLOCKED:
                    job.unmet = set(job.options.depends_on)
                owner = queue.unique.owner(job.options.unique_key, now) if job.options.unique_key else None
                if owner is None:
                    queue.unique.take(job)
                queue.watch_deadline(job)
                kept_as = job.state
                queue.place(job, now)
                if job.state is not kept_as:
                    shard.changed(job)  # its time came meanwhile
        for letter in letters:
            shard = self.shard(letter.queue)
            with shard.lock:
                queue = shard.queue(letter.queue)
                if letter.id in queue.jobs:
                    queue.dead.restore(letter)
        for job in restored:
            if bind and job.unmet:
                self.bind(job, tuple(job.unmet), missing=State.COMPLETED)
        changes = Changes()
        changes.woken.update({job.queue for job in restored})
        self.settle(changes)
        return len(restored)

    def accept(self, jobs: Iterable[Job]) -> int:
        """Take in new jobs that a producer has already written where the journal writes, ids and all.

        One whose id is live here is passed over; one whose unique key is taken by now is cancelled.
        Returns how many were taken in.
        """
        taken = 0
        for job in jobs:
            changes = Changes()
            shard = self.shard(job.queue)
            now = self.clock.now()
            with shard.lock:
                queue = shard.queue(job.queue)
                there = queue.jobs.get(job.id)
                if there is not None and there.state not in REUSABLE:
                    with self.place(there.id).lock:  # else it could complete meanwhile
                        shard.changed(there)
                    continue
                if there is not None:
                    job.has_dependents = shard.make_way(queue, there, now, changes)
                key = job.options.unique_key
                if key is not None and queue.unique.owner(key, now) is not None:
                    queue.jobs[job.id] = job
                    job.state = State.CANCELLED
                    job.reason = "duplicate"
                    job.finished_at = now
                    queue.finished.add(job)
                    shard.note_end(job, job.state, changes)
                else:
                    queue.admit(job, now)
                    changes.woken.add(queue.name)
                taken += 1
                if there is not None and self._journal is not None:
                    self._journal.added([job])
                shard.changed(job)
                event = "cancelled" if job.state is State.CANCELLED else "queued"
                shard.tell(queue, job, event, now, changes)
                if job.state is State.CANCELLED:
                    shard.incident(job, "cancelled", changes)
            self.settle(changes)
            if job.unmet:
                self.bind(job, tuple(job.unmet), missing=State.COMPLETED)
        return taken

    def evict(self, jobs: Iterable[Job]) -> None:
        """Forget completed and cancelled jobs that are kept elsewhere; the others stay."""
        for job in jobs:
            shard = self.shard(job.queue)
            with shard.lock:
                queue = shard.find(job.queue)
                ended = job.state is State.COMPLETED or job.state is State.CANCELLED
                if ended and queue.jobs.get(job.id) is job:
                    queue.finished.remove(job)
                    queue.drop(job)
