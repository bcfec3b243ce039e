"""Claims: which ready jobs become active, within the limits of their queues."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from djqueue.core.job import Claimed, ClaimRequest, Claims
from djqueue.core.logs import Log
from djqueue.core.policies import GLOBAL, NO_RETENTION, Hold, Rate, standing
from djqueue.core.states import State
from djqueue.storage.tables.rows import pair_of_limits, unpack_holds, unpack_options

from . import limiters
from .dialects import Row
from .stored import (
    NEXT_DUE,
    NO_RATE,
    READY,
    TOKENS,
    LockedGroup,
    StoredJob,
    advance,
    by_keys,
    holding_group,
    is_grouped,
    push,
    used_queues,
)
from .transaction import Tx, group_lock, limiter_lock, limits_lock
from .transitions import EXPIRED, fail_pending, move_to

logger = Log("djqueue.storage")
T = TypeVar("T")


class Claim(NamedTuple):
    """A row of the claims."""

    pk: int
    queue: str
    concurrency_key: str | None
    limiter: str | None
    weight: int
    worker: str
    token: int
    attempts: int
    started_at: int
    lease_until: int
    job_id: str
    name: str
    plain: bool
    kept: int | None
    readable: int | None
    content_type: str
    unique_key: str | None
    cancel: bool = False


CLAIM = ("id", *Claim._fields[1:])
"""Columns of `djqueue_claim`, in the order of `Claim`."""
COLUMNS = ", ".join(CLAIM)
"""The same, as SQL."""
PROMOTED = 1_000
"""Maximum number of due jobs that one claim promotes."""
LOCKED_JOBS_RETRY = 50
"""Milliseconds after which a claim looks again for jobs that another transaction has locked."""
BUSY_QUEUE_RETRY = 2
"""Milliseconds after which a claim tries again to take from a queue whose limits another one holds."""


class ReadyRow(NamedTuple):
    """A row of the ready jobs of a queue."""

    pk: int
    rank: int
    seq: int
    name: str
    concurrency_key: str | None
    weight: int
    stalls: int
    expires_at: int | None

    def is_expired(self, now: int) -> bool:
        """Return whether its ttl has ended: it fails instead of starting."""
        return self.expires_at is not None and self.expires_at <= now


TAKEN = "id, rank, seq, name, concurrency_key, weight, stalls, expires_at"
"""Columns of `ReadyRow`, as SQL."""
START = (
    "UPDATE djqueue_job SET state = 'active', attempts = attempts + 1, started_at = ?, worker = ?, "
    f"token = CASE WHEN token = 0 THEN id << {TOKENS} ELSE token END + 1, expires_at = NULL"
)
"""Makes jobs active."""
STARTED = "id, job_id, payload, options, token, attempts, failures, created_at, run_at"
"""Columns that it returns."""
NEXT_REST = (
    "SELECT rest_at FROM djqueue_rate_bucket WHERE queue = {} AND rest_at IS NOT NULL "
    "ORDER BY rest_at LIMIT 1"
)
"""When the next resting group of a queue continues."""
USED = "(SELECT COALESCE(SUM(weight), 0) FROM djqueue_claim WHERE queue = q.name)"
"""The slots of a queue's concurrency that its active jobs take."""


class ClaimableQueue(NamedTuple):
    """A queue that a claim may take from."""

    name: str
    paused: bool
    rate: Rate | None
    concurrency: int | None
    has_ready: bool
    has_stalled: bool
    due: int | None
    """When its next delayed job is due."""
    rest: int | None
    """When its next resting group continues."""
    holds: tuple[Hold, ...] = ()
    """Its holds."""


