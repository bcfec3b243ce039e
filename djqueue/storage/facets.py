"""The facets of the storage contract: jobs, queues, limiters, workers, events and reads.

A facet is a small protocol that a storage implements directly: the memory storage answers with its engine,
the database storage with the scheduler or the tables, Redis with scripts. Operations are batch-first: a
single job is a list of one. `djqueue.testing.contract` holds every storage to them.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, Unpack

from djqueue.core.explain import Explanation
from djqueue.core.flow import MAX_FLOW_JOBS, FlowGraph
from djqueue.core.job import (
    CancelResult,
    DeadLetterPage,
    DeadLetterRecord,
    Event,
    ItemMark,
    ItemPage,
    JobRecord,
)
from djqueue.core.metrics import Bucket, RunStats
from djqueue.core.options import JobKey
from djqueue.core.overview import Diagnostics, Finding, KeysOverview, LimiterState, Overview
from djqueue.core.pages import JobPage, JobSummaryPage
from djqueue.core.policies import UNSET, KeyLimit, KeyLimitChanges, SetConcurrency, SetRate
from djqueue.core.states import State
from djqueue.core.workers import WorkerDump, WorkerInfo

EventHandler = Callable[[Event], None]
Unsubscribe = Callable[[], None]

WORKER_TTL = 60_000
"""Milliseconds after its last heartbeat at which a worker counts as gone."""


class Jobs(Protocol):
    """Changes of single jobs of one queue, by id."""

    @abstractmethod
    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """Cancel jobs: a pending job never starts, an active one is asked to stop."""

    @abstractmethod
    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """Make delayed jobs claimable now; False for a job that is not delayed."""

    @abstractmethod
    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """Move waiting and delayed jobs to a time in UTC milliseconds; False for jobs in other states."""

    @abstractmethod
    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        """Change the priority or the payload of pending jobs, or both; False for a job that is not pending.

        A waiting job with a new priority goes behind those that have it already; otherwise it keeps its
        position.
        """

    @abstractmethod
    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        """Replace the payload of one job, unless it has changed since the caller read it.

        Args:
            old: The payload that the caller read. If the job has a different one, nothing changes.
            retry: The job is a dead letter, and is retried with the new payload. If False, the job is
                pending, and keeps its position.

        Returns:
            updated (a pending job) | retried (a dead letter) | not_found | changed | unique_key_taken, or the
            job's current state if the call does not apply to it.
        """

    @abstractmethod
    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """Move pending jobs to the end of another queue, and failed ones to its dead letters.

        A job keeps its id, counters, times and keys. Its dependents wait for it in the new queue.

        Returns:
            For each job: moved | not_found | active | ended | duplicate (the queue has a job with this id) |
            unique_key_taken (a live job of the queue has the key) |
            concurrency_key_needed (the queue requires a concurrency key, and the job has none).
        """

    @abstractmethod
    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        """Move dead letters back to waiting, or to blocked.

        A job that failed with `dependency_failed` waits again for the dependencies that have not completed,
        including failed ones that are not retried yet. If one of them was cancelled or removed, the retry is
        refused as `dependency_gone`.

        Args:
            dry_run: Only report what would happen to each job.

        Returns:
            For each job: retried | blocked_again | not_found | not_failed | unique_key_taken | rejected (the
            payload was never valid: use `replace_payload`) | dependency_gone.
        """

    @abstractmethod
    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        """Remove jobs with everything that belongs to them; False for a job that is active or unknown.

        Args:
            ended_before: Remove only jobs that ended before this time in UTC milliseconds; False for others.
        """


class Queues(Protocol):
    """Queues as a whole: pauses, limits, concurrency keys, and removal of many jobs."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the queues that have been used, sorted."""

    @abstractmethod
    def pause(self, queue: str) -> None:
        """Stop claims from a queue until `resume`."""

    @abstractmethod
    def resume(self, queue: str) -> None:
        """Resume a paused queue."""

    @abstractmethod
    def is_paused(self, queue: str) -> bool:
        """Return whether a queue is paused."""

    @abstractmethod
    def hold(self, queue: str, name: str, until: int | None, reason: str) -> None:
        """Stop claims of the jobs of one name until a time in UTC milliseconds, or until `release` if it is
        None. Replaces an earlier hold on the name.
        """

    @abstractmethod
    def release(self, queue: str, name: str) -> bool:
        """End a hold; return whether there was one."""

    @abstractmethod
    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Limit a queue's starts per period and active jobs, across all workers.

        None removes a limit; a limit that is not given is unchanged.
        """

    @abstractmethod
    def set_key_limit(self, queue: str, key: str | None, **overrides: Unpack[KeyLimitChanges]) -> None:
        """Override limits of a concurrency key, or the default for keys without their own if `key` is None.

        Only the values that are given change. None removes an override, so that the default of the queue, or
        of its policy, applies again. A changed rate starts with a full bucket.
        """

    @abstractmethod
    def pause_key(self, queue: str, key: str) -> None:
        """Stop claims of a concurrency key's jobs until `resume_key`."""

    @abstractmethod
    def resume_key(self, queue: str, key: str) -> None:
        """Resume a paused concurrency key."""

    @abstractmethod
    def key_limits(self, queue: str) -> dict[str | None, KeyLimit]:
        """Return the overrides of a queue's concurrency keys; under None, the default for the others."""

    @abstractmethod
    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """Remove jobs in these states that ended, or were enqueued, before a time in UTC milliseconds.

        Active jobs are never removed. Returns the number of removed jobs.
        """

    @abstractmethod
    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """Remove a queue with all its jobs, and return the number of removed jobs.

        Raises StorageError if jobs are active, unless `force` is set; their outcomes are then refused.
        """


