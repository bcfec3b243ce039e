"""Ends of attempts, and the leases, progress and items of active ones: all conditional on the claim."""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from djqueue.codecs import MSGPACK, encode
from djqueue.core.enginejob import ItemStream, stalled_error
from djqueue.core.job import (
    DEAD_LETTER_REASONS,
    AttemptRecord,
    Emission,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    check_outcomes,
)
from djqueue.core.logs import Log
from djqueue.core.options import DEFAULT_OPTIONS, JobKey
from djqueue.core.states import State
from djqueue.storage.tables import rows

from . import dependencies, limiters, queues, stored, transitions, workers
from .claim import CLAIM, COLUMNS, Claim
from .dialects import Row, given_rows
from .stored import TOKENS, StoredJob, advance, by_keys, holding_group, is_grouped, keep_newest, select
from .transaction import Tx, group_lock, key_lock, limiter_lock

logger = Log("djqueue.storage")
Attempt = Lease | ProgressReport | Emission | Outcome
"""A report of an attempt, with its queue, its job and its token."""
COMPLETE = (
    "UPDATE djqueue_job SET state = 'completed', finished_at = ?, error_type = '', error_message = '', "
    "traceback = '', expires_at"
)
"""Completes jobs; the time until which they are kept follows."""


def finish(tx: Tx, outcomes: Sequence[Outcome], *, waits: bool = True) -> list[bool | None]:
    """End the attempts whose tokens hold; return whether each held.

    Args:
        tx: The transaction.
        outcomes: How they ended.
        waits: Wait for transactions that have locked the claims. Otherwise, the answer for these is None, and
            nothing is done.
    """
    check_outcomes(outcomes)
    first: dict[int, Outcome] = {}
    for outcome in outcomes:
        # Of two outcomes with one token, the first counts.
        first.setdefault(outcome.token, outcome)
    complete = [one for one in first.values() if one.kind == "complete" and one.result is not None]
    completed = _complete(tx, complete, waits=waits)
    plain = {one.token: completed[one.token] for one in complete if one.token in completed}
    others = _take(tx, [one for one in first.values() if one.token not in plain], waits=waits)
    taken = plain | others
    locked = {} if waits else _locked(tx, first.values(), taken)
    # Locks, in this order after the claims: limiters, jobs, groups, unique keys.
    tx.lock(*{limiter_lock(claim.limiter) for claim in taken.values() if claim.limiter})
    followed, limits = _read_followed_and_limits(tx, taken.values(), plain.values())
    _note_completed(tx, plain.values(), followed)
    jobs = {job.pk: job for job in by_keys(tx, [claim.pk for claim in others.values()])}
    keys = {claim.pk: (claim.queue, claim.unique_key) for claim in taken.values() if claim.unique_key}
    dependencies.lock_successors(tx, keys)
    groups = _groups(tx, plain.values())
    _lock_groups(tx, jobs.values(), groups)
    tx.lock(*{key_lock(*key) for key in keys.values()})
    for queue, names in groups.items():
        advance(tx, queue, names)
    _free_keys(tx, plain.values())
    accepted: list[bool | None] = []
    unreported = set(taken)
    for outcome in outcomes:
        accepted.append(None if outcome.token in locked else outcome.token in unreported)
        unreported.discard(outcome.token)
        if accepted[-1] and (claim := others.get(outcome.token)):
            _apply(tx, jobs[claim.pk], outcome, cancel=bool(claim.cancel))
    for queue, limiter in sorted({(claim.queue, claim.limiter or "") for claim in taken.values()}):
        _wake_for_slot(tx, queue, limiter or None, limits[queue])
    return accepted


def _take(tx: Tx, outcomes: Iterable[Outcome], more: str = "", *, waits: bool) -> dict[int, Claim]:
    """Take the claims whose tokens hold, by token; only those for which a condition is true."""
    wanted = {outcome.token: (outcome.queue, outcome.id) for outcome in outcomes}
    if not wanted:
        return {}
    keyed, pks = _chosen(tx, list(wanted), waits=waits)
    condition, tokens = tx.among("token", list(wanted))
    taken = tx.rows(
        f"DELETE FROM djqueue_claim WHERE {keyed} AND {condition}{more} RETURNING {COLUMNS}", pks, tokens
    )
    claims = [Claim(*row) for row in taken]
    # A token of another job is refused.
    tx.insert("djqueue_claim", CLAIM, [one for one in claims if wanted[one.token] != (one.queue, one.job_id)])
    return {one.token: one for one in claims if wanted[one.token] == (one.queue, one.job_id)}


