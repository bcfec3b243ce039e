"""Changes of single jobs by id."""

from collections.abc import Mapping, Sequence

from ..changes import PendingChanges
from ..enginejob import EngineJob
from ..job import REJECTED, CancelResult
from ..options import JobKey
from ..queue import JobQueue
from ..shard import Shard
from ..states import PENDING, TERMINAL, State
from ..versions import counted, counted_unless_empty
from .context import EngineContext
from .finisher import Settlement
from .moving import move_job


class EngineJobs:
    """Changes of single jobs of one queue, made by the engine."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self.changes = context.changes
        self._context = context
        self._settlement = settlement

    @counted_unless_empty(1)
    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """Cancel jobs: a pending job never starts, an active one is asked to stop."""
        changes = PendingChanges()
        shard = self._context.shard(queue)
        now = self._context.clock.now()
        results = []
        with shard.lock:
            job_queue = shard.find(queue)
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is None:
                    results.append(CancelResult(job_id, "not_found"))
                elif job.state in PENDING:
                    shard.cancel_pending(job_queue, job, reason, now, changes)
                    results.append(CancelResult(job_id, "cancelled"))
                elif self._request_cancel(shard, job):
                    changes.note(job_queue, job, "cancel_requested", now)
                    results.append(CancelResult(job_id, "requested"))
                else:
                    results.append(CancelResult(job_id, str(job.state)))
        self._settlement.settle(changes)
        return results

    def _request_cancel(self, shard: Shard, job: EngineJob) -> bool:
        # A plain job completes under this lock alone; the journal must not record the request after the end.
        with self._context.processing_shard(job.id).lock:
            if job.state is not State.ACTIVE:
                return False
            job.cancel_requested = True
            shard.changed(job)
            return True

    @counted_unless_empty(1)
    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """Make delayed jobs claimable now; False for a job that is not delayed."""
        now = self._context.clock.now()
        return self._move(queue, ids, now, "promoted", frozenset({State.DELAYED}))

    @counted_unless_empty(1)
    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """Move waiting and delayed jobs to a time in UTC milliseconds; False for jobs in other states."""
        states = frozenset({State.DELAYED, State.WAITING})
        return self._move(queue, ids, run_at, "delayed", states)

    @counted_unless_empty(1)
    def update(
        self,
        queue: str,
        ids: Sequence[str],
        priority: int | None = None,
        payload: bytes | None = None,
    ) -> list[bool]:
        """Change the priority or payload of pending jobs, None leaves it as it is; False for other jobs."""
        shard = self._context.shard(queue)
        now = self._context.clock.now()
        updated = []
        with shard.lock:
            job_queue = shard.find(queue)
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is None or job.state not in PENDING:
                    updated.append(False)
                    continue
                if payload is not None:
                    job.payload = payload
                if priority is not None and priority != job.options.priority:
                    job_queue.prioritize(job, priority, now)
                    shard.changed(job)
                if self._context.journal is not None:
                    self._context.journal.updated(job)
                updated.append(True)
        return updated

    @counted
    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        """Replace the payload of a pending job or, with `retry`, of a dead letter, if it still is `old`.

        Returns updated | retried | not_found | changed | unique_key_taken, or the state of the job.
        """
        changes = PendingChanges()
        shard = self._context.shard(queue)
        now = self._context.clock.now()
        with shard.lock:
            job_queue = shard.find(queue)
            job = job_queue.jobs.get(id)
            if job is None:
                return "not_found"
            if job.state is not State.FAILED if retry else job.state not in PENDING:
                return str(job.state)
            if job.payload != old:
                return "changed"
            if retry and job.options.unique_key and job_queue.unique.owner(job.options.unique_key, now):
                return "unique_key_taken"
            unmet = _unmet_of(job_queue, id)
            if retry:
                shard.revive(job_queue, job, now, changes, by_itself=False, unmet=unmet)
            job.payload = payload
            if self._context.journal is not None:
                self._context.journal.updated(job)
        self._settlement.settle(changes)
        if retry and unmet:
            self._settlement.bind(job, job.options.depends_on)
        return "retried" if retry else "updated"

    def _move(
        self, queue: str, ids: Sequence[str], run_at: int, event: str, states: frozenset[State]
    ) -> list[bool]:
        changes = PendingChanges()
        shard = self._context.shard(queue)
        now = self._context.clock.now()
        moved = []
        with shard.lock:
            job_queue = shard.find(queue)
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is not None and job.state in states:
                    shard.move(job_queue, job, run_at, event, now, changes)
                    moved.append(True)
                else:
                    moved.append(False)
        self._settlement.settle(changes)
        return moved

    @counted_unless_empty(1)
    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """Move pending jobs to the end of another queue, and failed ones to its dead letters.

        Returns:
            For each job: moved | not_found | active | ended | duplicate | unique_key_taken | group_needed.
        """
        if queue == to:
            raise ValueError(f"the jobs are already in queue {to!r}; pass a different queue")
        answers = []
        for job_id in ids:
            changes = PendingChanges()
            answers.append(move_job(self._context, (queue, job_id), to, changes))
            self._settlement.settle(changes)
        return answers

    @counted_unless_empty(1)
    def retry(
        self, queue: str, ids: Sequence[str], *, by_itself: bool = False, dry_run: bool = False
    ) -> list[str]:
        """Move dead letters back to waiting, or to blocked if dependencies have not completed.

        Args:
            by_itself: the retry is an automatic one. It is not refused if a dependency is gone: the job
                fails again.
            dry_run: only report what would happen to each job.

        Returns:
            For each job: retried | blocked_again | not_found | not_failed | unique_key_taken | rejected |
            dependency_gone.
        """
        states = {key: self._state_of(key) for key in self._unmet(queue, ids)}
        return self._retry(queue, ids, states, by_itself=by_itself, dry_run=dry_run)

    def _retry(
        self,
        queue: str,
        ids: Sequence[str],
        states: Mapping[JobKey, State | None],
        *,
        by_itself: bool,
        dry_run: bool,
    ) -> list[str]:
        changes = PendingChanges()
        shard = self._context.shard(queue)
        now = self._context.clock.now()
        answers = []
        bound: list[EngineJob] = []
        would_be: set[str] = set()
        """Ids and unique keys (these behind a NUL) of the jobs that a dry run would have retried."""
        with shard.lock:
            job_queue = shard.find(queue)
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                unmet = _unmet_of(job_queue, job_id)
                ended = [states.get(key, State.FAILED) for key in unmet]
                if job is None:
                    answers.append("not_found")
                elif job.state is not State.FAILED or job_id in would_be:
                    answers.append("not_failed")
                elif by_itself and not job_queue.dead.is_due(job_id, now):
                    answers.append("not_failed")  # It was retried and failed again in the meantime.
                elif job.reason == REJECTED:
                    answers.append("rejected")
                elif (unique_key := job.options.unique_key) is not None and (
                    job_queue.unique.owner(unique_key, now) or f"\0{unique_key}" in would_be
                ):
                    answers.append("unique_key_taken")
                elif not by_itself and (None in ended or State.CANCELLED in ended):
                    answers.append("dependency_gone")
                else:
                    left = [
                        key for key, state in zip(unmet, ended, strict=True) if state is not State.COMPLETED
                    ]
                    if dry_run:
                        would_be |= {job_id, f"\0{unique_key}"}
                    else:
                        shard.revive(job_queue, job, now, changes, by_itself=by_itself, unmet=left)
                        bound += [job] if unmet else []
                    answers.append("blocked_again" if left else "retried")
        self._settlement.settle(changes)
        for job in bound:
            # Completed dependencies are bound, too: the job reads their results.
            self._settlement.bind(job, job.options.depends_on)
        return answers

    def _unmet(self, queue: str, ids: Sequence[str]) -> list[JobKey]:
        """Return the unmet dependencies of dead letters with the reason `dependency_failed`."""
        shard = self._context.shard(queue)
        with shard.lock:
            job_queue = shard.find(queue)
            return [key for job_id in ids for key in _unmet_of(job_queue, job_id)]

    def _state_of(self, key: JobKey) -> State | None:
        """Return the state of a job, which may have been moved; None if it is gone."""
        while (new := self._context.shard(key[0]).whereabouts(key)) is not None:
            key = new
        shard = self._context.shard(key[0])
        with shard.lock:
            job = shard.find(key[0]).jobs.get(key[1])
            return None if job is None else job.state

    @counted_unless_empty(1)
    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        """Remove jobs; False for a job that is active or unknown.

        Args:
            ended_before: remove only jobs that ended before this time in UTC milliseconds.
        """
        changes = PendingChanges()
        shard = self._context.shard(queue)
        now = self._context.clock.now()
        removed = []
        with shard.lock:
            job_queue = shard.find(queue)
            for job_id in ids:
                job = job_queue.jobs.get(job_id)
                if job is None or self._context.is_active(job) or not _has_ended(job, ended_before):
                    removed.append(False)
                else:
                    shard.remove(job_queue, [job], now, changes)
                    removed.append(True)
        self._settlement.settle(changes)
        return removed


def _unmet_of(queue: JobQueue, job_id: str) -> tuple[JobKey, ...]:
    letter = queue.dead.get(job_id)
    return () if letter is None else letter.unmet


def _has_ended(job: EngineJob, before: int | None) -> bool:
    return before is None or (job.state in TERMINAL and job.finished_at < before)