def claim(tx: Tx, request: ClaimRequest, *, waits: bool = True, expires: bool = True) -> Claims:
    """Move ready jobs to active, each with a lease and a token.

    Each call starts with another queue. Within a queue, jobs are claimed by priority, then in order of
    arrival. A job with a stalled attempt is claimed alone, or not at all if the request says so.

    Args:
        tx: The transaction.
        request: What may be claimed.
        waits: Wait for transactions that have locked the limits of a queue. Otherwise, others are served.
        expires: Fail jobs whose ttl has ended, which may wait for their dependents. Otherwise, leave them.
    """
    tx.waits, tx.expires = waits, expires
    call = ClaimCall(tx, request)
    if request.slots > 0 and request.names:
        # First the queues that recently had jobs: this saves a look at all of them.
        known = tx.database.ready_queues.get(request.queues, tx.tick)
        if not call.serve(_claimable_queue(tx, name) for name in _rotated(tx, known)):
            # The second pass finds these hints again.
            call.hints.clear()
            names = used_queues(tx) if request.queues is None else request.queues
            candidates = [
                queue for queue in (_claimable_queue(tx, name) for name in names) if queue is not None
            ]
            ready = [queue.name for queue in candidates if queue.has_ready]
            tx.database.ready_queues.set(request.queues, tx.tick, ready)
            call.serve(_rotated(tx, candidates))
    return Claims(call.claimed, min(call.hints, default=None))


def _rotated(tx: Tx, values: Sequence[T]) -> Sequence[T]:
    """Return values in their order, each time beginning with the next one."""
    first = tx.database.rotation() % len(values) if len(values) > 1 else 0
    return [*values[first:], *values[:first]]


def _claimable_queue(tx: Tx, name: str) -> ClaimableQueue | None:
    """Return a queue that a claim may take from; None if it has no jobs that are ready or will be in time."""
    row = tx.row(
        "SELECT s.paused, s.rate_capacity, s.rate_per, s.concurrency, s.limits_set, s.holds, "
        "EXISTS (SELECT 1 FROM djqueue_ready WHERE queue = q.name), "
        # Through the index of stalled ones: not through all that are ready.
        "EXISTS (SELECT 1 FROM djqueue_ready WHERE queue || '' = q.name AND stalls > 0), "
        f"({NEXT_DUE.format('q.name')}), ({NEXT_REST.format('q.name')}) "
        f"FROM (SELECT {tx.dialect.as_text} AS name) q LEFT JOIN djqueue_queue_state s ON s.name = q.name",
        name,
    )
    assert row is not None
    paused, capacity, per, concurrency, limits_set, holds, ready, stalled, due, rest = row
    if not ready and due is None and rest is None:
        return None
    policy = tx.database.policy(name)
    limits = pair_of_limits(capacity, per, concurrency) if limits_set else (policy.rate, policy.concurrency)
    held = standing(unpack_holds(holds), tx.now) if holds else ()
    return ClaimableQueue(name, bool(paused), *limits, bool(ready), bool(stalled), due, rest, held)


