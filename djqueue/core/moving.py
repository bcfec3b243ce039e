"""Jobs from one queue to another, with all that is theirs and all that waits for them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from .base import EngineBase
from .job import EngineJob
from .options import JobKey
from .queue import KEYED
from .shard import PendingChanges, Shard
from .states import PENDING, REUSABLE, State


class Moving(EngineBase):
    """The one verb that concerns two queues at once, and those of the jobs that wait."""

    def move(self, queue_name: str, ids: Sequence[str], to: str) -> list[str]:
        """Pending jobs to another queue, behind those that wait there, and dead letters to its dead letters.

        For each: moved | not_found | active | ended | duplicate (its id is there) | unique_key_taken |
        group_needed (it has none).
        """
        if queue_name == to:
            raise ValueError(f"the jobs are already in queue {to!r}; name another queue")
        changes = PendingChanges()
        answers = []
        for job_id in ids:
            key = (queue_name, job_id)
            with self._held(key, to) as (source, target):
                answers.append(self._move_one(source, target, key, to, changes))
            self.settle(changes)
            changes = PendingChanges()
        return answers

    @contextmanager
    def _held(self, key: JobKey, to: str) -> Iterator[tuple[Shard, Shard]]:
        """The locks of both queues' shards, and of those of the jobs that wait for the job."""
        source, target = self.shard(key[0]), self.shard(to)
        wanted = {source, target}
        while True:
            with self._all_held(wanted):
                waiting = {self.shard(job.queue) for job in source.dependencies.of(key)}
                if waiting <= wanted:
                    yield source, target
                    return
            wanted |= waiting

    @contextmanager
    def _all_held(self, shards: Iterable[Shard]) -> Iterator[None]:
        # In one order, by whoever takes more than one: nobody waits for one who waits for him.
        with ExitStack() as held:
            for shard in sorted(shards, key=self.shards.index):
                held.enter_context(shard.lock)
            yield

    def _move_one(self, source: Shard, target: Shard, key: JobKey, to: str, changes: PendingChanges) -> str:
        now = self.clock.now()
        queue = source.find(key[0])
        job = queue.jobs.get(key[1])
        if job is None:
            return "not_found"
        if job.state is State.FAILED:
            return self._move_letter(source, target, key, to, changes)
        if job.state not in PENDING:
            return "active" if self.is_active(job) else "ended"
        if job.options.group is None and self.policy(to).group_mode == KEYED:
            return "group_needed"
        there = target.find(to).jobs.get(job.id)
        if there is not None and there.state not in REUSABLE:
            return "duplicate"
        unique_key = job.options.unique_key
        if unique_key is not None and target.find(to).unique.owner(unique_key, now) is not None:
            return "unique_key_taken"
        retries = source.give(queue, job, now, changes)
        queue = target.queue(to)
        job.has_dependents = there is not None and target.make_way(queue, there, now, changes)
        job.queue = to
        target.take_in(queue, job, retries, now, changes)
        self._rename(source, target, key, job)
        return "moved"

    def _move_letter(
        self, source: Shard, target: Shard, key: JobKey, to: str, changes: PendingChanges
    ) -> str:
        now = self.clock.now()
        queue = source.find(key[0])
        job = queue.jobs[key[1]]
        if job.id in target.find(to).jobs:
            # None makes way, as for a job that is enqueued: it would be a letter that nobody has read.
            return "duplicate"
        letter = source.give_letter(queue, job, now, changes)
        queue = target.queue(to)
        job.has_dependents = False
        job.queue = to
        evicted = target.take_letter(queue, job, letter, now, changes)
        self._rename(source, target, key, job)
        target.bury_for_good(queue, evicted, changes, now)
        return "moved"

    def _rename(self, source: Shard, target: Shard, old: JobKey, job: EngineJob) -> None:
        """Have those that wait for the job, and will yet, wait for it where it is now."""
        new = (job.queue, job.id)
        for dependent in source.dependencies.pop(old):
            if self.shard(dependent.queue).wait_elsewhere(dependent, old, new):
                target.dependencies.add(new, dependent)
                job.has_dependents = True
        target.is_at(new)
        source.moved_on(old, new)
