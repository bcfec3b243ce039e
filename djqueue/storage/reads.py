"""The read contract: questions about jobs and queues that every storage answers.

Reads change nothing and are cheap enough for a page that refreshes every few seconds.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from djqueue.core.explain import Explanation
from djqueue.core.flow import MAX_FLOW_JOBS, FlowGraph
from djqueue.core.job import DeadLetterPage, DeadLetterRecord, ItemMark, ItemPage, JobRecord
from djqueue.core.metrics import Bucket
from djqueue.core.overview import Diagnostics, Finding, KeysOverview, Overview
from djqueue.core.pages import JobPage, JobSummaryPage
from djqueue.core.states import State


class Reads(Protocol):
    """Reads of jobs, queues, concurrency keys and metrics."""

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