class ClaimCall:
    """A call of `claim`: the jobs that it has claimed so far, and when to look for more."""

    __slots__ = ("claimed", "hints", "request", "tx")

    def __init__(self, tx: Tx, request: ClaimRequest) -> None:
        self.tx = tx
        self.request = request
        self.claimed: list[Claimed] = []
        self.hints: list[int] = []
        """Milliseconds until time alone may make more jobs claimable."""

    def serve(self, queues: Iterable[ClaimableQueue | None]) -> bool:
        """Claim from queues until the request is fulfilled; return whether it is."""
        for queue in queues:
            if queue is not None:
                self._take(queue)
            if len(self.claimed) == self.request.slots or (self.claimed and self.claimed[-1].stalls):
                return True
        return False

    def _take(self, queue: ClaimableQueue) -> None:
        """Claim from one queue, and add to the hints."""
        tx = self.tx
        if queue.paused:
            return
        name, policy = queue.name, tx.database.policy(queue.name)
        if queue.due is not None and queue.due <= tx.now:
            promote_due(tx, name)
        if queue.rest is not None and queue.rest <= tx.tick:
            end_rests(tx, name)
        is_plain = queue.rate is None and queue.concurrency is None and policy.limiter is None
        take = self._take_first if is_plain and not queue.has_stalled else self._take_within_limits
        before = len(self.claimed)
        names = sorted(self._claimed_names(queue) if queue.holds else self.request.names)
        while names and (left := self.request.slots - len(self.claimed)) > 0 and take(queue, names, left):
            pass
        due = queue.due
        if due is not None and due <= tx.now:
            due = tx.value(NEXT_DUE.format("?"), name)
        if due is not None:
            self.hints.append(due - tx.now if due > tx.now else LOCKED_JOBS_RETRY)
        # A started job may have used up the rate of its key, which need not be the queue's rate of keys.
        may_rest = queue.rest is not None or policy.key_rate is not None
        if may_rest or any(job.options.concurrency_key for job in self.claimed[before:]):
            rest = tx.value(NEXT_REST.format("?"), name)
            if rest is not None:
                self.hints.append(rest - tx.tick if rest > tx.tick else LOCKED_JOBS_RETRY)

    def _claimed_names(self, queue: ClaimableQueue) -> frozenset[str]:
        """Return the names that the queue does not hold, and add to the hints when it ends a hold."""
        held = {hold.name: hold.until for hold in queue.holds if hold.name in self.request.names}
        is_due = queue.due is not None and queue.due <= self.tx.now
        has_rested = queue.rest is not None and queue.rest <= self.tx.tick
        if queue.has_ready or is_due or has_rested:
            self.hints += [until - self.tx.now for until in held.values() if until is not None]
        return self.request.names - held.keys()

    def _take_first(self, queue: ClaimableQueue, claimed: Sequence[str], slots: int) -> bool:
        """Start ready jobs of these names, best first; return whether more may be ready."""
        tx = self.tx
        named, names = tx.among("name", claimed)
        which = f"queue = ? AND {named} AND stalls = 0"
        best = f"{which}{_free(tx, queue)} ORDER BY rank, seq LIMIT ?{tx.dialect.skip_locked}"
        chosen = tx.dialect.once(f"SELECT id FROM djqueue_ready WHERE {best}")
        take = f"DELETE FROM djqueue_ready WHERE id {chosen} RETURNING {TAKEN}"
        started: list[Row] = []
        if tx.dialect.nests_writes:
            rows = tx.rows(
                f"WITH taken (pk, rank, seq, name, part, weight, stopped, ends) AS ({take}), "
                f"started AS ({START} FROM taken WHERE id = pk AND (ends IS NULL OR ends > ?) "
                f"RETURNING {STARTED}) SELECT taken.*, {STARTED} FROM taken LEFT JOIN started ON id = pk",
                *(queue.name, names, slots, tx.now, self.request.worker, tx.now),
            )
            width = len(ReadyRow._fields)
            started = [row[width:] for row in rows if row[width] is not None]
            rows = [row[:width] for row in rows]
        else:
            rows = tx.rows(take, queue.name, names, slots)
        if len(rows) < slots and queue.has_ready:
            self._note_locked(queue, f"SELECT 1 FROM djqueue_ready WHERE {which} LIMIT 1", queue.name, names)
        ready = sorted((ReadyRow(*row) for row in rows), key=lambda job: (job.rank, job.seq))
        return self._start(queue.name, ready, started)

    def _note_locked(self, queue: ClaimableQueue, search: str, *parameters: object) -> None:
        """Look again soon if there are ready jobs that a claim has not seen.

        Not with holds, as the search could pass very many held jobs: workers look again when they poll.
        """
        if self.tx.dialect.skip_locked and not queue.holds and self.tx.row(search, *parameters):
            self.hints.append(LOCKED_JOBS_RETRY)

    def _take_within_limits(self, queue: ClaimableQueue, claimed: Sequence[str], slots: int) -> bool:
        """Start ready jobs of these names within the limits of their queue; return whether more may be ready
        and allowed.
        """
        tx = self.tx
        name, policy = queue.name, tx.database.policy(queue.name)
        named, names = tx.among("name", claimed)
        stalled = "" if self.request.stalled else " AND stalls = 0"
        limiter_locks = [] if policy.limiter is None else [limiter_lock(policy.limiter)]
        if not tx.lock_in_turn(*limiter_locks, limits_lock(name)):
            self.hints.append(BUSY_QUEUE_RETRY)
            return False
        limiter = None if policy.limiter is None else limiters.LockedLimiter(tx, policy.limiter)
        used, bucket = _usage(tx, queue)
        allowed = slots if bucket is None else min(slots, bucket.available)
        rows = tx.rows(
            f"SELECT {TAKEN} FROM djqueue_ready WHERE queue = ? AND {named}{stalled}{_free(tx, queue)} "
            f"ORDER BY rank, seq LIMIT ?{tx.dialect.skip_locked}",
            *(name, names, slots),
        )
        if len(rows) < slots and queue.has_ready:
            seen, pks = tx.among("id", [row[0] for row in rows])
            unseen = (
                f"SELECT 1 FROM djqueue_ready WHERE queue = ? AND {named}{stalled} AND NOT {seen} LIMIT 1"
            )
            self._note_locked(queue, unseen, name, names, pks)
        ready = [ReadyRow(*row) for row in rows]
        chosen, is_refused = self._choose(queue, used, ready, allowed, limiter)
        before = len(self.claimed)
        has_more = self._start(name, chosen, self._taken_out(chosen))
        if bucket is not None:
            bucket.take(len(self.claimed) - before)
            unseen = f"SELECT 1 FROM djqueue_ready WHERE queue = ? AND {named}{stalled} LIMIT 1"
            if bucket.wait and tx.row(unseen, name, names):
                self.hints.append(bucket.wait)
        if limiter is not None:
            limiter.save()
            if is_refused:
                self.hints += limiter.waits(name)
        return has_more and not is_refused and not (self.claimed and self.claimed[-1].stalls)

    def _taken_out(self, chosen: Sequence[ReadyRow]) -> list[Row]:
        """Take jobs out of the ready ones; return the active ones, if one statement does both."""
        tx = self.tx
        if not chosen:
            return []
        condition, pks = tx.among("id", [job.pk for job in chosen])
        take = f"DELETE FROM djqueue_ready WHERE {condition}"
        if not tx.dialect.nests_writes:
            tx.run(take, pks)
            return []
        which, living = tx.among("id", [job.pk for job in chosen if not job.is_expired(tx.now)])
        start = f"WITH taken AS ({take}) {START} WHERE {which} RETURNING {STARTED}"
        return tx.rows(start, pks, tx.now, self.request.worker, living)

    def _choose(
        self,
        queue: ClaimableQueue,
        used: int,
        ready: Sequence[ReadyRow],
        limit: int,
        limiter: limiters.LockedLimiter | None,
    ) -> tuple[list[ReadyRow], bool]:
        """Return the first ready jobs that the limits allow, at most `limit` besides expired ones, which take
        nothing of any limit, but wait like others; and whether the limiter has refused the next one.
        """
        chosen: list[ReadyRow] = []
        started = 0
        for job in ready:
            weight = 0 if queue.concurrency is None else min(job.weight, queue.concurrency)
            fits = started < limit and (queue.concurrency is None or used + weight <= queue.concurrency)
            if fits and job.is_expired(self.tx.now):
                chosen.append(job)
                continue
            if job.stalls and (self.claimed or started):
                # One at a time, up to the first job with a stalled attempt.
                if fits:
                    self.hints.append(0)
                break
            if not fits:
                break
            if limiter is not None and not limiter.reserve(queue.name, job.weight, is_served=started > 0):
                return chosen, True
            chosen.append(job)
            started += 1
            used += weight
            if job.stalls:
                break
        return chosen, False

    def _start(self, queue: str, ready: list[ReadyRow], started: Iterable[Row] = ()) -> bool:
        """Start jobs that were taken out of the ready ones; `started` has the rows of those that are active.

        Returns whether others may be ready instead of expired ones, or have become ready behind them in their
        groups.
        """
        tx = self.tx
        if not ready:
            return False
        expired = {job.pk: job for job in ready if job.is_expired(tx.now)}
        if expired:
            ready = [job for job in ready if job.pk not in expired]
            _fail_expired(tx, queue, expired)
            if not ready:
                return True
        policy = tx.database.policy(queue)
        lease, now, worker = policy.lease, tx.now, self.request.worker
        lease_until = tx.tick + lease
        rows_by_pk = {row[0]: row for row in started}
        if missing := [job.pk for job in ready if job.pk not in rows_by_pk]:
            condition, pks = tx.among("id", missing)
            rows = tx.rows(f"{START} WHERE {condition} RETURNING {STARTED}", now, worker, pks)
            rows_by_pk |= {row[0]: row for row in rows}
        if missing := [job.pk for job in ready if job.pk not in rows_by_pk]:
            logger.error("Dropped ready rows of queue %r, whose jobs are gone: %s.", queue, missing)
            ready = [job for job in ready if job.pk in rows_by_pk]
        claims, observed = [], tx.is_observed(queue)
        retention = policy.retention
        is_unbounded = retention is NO_RETENTION
        for pk, _, _, name, group, weight, stalls, _ in ready:
            _, id, payload, packed, token, attempts, failures, created_at, run_at = rows_by_pk[pk]
            options = unpack_options(bytes(packed))
            # Its completion concerns only its own rows, its group, its unique key and dependents.
            ends_alone = is_unbounded and not options.depends_on and options.rejected is None
            kept = retention.completed.shorten(options.kept)
            claims.append(
                Claim(
                    *(pk, queue, group, policy.limiter, weight, worker, token, attempts, now, lease_until),
                    *(id, name, ends_alone, kept, options.result_ttl),
                    *(options.content_type, options.unique_key),
                )
            )
            waited = max(0, now - max(created_at, run_at))
            self.claimed.append(
                Claimed(
                    *(id, queue, name, bytes(payload), options, token, attempts, failures, stalls),
                    *(created_at, lease, waited),
                )
            )
            if observed:
                job = StoredJob(id, queue, name, b"", options, State.ACTIVE, created_at, run_at)
                tx.note(job, "started")
        tx.insert("djqueue_claim", CLAIM, claims)
        tx.count(queue, "started", len(ready))
        tx.shift(queue, State.WAITING, State.ACTIVE, len(ready))
        by_group: dict[str, int] = {}
        for one in ready:
            if (holding := holding_group(tx, queue, one.concurrency_key)) is not None:
                by_group[holding] = by_group.get(holding, 0) + 1
        if by_group:
            advance(tx, queue, sorted(by_group), by_group)
        return bool(expired or by_group)


