"""Jobs that wait for others, and the records of ended jobs that they may read.

A live job has a row for each of its dependencies until it ends. While such a row exists, the record of a
dependency that has completed or was cancelled is kept.
"""

from collections.abc import Iterable, Sequence

from djqueue.core.job import JobFailure
from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, State

from .stored import StoredJob, by_keys, ids_by_queue
from .transaction import Tx

DEPENDENCY = ("dependent", "queue", "job_id", "met")


def waits(tx: Tx, job: StoredJob) -> bool:
    """Return whether a job waits for a dependency."""
    waiting = "SELECT 1 FROM djqueue_dependency WHERE dependent = ? AND NOT met LIMIT 1"
    return tx.row(waiting, job.pk) is not None


def unmet_of(tx: Tx, job: StoredJob) -> list[JobKey]:
    """Return the dependencies that a job waits for."""
    waiting = "SELECT queue, job_id FROM djqueue_dependency WHERE dependent = ? AND NOT met ORDER BY id"
    return [(queue, id) for queue, id in tx.rows(waiting, job.pk)]


def states_of(tx: Tx, keys: Iterable[JobKey], *, lock: bool = True) -> dict[JobKey, State]:
    """Return the states of jobs; with `lock`, they cannot end before the transaction does."""
    from . import retention

    found: dict[JobKey, State] = {}
    for queue, ids in ids_by_queue(sorted(set(keys))).items():
        condition, values = tx.among("job_id", ids)
        statement = f"SELECT job_id, state FROM djqueue_job WHERE queue = ? AND {condition} ORDER BY job_id"
        # Where records are counted, one that gets a dependent is changed: see `retention.hold`.
        lasting = tx.dialect.for_update if retention.is_bounded(tx, queue) else tx.dialect.for_share
        suffix = lasting if lock else ""
        found |= {(queue, id): State(state) for id, state in tx.rows(statement + suffix, queue, values)}
    return found


def bind(tx: Tx, job: StoredJob, unmet: Sequence[JobKey], *, missing: State = State.CANCELLED) -> None:
    """Make a blocked job wait for its dependencies; those that have ended are resolved at once.

    Args:
        job: A new job, or a dead letter that is retried.
        unmet: Those of its dependencies that it waits for; it may read the records of the others.
        missing: How a dependency without a record ended.
    """
    from . import retention

    keys = job.options.depends_on
    states = states_of(tx, keys)
    # A failed dependency may be retried and complete: a patient dependent waits for that. So does a retried
    # dependent, which has the error of its own failure.
    is_patient = job.options.on_dependency_failure == "wait" or job.error is not None
    ended: list[tuple[JobKey, State]] = []
    for key in keys:
        state = states.get(key, missing)
        if state not in LIVE and not (state is State.FAILED and is_patient):
            ended.append((key, state))
    tx.insert("djqueue_dependency", DEPENDENCY, [(job.pk, *key, key not in unmet) for key in keys])
    retention.hold(tx, [key for key, _ in ended if key in states])
    for key, state in ended:
        resolve(tx, job, key, state)
        if key not in states:
            tx.run(
                "DELETE FROM djqueue_dependency WHERE dependent = ? AND queue = ? AND job_id = ?",
                job.pk,
                *key,
            )


def resolve(tx: Tx, job: StoredJob, key: JobKey, ended: State) -> None:
    """Apply the end of a dependency to a job that waits for it."""
    from . import transitions, unique

    if job.state is not State.BLOCKED:
        return
    policy = job.options.on_dependency_failure
    which = "WHERE dependent = ? AND queue = ? AND job_id = ?"
    if ended is State.COMPLETED or policy == "ignore":
        # A failed job leaves no record to read, and may be retried: another end is no concern of this job.
        met = "UPDATE djqueue_dependency SET met = TRUE"
        change = "DELETE FROM djqueue_dependency" if ended is State.FAILED else met
        is_changed = tx.run(f"{change} {which} AND NOT met", job.pk, *key)
        if is_changed and not waits(tx, job) and not unique.is_waiting(tx, job):
            transitions.unblock(tx, job)
        return
    if tx.row(f"SELECT 1 FROM djqueue_dependency {which} AND NOT met", job.pk, *key) is None:
        return
    if policy == "wait" and ended is State.FAILED:
        return
    # Users who may see this job may have no access to the other queue.
    name = f"dependency {key[1]!r}" if key[0] == job.queue else "a dependency in another queue"
    if policy == "cancel":
        transitions.cancel_pending(tx, job, "dependency_failed")
    else:
        error = JobFailure("djqueue.core.errors.JobFailedError", f"{name} ended as {ended}")
        transitions.fail_pending(tx, job, "dependency_failed", error)


