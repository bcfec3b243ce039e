"""What the engine answers about its jobs."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import nlargest

from .base import EngineBase
from .groups import GroupOverview
from .job import DeadLetterPage, DeadLetterRecord, EngineJob, JobRecord
from .overview import GroupsOverview, Overview, QueueOverview, Totals
from .pages import JobPage, mark_of, page_of, place_of
from .queue import JobQueue
from .states import State
from .summaries import JobSummary, JobSummaryPage, first_of, mark_at, mark_before, mark_in, mention

TIMES = {
    State.DELAYED: "run_at",
    State.ACTIVE: "started_at",
    State.COMPLETED: "finished_at",
    State.FAILED: "finished_at",
    State.CANCELLED: "finished_at",
}
"""By which jobs in a state are paged; the others by when they were enqueued."""
MOST_GROUPS = 10_000
"""Groups of a queue of which the busiest are looked for."""


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

    def groups(self, queue_name: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        """Those with most waiting jobs, and some by name."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.find(queue_name)
            groups = queue.groups
            return GroupsOverview(
                queue.policy.group_mode,
                groups.limit if queue.is_grouped else 0,
                groups.rate,
                queue.group_limit,
                [groups.overview(name) for name in groups.busiest(limit, MOST_GROUPS)],
                [self._group(queue, name) for name in names],
                len(groups) <= MOST_GROUPS,
            )

    @staticmethod
    def _group(queue: JobQueue, name: str) -> GroupOverview:
        found = queue.groups.overview(name)
        return found if queue.is_grouped else found._replace(limit=0)

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

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        """Each queue as it is at one moment, with the records of its jobs that are kept elsewhere."""
        found = [self._overview_of(name) for name in (self.queues() if queues is None else queues)]
        return Overview(self.clock.now(), found)

    def _overview_of(self, name: str) -> QueueOverview:
        shard = self.shard(name)
        tick = self.clock.monotonic()
        with shard.lock:
            queue = shard.find(name)
            limiter, finished = queue.limiter, queue.finished
            bucket = limiter.bucket
            active = self.active_in(name)
            return QueueOverview(
                name,
                self._counts_of(queue, active),
                queue.paused,
                queue.ready.oldest_at() if queue.ready.size else None,
                queue.delayed.next_due(),
                bucket.rate if bucket is not None else None,
                bucket.available(tick) if bucket is not None else None,
                limiter.concurrency,
                active + self._extra_in(name),
                queue.policy.group_mode,
                queue.groups.parked,
                queue.ready.counts(),
                queue.tally.totals(finished.completions),
            )

    def _counts_of(self, queue: JobQueue, active: int) -> dict[State, int]:
        finished, elsewhere = queue.finished, queue.finished.elsewhere
        return {
            State.WAITING: queue.waiting,
            State.DELAYED: queue.delayed.size,
            State.BLOCKED: queue.blocked,
            State.ACTIVE: active,
            State.COMPLETED: finished.completed + elsewhere[State.COMPLETED],
            State.FAILED: len(queue.dead),
            State.CANCELLED: finished.cancelled + elsewhere[State.CANCELLED],
        }

    def news(self, queue_name: str) -> list[int]:
        """What the totals of a queue have risen by since this was last asked; empty: nothing."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.queues.get(queue_name)
            if queue is None:
                return []
            totals, noted = queue.tally.totals(queue.finished.completions), queue.tally.noted
            if totals == noted:
                return []
            queue.tally.noted = totals
        return [now - before for now, before in zip(totals, noted, strict=True)]

    def take_back(self, queue_name: str, news: Sequence[int]) -> None:
        """What `news` has told could not be noted."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.queues.get(queue_name)
            if queue is not None:
                noted = zip(queue.tally.noted, news, strict=True)
                queue.tally.noted = Totals(*(now - more for now, more in noted))

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

    def cursor_page(
        self, queue_name: str, state: State, limit: int, cursor: str | None, *, newest_first: bool
    ) -> JobPage:
        """Records of one state by the time at which they came into it, from a mark on."""
        place = place_of(cursor, newest_first=newest_first)
        time = TIMES.get(state, "created_at")
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.find(queue_name)
            found = sorted((getattr(job, time), job.id) for job in queue.jobs.values() if job.state is state)
            if place.mark is not None:
                at, job_id = mark_of(place.mark)
                first = bisect_left(found, (at, job_id)), bisect_right(found, (at, job_id))
                found = found[: first[0]] if place.is_descending else found[first[1] :]
            some = (found[::-1] if place.is_descending else found)[: limit + 1]
            jobs = [(f"{at}:{job_id}", queue.jobs[job_id].record()) for at, job_id in some]
        return page_of(jobs, limit, place)

    def find(self, job_id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        """The queues that have a job with an id, and its state there."""
        names = self.queues() if queues is None else queues
        found = [(name, self.states(name, [job_id])[0]) for name in names]
        return [(name, state) for name, state in found if state is not None]

    def about(
        self, subject: str, limit: int, cursor: str | None, queues: Sequence[str] | None
    ) -> JobSummaryPage:
        """Jobs about a subject by when they were enqueued, the newest first, from a mark on."""
        mark = mark_in(cursor)
        before = None if mark is None else mark_before(mark)
        found: list[tuple[tuple[int, str, str], JobSummary]] = []
        for name in self.queues() if queues is None else queues:
            shard = self.shard(name)
            with shard.lock:
                for job in shard.find(name).subjects.about(subject):
                    place = job.created_at, name, job.id
                    if before is None or place < before:
                        with self.place(job.id).lock:
                            found.append((place, mention(job)))
        some = nlargest(limit + 1, found)
        return first_of([(mark_at(*place), one) for place, one in some], limit)

    def dead_letters(self, queue_name: str) -> list[DeadLetterRecord]:
        """The queue's dead letters, oldest first."""
        queue = self.existing(queue_name)
        return [] if queue is None else queue.dead.letters()

    def dead_letter_page(self, queue_name: str, limit: int, after: str | None = None) -> DeadLetterPage:
        """Up to `limit` of the queue's dead letters, oldest first, from where an earlier page ended."""
        shard = self.shard(queue_name)
        with shard.lock:
            letters, last = shard.find(queue_name).dead.page(int(after or 0), limit)
        return DeadLetterPage(letters, None if last is None else str(last), self.clock.now())

    def unique_owners(self, queue_name: str, key: str) -> list[EngineJob]:
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
        return self.active_in(queue_name) + self._extra_in(queue_name)

    def _extra_in(self, queue_name: str) -> int:
        return sum([place.extra.get(queue_name, 0) for place in self.processing])
