"""The read contract for dashboards: what every storage tells of its queues beside its jobs.

Everything here reads, and may be called as often as a page is looked at.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from djqueue.core.diagnostics import DiagnosticLine, Diagnostics
from djqueue.core.explain import BlockingJob, Dependency, Explanation
from djqueue.core.graph import MOST, FlowEdge, FlowGraph, FlowNode
from djqueue.core.groups import GroupOverview
from djqueue.core.metrics import Bucket, Histogram, RunStats, Tiers
from djqueue.core.overview import GroupsOverview, Overview, QueueOverview, Totals
from djqueue.core.pages import JobPage
from djqueue.core.states import State
from djqueue.core.summaries import JobSummary, JobSummaryPage

__all__ = [
    "BlockingJob",
    "Bucket",
    "Dependency",
    "DiagnosticLine",
    "Diagnostics",
    "Explanation",
    "FlowEdge",
    "FlowGraph",
    "FlowNode",
    "GroupOverview",
    "GroupsOverview",
    "Histogram",
    "Inspector",
    "JobPage",
    "JobSummary",
    "JobSummaryPage",
    "Overview",
    "QueueOverview",
    "RunStats",
    "Tiers",
    "Totals",
]


class Inspector(ABC):
    """A part of `Storage`."""

    @abstractmethod
    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        """How these queues are, in this order (None: all, by name), each at one moment of its own.

        One that was never used is an empty one.
        """

    def change_version(self) -> str | None:
        """An opaque word for all queues, jobs and workers; None if the storage cannot tell.

        While it is the same, the other reads answer the same, but for what changes with time alone. It costs
        as much as one small read, however many jobs there are. Heartbeats, memory and running jobs of
        workers, renewed leases and the state of shared limiters are no part of it.
        """
        return None

    @abstractmethod
    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        """Up to `limit` groups of a queue, those with most waiting jobs first, and those with these names.

        Of a great many groups only some are looked at, which is told.
        """

    @abstractmethod
    def explain(self, queue: str, id: str) -> Explanation | None:
        """Why a job is not running; None if it is not known. See `djqueue.core.explain`."""

    @abstractmethod
    def flow(self, queue: str, id: str, limit: int = MOST) -> FlowGraph | None:
        """The jobs around one, along `depends_on` both ways, in any queue; None if it is not known.

        What a job depends on is always known; what depends on it while that has not ended, and of jobs that a
        flow enqueued also afterwards: of each the first 20, and what these lead to, but not where more than a
        hundred jobs of one step lead each to another one. A job that was enqueued with `depends_on` alone is,
        once it has ended, not found any more from those it waited for. While no scheduler lives, the database
        storage looks at the newest 200 blocked jobs of a queue only.

        Up to `limit` jobs are looked at, in as many round trips as the graph is long; see `FlowGraph.cut`.
        """

    @abstractmethod
    def record_runs(self, stats: Sequence[RunStats]) -> None:
        """Add what a worker tells of runs that have ended to the buckets of the present time."""

    @abstractmethod
    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        """What happened from `start` to before `end` (UTC milliseconds), in buckets of `step` milliseconds, a
        multiple of a minute; where need be they begin earlier and end later than that.

        For each queue, or for all together if `queues` is None, every bucket there is time for, by time.
        by_name: of each job name instead, those in which something happened.

        Buckets of minutes are kept for 7 days, of hours for 90, of days for 400, unless set otherwise; a step
        is made of the longest that fit. Counts are as of the last `maintain`.
        Raises OptionError for another step, and for more than 50,000 buckets of each queue.
        """

    @abstractmethod
    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        """Up to `limit` jobs of a queue in one state; `cursor`: the `next` or `previous` of another page.

        A page costs the same wherever it is. The order is that of the index which the storage has for the
        state: about that in which jobs came into it (delayed ones: in which they are due), or were enqueued.
        A job that comes, or goes, between two pages moves no other to another page. What is kept beside a
        job, its result, ended runs and log lines, may be left out.
        Raises OptionError for a cursor that is none.
        """

    @abstractmethod
    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        """The queues (None: of all) in which there is a job with this id, and its state in each."""

    @abstractmethod
    def about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        """Up to `limit` jobs about a subject, in short, in these queues (None: in all): the newest first.

        Those that wait or run, and those that have ended, as long as they are kept. Only they are looked at,
        and no other jobs. cursor: the `next` of another page.
        Raises OptionError for a cursor that is none.
        """

    @abstractmethod
    def diagnostics(self) -> Diagnostics:
        """How the storage is: where, its version, memory, persistence, who looks after it; never a secret.

        What may not be asked is left out, or said to be unknown; estimates, no counts of rows.
        """
