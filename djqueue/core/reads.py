"""What the engine answers about its jobs."""

from collections.abc import Sequence

from .base import EngineBase
from .job import DeadLetter, Job, JobRecord, LetterPage
from .states import State


class Reads(EngineBase):
    """Reads: records are copies, as of one moment."""

    def queues(self) -> list[str]:
        """Names of the queues that have been used."""
        return sorted(name for shard in self.shards for name in list(shard.queues))

    def jobs(self, queue_name: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Records as they are now."""
        shard = self.shard(queue_name)
        records: list[JobRecord | None] = []
        with shard.lock:
            queue = shard.find(queue_name)
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is None:
                    records.append(None)
                    continue
                with self.place(job_id).lock:
                    records.append(job.record())
        return records

    def states(self, queue_name: str, ids: Sequence[str]) -> list[State | None]:
        """States as they are now."""
        queue = self.existing(queue_name)
        if queue is None:
            return [None] * len(ids)
        return [job.state if (job := queue.jobs.get(job_id)) is not None else None for job_id in ids]

    def counts(self, queue_name: str) -> dict[State, int]:
        """How many jobs of the queue are in each state."""
        queue = self.existing(queue_name)
        if queue is None:
            return dict.fromkeys(State, 0)
        return {
            State.WAITING: queue.waiting,
            State.DELAYED: queue.delayed.size,
            State.BLOCKED: queue.blocked,
            State.ACTIVE: self.active_in(queue_name),
            State.COMPLETED: queue.finished.completed,
            State.FAILED: len(queue.dead),
            State.CANCELLED: queue.finished.cancelled,
        }

    def waiting_names(self, queue_name: str) -> dict[str, int]:
        """Jobs ready to be claimed, by job name: shows those that no worker handles."""
        queue = self.existing(queue_name)
        return {} if queue is None else queue.ready.counts()

    def page(
        self, queue_name: str, state: State | None, limit: int, after: str | None = None
    ) -> list[JobRecord]:
        """Records of one state (None: of all) in order of time and id, `limit` at most, after an id."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.find(queue_name)
            jobs = [job for job in queue.jobs.values() if state is None or job.state is state]
            jobs.sort(key=lambda job: (job.created_at, job.id))
            start = 0
            if after is not None:
                start = next((at for at, job in enumerate(jobs, 1) if job.id == after), len(jobs))
            return [job.record() for job in jobs[start : start + limit]]

    def dead_letters(self, queue_name: str) -> list[DeadLetter]:
        """The queue's dead letters, oldest first."""
        queue = self.existing(queue_name)
        return [] if queue is None else queue.dead.letters()

    def dead_letter_page(self, queue_name: str, limit: int, after: str | None = None) -> LetterPage:
        """Up to `limit` of the queue's dead letters, oldest first, from where an earlier page ended."""
        shard = self.shard(queue_name)
        with shard.lock:
            letters, last = shard.find(queue_name).dead.page(int(after or 0), limit)
        return LetterPage(letters, None if last is None else str(last), self.clock.now())

    def unique_owners(self, queue_name: str, key: str) -> list[Job]:
        """The live job of a queue that has a unique key, and the one that waits for its end."""
        shard = self.shard(queue_name)
        with shard.lock:
            unique = shard.find(queue_name).unique
            owner, successor = unique.owner(key, self.clock.now()), unique.waiting(key)
        return [job for job in (owner, successor) if job is not None]

    def active_in(self, queue_name: str) -> int:
        """Active jobs of a queue."""
        return sum([place.counts.get(queue_name, 0) for place in self.processing])

    def taken_in(self, queue_name: str) -> int:
        """Slots of a queue's concurrency that its active jobs take."""
        extra = sum([place.extra.get(queue_name, 0) for place in self.processing])
        return self.active_in(queue_name) + extra
