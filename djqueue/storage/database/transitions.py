"""The transitions of jobs: each in one place, in SQL. `core.states.TRANSITIONS` has the table.

Functions expect that the job is locked: read by `stored.by_keys`, or taken from the claims.
"""

from collections.abc import Iterable, Sequence

from djqueue.core.deadletters import letter_of
from djqueue.core.job import REJECTED, DeadLetterRecord, JobFailure
from djqueue.core.options import JobKey
from djqueue.core.states import TERMINAL, State
from djqueue.core.unique import REPLACED

from . import deadletters, dependencies, retention, stored, unique
from .ready import displace, groups, is_grouped, leave_group, place
from .stored import StoredJob
from .transaction import Tx

EXPIRED = JobFailure("djqueue.core.errors.JobTimeoutError", "the ttl expired before the job started")


# Active jobs. Their claims are gone already.


def complete(tx: Tx, job: StoredJob, result: bytes | None) -> None:
    """Complete a job: active → completed."""
    job.result = result
    job.error = None
    job.finished_at = tx.now
    _enter(tx, job, State.COMPLETED, "completed")
    retention.keep(tx, job)
    stored.save(tx, job)
    if result is not None:
        retention.keep_result(tx, job)
    _ended(tx, job)
    tx.note(job, "completed")


def put_back(tx: Tx, job: StoredJob, outcome: str, delay: int = 0, error: JobFailure | None = None) -> None:
    """Make a job wait again after a failure (`retried`), stall or release: active → waiting | delayed."""
    stored.note_attempt(tx, job, outcome, error)
    if outcome == "released":
        job.attempts -= 1
    elif outcome == "retried":
        job.failures += 1
    else:
        job.stalls += 1
    job.error = error or job.error
    if unique.is_followed(tx, job):
        # Of two waiting jobs with one key, the newer is kept.
        _cancel(tx, job, REPLACED)
        return
    stored.restart(tx, job)
    job.worker = ""
    job.run_at = tx.now + delay
    front = outcome != "retried"
    if front and not delay and is_grouped(tx, job):
        # The group's next job must not overtake it.
        job.state = State.WAITING
        groups(tx, job).readmit(job)
    else:
        leave_group(tx, job)
        place(tx, job, front=front)
    if outcome != "released":
        tx.count(job.queue, outcome)
    tx.shift(job.queue, State.ACTIVE, job.state)
    tx.woken.add(job.queue)
    stored.save(tx, job)
    tx.note(job, {"retried": "failing", "released": "released", "stalled": "stalled"}[outcome])


def fail_active(tx: Tx, job: StoredJob, reason: str, error: JobFailure | None) -> None:
    """Fail a job, which becomes a dead letter: active → failed."""
    is_stalled = reason in ("stalled", "worker_lost")
    stored.note_attempt(tx, job, "stalled" if is_stalled else "failed", error)
    if is_stalled:
        job.stalls += 1
        tx.count(job.queue, "stalled")
        job.state = State.FAILED
        tx.note(job, "stalled")
        job.state = State.ACTIVE
    else:
        job.failures += 1
    _bury(tx, job, reason, error)


def cancel_active(tx: Tx, job: StoredJob, reason: str) -> None:
    """Cancel a job: active → cancelled."""
    stored.note_attempt(tx, job, "cancelled", None)
    _cancel(tx, job, reason)


# Pending jobs.


def cancel_pending(tx: Tx, job: StoredJob, reason: str) -> None:
    """Cancel a job that has not started: waiting | delayed | blocked → cancelled."""
    _displace(tx, job)
    _cancel(tx, job, reason)
    tx.note_incident(job, "cancelled")


def fail_pending(tx: Tx, job: StoredJob, reason: str, error: JobFailure) -> None:
    """Fail a job whose ttl or dependency has ended: waiting | delayed | blocked → failed."""
    # For the dead letter: a retried job waits for these again.
    unmet = dependencies.unmet_of(tx, job) if reason == "dependency_failed" else []
    _displace(tx, job)
    job.unmet = set(unmet) or None
    _bury(tx, job, reason, error)
    job.unmet = None
    tx.note_incident(job, "failed")


def reject(tx: Tx, job: StoredJob) -> None:
    """Turn a new job, whose row is written, into a dead letter: see `JobOptions.rejected`."""
    assert job.options.rejected is not None
    _bury(tx, job, REJECTED, JobFailure(*job.options.rejected), is_new=True)
    tx.note_incident(job, "failed")


def move_to(tx: Tx, job: StoredJob, run_at: int, event: str) -> None:
    """Move a pending job to another time: promoted, rescheduled or due."""
    before = job.state
    _displace(tx, job)
    job.run_at = run_at
    place(tx, job)
    tx.shift(job.queue, before, job.state)
    tx.woken.add(job.queue)
    stored.save(tx, job)
    tx.note(job, event)


