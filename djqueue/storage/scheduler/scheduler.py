"""The scheduler: the engine, its journal, and the workers whose claims it knows."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import Any

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.deadlines import within
from djqueue.core.engine import Engine, EngineReads
from djqueue.core.enginejob import EngineJob
from djqueue.core.errors import SchedulerRunningError, StorageError, StorageUnavailableError
from djqueue.core.job import (
    Batch,
    Claimed,
    ClaimRequest,
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
from djqueue.core.logs import Log
from djqueue.core.messages import gettext_noop as _
from djqueue.core.metrics import Tiers
from djqueue.core.overview import WARN, DiagnosticLine, Diagnostics, Finding
from djqueue.core.policies import DEFAULT_POLICY, LimiterPolicy, QueuePolicy
from djqueue.core.threads import start_daemon
from djqueue.storage.actions import DONE
from djqueue.storage.enginesnapshots import EngineSnapshots
from djqueue.storage.facets import WORKER_TTL, Unsubscribe
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.dialects import dialect_for
from djqueue.storage.tables.leaderlease import SCHEDULER, LeaderLease
from djqueue.storage.tables.schedules import TableSchedules

from .changes import StoredMetrics
from .folder import PrivateFolder
from .journal import TableJournal
from .protocol import (
    FOR_COMMIT,
    LIMITER_SETTINGS,
    LONG,
    LONG_TIMEOUT,
    OPERATIONS,
    QUEUE_SETTINGS,
    WRITTEN,
    fitting,
    time_for,
)
from .recovery import recover

logger = Log("djqueue.scheduler")

ANNOUNCE_TIMEOUT = 5.0
"""Seconds for which a new scheduler waits for the living workers of an earlier one."""
LOOK_EVERY = 0.05
"""Seconds between two looks whether they are still alive."""
REMEMBERED_ANSWERS = 16
"""Number of last answers to a client whose claims it may not have received; it has fewer calls in flight."""
MAX_APPLIED = 10_000
"""Maximum number of outcomes of a client that it may report again."""

CHANGED = DONE | {"updated", "moved"}
"""Outcomes of changed jobs."""

HeldAttempt = tuple[str, Claimed, Outcome | None]
"""A worker, its claim, and its outcome if the attempt has ended."""


@dataclass(slots=True)
class ClientRecord:
    """A process with workers, as the scheduler knows it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: "OrderedDict[int, tuple[list[int], list[Claimed]]]" = field(default_factory=OrderedDict)
    """The accepted tokens and the claims of the last answers, by the number of the call."""
    refused: set[int] = field(default_factory=set)
    """Calls that the client has given up before they were read."""
    applied: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    """Tokens of outcomes that were applied, although the client does not know it."""

    def note_applied(self, tokens: Sequence[int]) -> None:
        """Accept these outcomes, if they are reported again."""
        self.applied.update(dict.fromkeys(tokens))
        while len(self.applied) > MAX_APPLIED:
            self.applied.popitem(last=False)