def _chosen(tx: Tx, tokens: Sequence[int], *, waits: bool) -> tuple[str, Any]:
    """Return the condition for the claims of tokens, or for those that are not locked; and its parameter."""
    condition, pks = tx.among("id", [token >> TOKENS for token in tokens])
    if not waits:
        free = f"SELECT id FROM djqueue_claim WHERE {condition}{tx.dialect.skip_locked}"
        condition = f"id {tx.dialect.once(free)}"
    return condition, pks


def _complete(tx: Tx, outcomes: Sequence[Outcome], *, waits: bool) -> dict[int, Claim]:
    """Complete the jobs whose end concerns nothing but their own rows and, perhaps, jobs that depend on them.

    Returns their claims by token.
    """
    if not outcomes:
        return {}
    if tx.dialect.nests_writes:
        keyed, pks = _chosen(tx, [one.token for one in outcomes], waits=waits)
        wanted, values = given_rows(
            ("bigint", "text", "text", "bytea"),
            [(one.token, one.queue, one.id, one.result) for one in outcomes],
        )
        ended = tx.rows(
            f"WITH ended AS (DELETE FROM djqueue_claim USING {wanted} AS wanted (attempt, home, named, "
            f"result) WHERE djqueue_claim.id = attempt >> {TOKENS} AND djqueue_claim.{keyed} "
            "AND token = attempt AND queue = home AND job_id = named AND plain "
            f"RETURNING {COLUMNS}, result), "
            f"jobs AS ({COMPLETE} = CAST(? AS bigint) + kept FROM ended WHERE djqueue_job.id = ended.id), "
            f"results AS (INSERT INTO djqueue_job_result ({', '.join(rows.RESULT)}) SELECT queue, job_id, "
            "content_type, result, ?, CAST(? AS bigint) + readable FROM ended) "
            f"SELECT {COLUMNS} FROM ended",
            *(*values, pks, tx.now, tx.now, tx.now, tx.now),
        )
        return {one.token: one for one in (Claim(*row) for row in ended)}
    claims = _take(tx, outcomes, " AND plain", waits=waits)
    by_kept: dict[int | None, list[int]] = {}
    for claim in claims.values():
        by_kept.setdefault(claim.kept, []).append(claim.pk)
    for kept, pks in by_kept.items():
        condition, values = tx.among("id", pks)
        expires_at = None if kept is None else tx.now + kept
        tx.run(f"{COMPLETE} = ? WHERE {condition}", tx.now, expires_at, values)
    tx.insert(
        "djqueue_job_result",
        rows.RESULT,
        [
            (
                *(claim.queue, claim.job_id, claim.content_type, outcome.result, tx.now),
                None if claim.readable is None else tx.now + claim.readable,
            )
            for outcome in outcomes
            if outcome.token in claims
            for claim in [claims[outcome.token]]
        ],
    )
    return claims


def _read_followed_and_limits(
    tx: Tx, taken: Collection[Claim], plain: Collection[Claim]
) -> tuple[set[JobKey], dict[str, int | None]]:
    """Return which completed jobs others wait for, and the concurrency of queues; read which are observed.

    A job that comes to depend on a completed one waits for its row, or is seen here.
    """
    names = sorted({claim.queue for claim in taken})
    if not names:
        return set(), {}
    named, queues = tx.among("name", names)
    within, homes = tx.among("queue", names)
    known, ids = tx.among("job_id", [claim.job_id for claim in plain])
    marks = tx.rows(
        "SELECT 'observed', name, '', 0 FROM djqueue_observed WHERE until > ? UNION ALL "
        f"SELECT 'limited', name, '', concurrency FROM djqueue_queue_state WHERE {named} AND limits_set "
        "UNION ALL SELECT DISTINCT 'followed', queue, job_id, 0 FROM djqueue_dependency "
        f"WHERE {within} AND {known} AND NOT met",
        *(tx.now, queues, homes, ids),
    )
    tx.observed = {queue for kind, queue, *_ in marks if kind == "observed"}
    limits = {queue: tx.database.policy(queue).concurrency for queue in names}
    limits |= {queue: concurrency for kind, queue, _, concurrency in marks if kind == "limited"}
    return {(queue, id) for kind, queue, id, _ in marks if kind == "followed"}, limits


def _note_completed(tx: Tx, claims: Iterable[Claim], followed: set[JobKey]) -> None:
    """Count and announce completed jobs."""
    counts: Counter[str] = Counter()
    for claim in claims:
        counts[claim.queue] += 1
        is_followed = (claim.queue, claim.job_id) in followed
        if is_followed or tx.is_observed(claim.queue):
            job = StoredJob(
                claim.job_id, claim.queue, claim.name, b"", DEFAULT_OPTIONS, State.COMPLETED, 0, 0
            )
            job.pk = claim.pk
            if is_followed:
                dependencies.note_end(tx, job, State.COMPLETED)
            tx.note(job, "completed")
    for queue, count in counts.items():
        tx.count(queue, "completed", count)
        tx.shift(queue, State.ACTIVE, State.COMPLETED, count)


