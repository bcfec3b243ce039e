"""Operations on single jobs by id: cancel, promote, replace the payload, retry, remove and others."""

from collections.abc import Mapping, Sequence

from .base import EngineBase
from .job import REJECTED, CancelResult, EngineJob
from .options import JobKey
from .queue import JobQueue
from .shard import PendingChanges, Shard
from .states import PENDING, TERMINAL, State


class JobControls(EngineBase):
    """Verbs on jobs of one queue, by id."""

    def cancel(self, queue_name: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """Take jobs back: a pending one never starts, an active one is asked to stop."""
        changes = PendingChanges()
        shard = self.shard(queue_name)
        now = self.clock.now()
        results = []
        with shard.lock:
            queue = shard.find(queue_name)
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is None:
                    results.append(CancelResult(job_id, "not_found"))
                elif job.state in PENDING:
                    shard.cancel_pending(queue, job, reason, now, changes)
                    results.append(CancelResult(job_id, "cancelled"))
                elif self._request_cancel(shard, job):
                    shard.tell(queue, job, "cancel_requested", now, changes)
                    results.append(CancelResult(job_id, "requested"))
                else:
                    results.append(CancelResult(job_id, str(job.state)))
        self.settle(changes)
        return results

    def _request_cancel(self, shard: Shard, job: EngineJob) -> bool:
        # A plain job completes under this lock alone: what is noted here must not come after that.
        with self.place(job.id).lock:
            if job.state is not State.ACTIVE:
                return False
            job.cancel_requested = True
            shard.changed(job)
            return True

    def promote(self, queue_name: str, ids: Sequence[str]) -> list[bool]:
        """Delayed jobs to waiting, now; False for one that is not delayed."""
        now = self.clock.now()
        return self._move(queue_name, ids, now, "promoted", frozenset({State.DELAYED}))

    def reschedule(self, queue_name: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """Jobs that have not started to another time (UTC milliseconds); False for the others."""
        states = frozenset({State.DELAYED, State.WAITING})
        return self._move(queue_name, ids, run_at, "delayed", states)

    def update(
        self,
        queue_name: str,
        ids: Sequence[str],
        priority: int | None = None,
        payload: bytes | None = None,
    ) -> list[bool]:
        """Change pending jobs; False for the others. None leaves the priority, or the payload, as it is."""
        shard = self.shard(queue_name)
        now = self.clock.now()
        updated = []
        with shard.lock:
            queue = shard.find(queue_name)
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is None or job.state not in PENDING:
                    updated.append(False)
                    continue
                if payload is not None:
                    job.payload = payload
                if priority is not None and priority != job.options.priority:
                    queue.prioritize(job, priority, now)
                    shard.changed(job)
                if self._journal is not None:
                    self._journal.updated(job)
                updated.append(True)
        return updated

    def replace_payload(
        self, queue_name: str, job_id: str, payload: bytes, old: bytes, *, retry: bool = False
    ) -> str:
        """Another payload in the place of a known one, for a pending job or, with `retry`, a dead letter.

        updated | retried | not_found | changed | unique_key_taken, or the state in which it is instead.
        """
        unmet = self._unmet(queue_name, [job_id]) if retry else []
        if not unmet:
            return self._revise(queue_name, job_id, payload, old, retry=retry)
        with self.knowing(unmet):
            return self._revise(queue_name, job_id, payload, old, retry=retry)

    def _revise(self, queue_name: str, job_id: str, payload: bytes, old: bytes, *, retry: bool) -> str:
        changes = PendingChanges()
        shard = self.shard(queue_name)
        now = self.clock.now()
        with shard.lock:
            queue = shard.find(queue_name)
            job = queue.jobs.get(job_id)
            if job is None:
                return "not_found"
            if job.state is not State.FAILED if retry else job.state not in PENDING:
                return str(job.state)
            if job.payload != old:
                return "changed"
            if retry and job.options.unique_key and queue.unique.owner(job.options.unique_key, now):
                return "unique_key_taken"
            unmet = _unmet_of(queue, job_id)
            if retry:
                shard.revive(queue, job, now, changes, by_itself=False, unmet=unmet)
            job.payload = payload
            if self._journal is not None:
                self._journal.updated(job)
        self.settle(changes)
        if retry and unmet:
            self.bind(job, job.options.depends_on)
        return "retried" if retry else "updated"

    def _move(
        self, queue_name: str, ids: Sequence[str], run_at: int, event: str, states: frozenset[State]
    ) -> list[bool]:
        changes = PendingChanges()
        shard = self.shard(queue_name)
        now = self.clock.now()
        moved = []
        with shard.lock:
            queue = shard.find(queue_name)
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is not None and job.state in states:
                    shard.move(queue, job, run_at, event, now, changes)
                    moved.append(True)
                else:
                    moved.append(False)
        self.settle(changes)
        return moved

    def retry(
        self, queue_name: str, ids: Sequence[str], *, by_itself: bool = False, dry_run: bool = False
    ) -> list[str]:
        """Dead letters back to waiting, or behind their dependencies: retried | blocked_again | not_found |
        not_failed | unique_key_taken | rejected | dependency_gone, for each.

        by_itself: a dependency that is gone is no reason to refuse it: it fails again.
        dry_run: only say what would become of each.
        """
        unmet = self._unmet(queue_name, ids)
        if not unmet:
            return self._retry(queue_name, ids, {}, by_itself=by_itself, dry_run=dry_run)
        with self.knowing(unmet):
            states = {key: self._state_of(key) for key in unmet}
            return self._retry(queue_name, ids, states, by_itself=by_itself, dry_run=dry_run)

    def _retry(
        self,
        queue_name: str,
        ids: Sequence[str],
        states: Mapping[JobKey, State | None],
        *,
        by_itself: bool,
        dry_run: bool,
    ) -> list[str]:
        changes = PendingChanges()
        shard = self.shard(queue_name)
        now = self.clock.now()
        answers = []
        bound: list[EngineJob] = []
        would_be: set[str] = set()
        """Ids, and unique keys behind a NUL, of those that a dry run has passed."""
        with shard.lock:
            queue = shard.find(queue_name)
            for job_id in ids:
                job = queue.jobs.get(job_id)
                unmet = _unmet_of(queue, job_id)
                ended = [states.get(key, State.FAILED) for key in unmet]
                if job is None:
                    answers.append("not_found")
                elif job.state is not State.FAILED or job_id in would_be:
                    answers.append("not_failed")
                elif by_itself and not queue.dead.is_due(job_id, now):
                    answers.append("not_failed")  # Retried, and failed again, since it was seen.
                elif job.reason == REJECTED:
                    answers.append("rejected")
                elif (key := job.options.unique_key) is not None and (
                    queue.unique.owner(key, now) or f"\0{key}" in would_be
                ):
                    answers.append("unique_key_taken")
                elif not by_itself and (None in ended or State.CANCELLED in ended):
                    answers.append("dependency_gone")
                else:
                    left = [
                        one for one, state in zip(unmet, ended, strict=True) if state is not State.COMPLETED
                    ]
                    if dry_run:
                        would_be |= {job_id, f"\0{key}"}
                    else:
                        shard.revive(queue, job, now, changes, by_itself=by_itself, unmet=left)
                        bound += [job] if unmet else []
                    answers.append("blocked_again" if left else "retried")
        self.settle(changes)
        for job in bound:
            # Also to those that have completed: it reads their results.
            self.bind(job, job.options.depends_on)
        return answers

    def _unmet(self, queue_name: str, ids: Sequence[str]) -> list[JobKey]:
        """What dead letters with the reason `dependency_failed` waited for."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.find(queue_name)
            return [key for job_id in ids for key in _unmet_of(queue, job_id)]

    def _state_of(self, key: JobKey) -> State | None:
        """The state of a job, wherever it has been moved; None if it is gone."""
        while (new := self.shard(key[0]).whereabouts(key)) is not None:
            key = new
        shard = self.shard(key[0])
        with shard.lock:
            job = shard.find(key[0]).jobs.get(key[1])
            return None if job is None else job.state

    def remove(self, queue_name: str, ids: Sequence[str], ended_before: int | None = None) -> list[bool]:
        """Forget jobs that are not active; False for one that is, or that is not there.

        ended_before: only jobs that have ended before then.
        """
        changes = PendingChanges()
        shard = self.shard(queue_name)
        now = self.clock.now()
        removed = []
        with shard.lock:
            queue = shard.find(queue_name)
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is None or self.is_active(job) or not _has_ended(job, ended_before):
                    removed.append(False)
                else:
                    shard.remove(queue, [job], now, changes)
                    removed.append(True)
        self.settle(changes)
        return removed


def _unmet_of(queue: JobQueue, job_id: str) -> tuple[JobKey, ...]:
    letter = queue.dead.get(job_id)
    return () if letter is None else letter.unmet


def _has_ended(job: EngineJob, before: int | None) -> bool:
    return before is None or (job.state in TERMINAL and job.finished_at < before)
