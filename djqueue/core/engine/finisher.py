"""Ends of attempts: completed, retried, released, failed, cancelled."""

from collections.abc import Sequence

from ..changes import PendingChanges
from ..enginejob import EngineJob
from ..errors import OptionError
from ..job import DEAD_LETTER_REASONS, Outcome
from ..queue import JobQueue
from ..shard import Shard
from .context import EngineContext
from .settlement import Settlement

OUTCOMES = frozenset({"complete", "retry", "release", "fail", "cancel"})


class Finisher:
    """Ends attempts whose tokens hold."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self._context = context
        self._settlement = settlement

    def finish(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """End attempts: see `Engine.finish`; return whether each token held."""
        changes = PendingChanges()
        is_timed = False
        for outcome in outcomes:
            if outcome.kind not in OUTCOMES:
                raise OptionError(f"unknown outcome {outcome.kind!r}")
            if outcome.delay:
                is_timed = True
        now = self._context.now_for_lengths() if is_timed else self._context.clock.now()
        accepted = [self._finish_one(outcome, now, changes) for outcome in outcomes]
        some = changes.events or changes.ended or changes.woken
        if some or changes.incidents or changes.unbound or changes.freed:
            self._settlement.settle(changes)
        return accepted

    def _finish_one(self, outcome: Outcome, now: int, changes: PendingChanges) -> bool:
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
                    shard.complete(queue, job, outcome.result, now, changes)
                    return True
        with shard.lock:
            with processing.lock:
                job = processing.release(outcome.token, outcome.queue, outcome.id)
            if job is None:
                return False
            self._apply(shard, queue, job, outcome, now, changes)
        return True

    def _apply(
        self,
        shard: Shard,
        queue: JobQueue,
        job: EngineJob,
        outcome: Outcome,
        now: int,
        changes: PendingChanges,
    ) -> None:
        if outcome.kind == "complete":
            shard.complete(queue, job, outcome.result, now, changes)
        elif outcome.kind == "fail":
            reason = outcome.reason if outcome.reason in DEAD_LETTER_REASONS else "unknown"
            shard.fail_active(queue, job, reason, outcome.error, now, changes)
        elif outcome.kind == "cancel" or job.cancel_requested:
            shard.cancel_active(queue, job, outcome.reason or "cancelled", now, changes)
            if outcome.kind != "cancel":
                changes.note_incident(job, "cancelled")  # The worker does not know of it.
        else:
            event = "retried" if outcome.kind == "retry" else "released"
            shard.put_back(queue, job, event, outcome.delay, outcome.error, now, changes)