def _groups(tx: Tx, claims: Iterable[Claim]) -> dict[str, list[str]]:
    """Return the groups of completed jobs that may continue, each once, by queue."""
    by_queue: dict[str, dict[str, None]] = {}
    for claim in claims:
        if (group := holding_group(tx, claim.queue, claim.concurrency_key)) is not None:
            by_queue.setdefault(claim.queue, {})[group] = None
    return {queue: list(names) for queue, names in by_queue.items()}


def _lock_groups(tx: Tx, jobs: Iterable[StoredJob], groups: Mapping[str, Iterable[str]]) -> None:
    """Lock the groups of jobs, and groups by queue."""
    keys = {(job.queue, job.options.concurrency_key or "") for job in jobs if is_grouped(tx, job)}
    keys.update((queue, name) for queue, names in groups.items() for name in names)
    tx.lock(*(group_lock(*key) for key in keys))


def _free_keys(tx: Tx, claims: Iterable[Claim]) -> None:
    """Free the unique keys of completed jobs."""
    by_queue: dict[str, dict[int, str]] = {}
    for claim in claims:
        if claim.unique_key is not None:
            by_queue.setdefault(claim.queue, {})[claim.pk] = claim.unique_key
    for queue, keys in by_queue.items():
        remaining = keys.keys() - dependencies.free_keys(tx, queue, keys)
        for pk in sorted(remaining):
            transitions.free_key(tx, queue, keys[pk], pk)


def _apply(tx: Tx, job: StoredJob, outcome: Outcome, *, cancel: bool) -> None:
    if outcome.kind == "complete":
        transitions.complete(tx, job, outcome.result)
    elif outcome.kind == "fail":
        reason = outcome.reason if outcome.reason in DEAD_LETTER_REASONS else "unknown"
        transitions.fail_active(tx, job, reason, outcome.error)
    elif outcome.kind == "cancel" or cancel:
        transitions.cancel_active(tx, job, outcome.reason or "cancelled")
        if outcome.kind != "cancel":
            tx.note_incident(job, "cancelled")  # The worker does not know of it.
    else:
        event = "retried" if outcome.kind == "retry" else "released"
        transitions.put_back(tx, job, event, outcome.delay, outcome.error)


def _wake_for_slot(tx: Tx, queue: str, limiter: str | None, concurrency: int | None) -> None:
    """Wake what waits for the slot of a job that is no longer active, within the limits of its queue."""
    if limiter is not None:
        limiters.LockedLimiter(tx, limiter).released()
    if concurrency is not None:
        tx.woken.add(queue)


def held_claims(tx: Tx, attempts: Sequence[Attempt], lock: str) -> dict[int, Row]:
    """Return the claims (token, id, cancel, queue, id of the job, end of the lease) of the attempts whose
    tokens hold, by token.

    Args:
        lock: What follows the SELECT.
    """
    keys = {attempt.token: (attempt.queue, attempt.id) for attempt in attempts}
    condition, values = tx.among("token", list(keys))
    keyed, pks = tx.among("id", [token >> TOKENS for token in keys])
    claims = tx.rows(
        "SELECT token, id, cancel, queue, job_id, lease_until FROM djqueue_claim "
        f"WHERE {keyed} AND {condition}{lock}",
        *(pks, values),
    )
    return {row[0]: row for row in claims if keys[row[0]] == row[3:5]}


def renew(tx: Tx, leases: Sequence[Lease], *, waits: bool = False) -> list[Renewal | None]:
    """Extend the claims whose tokens hold to a full lease from now.

    Args:
        tx: The transaction.
        leases: The leases.
        waits: Wait for transactions that have locked the claims. Otherwise, these are renewed later, and the
            answer for those that a sweep may take back already is None.
    """
    free, locked = _free_and_locked(
        tx, leases, tx.dialect.for_update if waits else tx.dialect.unlocked_change
    )
    by_length: dict[int, list[int]] = {}
    for lease in leases:
        if lease.token in free:
            length = tx.database.policy(lease.queue).lease
            by_length.setdefault(length, []).append(free[lease.token][1])
    for length, pks in by_length.items():
        condition, values = tx.among("id", pks)
        tx.run(f"UPDATE djqueue_claim SET lease_until = ? WHERE {condition}", tx.tick + length, values)
    answers: list[Renewal | None] = []
    for token in (lease.token for lease in leases):
        row = free.get(token) or locked.get(token)
        is_overdue = token in locked and locked[token][5] <= tx.tick
        answers.append(Renewal(False) if row is None else None if is_overdue else Renewal(True, bool(row[2])))
    return answers


