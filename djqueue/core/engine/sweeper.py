"""Sweeps: what time does to the jobs of an engine."""

from itertools import islice

from ..enginejob import EngineJob, stalled_error
from ..job import AttemptRecord, Swept
from .changes import PendingChanges
from .claimer import EXPIRED
from .context import EngineContext
from .jobs import EngineJobs
from .queue import JobQueue
from .queues import EngineLimiters
from .settlement import Settlement
from .workers import EngineWorkers

SWEEP_LIMIT = 1_000
"""Records removed from a queue under one hold of its lock."""
MAX_REMOVED = 50_000
"""Records that one sweep removes from a queue, in parts: thousands may expire in a second."""


class Sweeper:
    """Sweeps the queues of an engine. Any number of sweeps may run; a second one changes nothing."""

    def __init__(
        self,
        context: EngineContext,
        settlement: Settlement,
        jobs: EngineJobs,
        limiters: EngineLimiters,
        workers: EngineWorkers,
    ) -> None:
        self._context = context
        self._settlement = settlement
        self._jobs = jobs
        self._limiters = limiters
        self._workers = workers

    def sweep(self, worker_ttl: int) -> Swept:
        """Do once what time requires: see `Engine.sweep`."""
        self._workers.forget(worker_ttl)
        self._limiters.pass_turns_on()
        stalled = self._sweep_leases(self._context.clock.monotonic())
        totals = [0, 0, 0, 0]
        for name in self._context.queue_names():
            for index, count in enumerate(self._sweep_queue(name)):
                totals[index] += count
        promoted, expired, retried, removed = totals
        return Swept(promoted, stalled, expired, retried, removed)

    def _sweep_leases(self, tick: int) -> int:
        overdue: list[tuple[int, EngineJob]] = []
        for processing in self._context.processing:
            with processing.lock:
                overdue += processing.overdue(tick)
        # The job that was claimed last is claimed first again: a job that kills its worker soon after its
        # start is among the last ones. Jobs of one claim keep their order.
        overdue.sort(key=lambda entry: (entry[1].started_at, -entry[0]))
        return sum(self._stall(token, job, tick) for token, job in overdue)

    def _stall(self, token: int, job: EngineJob, tick: int) -> bool:
        context = self._context
        shard, processing = context.shard(job.queue), context.processing_shard(job.id)
        changes = PendingChanges(context.clock.now())
        with shard.lock:
            queue = shard.find(job.queue)
            with processing.lock:
                # It was renewed, finished or swept in the meantime.
                if job.token != token or job.lease_until > tick:
                    return False
                if processing.release(token, job.queue, job.id) is None:
                    return False
                job.last_token = 0
            if job.cancel_requested:
                queue.cancel_active(job, "cancelled", changes)
                changes.note_incident(job, "cancelled")
            elif job.stalls >= job.options.max_stalls:
                alive = any(info.id == job.worker for info in self._workers.all())
                reason = "stalled" if alive else "worker_lost"
                last = AttemptRecord(job.attempts, job.worker, job.started_at, changes.now, "stalled")
                error = stalled_error(job.stalls + 1, [*(job.history or ()), last])
                changes.note_incident(job, "stalled")
                queue.fail_active(job, reason, error, changes)
                changes.note_incident(job, "failed")
            else:
                queue.put_back(job, "stalled", 0, None, changes)
                changes.note_incident(job, "stalled")
        self._settlement.settle(changes)
        return True

    def _sweep_queue(self, name: str) -> tuple[int, int, int, int]:
        shard = self._context.shard(name)
        changes = PendingChanges(self._context.clock.now())
        now = changes.now
        with shard.lock:
            queue = shard.queues.get(name)
            if queue is None:
                return 0, 0, 0, 0  # It was obliterated in the meantime.
            before = queue.delayed.size
            tick = self._context.clock.monotonic()
            queue.promote_due(tick, changes)
            promoted = before - queue.delayed.size
            if queue.end_rests(tick):
                changes.woken.add(name)
            queue.groups.forget_full()
            expired = queue.pop_expired(now)
            for job in expired:
                queue.fail_pending(job, "ttl_expired", EXPIRED, changes)
            queue.unique.sweep(now)
            over = queue.dead.expired(now, SWEEP_LIMIT)
            queue.remove_dead_letters(over, changes)
            surplus = queue.dead.surplus(SWEEP_LIMIT)
            queue.remove_dead_letters(surplus, changes)
            removed, is_done = _forget(queue, changes)
            # Dead letters whose unique keys are taken would hold up the others.
            free = (letter.id for letter in queue.dead.due(now) if not _is_barred(queue, letter.id, now))
            due = list(islice(free, SWEEP_LIMIT))
        self._settlement.settle(changes)
        removed += len(over) + len(surplus)
        answers = self._jobs.retry(name, due, by_itself=True)
        for _ in range(MAX_REMOVED // SWEEP_LIMIT):
            if is_done:
                break
            changes = PendingChanges(now)
            with shard.lock:
                part, is_done = _forget(queue, changes)
            self._settlement.settle(changes)
            removed += part
        retried = answers.count("retried") + answers.count("blocked_again")
        return promoted, len(expired), retried, removed


def _is_barred(queue: JobQueue, job_id: str, now: int) -> bool:
    """Return whether a job cannot be retried, as another one has its unique key."""
    key = queue.jobs[job_id].options.unique_key
    return key is not None and queue.unique.owner(key, now) is not None


def _forget(queue: JobQueue, changes: PendingChanges) -> tuple[int, bool]:
    """Remove some expired records of ended jobs; return their number, and whether these were all."""
    finished, now = queue.finished, changes.now
    results = finished.drop_results(now, SWEEP_LIMIT)
    details = finished.drop_details(now, SWEEP_LIMIT)
    if queue.journal is not None and (results or details):
        queue.journal.trimmed([*results, *details])
    old = finished.expired(now, SWEEP_LIMIT)
    queue.remove(old, changes)
    surplus = finished.surplus(SWEEP_LIMIT)
    queue.remove(surplus, changes)
    is_done = max(map(len, (results, details, old, surplus))) < SWEEP_LIMIT
    return len(old) + len(surplus), is_done
