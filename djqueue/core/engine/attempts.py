"""Reports of attempts: their outcomes, progress, log lines and streamed items; and their leases."""

from collections.abc import Callable, Container, Sequence
from typing import TypeVar

from ..enginejob import EngineJob, ItemStream
from ..job import (
    DEAD_LETTER_REASONS,
    Emission,
    Event,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    check_outcomes,
)
from .changes import PendingChanges
from .context import EngineContext
from .queue import JobQueue
from .settlement import Settlement

R = TypeVar("R", ProgressReport, Emission)


class AttemptReports:
    """Records reports of attempts whose tokens hold."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self._context = context
        self._settlement = settlement

    def finish(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """End attempts: see `Engine.finish`; return whether each token held."""
        check_outcomes(outcomes)
        changes = PendingChanges(self._context.clock.now())
        accepted = [self._finish_one(outcome, changes) for outcome in outcomes]
        follows = changes.events or changes.ended or changes.woken
        if follows or changes.incidents or changes.unbound or changes.freed:
            self._settlement.settle(changes)
        return accepted

    def _finish_one(self, outcome: Outcome, changes: PendingChanges) -> bool:
        context = self._context
        processing = context.processing[hash(outcome.id) & context.mask]
        shard = context.shard(outcome.queue)
        queue = shard.queues.get(outcome.queue)
        if queue is None:
            return False
        if outcome.kind == "complete":
            with processing.lock:
                job = processing.active.get(outcome.token)
                if job is None:
                    return False
                if job.options.plain and not job.has_dependents:
                    if processing.release(outcome.token, outcome.queue, outcome.id) is None:
                        return False
                    queue.complete(job, outcome.result, changes)
                    return True
        with shard.lock:
            with processing.lock:
                job = processing.release(outcome.token, outcome.queue, outcome.id)
            if job is None:
                return False
            _apply(queue, job, outcome, changes)
        return True

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        """Record progress and log lines: see `Engine.report`; return whether each token held."""
        return self._record(reports, self._report_one)

    def _report_one(
        self, queue: JobQueue, job: EngineJob, report: ProgressReport, changes: PendingChanges
    ) -> bool:
        journal = self._context.journal
        if report.progress is not None:
            job.progress = report.progress
        if report.lines:
            limit = queue.policy.retention.logs.count
            job.logs = [*(job.logs or ()), *report.lines][-limit:]
        if journal is not None:
            journal.reported(job, report.lines)
        if report.progress is not None:
            queue.note(job, "progress", changes)
        return True

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """Add streamed items: see `Engine.emit`; return whether each token held, and no gap was left."""
        return self._record(emissions, self._emit_one)

    def _emit_one(self, queue: JobQueue, job: EngineJob, emission: Emission, changes: PendingChanges) -> bool:
        journal, stream = self._context.journal, job.stream
        if stream is None:
            stream = job.stream = ItemStream(emission.token, [])
        if emission.start > stream.count:
            return False
        new = emission.items[stream.count - emission.start :]
        if not new or stream.items is None:
            return True
        stream.items += new
        stream.count += len(new)
        if journal is not None:
            journal.emitted(job, new)
        if queue.observed:
            fields = (queue.name, job.id, job.name, "item", job.state, changes.now, stream.count)
            changes.events.append(Event(*fields))
        return True

    def _record(
        self, reports: Sequence[R], record: Callable[[JobQueue, EngineJob, R, PendingChanges], bool]
    ) -> list[bool]:
        """Record reports of running attempts; return for each whether its token held and it was accepted."""
        context = self._context
        changes = PendingChanges(context.clock.now())
        accepted = []
        for report in reports:
            queue = context.existing(report.queue)
            processing = context.processing_shard(report.id)
            with processing.lock:
                job = processing.held(report.token, report.queue, report.id)
                accepted.append(queue is not None and job is not None and record(queue, job, report, changes))
        self._settlement.settle(changes)
        return accepted


def _apply(queue: JobQueue, job: EngineJob, outcome: Outcome, changes: PendingChanges) -> None:
    """End an attempt whose claim has been released. The caller holds the lock of the queue."""
    if outcome.kind == "complete":
        queue.complete(job, outcome.result, changes)
    elif outcome.kind == "fail":
        reason = outcome.reason if outcome.reason in DEAD_LETTER_REASONS else "unknown"
        queue.fail_active(job, reason, outcome.error, changes)
    elif outcome.kind == "cancel" or job.cancel_requested:
        queue.cancel_active(job, outcome.reason or "cancelled", changes)
        if outcome.kind != "cancel":
            changes.note_incident(job, "cancelled")  # The worker does not know of it.
    else:
        event = "retried" if outcome.kind == "retry" else "released"
        queue.put_back(job, event, outcome.delay, outcome.error, changes)


class EngineLeases:
    """Leases of the engine's active jobs, by monotonic time."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend claims to a full lease from now: see `Engine.renew`."""
        context = self._context
        tick = context.clock.monotonic()
        renewals = []
        for lease in leases:
            processing = context.processing_shard(lease.id)
            with processing.lock:
                job = processing.held(lease.token, lease.queue, lease.id)
                if job is None:
                    renewals.append(Renewal(False))
                    continue
                job.lease_until = tick + context.policy(job.queue).lease
                renewals.append(Renewal(True, job.cancel_requested))
        return renewals

    def processes(self) -> set[str]:
        """Return the processes that hold claims, without the engine's own process."""
        processes: set[str] = set()
        for processing in self._context.processing:
            with processing.lock:
                processes.update(job.process for job in processing.active.values())
        processes.discard("")
        return processes

    def expire(self, processes: Container[str], tick: int) -> None:
        """Let the claims of some processes expire by a monotonic time; the next sweep takes them back."""
        for processing in self._context.processing:
            with processing.lock:
                for job in processing.active.values():
                    if job.process in processes:
                        job.lease_until = min(job.lease_until, tick)
