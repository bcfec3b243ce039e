"""Where pending jobs wait: ready to be claimed, delayed, or held back by their group."""

from collections.abc import Sequence

from djqueue.core.groups import NO_LIMIT, GroupLimit
from djqueue.core.limiter import Rate
from djqueue.core.queue import GLOBAL
from djqueue.core.states import State
from djqueue.storage.tables.groups import limit_of

from . import rates
from .dialects import Row
from .stored import StoredJob, by_keys
from .transaction import Tx, group_lock

READY = ("id", "queue", "rank", "seq", "name", '"group"', "weight", "stalls", "expires_at")
DELAYED = ("id", "queue", "run_at")
GROUP_LIMIT = 'queue, "group", concurrency, paused, rate_capacity, rate_per, weight'
"""Columns of the overrides of a group, for `limit_of`."""
HELD = ("id", "queue", '"group"', "seq", "name")


def ready_row(job: StoredJob, seq: int) -> Row:
    """Return a job as `READY`."""
    options = job.options
    expires_at = job.expires_at if not job.started_at else None
    return (
        *(job.pk, job.queue, -options.priority, seq, job.name, options.group, options.weight),
        *(job.stalls, expires_at),
    )


def is_grouped(tx: Tx, job: StoredJob) -> bool:
    """Return whether a group may hold a job back."""
    return job.options.group is not None and tx.storage.policy(job.queue).group_mode != GLOBAL


def place(tx: Tx, job: StoredJob, *, front: bool = False, is_blocked: bool = False) -> None:
    """Put a pending job where it waits, and give it the state."""
    if is_blocked:
        job.state = State.BLOCKED
    elif job.run_at > tx.now:
        job.state = State.DELAYED
        tx.insert("djqueue_delayed", DELAYED, [(job.pk, job.queue, job.run_at)])
    else:
        job.state = State.WAITING
        front = front or job.options.lifo
        if not is_grouped(tx, job):
            push(tx, [job], front=front)
        else:
            groups(tx, job).admit(job, front=front)


def push(tx: Tx, jobs: Sequence[StoredJob], *, front: bool = False) -> None:
    """Make jobs ready, behind or before those of their priority."""
    numbers = tx.numbers(len(jobs))
    rows = [ready_row(job, -number if front else number) for job, number in zip(jobs, numbers, strict=True)]
    tx.insert("djqueue_ready", READY, rows)
    tx.woken.update(job.queue for job in jobs)


def displace(tx: Tx, job: StoredJob) -> None:
    """Take a pending job out of where it waits."""
    if job.state is State.BLOCKED:
        return
    if job.state is State.DELAYED:
        tx.run("DELETE FROM djqueue_delayed WHERE id = ?", job.pk)
        return
    if not is_grouped(tx, job):
        tx.run("DELETE FROM djqueue_ready WHERE id = ?", job.pk)
        return
    group = groups(tx, job)
    for table in ("djqueue_ready", "djqueue_held"):
        tx.run(f"DELETE FROM {table} WHERE id = ?", job.pk)
    group.advance()