class JobScheduler:
    """The engine of one database, in the process that holds the lease.

    Args:
        alias: The database.
        clock: The engine's clock.
        folder: The folder of the socket.
        lost: Called when another process has become the scheduler.
    """

    def __init__(
        self,
        alias: str,
        clock: Clock,
        folder: PrivateFolder,
        *,
        policies: Mapping[str, QueuePolicy] | None,
        limiters: Mapping[str, LimiterPolicy] | None,
        metrics: Tiers,
        cores: int | None,
        random: Random | None,
        incidents: Callable[[list[Incident]], None],
        lost: Callable[[], None],
        describe: Callable[[], str],
        timeout: float,
    ) -> None:
        self._alias = alias
        self._folder = folder
        self._timeout = timeout
        self.lease = LeaderLease(alias, clock, SCHEDULER)
        self._metrics = StoredMetrics(metrics)
        self.journal = TableJournal(
            dialect_for(alias), self.lease, clock, self._metrics, lambda _error: lost()
        )
        self.engine = engine = Engine(
            clock=clock,
            random=random,
            journal=self.journal,
            policies=policies,
            default_policy=DEFAULT_POLICY,
            limiters=limiters,
            cores=cores,
            metrics=self._metrics,
            incidents=incidents,
        )
        self.journal.engine = engine
        self.jobs = engine.jobs
        self.queues = engine.queues
        self.limiters = engine.limiters
        self.workers = engine.workers
        self.events = engine.events
        self.reads = LoadedReads(self, describe)
        self.snapshots = SchedulerSnapshots(engine, self.journal)
        self.ready = threading.Event()
        """Set when all living workers have announced what they run."""
        self._awaited: set[str] = set()
        self._announced: set[str] = set()
        self._held: list[tuple[str, HeldAttempt]] = []
        self._has_adopted = False
        """Whether what was announced is being adopted: later clients adopt theirs themselves."""
        self._adopting = threading.Lock()
        self._clients: dict[str, ClientRecord] = {}
        self._clients_lock = threading.Lock()
        self._closing = threading.Event()
        self.relays: list[Callable[[], None]] = []
        """Called when jobs may have been written to the outbox."""

    # Life.

    def open(self) -> None:
        """Take the lease, and load the tables.

        Raises SchedulerRunningError if another process is the scheduler.
        """
        with named(self._alias):
            if not self.lease.acquire():
                holder = self.lease.holder()
                running = "another process" if holder is None else holder.describe()
                raise SchedulerRunningError(
                    f"{running} is the scheduler of database {self._alias!r}: stop it first, or start "
                    "this one with --join to add workers to it"
                )
            try:
                self._folder.check(create=True)
                self._awaited = self._folder.living()
                self._metrics.load(self._alias)
                # Otherwise, another process could take over, and load the same jobs.
                with self.lease.kept():
                    found = recover(self._alias, self.engine, self.journal, self._awaited.__contains__)
                known = models.QueueState.objects.using(self._alias).values_list("name", flat=True)
                self.journal.start(set(known))
                self.journal.wait()
            except BaseException:
                self.lease.release()
                raise
        if any(found):
            logger.info(
                "The scheduler loaded its tables: jobs not started: %d, running: %d, interrupted: %d, dead "
                "letters: %d, records of ended jobs: %d. Jobs in the outbox follow.",
                *found,
            )
        if not self._awaited:
            self._has_adopted = True
            self.ready.set()
        else:
            try:
                start_daemon("djqueue-recovery", self._await_workers)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Write the rest, and release the lease."""
        self._closing.set()
        try:
            self.engine.record_totals()
            self.journal.close()
        finally:
            with named(self._alias):
                self.lease.release()

    # Operations.

    def call(self, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out an operation; return its answer when it is committed, if it changes what people set."""
        self._check_ready()
        if operation not in OPERATIONS:
            raise StorageError(f"{operation!r} is not an operation of the scheduler")
        answer = attrgetter(operation)(self)(*args, **kwargs)
        if operation in QUEUE_SETTINGS:
            self.journal.queue_set(args[0] if args else kwargs["queue"])
        elif operation in LIMITER_SETTINGS:
            self.journal.limiter_set(args[0] if args else kwargs["name"])
        if operation in WRITTEN:
            with within(LONG_TIMEOUT if operation in LONG else FOR_COMMIT * self._timeout):
                self.journal.wait()
            if operation.startswith("jobs.") and _has_changed(answer) and not kwargs.get("dry_run"):
                queue, ids = args[2 if operation == "jobs.move" else 0], args[1]
                keys = [(queue, job_id) for job_id in ([ids] if isinstance(ids, str) else ids)]
                # Otherwise, one of them would keep a bulk operation from going on.
                self.journal.check_stored(keys, all_of_them=True)
        return answer

    def subscribe(self, operation: str, args: Sequence[Any], handler: Callable[..., None]) -> Unsubscribe:
        """Call `handler` with each event, or without an argument for each wake-up."""
        if operation == "events.subscribe":
            queue, job_id = args
            return self.events.subscribe(queue, handler, job_id)
        [subject] = args
        if operation == "listen":
            return self.engine.listen(subject, handler)
        return self.workers.on_command(subject, handler)

    def _check_ready(self) -> None:
        self.journal.check_lease()
        if not self.ready.wait(self._timeout):
            raise StorageUnavailableError("the scheduler has just started, and waits for the living workers")

    def enqueue(
        self, batches: Sequence[Batch], *, written: bool = False, patience: float | None = None
    ) -> list[EnqueueResult]:
        """Add jobs.

        Args:
            batches: The jobs.
            written: Wait for the commit, as for jobs with `durable=True`.
            patience: Seconds for which the caller waits; None: the timeout.
        """
        self._check_ready()
        results = self.engine.enqueue(batches)
        is_durable = any(batch.options.durable for batch in batches)
        if patience is None:
            patience = self._timeout + time_for(batches)
        with within(FOR_COMMIT * patience):
            if is_durable or written:
                self.journal.wait(durable=True)
                self.journal.check_stored([(result.queue, result.id) for result in results])
            else:
                self.journal.wait_for_room()
        return results

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """Add streamed items; return when they are committed.

        A worker does not send items again that were accepted, and items behind a gap would be refused.
        """
        self._check_ready()
        accepted = self.engine.emit(emissions)
        with within(self._timeout):
            self.journal.wait()
        return accepted

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend claims."""
        return self.engine.renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        """Record progress and log lines."""
        return self.engine.report(reports)

    def finish_here(self, outcomes: Sequence[Outcome], then: ClaimRequest | None) -> Finished:
        """End attempts and claim, for this process, whose attempts end with the scheduler."""
        self.journal.check_lease()
        return self.engine.finish(outcomes, then if self.ready.is_set() else None)

    def finish(
        self,
        client: str,
        number: int,
        failed: Sequence[int],
        outcomes: Sequence[Outcome],
        then: ClaimRequest | None = None,
    ) -> tuple[Finished, int, int]:
        """End attempts and claim, for another process.

        Args:
            client: The process.
            number: The number of the call among those of the process.
            failed: Numbers of earlier calls whose answers it did not receive.
            outcomes: The ends of attempts.
            then: The request for jobs.

        Returns:
            The answer, the generation of its changes, and that of the changes that are on disk.
        """
        self._check_ready()
        record = self.client(client)
        with record.lock:
            for other in failed:
                self._give_up(record, other)
            if number in record.refused:
                record.refused.discard(number)
                raise StorageUnavailableError("the caller has given up this call")
            if then is not None:
                then = then._replace(process=client)
            finished = self.engine.finish(outcomes, then)
            claimed = finished.claims.jobs
            count = fitting(len(one.payload) for one in claimed)
            if count < len(claimed):
                self.release(claimed[count:])
                finished = finished._replace(claims=finished.claims._replace(jobs=claimed[:count]))
            if record.applied:
                accepted = [
                    is_accepted or record.applied.pop(outcome.token, 0) is None
                    for outcome, is_accepted in zip(outcomes, finished.accepted, strict=True)
                ]
                finished = finished._replace(accepted=accepted)
            tokens = [o.token for o, held in zip(outcomes, finished.accepted, strict=True) if held]
            record.answers[number] = tokens, finished.claims.jobs
            if len(record.answers) > REMEMBERED_ANSWERS:
                record.answers.popitem(last=False)
        return finished, self.journal.generation, self.journal.written

    def client(self, name: str) -> ClientRecord:
        """Return the record of a process with workers."""
        with self._clients_lock:
            return self._clients.setdefault(name, ClientRecord())

    def _give_up(self, record: ClientRecord, number: int) -> None:
        answer = record.answers.pop(number, None)
        if answer is None:
            record.refused = {one for one in record.refused if one > number - REMEMBERED_ANSWERS} | {number}
            return
        tokens, claims = answer
        record.note_applied(tokens)
        self.release(claims)

    def release(self, claims: Sequence[Claimed | EngineJob]) -> None:
        """Return claimed jobs that no worker has received, given in the order of their claims."""
        # Each goes before all others.
        self.engine.finish([Outcome(one.queue, one.id, one.token, "release") for one in reversed(claims)])

    def probe(self) -> list[Finding]:
        """Return what keeps the tables from being written. Jobs are accepted until too many are unwritten."""
        return self.journal.problems()

    def outbox_written(self) -> None:
        """Let the relay look for jobs in the outbox."""
        for wake in self.relays:
            wake()

    def sweep(self) -> Swept:
        """Sweep, and end the claims of processes that have died."""
        # Before the look at the processes: another one may begin to claim meanwhile.
        holding, known = self.engine.leases.processes(), set(self._clients)
        living = self._folder.living(holding)
        if self.ready.is_set():
            self.engine.leases.expire(holding - living, self.engine.clock.monotonic())
        with self._clients_lock:
            for name in known - living:
                self._clients.pop(name, None)  # Another sweep may run.
        swept = self.engine.sweep(WORKER_TTL)
        self.engine.record_totals()
        return swept

    # Workers of an earlier scheduler.

    def announce(self, client: str, held: Sequence[HeldAttempt]) -> None:
        """Note what the workers of a process run, and the outcomes that may not be on disk."""
        with self._clients_lock:
            self._held += [(client, one) for one in held]
            self._awaited.discard(client)
            is_late = self._has_adopted
            if not is_late:
                self._announced.add(client)
        if is_late:
            self._adopt()

    def _await_workers(self) -> None:
        waited = 0.0
        try:
            while self._awaited and waited < ANNOUNCE_TIMEOUT and not self._closing.wait(LOOK_EVERY):
                waited += LOOK_EVERY
                with self._clients_lock:
                    self._awaited &= self._folder.living()
            if self._awaited:
                logger.warning(
                    "%d processes with workers have not announced what they run; jobs of their last claims "
                    "may run again.",
                    len(self._awaited),
                )
            self._adopt(is_first=True)
        except Exception:
            logger.exception(
                "The attempts of living workers could not be continued; their jobs may run again."
            )
        finally:
            self.ready.set()
            self.engine.settlement.wake_all()

    def _adopt(self, *, is_first: bool = False) -> None:
        """Continue the attempts that workers have announced, and apply their outcomes, in order of claims."""
        # A client whose attempts another one takes along waits until they are adopted.
        with self._adopting:
            with self._clients_lock:
                held, self._held = self._held, []
                self._has_adopted = True
            tokens = {claimed.token for _, (_, claimed, _) in held}
            for client, (worker, claimed, outcome) in sorted(held, key=lambda one: one[1][1].token):
                is_held = self.engine.persistence.adopt(claimed, worker, client)
                if outcome is not None:
                    if is_held:
                        self.engine.finish([outcome])
                elif not is_held:
                    self._note_if_applied(client, claimed)
            if is_first:
                # Those that were claimed, but never received.
                claims = [job for job in self._claims() if job.process in self._announced]
                lost = [job for job in claims if job.token not in tokens]
                self.release(sorted(lost, key=attrgetter("token")))

    def _claims(self) -> list[EngineJob]:
        return [job for one in self.engine.context.processing for job in list(one.active.values())]

    def _note_if_applied(self, client: str, claimed: Claimed) -> None:
        """Accept the outcome of an attempt that an earlier scheduler has ended and written."""
        queue = self.engine.context.existing(claimed.queue)
        job = None if queue is None else queue.jobs.get(claimed.id)
        if job is not None and job.last_token == claimed.token:
            record = self.client(client)
            with record.lock:
                record.note_applied([claimed.token])


def _has_changed(answer: Any) -> bool:
    """Return whether an operation has changed one of its jobs."""
    outcomes = [answer] if isinstance(answer, str) else answer
    return any(one in CHANGED if isinstance(one, str) else one for one in outcomes)


class LoadedReads(EngineReads):
    """Reads of the engine."""

    def __init__(self, scheduler: JobScheduler, describe: Callable[[], str]) -> None:
        super().__init__(scheduler.engine.context, scheduler.engine.workers)
        self._scheduler = scheduler
        self._describe = describe

    def diagnostics(self) -> Diagnostics:
        journal = self._scheduler.journal
        backlog = DiagnosticLine(
            "scheduler.backlog", _("Scheduler"), _("Unwritten jobs"), f"{journal.backlog:,}"
        )
        lines = [*self.storage_lines(self._describe()), backlog]
        if (failure := journal.failure) is not None:
            lines.append(
                DiagnosticLine("scheduler.error", _("Scheduler"), _("Last error"), str(failure), WARN)
            )
        return Diagnostics("scheduler", self._context.clock.now(), lines)


class SchedulerSnapshots(EngineSnapshots):
    """Snapshots of the engine, whose write is also that of the tables."""

    def __init__(self, engine: Engine, journal: TableJournal) -> None:
        super().__init__(engine)
        self.schedules = TableSchedules()
        self._journal = journal

    def _is_being_replaced(self) -> None:
        self._journal.replaced()

    def _was_replaced(self) -> None:
        # In this thread, which may have a transaction with the schedules.
        self._journal.flush()