def _fail_expired(tx: Tx, queue: str, expired: Mapping[int, ReadyRow]) -> None:
    """Let jobs whose ttl has ended fail, by their primary keys."""
    jobs = {job.pk: job for job in by_keys(tx, list(expired))}
    for pk, (_, *others) in expired.items():
        if job := jobs.get(pk):
            # It was taken: put it back, so that it fails like any pending job.
            tx.insert("djqueue_ready", READY, [(pk, queue, *others)])
            fail_pending(tx, job, "ttl_expired", EXPIRED)


def _free(tx: Tx, queue: ClaimableQueue) -> str:
    """Return the condition that a ready job has no group, or one that no other transaction has locked.

    A claim does not wait for groups: it may hold those of jobs that have just ended, and callers keep groups
    in which they enqueue.
    """
    living = "" if tx.expires else f" AND (expires_at IS NULL OR expires_at > {tx.now:d})"
    return living if tx.database.policy(queue.name).key_mode == GLOBAL else living + tx.dialect.free_group


def _usage(tx: Tx, queue: ClaimableQueue) -> tuple[int, limiters.RateTokens | None]:
    """Return the slots of the concurrency that are taken (0 without one), and the tokens of the rate."""
    used = USED if queue.concurrency is not None else "0"
    columns = ", ".join(f"b.{name}" for name in limiters.BUCKET)
    row = tx.row(
        f"SELECT {used}, {columns} FROM (SELECT {tx.dialect.as_text} AS name) q "
        "LEFT JOIN djqueue_rate_bucket b ON b.queue = q.name AND b.name = ''",
        queue.name,
    )
    assert row is not None
    bucket = None if queue.rate is None else limiters.RateTokens(tx, queue.name, "", queue.rate, row[1:])
    return int(row[0]), bucket