class LockedGroup:
    """One group of a queue, locked for the rest of the transaction unless it is only read.

    As many jobs of a group as its weight are ready, if its limit and its rate allow; the others are held back
    in the order of arrival. When a ready one is claimed, or an active one ends, the next becomes ready. So a
    claim never meets a job that its group holds back, and groups take turns by their weights.
    """

    def __init__(self, tx: Tx, queue: str, name: str, *, lock: bool = True) -> None:
        self.tx = tx
        self.queue = queue
        self.name = name
        if lock:
            tx.lock(group_lock(queue, name))
        policy = tx.storage.policy(queue)
        default, own = overrides(tx, queue, name)
        self.paused = own.paused
        self.limit: int = own.concurrency or default.concurrency or policy.group_concurrency
        self.rate: Rate | None = own.rate or default.rate or policy.group_rate
        self.weight: int = own.weight or default.weight or policy.group_weights.get(name, 1)

    def ready(self) -> int:
        """Return the number of its ready jobs."""
        return self._count("djqueue_ready")

    def active(self) -> int:
        """Return the number of its active jobs."""
        return self._count("djqueue_claim")

    def held(self) -> int:
        """Return the number of jobs that it holds back."""
        return self._count("djqueue_held")

    def admit(self, job: StoredJob, *, front: bool = False) -> None:
        """Make a job ready, or hold it back."""
        if not self._has_held() and self.ready() < min(self.weight, self._room()):
            push(self.tx, [job], front=front)
        else:
            self._hold([job], front=front)
            self._note_rest()

    def readmit(self, job: StoredJob) -> None:
        """Like `admit`, for a job that was active and comes back before all others of its group."""
        if self.ready() < self._room():
            push(self.tx, [job], front=True)
        else:
            self._hold([job], front=True)
        self._note_rest()

    def claimed(self, count: int) -> None:
        """Record that ready jobs became active; the next ones may be ready."""
        if self.rate is not None:
            rates.consume(self.tx, self.queue, self.name, self.rate, count)
        self.advance()

    def advance(self) -> int:
        """Make the next jobs ready that may be; return their number."""
        if not self._has_held():
            self._note_rest()
            return 0
        free = min(self.weight, self._room()) - self.ready()
        freed = []
        if free > 0:
            freed = self.tx.rows(
                'SELECT id FROM djqueue_held WHERE queue = ? AND "group" = ? ORDER BY seq LIMIT ?'
                + self.tx.dialect.skip_locked,
                *(self.queue, self.name, free),
            )
            make_ready(self.tx, [pk for (pk,) in freed])
        self._note_rest()
        return len(freed)

    def hold_back(self) -> None:
        """Hold back ready jobs that may not be ready any more, because a limit was lowered."""
        room = max(0, self._room())
        late = self.tx.rows(
            'SELECT id FROM djqueue_ready WHERE queue = ? AND "group" = ? ORDER BY rank, seq LIMIT 1000000 '
            "OFFSET ?",
            *(self.queue, self.name, room),
        )
        jobs = {job.pk: job for job in by_keys(self.tx, [pk for (pk,) in late])}
        for (pk,) in reversed(late):
            if self.tx.run("DELETE FROM djqueue_ready WHERE id = ?", pk):
                self._hold([jobs[pk]], front=True)

    def _hold(self, jobs: Sequence[StoredJob], *, front: bool) -> None:
        numbers = self.tx.numbers(len(jobs))
        rows = [
            (job.pk, self.queue, self.name, -number if front else number, job.name)
            for job, number in zip(jobs, numbers, strict=True)
        ]
        self.tx.insert("djqueue_held", HELD, rows)

    def _room(self) -> int:
        """Return how many jobs may be ready if all of them may start."""
        if self.paused:
            return 0
        room = self.limit - self.active()
        if self.rate is None or room <= 0:
            return room
        return min(room, rates.available(self.tx, self.queue, self.name, self.rate))

    def _note_rest(self) -> None:
        """Record when the group's rate lets its next job be ready, if the rate alone holds it back."""
        if self.rate is None:
            return
        ready = self.ready()
        room = min(self.limit - self.active(), self.weight, self.rate.capacity)
        rests = self._has_held() and not self.paused and ready < room
        at = rates.available_at(self.tx, self.queue, self.name, self.rate, ready + 1) if rests else None
        rates.set_rest(self.tx, self.queue, self.name, self.rate, at)

    def _has_held(self) -> bool:
        held = 'SELECT 1 FROM djqueue_held WHERE queue = ? AND "group" = ? LIMIT 1'
        return self.tx.row(held, self.queue, self.name) is not None

    def _count(self, table: str) -> int:
        counted = f'SELECT COUNT(*) FROM {table} WHERE queue = ? AND "group" = ?'
        number: int = self.tx.value(counted, self.queue, self.name)
        return number


def groups(tx: Tx, job: StoredJob) -> LockedGroup:
    """Return the group of a job."""
    assert job.options.group is not None
    return LockedGroup(tx, job.queue, job.options.group)


def leave_group(tx: Tx, job: StoredJob) -> None:
    """Make the next jobs of a group ready after one of its active jobs has ended."""
    if is_grouped(tx, job):
        groups(tx, job).advance()


def overrides(tx: Tx, queue: str, group: str) -> tuple[GroupLimit, GroupLimit]:
    """Return the overrides for all groups of a queue, and those of one group."""
    found = {
        row[1]: limit_of(row)
        for row in tx.rows(
            f"SELECT {GROUP_LIMIT} FROM djqueue_group_state WHERE queue = ? AND \"group\" IN ('', ?)",
            *(queue, group),
        )
    }
    return found.get("", NO_LIMIT), found.get(group, NO_LIMIT)


def make_ready(tx: Tx, pks: Sequence[int]) -> None:
    """Make held jobs ready, behind the others of their priority, in this order."""
    jobs = {job.pk: job for job in by_keys(tx, pks, lock=False)}
    condition, values = tx.among("id", pks)
    tx.run(f"DELETE FROM djqueue_held WHERE {condition}", values)
    push(tx, [jobs[pk] for pk in pks])
