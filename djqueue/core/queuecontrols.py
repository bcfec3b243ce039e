"""What can be done to whole queues: limits, pause, clean, obliterate."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Unpack

from .groups import NO_LIMIT, GroupLimit, GroupWords
from .job import EngineJob
from .limiter import UNSET, Rate, SetConcurrency, SetRate
from .limitercontrols import LimiterControls
from .queue import QueuePolicy
from .shard import PendingChanges
from .states import State

AT_ONCE = 1_000
"""Jobs that are forgotten while others wait."""


class QueueControls(LimiterControls):
    """Verbs on queues."""

    def configure(self, queue_name: str, policy: QueuePolicy) -> None:
        """Give a queue another policy, at once."""
        changes = PendingChanges()
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.queue(queue_name)
            policy.check_mode(queue_name, queue.policy.group_mode)
            self._policies[queue_name] = policy
            if policy.limiter != queue.policy.limiter:
                self._share(queue, policy.limiter, changes)
            queue.configure(policy)
            self.may_block = self.may_block or policy.when_full == "block"
            queue.dead.policy = policy.dead_letters
            with ExitStack() as held:
                for place in self.processing:  # under whose locks plain jobs complete
                    held.enter_context(place.lock)
                queue.finished.configure(policy.retention, queue.jobs)
            queue.limiter.set(policy.rate, policy.concurrency, self.clock.monotonic())
            queue.limit_groups(policy, queue.group_limit)
            queue.regroup(queue.groups.names())
            changes.woken.add(queue_name)
        self.settle(changes)

    def set_limits(self, queue_name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Change the limits of a queue while it runs: those that are given."""
        changes = PendingChanges()
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.queue(queue_name)
            queue.limiter.set(rate, concurrency, self.clock.monotonic())
            changes.woken.add(queue_name)
        self.settle(changes)

    def set_group_limit(self, queue_name: str, group: str | None, **said: Unpack[GroupWords]) -> None:
        """Change what counts for a group; None: for all without their own.

        A word that is None takes back what was said, so that the queue's counts, or its policy's.
        """
        changes = PendingChanges()
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.queue(queue_name)
            if group is None:
                queue.limit_groups(queue.policy, queue.group_limit._replace(**said))
                queue.regroup(queue.groups.names())
            else:
                queue.groups.set_own(group, queue.groups.own(group)._replace(**said))
                queue.regroup([group])
            changes.woken.add(queue_name)
        self.settle(changes)

    def pause_group(self, queue_name: str, group: str) -> None:
        """No job of the group is claimed until `resume_group`."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.queue(queue_name)
            queue.groups.set_own(group, queue.groups.own(group)._replace(paused=True))
            queue.regroup([group])

    def resume_group(self, queue_name: str, group: str) -> None:
        """End a group's pause."""
        changes = PendingChanges()
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.find(queue_name)
            queue.groups.set_own(group, queue.groups.own(group)._replace(paused=False))
            queue.regroup([group])
            changes.woken.add(queue_name)
        self.settle(changes)

    def group_limits(self, queue_name: str) -> dict[str | None, GroupLimit]:
        """What was said to groups; under None, to all."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.find(queue_name)
            said: dict[str | None, GroupLimit] = dict(queue.groups.said().items())
            if queue.group_limit != NO_LIMIT:
                said[None] = queue.group_limit
        return said

    def pause(self, queue_name: str) -> None:
        """Nothing of the queue is claimed until `resume`; enqueues go on, and so do running jobs."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.queue(queue_name)
            queue.paused = True

    def resume(self, queue_name: str) -> None:
        """End a pause."""
        changes = PendingChanges()
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.find(queue_name)
            queue.paused = False
            changes.woken.add(queue_name)
        self.settle(changes)

    def is_paused(self, queue_name: str) -> bool:
        """Whether the queue is paused."""
        queue = self.existing(queue_name)
        return queue is not None and queue.paused

    def limits(self, queue_name: str) -> tuple[Rate | None, int | None]:
        """Rate and concurrency of the queue, as they are now."""
        queue = self.existing(queue_name)
        if queue is None:
            return None, None
        bucket = queue.limiter.bucket
        return bucket.rate if bucket is not None else None, queue.limiter.concurrency

    def clean(self, queue_name: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """Forget jobs in these states (not active) that ended, or were enqueued, before a time.

        Returns how many. `before` is in UTC milliseconds.
        """
        return sum(self.clean_in_parts(queue_name, states, before, limit))

    def clean_in_parts(
        self, queue_name: str, states: frozenset[State], before: int, limit: int | None = None
    ) -> Iterator[int]:
        """See `clean`: how many each part has forgotten, between which others come to their turn."""

        def is_meant(job: EngineJob) -> bool:
            return job.state in states and (job.finished_at or job.created_at) < before

        shard = self.shard(queue_name)
        with shard.lock:
            found = [job for job in shard.find(queue_name).jobs.values() if is_meant(job)]
        # Before what they wait for: else they would end with that, and stay.
        blocked = [job for job in found if job.state is State.BLOCKED]
        if blocked:
            found = [*reversed(blocked), *(job for job in found if job.state is not State.BLOCKED)]
        left = len(found) if limit is None else limit
        for first in range(0, len(found), AT_ONCE):
            changes = PendingChanges()
            with shard.lock:
                queue = shard.find(queue_name)
                jobs = [
                    job
                    for job in found[first : first + AT_ONCE]
                    if queue.jobs.get(job.id) is job and is_meant(job) and not self.is_active(job)
                ][:left]
                shard.remove(queue, jobs, self.clock.now(), changes)
            self.settle(changes)
            left -= len(jobs)
            yield len(jobs)
            if not left:
                return

    def obliterate(self, queue_name: str, *, force: bool = False) -> int:
        """Forget a queue and all its jobs; with active ones only by `force`, whose ends are then refused.

        Returns how many jobs are gone, or -1 if active ones forbade it.
        """
        changes = PendingChanges()
        shard = self.shard(queue_name)
        now = self.clock.now()
        with shard.lock:
            queue = shard.find(queue_name)
            active = [job for job in queue.jobs.values() if self.is_active(job)]
            if active and not force:
                return -1
            for job in active:
                place = self.place(job.id)
                with place.lock:
                    released = place.release(job.token, queue.name, job.id)
                if released is not None:
                    shard.cancel_active(queue, job, "obliterated", now, changes)
            jobs = list(queue.jobs.values())
            shard.remove(queue, jobs, now, changes)
            shard.queues.pop(queue_name, None)
            if queue.shared is not None:
                queue.shared.forget(queue_name, changes.woken)
            if queue.observed:
                # The subscribers are of the name, not of what was in the queue.
                fresh = shard.queue(queue_name)
                fresh.handlers, fresh.watchers = queue.handlers, queue.watchers
        changes.woken.discard(queue_name)
        self.settle(changes)
        return len(jobs)