def report(tx: Tx, reports: Sequence[ProgressReport]) -> list[bool | None]:
    """Record progress and log lines of attempts whose tokens hold; None for jobs that others have locked."""
    held, locked = _free_and_locked(tx, reports, tx.dialect.skip_locked)
    jobs = {job.pk: job for job in _jobs_of(tx, held)}
    accepted: list[bool | None] = []
    for one in reports:
        accepted.append(None if one.token in locked else one.token in held)
        if not accepted[-1]:
            continue
        job = jobs[held[one.token][1]]
        if one.progress is not None:
            job.progress = one.progress
            tx.run("UPDATE djqueue_job SET progress = ? WHERE id = ?", encode(job.progress, MSGPACK), job.pk)
            tx.note(job, "progress")
        if one.lines:
            tx.touch()
            limit = tx.database.policy(job.queue).retention.logs.count
            tx.insert("djqueue_job_log", rows.LOG, rows.log_rows(job, one.lines[-limit:]))
            keep_newest(tx, "djqueue_job_log", job, limit)
    return accepted


def emit(tx: Tx, emissions: Sequence[Emission]) -> list[bool | None]:
    """Add streamed items of attempts whose tokens hold; items that leave a gap are refused.

    The answer is None for jobs that others have locked.
    """
    held, locked = _free_and_locked(tx, emissions, tx.dialect.skip_locked)
    jobs = {job.pk: job for job in _jobs_of(tx, held)}
    accepted: list[bool | None] = []
    for one in emissions:
        if one.token not in held:
            accepted.append(None if one.token in locked else False)
            continue
        job = jobs[held[one.token][1]]
        count = 0 if job.stream is None else job.stream.count
        new = one.items[max(0, count - one.start) :]
        accepted.append(one.start <= count)
        if not accepted[-1] or not new:
            continue
        job.stream = ItemStream(one.token, None, count + len(new))
        tx.insert("djqueue_job_item", rows.ITEM, rows.item_rows(job, new))
        tx.run("UPDATE djqueue_job SET items = ? WHERE id = ?", job.stream.count, job.pk)
        tx.note(job, "item", job.stream.count)
    return accepted


def _free_and_locked(tx: Tx, attempts: Sequence[Attempt], lock: str) -> tuple[dict[int, Row], dict[int, Row]]:
    """Return the claims of attempts whose tokens hold, by token: those it could lock, and the others."""
    free = held_claims(tx, attempts, lock)
    return free, _locked(tx, attempts, free) if lock else {}


def _locked(tx: Tx, attempts: Iterable[Attempt], free: Container[int]) -> dict[int, Row]:
    """Return the claims of the other attempts whose tokens hold, by token: another transaction has locked
    them.
    """
    missing = [attempt for attempt in attempts if attempt.token not in free]
    return held_claims(tx, missing, "") if missing else {}


def _jobs_of(tx: Tx, held: dict[int, Row]) -> list[StoredJob]:
    if not held:
        return []
    condition, pks = tx.among("j.id", [row[1] for row in held.values()])
    return select(tx, condition, pks)


def stall(tx: Tx, pk: int, token: int) -> bool:
    """Take back a claim whose lease has expired; False if it was renewed or has ended meanwhile."""
    row = tx.row(
        "DELETE FROM djqueue_claim WHERE id = ? AND token = ? AND lease_until <= ? RETURNING queue, "
        "limiter, cancel",
        *(pk, token, tx.tick),
    )
    if row is None:
        return False
    queue, limiter, cancel = row
    if limiter is not None:
        tx.lock(limiter_lock(limiter))
    jobs = by_keys(tx, [pk])
    if not jobs:
        logger.error("Dropped the claim %d of queue %r, whose job is gone.", pk, queue)
        return True
    [job] = jobs
    if job.options.unique_key is not None:
        dependencies.lock_successors(tx, {pk: (queue, job.options.unique_key)})
    if cancel:
        transitions.cancel_active(tx, job, "cancelled")
        tx.note_incident(job, "cancelled")
    elif job.stalls >= job.options.max_stalls:
        reason = "stalled" if workers.is_known(tx, job.worker) else "worker_lost"
        last = AttemptRecord(job.attempts, job.worker, job.started_at, tx.now, "stalled")
        history = [*stored.history(tx, job), last]
        error = stalled_error(job.stalls + 1, history)
        tx.note_incident(job, "stalled")
        transitions.fail_active(tx, job, reason, error)
        tx.note_incident(job, "failed")
    else:
        transitions.put_back(tx, job, "stalled")
        tx.note_incident(job, "stalled")
    _wake_for_slot(tx, queue, limiter, queues.controls(tx, queue).concurrency)
    assert job.state is not State.ACTIVE
    return True