class Limiters(Protocol):
    """Limiters that queues share: see `QueuePolicy.limiter`."""

    @abstractmethod
    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Limit the starts per period and the weight of active jobs, across all queues of a limiter.

        None removes a limit; a limit that is not given is unchanged.
        """

    @abstractmethod
    def state(self, name: str) -> LimiterState:
        """Return what a limiter allows, and how much of it is in use."""


class Workers(Protocol):
    """Live workers, their commands, and their dumps."""

    @abstractmethod
    def register(self, info: WorkerInfo) -> tuple[str, ...]:
        """Add a worker, or record its heartbeat, and return the commands that it should follow now.

        Each command is delivered once: a command whose answer is lost is not repeated.

        Raises StorageError if the storage ends leases of killed workers by their ids, and a live worker of
        another process has the id.
        """

    @abstractmethod
    def unregister(self, worker_id: str) -> None:
        """Remove a worker that has stopped."""

    @abstractmethod
    def all(self) -> list[WorkerInfo]:
        """Return the workers that sent a heartbeat recently."""

    @abstractmethod
    def control(self, worker_id: str, command: str) -> str:
        """Send a worker a command: quiet (claim no more jobs, finish the running ones), resume (claim again),
        stop (as after a signal), dump (save the stacks of its threads and tasks).

        The worker receives it with its next heartbeat. Of quiet, resume and stop only the last one counts
        until then.

        Returns:
            asked | stopping (the worker is already stopping, and accepts only dump) | not_found.

        Raises:
            OptionError: The command is unknown.
        """

    @abstractmethod
    def on_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake`, from any thread, when commands may wait for a worker."""

    @abstractmethod
    def save_dump(self, worker_id: str, text: str) -> bool:
        """Keep a worker's dump for five minutes, replacing an earlier one; False if the worker is unknown.

        Text beyond 65,536 characters is cut off.
        """

    @abstractmethod
    def dump(self, worker_id: str) -> WorkerDump | None:
        """Return the dump of a live worker; None if it has none, or the dump has expired."""

    @abstractmethod
    def record_runs(self, stats: Sequence[RunStats]) -> None:
        """Add a worker's statistics of ended attempts to the current buckets of the metrics."""


