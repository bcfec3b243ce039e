"""The in-memory engine: its hot path, and the components that answer for everything else."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from ..clock import SYSTEM_CLOCK, Clock
from ..ids import IdSource
from ..job import (
    Batch,
    ClaimRequest,
    Claims,
    Emission,
    EnqueueResult,
    Finished,
    Incident,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    Swept,
)
from ..policies import DEFAULT_POLICY, LimiterPolicy, QueuePolicy
from .attempts import AttemptReports, EngineLeases
from .changes import ChangeCounter, Journal, counted_if_answered, counted_unless_empty
from .claimer import Claimer
from .context import EngineContext
from .enqueuer import Enqueuer
from .jobs import EngineJobs
from .metricstore import MetricKeeper, MetricStore
from .persistence import PersistentEngine
from .queues import EngineLimiters, EngineQueues, record_totals
from .reads import EngineReads
from .settlement import EngineEvents, Settlement, Unsubscribe, Wake
from .sweeper import Sweeper
from .workers import EngineWorkers

NO_CLAIMS = Claims([], None)


class Engine:
    """All queues of one process.

    Args:
        journal: receives every change; None for jobs that live in memory alone.
        policies: configuration of single queues; `default_policy` applies to the others.
        limiters: configuration of limiters that queues share.
        cores: decides the number of shards, which never changes afterwards.
        metrics: store of metric buckets.
        incidents: receives what happened to jobs beyond what workers reported.
    """

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM_CLOCK,
        ids: IdSource | None = None,
        random: Random | None = None,
        journal: Journal | None = None,
        policies: Mapping[str, QueuePolicy] | None = None,
        default_policy: QueuePolicy = DEFAULT_POLICY,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        cores: int | None = None,
        metrics: MetricKeeper | None = None,
        incidents: Callable[[list[Incident]], None] | None = None,
    ) -> None:
        self.context = context = EngineContext(
            clock=clock,
            ids=ids or IdSource(),
            random=random or Random(),
            journal=journal,
            policies=policies or {},
            default_policy=default_policy,
            limiters=limiters or {},
            metrics=metrics or MetricStore(),
            cores=cores,
        )
        self.settlement = settlement = Settlement(context, incidents)
        self.jobs = EngineJobs(context, settlement)
        self.queues = EngineQueues(context, settlement)
        self.limiters = EngineLimiters(context, settlement)
        self.workers = EngineWorkers(context)
        self.reads = EngineReads(context, self.workers)
        self.events = EngineEvents(context)
        self.leases = EngineLeases(context)
        self.persistence = PersistentEngine(context, settlement)
        self._enqueuer = Enqueuer(context, settlement)
        self._claimer = Claimer(context, settlement)
        self._attempts = AttemptReports(context, settlement)
        self._sweeper = Sweeper(context, settlement, self.jobs, self.limiters, self.workers)

    @property
    def clock(self) -> Clock:
        """The source of time."""
        return self.context.clock

    @property
    def changes(self) -> ChangeCounter:
        """The counter of changes: see `EngineReads.change_version`."""
        return self.context.changes

    @counted_unless_empty(0)
    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs; return a result for each job, in order. A duplicate is a result, not an error.

        Raises QueueFullError if a queue has no room for a batch, of which nothing is enqueued then.
        """
        return self._enqueuer.enqueue(batches)

    @counted_if_answered
    def claim(self, request: ClaimRequest) -> Claims:
        """Move waiting jobs to active, up to the slots of the request, each with a lease and a token.

        Each call starts with another queue. Within a queue, jobs are claimed by priority, then in order of
        arrival. A job with a stalled attempt is claimed alone, or not at all if the request says so.
        """
        return self._claimer.claim(request)

    @counted_unless_empty(0)
    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """End the attempts whose tokens hold, and claim the next jobs in the same call."""
        if not outcomes:
            return Finished([], self.claim(then) if then is not None else NO_CLAIMS)
        accepted = self._attempts.finish(outcomes)
        # Counted as a change with the outcomes.
        return Finished(accepted, self._claimer.claim(then) if then is not None else NO_CLAIMS)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend the claims whose tokens hold to a full lease from now."""
        return self.leases.renew(leases)

    @counted_unless_empty(0)
    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        """Record progress and log lines of attempts whose tokens hold."""
        return self._attempts.report(reports)

    @counted_unless_empty(0)
    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """Add streamed items of attempts whose tokens hold; items that leave a gap are refused."""
        return self._attempts.emit(emissions)

    def listen(self, queues: Iterable[str] | None, wake: Wake) -> Unsubscribe:
        """Call `wake`, from any thread, when a job of these queues (None: of any) may be claimable."""
        return self.settlement.listen(queues, wake)

    def sweep(self, worker_ttl: int) -> Swept:
        """Do once what time requires: due jobs, expired leases, ttls, dead letters, old records.

        Args:
            worker_ttl: milliseconds without a heartbeat after which a worker is removed.
        """
        swept = self._sweeper.sweep(worker_ttl)
        if any(swept):
            self.changes.bump()
        return swept

    def record_totals(self) -> None:
        """Add what the totals of queues have risen by since the last call to the metrics."""
        record_totals(self.context)
