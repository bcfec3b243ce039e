"""The transitions of jobs: each in one place, in SQL, and the changes of jobs by id that consist of them.

`core.states.TRANSITIONS` has the table. Functions of a `StoredJob` expect that it is locked: read by
`stored.by_keys`, or taken from the claims.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from djqueue.core.enginejob import letter_of
from djqueue.core.job import REJECTED, CancelResult, DeadLetterRecord, JobFailure
from djqueue.core.options import JobKey
from djqueue.core.policies import KEYED, REPLACED
from djqueue.core.states import LIVE, PENDING, REUSABLE, TERMINAL, State
from djqueue.storage.tables import rows

from . import deadletters, dependencies, retention, stored
from .stored import StoredJob, displace, group_of, is_grouped, leave_group, place
from .transaction import Tx

EXPIRED = JobFailure("djqueue.core.errors.JobTimeoutError", "the ttl expired before the job started")


# Active jobs. Their claims are gone already.


def complete(tx: Tx, job: StoredJob, result: bytes | None) -> None:
    """Complete a job: active → completed."""
    job.result = result
    job.error = None
    job.finished_at = tx.now
    _enter(tx, job, State.COMPLETED)
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
    if dependencies.is_followed(tx, job):
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
        group_of(tx, job).readmit(job)
    else:
        leave_group(tx, job)
        place(tx, job, front=front)
    if outcome != "released":
        tx.count(job.queue, outcome)
    tx.shift(job.queue, State.ACTIVE, job.state)
    tx.woken.add(job.queue)
    stored.save(tx, job)
    tx.note(job, outcome)


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
    retries = letter.retries + 1 if by_itself else 0
    tx.run("UPDATE djqueue_job SET retries = ? WHERE id = ?", retries, job.pk)
    stored.restart(tx, job)
    job.failures = job.stalls = 0
    job.finished_at = 0
    job.reason = job.worker = ""
    job.run_at = tx.now
    job.expires_at = None
    dependencies.take_key(tx, job)
    place(tx, job, is_blocked=bool(set(unmet)))
    tx.shift(job.queue, State.FAILED, job.state)
    tx.woken.add(job.queue)
    stored.save(tx, job)
    tx.note(job, "requeued")


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
    plain = [job for job in jobs if not is_grouped(tx, job)]
    for state, table in ((State.WAITING, "djqueue_ready"), (State.DELAYED, "djqueue_delayed")):
        if pks := [job.pk for job in plain if job.state is state]:
            condition, values = tx.among("id", pks)
            tx.run(f"DELETE FROM {table} WHERE {condition}", values)
    for job in jobs:
        if job.state not in TERMINAL:
            if is_grouped(tx, job):
                _displace(tx, job)
            successor = dependencies.release_key(tx, job.queue, job.options.unique_key, job.pk)
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
    _enter(tx, job, State.FAILED, is_new=is_new)
    policy = tx.database.policy(job.queue).dead_letters
    retries: int = tx.value("SELECT retries FROM djqueue_job WHERE id = ?", job.pk) or 0
    letter = letter_of(job, tx.now, retries, policy, tx.database.random)
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
    _enter(tx, job, State.CANCELLED)
    retention.keep(tx, job)
    stored.save(tx, job)
    _ended(tx, job)
    tx.note(job, "cancelled")


def _enter(tx: Tx, job: StoredJob, state: State, *, is_new: bool = False) -> None:
    """Count the end of a job."""
    tx.count(job.queue, state.value)
    tx.shift(job.queue, None if is_new else job.state, state)
    job.state = state


def _displace(tx: Tx, job: StoredJob) -> None:
    displace(tx, job)
    if job.options.concurrency_key is not None:
        tx.woken.add(job.queue)


def _ended(tx: Tx, job: StoredJob) -> None:
    """Do what follows when a live job has ended."""
    retention.note_details(tx, job)
    if job.options.plain:
        dependencies.note_end(tx, job, job.state)
        return
    leave_group(tx, job)
    free_key(tx, job.queue, job.options.unique_key, job.pk)
    dependencies.unbind(tx, job)
    dependencies.note_end(tx, job, job.state)


def free_key(tx: Tx, queue: str, key: str | None, pk: int) -> None:
    """Free the unique key of a job that has ended; the job that waits for it gets it."""
    successor = dependencies.release_key(tx, queue, key, pk)
    if successor is not None:
        [follower] = stored.by_keys(tx, [successor])
        if not dependencies.waits(tx, follower):
            unblock(tx, follower)


# Changes of jobs by id.


def cancel(tx: Tx, queue: str, ids: Sequence[str], reason: str) -> list[CancelResult]:
    """Cancel jobs: a pending job never starts, an active one is asked to stop."""
    locked = stored.by_ids(tx, queue, ids)
    results = []
    for id in ids:
        # The end of one may end another. One that has arrived since is not locked.
        job = stored.by_id(tx, queue, id, lock=False) if id in locked else None
        if job is None:
            results.append(CancelResult(id, "not_found"))
        elif job.state in PENDING:
            cancel_pending(tx, job, reason)
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
    locked = stored.by_ids(tx, queue, ids)
    for id in ids:
        job = stored.by_id(tx, queue, id, lock=False) if id in locked else None
        moved.append(job is not None and job.state in states)
        if job is not None and moved[-1]:
            move_to(tx, job, run_at, event)
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
        stored.push(tx, [job])


def replace_payload(tx: Tx, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool) -> str:
    """Replace the payload of a pending job or, with `retry`, of a dead letter, if it still is `old`."""
    job = stored.by_id(tx, queue, id)
    if job is None:
        return "not_found"
    if job.state is not State.FAILED if retry else job.state not in PENDING:
        return str(job.state)
    if job.payload != old:
        return "changed"
    if retry and dependencies.owner_of_key(tx, job) is not None:
        return "unique_key_taken"
    tx.run("UPDATE djqueue_job SET payload = ? WHERE id = ?", payload, job.pk)
    tx.touch()
    if not retry:
        return "updated"
    letter = deadletters.of(tx, job)
    unmet = () if letter is None else letter.unmet
    revive(tx, job, letter or deadletters.NONE, by_itself=False, unmet=unmet)
    if unmet:
        bind(tx, job, unmet)
    return "retried"


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
            job.options.unique_key in keys or dependencies.owner_of_key(tx, job) is not None
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
                revive(tx, job, letter or deadletters.NONE, by_itself=by_itself, unmet=left)
                if unmet:
                    bound.append((job, left))
            answers.append("blocked_again" if left else "retried")
    for job, left in bound:
        # Completed dependencies are bound, too: the job reads their results.
        bind(tx, job, left)
    return answers


def remove_by_ids(tx: Tx, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
    """Remove jobs; False for a job that is active or unknown."""
    jobs = stored.by_ids(tx, queue, ids)
    if ended_before is None:
        meant = {id: job for id, job in jobs.items() if job.state is not State.ACTIVE}
    else:
        meant = {
            id: job for id, job in jobs.items() if job.state in TERMINAL and job.finished_at < ended_before
        }
    remove(tx, list(meant.values()))
    return [meant.pop(id, None) is not None for id in ids]


# Moves of jobs between queues, with everything that belongs to them and waits for them.


BELONGINGS = ("djqueue_job_result", "djqueue_job_attempt", "djqueue_job_log", "djqueue_job_item")
"""Tables of what a job takes along, by its queue and id. Its dead letter becomes the newest one there."""


def move(tx: Tx, queue: str, ids: Sequence[str], to: str) -> list[str]:
    """Move pending jobs, or dead letters, to the end of another queue; return what became of each."""
    locked = stored.by_ids(tx, queue, ids)
    answers = [_move(tx, queue, id, to) if id in locked else "not_found" for id in ids]
    moved = {(queue, id): (to, id) for id, answer in zip(ids, answers, strict=True) if answer == "moved"}
    if moved:
        _rename_in_letters(tx, moved)
    return answers


def _move(tx: Tx, queue: str, id: str, to: str) -> str:
    # The move of one may have changed another, which waits for it.
    job = stored.by_id(tx, queue, id, lock=False)
    if job is None:
        return "not_found"
    if job.state is State.FAILED:
        return _move_letter(tx, job, to)
    if job.state not in PENDING:
        return "active" if job.state is State.ACTIVE else "ended"
    return _move_pending(tx, job, to)


def _move_pending(tx: Tx, job: StoredJob, to: str) -> str:
    if job.options.concurrency_key is None and tx.database.policy(to).key_mode == KEYED:
        return "concurrency_key_needed"
    existing = stored.by_id(tx, to, job.id)
    if existing is not None and existing.state not in REUSABLE:
        return "duplicate"
    if (
        job.options.unique_key is not None
        and dependencies.lock_key(tx, to, job.options.unique_key).owner is not None
    ):
        return "unique_key_taken"
    old = (job.queue, job.id)
    # A job whose unique key it waits for stays behind.
    is_blocked = job.state is State.BLOCKED and dependencies.waits(tx, job)
    _leave(tx, job)
    if existing is not None:
        make_way(tx, existing)
    _carry(tx, job, to)
    dependencies.take_key(tx, job)
    place(tx, job, is_blocked=is_blocked)
    tx.count(to, "enqueued")
    tx.shift(to, None, job.state)
    tx.woken.add(to)
    stored.save(tx, job)
    tx.note(job, "enqueued")
    _rename(tx, old, (to, job.id))
    return "moved"


def _leave(tx: Tx, job: StoredJob) -> None:
    """Take a pending job out of its queue."""
    _displace(tx, job)
    dependencies.release_key(tx, job.queue, job.options.unique_key, job.pk)
    tx.shift(job.queue, job.state, None)
    tx.note(job, "removed")


def _move_letter(tx: Tx, job: StoredJob, to: str) -> str:
    if stored.by_id(tx, to, job.id) is not None:
        # Unlike for a new job, an ended one does not make way: its dead letter would be lost unread.
        return "duplicate"
    old = (job.queue, job.id)
    letter = deadletters.of(tx, job) or deadletters.NONE
    tx.note(job, "removed")
    tx.shift(job.queue, State.FAILED, None)
    deadletters.drop(tx, job)
    _carry(tx, job, to)
    policy = tx.database.policy(to).dead_letters
    retry_at = policy.retry_at(letter.reason, letter.retries, tx.now, tx.database.random)
    deadletters.add(tx, job, letter._replace(queue=to, next_retry_at=retry_at))
    tx.shift(to, None, State.FAILED)
    retention.note_details(tx, job)
    tx.note(job, "failed")
    _rename(tx, old, (to, job.id))
    evict_letters(tx, to)
    return "moved"


def _carry(tx: Tx, job: StoredJob, to: str) -> None:
    """Give the rows of a job, and of what belongs to it, their new queue."""
    stored.use(tx, to)
    tx.run("UPDATE djqueue_job SET queue = ? WHERE id = ?", to, job.pk)
    for table in BELONGINGS:
        tx.run(f"UPDATE {table} SET queue = ? WHERE queue = ? AND job_id = ?", to, job.queue, job.id)
    job.queue = to


def _rename(tx: Tx, old: JobKey, new: JobKey) -> None:
    """Make the jobs that wait for a job wait for it under its new key."""
    waiting = "FROM djqueue_dependency WHERE queue = ? AND job_id = ? AND NOT met"
    pks = [pk for (pk,) in tx.rows(f"SELECT DISTINCT dependent {waiting}", *old)]
    if not pks:
        return
    _rename_in_options(tx, stored.by_keys(tx, pks), {old: new})
    tx.run(
        "UPDATE djqueue_dependency SET queue = ?, job_id = ? WHERE queue = ? AND job_id = ? AND NOT met",
        *new,
        *old,
    )


def _rename_in_letters(tx: Tx, moved: Mapping[JobKey, JobKey]) -> None:
    """Make the failed jobs that a retry would let wait for moved ones wait for them under their new keys."""
    failed: dict[str, dict[str, str]] = {}
    for queue, id, unmet in tx.rows("SELECT queue, job_id, unmet FROM djqueue_dead_letter WHERE unmet <> ''"):
        keys = rows.unpack_keys(unmet)
        if not moved.keys().isdisjoint(keys):
            failed.setdefault(queue, {})[id] = rows.pack_keys([moved.get(key, key) for key in keys])
    for queue, letters in sorted(failed.items()):
        _rename_in_options(tx, stored.by_ids(tx, queue, list(letters)).values(), moved)
        tx.many(
            "UPDATE djqueue_dead_letter SET unmet = ? WHERE queue = ? AND job_id = ?",
            [(unmet, queue, id) for id, unmet in letters.items()],
        )


def _rename_in_options(tx: Tx, dependents: Iterable[StoredJob], moved: Mapping[JobKey, JobKey]) -> None:
    changed = []
    for dependent in dependents:
        keys = dict.fromkeys(moved.get(key, key) for key in dependent.options.depends_on)
        options = replace(dependent.options, depends_on=tuple(keys))
        changed.append((rows.pack_options(options), dependent.pk))
    tx.many("UPDATE djqueue_job SET options = ? WHERE id = ?", changed)


# Dependencies: what the end of a job does to those that wait for it.


def bind(tx: Tx, job: StoredJob, unmet: Sequence[JobKey], *, missing: State = State.CANCELLED) -> None:
    """Make a blocked job wait for its dependencies; those that have ended are resolved at once.

    Args:
        job: A new job, or a dead letter that is retried.
        unmet: Those of its dependencies that it waits for; it may read the records of the others.
        missing: How a dependency without a record ended.
    """
    keys = job.options.depends_on
    states = dependencies.states_of(tx, keys)
    # A failed dependency may be retried and complete: a patient dependent waits for that. So does a retried
    # dependent, which has the error of its own failure.
    is_patient = job.options.on_dependency_failure == "wait" or job.error is not None
    ended: list[tuple[JobKey, State]] = []
    for key in keys:
        state = states.get(key, missing)
        if state not in LIVE and not (state is State.FAILED and is_patient):
            ended.append((key, state))
    tx.insert(
        "djqueue_dependency", dependencies.DEPENDENCY, [(job.pk, *key, key not in unmet) for key in keys]
    )
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
    if job.state is not State.BLOCKED:
        return
    policy = job.options.on_dependency_failure
    which = "WHERE dependent = ? AND queue = ? AND job_id = ?"
    if ended is State.COMPLETED or policy == "ignore":
        # A failed job leaves no record to read, and may be retried: another end is no concern of this job.
        met = "UPDATE djqueue_dependency SET met = TRUE"
        change = "DELETE FROM djqueue_dependency" if ended is State.FAILED else met
        is_changed = tx.run(f"{change} {which} AND NOT met", job.pk, *key)
        if is_changed and not dependencies.waits(tx, job) and not dependencies.waits_for_key(tx, job):
            unblock(tx, job)
        return
    if tx.row(f"SELECT 1 FROM djqueue_dependency {which} AND NOT met", job.pk, *key) is None:
        return
    if policy == "wait" and ended is State.FAILED:
        return
    # Users who may see this job may have no access to the other queue.
    name = f"dependency {key[1]!r}" if key[0] == job.queue else "a dependency in another queue"
    if policy == "cancel":
        cancel_pending(tx, job, "dependency_failed")
    else:
        error = JobFailure("djqueue.core.errors.JobFailedError", f"{name} ended as {ended}")
        fail_pending(tx, job, "dependency_failed", error)


def settle(tx: Tx) -> None:
    """Apply the ends of jobs, whose rows are written, to the jobs that wait for them, in order."""
    while tx.ended:
        key, state, waiting = tx.ended.pop(0)
        stored.by_keys(tx, waiting)
        # One after the other: the end of one may end another.
        for pk in waiting:
            for dependent in stored.by_keys(tx, [pk], lock=False):
                resolve(tx, dependent, key, state)
