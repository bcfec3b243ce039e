"""Reads of the engine's jobs, queues, concurrency keys and metrics."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from heapq import nlargest, nsmallest

from ..enginejob import EngineJob
from ..explain import MAX_BEFORE, SHOWN, BlockingJob, Dependency, Explanation, Facts, decide
from ..flow import MAX_FLOW_JOBS, FlowGraph, FlowNode, JobLink, explore_all, link, walked
from ..job import DeadLetterPage, DeadLetterRecord, ItemMark, ItemPage, JobRecord
from ..messages import gettext_noop as _
from ..metrics import Bucket, assemble, since_beginning, span_of
from ..options import JobKey
from ..overview import (
    DiagnosticLine,
    Finding,
    KeyOverview,
    KeysOverview,
    Overview,
    QueueOverview,
    storage_lines,
    workers_line,
)
from ..pages import (
    JobPage,
    JobSummary,
    JobSummaryPage,
    Marked,
    are_readable,
    cut,
    first_of,
    mark_at,
    mark_before,
    mark_in,
    mark_of,
    page_of,
    position_of,
    summary_of,
)
from ..policies import PREDECESSOR, hold_on, standing
from ..states import PENDING, State
from ..workers import version_of
from .context import EngineContext
from .groups import GROUP_WAITING
from .queue import JobQueue
from .workers import EngineWorkers

TIMES = {
    State.DELAYED: "run_at",
    State.ACTIVE: "started_at",
    State.COMPLETED: "finished_at",
    State.FAILED: "finished_at",
    State.CANCELLED: "finished_at",
}
"""Times by which the jobs in a state are paged; other states are paged by the time of the enqueue."""
MAX_GROUPS = 10_000
"""Groups of a queue among which the busiest are searched."""


class EngineReads:
    """Reads of what the engine knows. Records are copies, each as of one moment."""

    def __init__(self, context: EngineContext, workers: EngineWorkers) -> None:
        self._context = context
        self._workers = workers
        self._facts = FactFinder(context)

    # Single jobs.

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Return records by id; None for an unknown job."""
        shard = self._context.shard(queue)
        records: list[JobRecord | None] = []
        with shard.lock:
            job_queue = shard.find(queue)
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is None:
                    records.append(None)
                    continue
                with self._context.processing_shard(job_id).lock:
                    records.append(job.record())
        return records

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Async version of `jobs`."""
        return self.jobs(queue, ids)

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """Return the streamed items behind each mark; None if the engine has not the job or its items."""
        shard = self._context.shard(queue)
        now = self._context.clock.now()
        pages: list[ItemPage | None] = []
        with shard.lock:
            job_queue = shard.find(queue)
            for mark in marks:
                job = job_queue.jobs.get(mark.id)
                if job is None:
                    pages.append(None)
                    continue
                with self._context.processing_shard(job.id).lock:
                    pages.append(item_page(job, mark, now))
        return pages

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """Async version of `items`."""
        return self.items(queue, marks)

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """Return states by id; None for an unknown job."""
        job_queue = self._context.existing(queue)
        if job_queue is None:
            return [None] * len(ids)
        return [job.state if (job := job_queue.jobs.get(job_id)) is not None else None for job_id in ids]

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        """Return the queues (None: of all) that have a job with this id, and its state in each."""
        names = self._context.queue_names() if queues is None else queues
        states = [(name, self.states(name, [id])[0]) for name in names]
        return [(name, state) for name, state in states if state is not None]

    def explain(self, queue: str, id: str) -> Explanation | None:
        """Explain why a job is not running; None for an unknown job."""
        facts = self._facts.facts(queue, id)
        return None if facts is None else decide(facts, self._workers.all())

    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        """Return the jobs connected to one by `depends_on`; None for an unknown job."""
        return self.flows([(queue, id)], limit)[0]

    def flows(self, keys: Sequence[JobKey], limit: int = MAX_FLOW_JOBS) -> list[FlowGraph | None]:
        """Return the graph of each job."""
        return walked(explore_all(keys, limit), lambda wanted: self.links(wanted, limit))

    def links(self, keys: Sequence[JobKey], limit: int) -> Mapping[JobKey, JobLink]:
        """Return known jobs with their dependencies and up to `limit` dependents each."""
        links = {}
        for key in keys:
            shard = self._context.shard(key[0])
            with shard.lock:
                job = shard.find(key[0]).jobs.get(key[1])
                if job is not None:
                    links[key] = link(_node(job), job.options, shard.dependencies.known(key, limit))
        return links

    def dependents(self, key: JobKey, limit: int) -> list[JobKey]:
        """Return up to `limit` live jobs that depend on one, also if only the tables have its record."""
        shard = self._context.shard(key[0])
        with shard.lock:
            return shard.dependencies.known(key, limit)

    # Pages of jobs.

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """Return up to `limit` records of one state (None: all), oldest first, behind the job with an id."""
        jobs = self._in_state(queue, state)
        mark = next(((job.created_at, job.id) for job in jobs if job.id == after), None)
        if mark is None and after is not None:
            return []
        return [record for _, record in self._first(queue, jobs, "created_at", limit, mark)]

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        """Return up to `limit` jobs of one state, by the time at which they came into it."""
        position = position_of(cursor, newest_first=newest_first)
        mark = None if position.mark is None else mark_of(position.mark)
        jobs, time = self._in_state(queue, state), TIMES.get(state, "created_at")
        marked = self._first(queue, jobs, time, limit + 1, mark, is_descending=position.is_descending)
        return page_of(marked, limit, position)

    def _in_state(self, queue: str, state: State | None) -> list[EngineJob]:
        """Return the jobs in one state (None: all), roughly in the order of their enqueue."""
        shard = self._context.shard(queue)
        with shard.lock:
            jobs = shard.find(queue).jobs.values()
            return [job for job in jobs if state is None or job.state is state]

    def _first(
        self,
        queue: str,
        jobs: Sequence[EngineJob],
        time: str,
        limit: int,
        mark: tuple[int, str] | None,
        *,
        is_descending: bool = False,
    ) -> list[Marked]:
        """Return the records of the first jobs behind a mark, by a time and their ids.

        The jobs are compared without the lock, because there may be a million. Their records are as of one
        moment afterwards.
        """
        entries = ((getattr(job, time), job.id, job) for job in (reversed(jobs) if is_descending else jobs))
        if is_descending:
            first = nlargest(limit, (entry for entry in entries if mark is None or entry[:2] < mark))
        else:
            first = nsmallest(limit, (entry for entry in entries if mark is None or entry[:2] > mark))
        with self._context.shard(queue).lock:
            return [(f"{at}:{job_id}", job.record()) for at, job_id, job in first]

    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        """Return up to `limit` summaries of jobs about a subject, newest first."""
        mark = mark_in(cursor)
        before = None if mark is None else mark_before(mark)
        summaries: list[tuple[tuple[int, str, str], JobSummary]] = []
        for name in self._context.queue_names() if queues is None else queues:
            shard = self._context.shard(name)
            with shard.lock:
                for job in shard.find(name).subjects.about(subject):
                    position = job.created_at, name, job.id
                    if before is None or position < before:
                        with self._context.processing_shard(job.id).lock:
                            summaries.append((position, summary_of(job)))
        first = nlargest(limit + 1, summaries)
        return first_of([(mark_at(*position), summary) for position, summary in first], limit)

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        """Return a queue's dead letters, oldest first."""
        job_queue = self._context.existing(queue)
        return [] if job_queue is None else job_queue.dead.letters()

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        """Return up to `limit` dead letters, oldest first; `after` is the `next` of an earlier page."""
        shard = self._context.shard(queue)
        with shard.lock:
            letters, last = shard.find(queue).dead.page(int(after or 0), limit)
        return DeadLetterPage(letters, None if last is None else str(last), self._context.clock.now())

    # Queues and groups.

    def counts(self, queue: str) -> dict[State, int]:
        """Return the number of jobs in each state, without records that only the tables have."""
        job_queue = self._context.existing(queue)
        if job_queue is None:
            return dict.fromkeys(State, 0)
        return _counts(job_queue, self._context.active_in(queue))

    def waiting_names(self, queue: str) -> dict[str, int]:
        """Return the number of claimable jobs by job name."""
        job_queue = self._context.existing(queue)
        return {} if job_queue is None else job_queue.ready.counts()

    def concurrency_keys(self, queue: str, limit: int, names: Sequence[str] = ()) -> KeysOverview:
        """Return up to `limit` keys, those with most waiting jobs first, and the named ones."""
        shard = self._context.shard(queue)
        with shard.lock:
            job_queue = shard.find(queue)
            groups = job_queue.groups
            return KeysOverview(
                job_queue.policy.key_mode,
                groups.limit if job_queue.is_grouped else 0,
                groups.rate,
                job_queue.key_limit,
                [groups.overview(name) for name in groups.busiest(limit, MAX_GROUPS)],
                [_group(job_queue, name) for name in names],
                len(groups) <= MAX_GROUPS,
            )

    def key_modes(self, queues: Sequence[str]) -> dict[str, str]:
        """Return the key mode of each queue."""
        existing = {queue: self._context.existing(queue) for queue in queues}
        return {
            queue: (self._context.policy(queue) if job_queue is None else job_queue.policy).key_mode
            for queue, job_queue in existing.items()
        }

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        """Return the counts and controls of queues (None: all), including records that only tables have."""
        names = self._context.queue_names() if queues is None else queues
        return Overview(self._context.clock.now(), [self._overview_of(name) for name in names])

    def _overview_of(self, name: str) -> QueueOverview:
        shard = self._context.shard(name)
        tick = self._context.clock.monotonic()
        with shard.lock:
            queue = shard.find(name)
            limiter, finished = queue.limiter, queue.finished
            bucket = limiter.bucket
            active = self._context.active_in(name)
            counts = _counts(queue, active)
            holds = tuple(sorted(standing(queue.holds.values(), self._context.clock.now())))
            held = {hold.name for hold in holds}
            return QueueOverview(
                name,
                counts,
                queue.paused,
                queue.ready.oldest_at(held) if queue.ready.size else None,
                queue.delayed.next_due(),
                bucket.rate if bucket is not None else None,
                bucket.available(tick) if bucket is not None else None,
                limiter.concurrency,
                active + self._context.extra_in(name),
                queue.policy.key_mode,
                queue.groups.group_waiting,
                queue.ready.counts(),
                queue.tally.totals(finished.completions),
                holds,
            )

    def stale_leases(self, grace: int) -> dict[str, int]:
        """Return the number of active jobs by queue whose lease expired more than `grace` ms ago."""
        until = self._context.clock.monotonic() - grace
        stale: Counter[str] = Counter()
        for processing in self._context.processing:
            with processing.lock:
                stale.update(job.queue for job in processing.active.values() if job.lease_until < until)
        return dict(stale)

    def change_version(self) -> str | None:
        """Return an opaque version of all queues, jobs and workers."""
        context = self._context
        # Sizes, because a claim also promotes due jobs and fails expired ones, which is not counted.
        sizes = [
            (queue.name, queue.ready.size, queue.delayed.size, len(queue.dead), len(queue.jobs))
            for shard in context.shards
            for queue in list(shard.queues.values())
        ]
        return version_of([context.started, context.changes.value, *sizes], self._workers.all())

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        """Return the metrics of a period in buckets of `step` milliseconds."""
        span = span_of(start, end, step)
        rows: Iterable[tuple[str, str, int, Sequence[int]]]
        rows = self._context.metrics.rows(queues, span, by_name=by_name)
        return assemble(rows, queues, span, by_name=by_name)

    def cumulative(self, queues: Sequence[str] | None = None) -> list[Bucket]:
        """Return the metrics of queues since they began."""
        return since_beginning(self._context.metrics.everything(queues))

    def storage_lines(self, where: str) -> list[DiagnosticLine]:
        """Return the diagnostics that any storage over an engine has; `where` describes it."""
        queues = self.overview().queues
        jobs = sum(sum(queue.counts.values()) for queue in queues)
        return [
            *storage_lines(where, len(queues)),
            DiagnosticLine("storage.jobs", _("Storage"), _("Jobs"), f"{jobs:,}"),
            workers_line(len(self._workers.all())),
        ]

    def findings(self) -> Sequence[Finding]:
        """Return problems of the storage's servers: the engine has none."""
        return ()