def note_end(tx: Tx, job: StoredJob, state: State) -> None:
    """Record the end of a job for those that wait for it; `settle` applies it."""
    waiting = tx.rows(
        "SELECT dependent FROM djqueue_dependency WHERE queue = ? AND job_id = ? AND NOT met ORDER BY id",
        *(job.queue, job.id),
    )
    if waiting:
        tx.ended.append(((job.queue, job.id), state, [pk for (pk,) in waiting]))


def settle(tx: Tx) -> None:
    """Apply the ends of jobs, whose rows are written, to the jobs that wait for them, in order."""
    while tx.ended:
        key, state, waiting = tx.ended.pop(0)
        by_keys(tx, waiting)
        # One after the other: the end of one may end another.
        for pk in waiting:
            for dependent in by_keys(tx, [pk], lock=False):
                resolve(tx, dependent, key, state)


def note_removed(tx: Tx, jobs: Sequence[StoredJob]) -> None:
    """Apply the removal of jobs, whose rows are gone, to the jobs that wait for them or may read them."""
    for queue, ids in ids_by_queue((job.queue, job.id) for job in jobs).items():
        condition, values = tx.among("job_id", ids)
        which = f"SELECT DISTINCT job_id, met FROM djqueue_dependency WHERE queue = ? AND {condition}"
        found = tx.rows(which, queue, values)
        waited_for = {id for id, met in found if not met}
        for job in jobs:
            if job.queue == queue and job.id in waited_for:
                note_end(tx, job, State.CANCELLED)
        if found:
            forget(tx, queue, ids)  # Another job may get the id.


def unbind(tx: Tx, job: StoredJob) -> None:
    """Release the dependencies of a job that has ended, and their records."""
    from . import retention

    if not job.options.depends_on:
        return
    tx.run("DELETE FROM djqueue_dependency WHERE dependent = ?", job.pk)
    retention.let_go(tx, job.options.depends_on)


def exist(tx: Tx) -> bool:
    """Return whether any job depends on another."""
    return tx.row("SELECT 1 FROM djqueue_dependency LIMIT 1") is not None


def followed(tx: Tx, queue: str, ids: Sequence[str]) -> set[str]:
    """Return those of the jobs that others wait for."""
    condition, values = tx.among("job_id", ids)
    waiting = f"SELECT DISTINCT job_id FROM djqueue_dependency WHERE queue = ? AND {condition} AND NOT met"
    return {id for (id,) in tx.rows(waiting, queue, values)}


def forget(tx: Tx, queue: str, ids: Sequence[str]) -> None:
    """Drop the dependencies on records of a queue that are removed."""
    condition, values = tx.among("job_id", ids)
    if tx.run(f"DELETE FROM djqueue_dependency WHERE queue = ? AND {condition} AND met", queue, values):
        tx.run(f"DELETE FROM djqueue_pinned WHERE queue = ? AND {condition}", queue, values)


def are_held(tx: Tx, queue: str, ids: Sequence[str]) -> set[str]:
    """Return the jobs whose records live jobs may read."""
    condition, values = tx.among("job_id", ids)
    statement = f"SELECT DISTINCT job_id FROM djqueue_dependency WHERE queue = ? AND {condition}"
    return {id for (id,) in tx.rows(statement, queue, values)}