def taken(tx: Tx, queue: str) -> int:
    """Return the slots of a queue's concurrency that its active jobs take."""
    return int(tx.value(f"SELECT {USED} FROM (SELECT {tx.dialect.as_text} AS name) q", queue))


def promote_due(tx: Tx, queue: str, limit: int = PROMOTED) -> int:
    """Promote the jobs of a queue that are due: delayed → waiting. Groups that could continue before them do
    so. Returns the number of jobs.
    """
    due = tx.rows(
        "SELECT id, run_at FROM djqueue_delayed WHERE queue = ? AND run_at <= ? ORDER BY run_at, id LIMIT ?"
        + tx.dialect.skip_locked,
        *(queue, tx.now, limit),
    )
    if not due:
        return 0
    jobs = {job.pk: job for job in by_keys(tx, [pk for pk, _ in due])}
    groups = {
        job.pk: group_lock(queue, job.options.concurrency_key or "")
        for job in jobs.values()
        if is_grouped(tx, job)
    }
    if locked := tx.try_lock(groups.values()):
        due = [(pk, run_at) for pk, run_at in due if groups.get(pk) not in locked]
        if not due:
            return 0
    order = [pk for pk, _ in due]
    condition, pks = tx.among("id", order)
    plain = [
        job for pk in order if (job := jobs[pk]).options.concurrency_key is None and not job.options.lifo
    ]
    if len(plain) < len(order) or _has_rested(tx, queue):
        for pk, run_at in due:
            end_rests(tx, queue, tx.now - run_at)
            move_to(tx, jobs[pk], run_at, "promoted")
        return len(order)
    tx.run(f"DELETE FROM djqueue_delayed WHERE {condition}", pks)
    tx.run(f"UPDATE djqueue_job SET state = 'waiting' WHERE {condition}", pks)
    push(tx, plain)
    tx.shift(queue, State.DELAYED, State.WAITING, len(plain))
    for job in plain:
        job.state = State.WAITING
        tx.note(job, "promoted")
    return len(order)


def end_rests(tx: Tx, queue: str, overdue: int = 0) -> int:
    """Resume groups whose next token was available `overdue` milliseconds ago, in the order of these times,
    and by name if they are equal. Returns how many jobs became ready.
    """
    rested = "SELECT name, rest_at FROM djqueue_rate_bucket WHERE queue = ? AND rest_at <= ? ORDER BY name"
    rows = tx.rows(rested, queue, tx.tick - overdue)
    locked = tx.try_lock(group_lock(queue, name) for name, _ in rows)
    groups = [
        (at, LockedGroup(tx, queue, name)) for name, at in rows if group_lock(queue, name) not in locked
    ]
    for _, group in groups:
        if group.rate is None:  # Its next job was locked.
            limiters.set_rest(tx, queue, group.name, NO_RATE, None)
    return sum(group.advance() for _, group in sorted(groups, key=lambda rest: (rest[0], rest[1].name)))


def _has_rested(tx: Tx, queue: str) -> bool:
    """Return whether a group's next token is available."""
    rested = "SELECT 1 FROM djqueue_rate_bucket WHERE queue = ? AND rest_at <= ? LIMIT 1"
    return tx.row(rested, queue, tx.tick) is not None