def _node(job: EngineJob) -> FlowNode:
    return FlowNode(
        job.queue,
        job.id,
        job.name,
        job.state,
        job.reason,
        created_at=job.created_at,
        finished_at=job.finished_at,
        started_at=job.started_at,
    )


def _group(queue: JobQueue, name: str) -> KeyOverview:
    group = queue.groups.overview(name)
    return group if queue.is_grouped else group._replace(limit=0)


def _counts(queue: JobQueue, active: int) -> dict[State, int]:
    return {
        State.WAITING: queue.waiting,
        State.DELAYED: queue.delayed.size,
        State.BLOCKED: queue.blocked,
        State.ACTIVE: active,
        State.COMPLETED: queue.finished.completed,
        State.FAILED: len(queue.dead),
        State.CANCELLED: queue.finished.cancelled,
    }


def item_page(job: EngineJob, mark: ItemMark, now: int) -> ItemPage | None:
    """Return the items behind a mark; None if they are no longer in memory. The caller holds the locks."""
    content_type, stream = job.options.content_type, job.stream
    if stream is None:
        return ItemPage(job.state, content_type, job.token, 0, (), 0)
    if stream.items is None:
        return None
    start = mark.start if mark.run == stream.run else 0
    readable = are_readable(job.state, job.options, job.finished_at, now)
    # Copy one page only, not all items behind the mark.
    ahead = (stream.items[at] for at in range(start, len(stream.items))) if readable else ()
    return ItemPage(job.state, content_type, stream.run, start, cut(ahead), stream.count)