def unblock(tx: Tx, job: StoredJob) -> None:
    """Let a job wait for nothing but its time: blocked → waiting | delayed."""
    place(tx, job)
    tx.shift(job.queue, State.BLOCKED, job.state)
    tx.woken.add(job.queue)
    stored.save(tx, job)
    tx.note(job, "unblocked")


# Ended jobs.


def revive(
    tx: Tx, job: StoredJob, letter: DeadLetterRecord, *, by_itself: bool, unmet: Iterable[JobKey] = ()
) -> None:
    """Retry a dead letter with a new budget of failures and stalls: failed → waiting | blocked.

    Args:
        by_itself: It is an automatic retry.
        unmet: Dependencies that it waits for again; the caller binds it to them.
    """
    deadletters.drop(tx, job)
    retention.note_retries(tx, job, letter.retries + 1 if by_itself else 0)
    stored.restart(tx, job)
    job.failures = job.stalls = 0
    job.finished_at = 0
    job.reason = job.worker = ""
    job.run_at = tx.now
    job.expires_at = None
    unique.take(tx, job)
    place(tx, job, is_blocked=bool(set(unmet)))
    tx.shift(job.queue, State.FAILED, job.state)
    tx.woken.add(job.queue)
    stored.save(tx, job)
    tx.note(job, "retried")


def remove(tx: Tx, jobs: Sequence[StoredJob]) -> None:
    """Remove jobs that are not active, with everything that belongs to them."""
    _delete(tx, jobs)
    dependencies.note_removed(tx, jobs)


def make_way(tx: Tx, job: StoredJob) -> None:
    """Remove an ended job whose id another one gets now; jobs that wait for it wait for the other one."""
    _delete(tx, [job])
    dependencies.forget(tx, job.queue, [job.id])


def evict_letters(tx: Tx, queue: str) -> None:
    """Remove the oldest dead letters above the maximum of a queue that has got a new one."""
    ids = deadletters.surplus(tx, queue)
    if ids:
        remove(tx, list(stored.by_ids(tx, queue, ids).values()))


def _delete(tx: Tx, jobs: Sequence[StoredJob]) -> None:
    for job in jobs:
        if job.state not in TERMINAL:
            _displace(tx, job)
            successor = unique.release(tx, job)
            assert successor is None
            dependencies.unbind(tx, job)
        tx.shift(job.queue, job.state, None)
        tx.note(job, "removed")
    if jobs:
        stored.delete(tx, jobs)


def _bury(tx: Tx, job: StoredJob, reason: str, error: JobFailure | None, *, is_new: bool = False) -> None:
    job.reason = reason
    job.error = error
    job.finished_at = tx.now
    job.expires_at = None
    tx.count(job.queue, "failed")
    if is_new:
        job.state = State.FAILED
        tx.shift(job.queue, None, State.FAILED)
    else:
        _enter(tx, job, State.FAILED)
    policy = tx.storage.policy(job.queue).dead_letters
    retries = retention.take_retries(tx, job)
    letter = letter_of(job, tx.now, retries, policy, tx.storage.random)
    deadletters.add(tx, job, letter)
    stored.save(tx, job)
    if is_new:
        retention.note_details(tx, job)
    else:
        _ended(tx, job)
    tx.note(job, "failed")
    evict_letters(tx, job.queue)


def _cancel(tx: Tx, job: StoredJob, reason: str) -> None:
    job.reason = reason
    job.finished_at = tx.now
    tx.count(job.queue, "cancelled")
    _enter(tx, job, State.CANCELLED)
    retention.keep(tx, job)
    stored.save(tx, job)
    _ended(tx, job)
    tx.note(job, "cancelled")


def _enter(tx: Tx, job: StoredJob, state: State, total: str | None = None) -> None:
    tx.shift(job.queue, job.state, state)
    if total is not None:
        tx.count(job.queue, total)
    job.state = state


def _displace(tx: Tx, job: StoredJob) -> None:
    displace(tx, job)
    if job.options.group is not None:
        tx.woken.add(job.queue)


def _ended(tx: Tx, job: StoredJob) -> None:
    """Do what follows when a live job has ended."""
    retention.note_details(tx, job)
    if job.options.plain:
        dependencies.note_end(tx, job, job.state)
        return
    successor = unique.release(tx, job)
    leave_group(tx, job)
    if successor is not None:
        [follower] = stored.by_keys(tx, [successor])
        if not dependencies.waits(tx, follower):
            unblock(tx, follower)
    dependencies.unbind(tx, job)
    dependencies.note_end(tx, job, job.state)