class Events(Protocol):
    """Events of jobs, as they happen."""

    @abstractmethod
    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of a queue, or of one of its jobs."""


class Reads(Protocol):
    """Reads of jobs, queues, concurrency keys and metrics.

    They change nothing, and are cheap enough for a page that refreshes every few seconds.
    """

    @abstractmethod
    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Return records by id; None for an unknown job."""

    @abstractmethod
    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Async version of `jobs`."""

    @abstractmethod
    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """Return the streamed items behind each mark with the state of the job; None for an unknown job.

        Items are kept as long as the result; those of an attempt that did not end the job are kept until the
        job waits again.
        """

    @abstractmethod
    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """Async version of `items`."""

    @abstractmethod
    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """Return states by id; None for an unknown job."""

    @abstractmethod
    def counts(self, queue: str) -> dict[State, int]:
        """Return the number of jobs in each state."""

    @abstractmethod
    def waiting_names(self, queue: str) -> dict[str, int]:
        """Return the number of claimable jobs by job name."""

    @abstractmethod
    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """Return up to `limit` records of one state (None: all), oldest first, after the job `after`."""

    @abstractmethod
    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        """Return up to `limit` jobs of a queue in one state; `cursor` is the `next` or `previous` of a page.

        Every page costs the same. Jobs are in the order of the storage's index of the state: roughly by
        when they entered it or were enqueued, and delayed jobs by when they are due. Jobs that enter or
        leave the state between two pages do not move other jobs to another page. Results, ended attempts
        and log lines may be left out.

        Raises:
            OptionError: The cursor is invalid.
        """

    @abstractmethod
    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        """Return those of the queues (None: of all) that have a job with this id, and its state in each."""

    @abstractmethod
    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        """Return up to `limit` summaries of jobs about a subject, newest first, of these queues (None: all).

        Includes live jobs and ended jobs that are retained, at a cost that depends only on their number.
        `cursor` is the `next` of an earlier page.

        Raises:
            OptionError: The cursor is invalid.
        """

    @abstractmethod
    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        """Return a queue's dead letters, oldest first."""

    @abstractmethod
    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        """Return up to `limit` dead letters, oldest first; `after` is the `next` of an earlier page.

        Dead letters that are added or removed between two pages do not move others to another page.
        """

    @abstractmethod
    def explain(self, queue: str, id: str) -> Explanation | None:
        """Explain why a job is not running; None for an unknown job. See `djqueue.core.explain`."""

    @abstractmethod
    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        """Return the jobs connected to one by `depends_on`, both ways and in any queue; None if it is
        unknown.

        Dependencies are always found. Dependents are found while a job has not ended, and afterwards if a
        flow enqueued them: the first 20 of each job and their dependents, unless more than a hundred jobs
        of one step each lead to another one. A job enqueued with `depends_on` alone is no longer found
        from its dependencies once it has ended. While no scheduler is running, the database storage
        considers only the newest 200 blocked jobs of a queue.

        Up to `limit` jobs are read, in as many round trips as the graph is deep; see `FlowGraph.cut`.
        """

    @abstractmethod
    def flows(self, keys: Sequence[JobKey], limit: int = MAX_FLOW_JOBS) -> list[FlowGraph | None]:
        """Return what `flow` returns for each of these jobs, in as many round trips as the longest takes."""

    @abstractmethod
    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        """Return the counts and controls of queues, in this order (None: all, by name).

        Each queue is read at one moment. A queue that was never used is empty.
        """

    @abstractmethod
    def change_version(self) -> str | None:
        """Return an opaque version of all queues, jobs and workers; None if the storage cannot tell.

        While it stays the same, the other reads return the same, except for values that depend on the
        time. It costs one small read, regardless of the number of jobs. Heartbeats, memory and running
        jobs of workers, renewed leases and the state of shared limiters do not change it.
        """

    @abstractmethod
    def concurrency_keys(self, queue: str, limit: int, names: Sequence[str] = ()) -> KeysOverview:
        """Return up to `limit` keys of a queue, those with the most waiting jobs first, and the named ones.

        If a queue has very many keys, only some are considered, and the result says so.
        """

    @abstractmethod
    def key_modes(self, queues: Sequence[str]) -> dict[str, str]:
        """Return the key mode of each queue, one of `core.policies.KEY_MODES`, in one call for all."""

    @abstractmethod
    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        """Return the metrics from `start` to before `end` (UTC milliseconds) in buckets of `step`
        milliseconds.

        `step` is a multiple of a minute. The first bucket may begin before `start`, and the last one end
        after `end`. The result has every bucket of the period by time, for each queue, or for all together
        if `queues` is None. With `by_name`, it has the buckets of each job name in which something
        happened.

        Buckets of minutes are kept for 7 days, of hours for 90, and of days for 400, unless the settings
        differ. A step combines the longest buckets that fit. Counts are as of the last `sweep`.

        Raises:
            OptionError: `step` is not a multiple of a minute, or a queue would have more than 50,000
            buckets.
        """

    @abstractmethod
    def stale_leases(self, grace: int) -> dict[str, int]:
        """Return, by queue, the number of active jobs whose lease expired more than `grace` milliseconds ago.

        A sweep takes such jobs back, so they remain only where nothing sweeps.
        """

    @abstractmethod
    def cumulative(self, queues: Sequence[str] | None = None) -> list[Bucket]:
        """Return the metrics of queues since they began (None: of all queues), each queue with one bucket
        for all its jobs and one for each job name.

        Numbers only rise, also when schedulers or workers restart, until the queue is obliterated; those of
        the memory storage begin with its process. Counts are as of the last `sweep`. A queue or job name in
        which nothing happened has no bucket.
        """

    @abstractmethod
    def diagnostics(self) -> Diagnostics:
        """Describe the storage: location, version, memory, persistence, scheduler. Never contains a secret.

        Values that the server does not disclose are omitted or marked unknown; row counts are estimates.
        """

    @abstractmethod
    def findings(self) -> Sequence[Finding]:
        """Return the problems, and possible problems, of the storage's servers."""
