"""Changes of single jobs by id."""

from collections.abc import Sequence
from dataclasses import replace

from djqueue.core.job import REJECTED, CancelResult, DeadLetterRecord
from djqueue.core.options import JobKey
from djqueue.core.states import PENDING, TERMINAL, State

from . import deadletters, dependencies, ready, stored, transitions, unique
from .stored import StoredJob
from .transaction import Tx


def cancel(tx: Tx, queue: str, ids: Sequence[str], reason: str) -> list[CancelResult]:
    """Cancel jobs: a pending job never starts, an active one is asked to stop."""
    stored.by_ids(tx, queue, ids)
    results = []
    for id in ids:
        # The end of one may end another.
        job = stored.by_id(tx, queue, id, lock=False)
        if job is None:
            results.append(CancelResult(id, "not_found"))
        elif job.state in PENDING:
            transitions.cancel_pending(tx, job, reason)
            results.append(CancelResult(id, "cancelled"))
        elif job.state is State.ACTIVE:
            tx.run("UPDATE djqueue_claim SET cancel = TRUE WHERE id = ?", job.pk)
            tx.note(job, "cancel_requested")
            results.append(CancelResult(id, "requested"))
        else:
            results.append(CancelResult(id, str(job.state)))
    return results


def move_in_time(
    tx: Tx, queue: str, ids: Sequence[str], run_at: int, event: str, states: frozenset[State]
) -> list[bool]:
    """Move jobs in one of these states to another time; False for others."""
    tx.touch()
    moved = []
    stored.by_ids(tx, queue, ids)
    for id in ids:
        job = stored.by_id(tx, queue, id, lock=False)
        moved.append(job is not None and job.state in states)
        if job is not None and moved[-1]:
            transitions.move_to(tx, job, run_at, event)
    return moved


def update(tx: Tx, queue: str, ids: Sequence[str], priority: int | None, payload: bytes | None) -> list[bool]:
    """Change the priority or payload of pending jobs; False for other jobs."""
    jobs = stored.by_ids(tx, queue, ids)
    updated = []
    for id in ids:
        job = jobs.get(id)
        if job is None or job.state not in PENDING:
            updated.append(False)
            continue
        tx.touch()
        if payload is not None:
            tx.run("UPDATE djqueue_job SET payload = ? WHERE id = ?", payload, job.pk)
        if priority is not None and priority != job.options.priority:
            _prioritize(tx, job, priority)
        updated.append(True)
    return updated


def _prioritize(tx: Tx, job: StoredJob, priority: int) -> None:
    """Change the priority of a pending job; a ready job goes behind those that have this priority."""
    job.options = replace(job.options, priority=priority)
    stored.save_options(tx, job)
    if tx.run("DELETE FROM djqueue_ready WHERE id = ?", job.pk):
        job.run_at = tx.now  # Its turn in the group, like a new job.
        tx.run("UPDATE djqueue_job SET run_at = ? WHERE id = ?", job.run_at, job.pk)
        ready.push(tx, [job])


def replace_payload(tx: Tx, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool) -> str:
    """Replace the payload of a pending job or, with `retry`, of a dead letter, if it still is `old`."""
    job = stored.by_id(tx, queue, id)
    if job is None:
        return "not_found"
    if job.state is not State.FAILED if retry else job.state not in PENDING:
        return str(job.state)
    if job.payload != old:
        return "changed"
    if retry and unique.owner_of(tx, job) is not None:
        return "unique_key_taken"
    tx.run("UPDATE djqueue_job SET payload = ? WHERE id = ?", payload, job.pk)
    tx.touch()
    if not retry:
        return "updated"
    letter = deadletters.of(tx, job)
    unmet = () if letter is None else letter.unmet
    _revive(tx, job, letter, by_itself=False, unmet=unmet)
    if unmet:
        dependencies.bind(tx, job, unmet)
    return "retried"


def _revive(
    tx: Tx, job: StoredJob, letter: DeadLetterRecord | None, *, by_itself: bool, unmet: Sequence[JobKey]
) -> None:
    if letter is None:
        letter = deadletters.NONE
    transitions.revive(tx, job, letter, by_itself=by_itself, unmet=unmet)


def retry(
    tx: Tx, queue: str, ids: Sequence[str], *, by_itself: bool = False, dry_run: bool = False
) -> list[str]:
    """Move dead letters back to waiting, or to blocked if dependencies have not completed.

    Args:
        by_itself: The retry is an automatic one. It is not refused if a dependency is gone: the job fails
            again.
        dry_run: Only report what would happen to each job.
    """
    jobs = stored.by_ids(tx, queue, ids)
    letters = deadletters.by_ids(tx, queue, ids)
    states = dependencies.states_of(tx, [key for letter in letters.values() for key in letter.unmet])
    answers = []
    bound: list[tuple[StoredJob, list[JobKey]]] = []
    done: set[str] = set()
    keys: set[str] = set()
    for id in ids:
        job, letter = jobs.get(id), letters.get(id)
        unmet = () if letter is None else letter.unmet
        ended = [states.get(key) for key in unmet]
        if job is None:
            answers.append("not_found")
        elif job.state is not State.FAILED or id in done:
            answers.append("not_failed")
        elif by_itself and (letter is None or not 0 < letter.next_retry_at <= tx.now):
            answers.append("not_failed")  # It was retried and failed again in the meantime.
        elif job.reason == REJECTED:
            answers.append("rejected")
        elif job.options.unique_key is not None and (
            job.options.unique_key in keys or unique.owner_of(tx, job) is not None
        ):
            answers.append("unique_key_taken")
        elif not by_itself and (None in ended or State.CANCELLED in ended):
            answers.append("dependency_gone")
        else:
            left = [key for key, state in zip(unmet, ended, strict=True) if state is not State.COMPLETED]
            done.add(id)
            if dry_run and job.options.unique_key is not None:
                keys.add(job.options.unique_key)
            if not dry_run:
                _revive(tx, job, letter, by_itself=by_itself, unmet=left)
                if unmet:
                    bound.append((job, left))
            answers.append("blocked_again" if left else "retried")
    for job, left in bound:
        # Completed dependencies are bound, too: the job reads their results.
        dependencies.bind(tx, job, left)
    return answers


def remove(tx: Tx, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
    """Remove jobs; False for a job that is active or unknown."""
    stored.by_ids(tx, queue, ids)
    removed = []
    for id in ids:
        job = stored.by_id(tx, queue, id, lock=False)
        is_meant = job is not None and job.state is not State.ACTIVE
        if job is not None and ended_before is not None:
            is_meant = job.state in TERMINAL and job.finished_at < ended_before
        removed.append(is_meant)
        if job is not None and is_meant:
            transitions.remove(tx, [job])
    return removed