class FactFinder:
    """Reads one job and everything that may keep it waiting."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def facts(self, queue: str, job_id: str) -> Facts | None:
        """Return what is known of a job; None if it is unknown."""
        shard = self._context.shard(queue)
        with shard.lock:
            job_queue = shard.find(queue)
            job = job_queue.jobs.get(job_id)
            if job is None:
                return None
            now, tick = self._context.clock.now(), self._context.clock.monotonic()
            with self._context.processing_shard(job_id).lock:
                # A plain job completes under this lock alone.
                facts = Facts(now, queue, job_id, job.name, job.state, job.run_at, worker=job.worker)
                if job.state is State.ACTIVE:
                    return facts._replace(lease_until=now + max(0, job.lease_until - tick))
            if facts.state not in PENDING:
                return facts
            unmet = sorted(job.unmet or ())
            facts = self._grouped(job_queue, job, self._limits(job_queue, job, facts, tick))
            predecessor = self._predecessor(job_queue, job, now) if PREDECESSOR in unmet else ()
        # Jobs of other queues are read a moment later, without this lock.
        others = tuple(self._dependency(key) for key in unmet if key != PREDECESSOR)
        return facts._replace(unmet=(*predecessor, *others))

    def _limits(self, queue: JobQueue, job: EngineJob, facts: Facts, tick: int) -> Facts:
        bucket = queue.limiter.bucket
        wait = bucket.wait(tick) if bucket is not None else 0
        active = self._active_of({queue.name})
        extra = self._context.extra_in(queue.name)
        is_ready = job.state is State.WAITING and job.generation != GROUP_WAITING
        return self._shared(queue, facts)._replace(
            paused=queue.paused,
            hold=hold_on(job.name, queue.holds.values(), facts.at),
            next_token_at=facts.at + wait if wait else None,
            weight=job.options.weight,
            concurrency=queue.limiter.concurrency,
            used=len(active) + extra,
            holders=_first(active),
            before=queue.ready.before(job, MAX_BEFORE) if is_ready else None,
        )

    def _shared(self, queue: JobQueue, facts: Facts) -> Facts:
        shared = queue.shared
        if shared is None:
            return facts
        state, wait = shared.state(), shared.next_token()
        facts = facts._replace(
            limiter=queue.policy.limiter,
            limiter_next_at=facts.at + wait if wait else None,
            limiter_limit=state.concurrency,
            limiter_used=state.used,
        )
        if state.free is None:
            return facts
        queues = [other for shard in self._context.shards for other in list(shard.queues.values())]
        active = self._active_of({other.name for other in queues if other.shared is shared})
        return facts._replace(limiter_holders=_first(active, queue.name))

    def _grouped(self, queue: JobQueue, job: EngineJob, facts: Facts) -> Facts:
        group = job.options.concurrency_key
        if group is None or not queue.is_grouped:
            return facts
        active = [other for other in self._active_of({queue.name}) if other.options.concurrency_key == group]
        facts = facts._replace(
            concurrency_key=group,
            key_paused=queue.groups.own(group).paused,
            key_limit=queue.groups.limit_of(group),
            key_active=len(active),
            key_holders=_first(active),
        )
        if job.state is not State.WAITING or job.generation != GROUP_WAITING:
            return facts
        rests = queue.groups.rests.of(group)
        if rests is not None:
            facts = facts._replace(key_next_at=facts.at + max(0, rests - self._context.clock.monotonic()))
        return facts._replace(is_group_waiting=True, before=min(MAX_BEFORE, queue.groups.before(job)))

    def _active_of(self, names: Set[str]) -> list[EngineJob]:
        active: list[EngineJob] = []
        for processing in self._context.processing:
            with processing.lock:
                active += [job for job in processing.active.values() if job.queue in names]
        return active

    def _predecessor(self, queue: JobQueue, job: EngineJob, now: int) -> tuple[Dependency, ...]:
        key = job.options.unique_key
        owner = queue.unique.owner(key, now) if key is not None else None
        return () if owner is None else (Dependency(queue.name, owner.id, owner.state),)

    def _dependency(self, key: JobKey) -> Dependency:
        queue = self._context.existing(key[0])
        job = queue.jobs.get(key[1]) if queue is not None else None
        return Dependency(*key, job.state if job is not None else None)


def _first(jobs: list[EngineJob], here: str | None = None) -> tuple[BlockingJob, ...]:
    """Return the jobs that were claimed first, without their queue if it is `here` or `here` is None."""
    jobs.sort(key=lambda job: job.token)
    return tuple(
        BlockingJob(job.id, job.worker, "" if here in (None, job.queue) else job.queue)
        for job in jobs[:SHOWN]
    )
