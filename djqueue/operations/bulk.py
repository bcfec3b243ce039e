"""Bulk operations: do something to all jobs that match, part by part, in processes that run jobs.

A row says what to do to which jobs, as they were at its creation; any number of processes may read the
rows. One process at a time holds a row, does a part, and notes the result and the next position in one
conditional update. If it dies within a part, that part is done again: a job that was retried or removed
cannot be retried or removed a second time.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from secrets import token_hex
from typing import Any, NamedTuple

from django.db.models import Q, QuerySet

from djqueue.client.deadletters import DeadLetterFilter, read_filter
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadlines import remaining
from djqueue.core.errors import JobNotStoredError, OptionError
from djqueue.core.job import JobRecord
from djqueue.core.logs import Log
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.models import BulkKind, BulkOperation, BulkState
from djqueue.storage.actions import CANCEL, DONE, PROMOTE, REMOVE, RETRY, Action
from djqueue.storage.base import Storage

logger = Log("djqueue.bulk")

JOBS_PER_CALL = 500
"""Jobs per call of the storage."""
PARTS_PER_SWEEP = 20
"""Operations per sweep, and parts of each; the rest waits for the next sweep."""
MAX_ROUND_TIME = 500
"""Milliseconds of a sweep after which no further part is begun."""
HOLD_TIME = 30_000
"""Milliseconds for which a process holds a row without renewing it."""
MAX_PREVIEWED = 10_000
"""Jobs that a preview examines."""
UNDO_TIME = 30_000
"""Milliseconds before a deletion begins."""
DELETIONS = frozenset({BulkKind.PURGE, BulkKind.DELETE, BulkKind.CLEAN, BulkKind.OBLITERATE})
"""Kinds that begin with a delay, in which they can be undone."""
QUEUE_KINDS = frozenset({BulkKind.CLEAN, BulkKind.OBLITERATE})
"""Kinds that apply to a queue, and not to single jobs."""
ACTIONS: Mapping[str, Action] = {
    BulkKind.RETRY: RETRY,
    BulkKind.PURGE: REMOVE,
    BulkKind.DELETE: REMOVE,
    BulkKind.CANCEL: CANCEL,
    BulkKind.PROMOTE: PROMOTE,
}
"""The actions of the other kinds, on single jobs."""


class Selection(NamedTuple):
    """The jobs of a bulk operation: dead letters by their contents, or jobs of one state."""

    queues: tuple[str, ...]
    dead_letters: Mapping[str, Any] = {}
    """Filters of dead letters, as `Queue.retry_dead` takes them."""
    state: str = ""
    """State of the jobs, unless they are chosen as dead letters."""
    ids: tuple[str, ...] = ()
    """If given: only these jobs of the one queue; of dead letters, those that still are dead letters."""
    states: tuple[str, ...] = ()
    """States of the jobs, in this order, in place of the single `state`."""
    name: str = ""
    """Only jobs with this name, if they are chosen by state."""
    tag: str = ""
    """Only jobs, or dead letters of jobs, with this tag; so do the following."""
    worker: str = ""
    """The worker that runs a job, or ran it last."""
    priority: int | None = None
    since: int | None = None
    """Earliest time of enqueueing, in UTC milliseconds; `until` is the end, exclusive."""
    until: int | None = None
    id: str = ""
    """Prefix of the ID."""

    @property
    def is_narrow(self) -> bool:
        """Whether jobs are chosen by more than their state, their name or what a dead letter has."""
        return self[Selection._fields.index("tag") :] != ("", "", None, None, None, "")

    def includes(self, record: JobRecord) -> bool:
        """Return whether a job is one of them, by its record."""
        return (
            self.name in ("", record.name)
            and self.tag in ("", *record.options.tags)
            and self.worker in ("", record.worker)
            and self.priority in (None, record.options.priority)
            and (self.since is None or record.created_at >= self.since)
            and (self.until is None or record.created_at < self.until)
            and record.id.startswith(self.id)
        )

    def as_json(self) -> dict[str, Any]:
        """Return a value for the row's JSON column."""
        return {**self._asdict(), "dead_letters": dict(self.dead_letters)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Selection":
        """Return the selection that `as_json` stored."""
        lists = {name: tuple(stored.get(name, ())) for name in ("queues", "ids", "states")}
        return cls(**{**stored, **lists})


Position = dict[str, Any]
"""The position where an operation continues."""
PartResult = tuple[Counter[str], Position | None]
"""The outcomes of a part, and the position of the next part; None: this was the last."""


class Preview(NamedTuple):
    """The expected result of a bulk operation."""

    matching: int
    able: int
    refused: dict[str, int]
    """The number of jobs by reason."""
    capped: bool
    """True if more jobs match than were examined."""
    examined: int
    """The number of jobs that were examined."""


class BulkPart(NamedTuple):
    """Some of the jobs, all of one queue, and the position of the next ones."""

    queue: str
    ids: list[str]
    next: Position | None
    """None for the last part."""
    examined: int = 0
    """Jobs that were examined to find these."""


def preview(
    storage: Storage,
    kind: str,
    selection: Selection,
    clock: Clock = SYSTEM_CLOCK,
    before: int | None = None,
    calls: int | None = None,
) -> Preview:
    """Count the first 10,000 jobs that match, and change nothing. Raises OptionError for a wrong filter.

    With a tag or another filter that only a job's record has, the first 10,000 jobs are examined, whether
    they match or not. If the caller has a deadline, the count ends halfway to it.

    Args:
        before: Time up to which they were enqueued, in UTC milliseconds; None means now.
        calls: Maximum number of pages to read, at least one for each queue and state; None means no limit.
    """
    before = clock.now() if before is None else before
    position: Position | None = _beginning(selection)
    dry_run = ACTIONS[kind].dry_run if kind in ACTIONS else None
    matching, examined, outcomes = 0, 0, Counter[str]()
    until = SYSTEM_CLOCK.monotonic() + remaining(inf) * 1_000 / 2
    while position is not None and max(matching, examined) < MAX_PREVIEWED:
        if calls == 0 or SYSTEM_CLOCK.monotonic() >= until:
            break
        calls = None if calls is None else calls - 1
        part = _part(storage, kind, selection, position, before)
        matching += len(part.ids)
        examined += part.examined if selection.is_narrow else 0
        if dry_run is not None and part.ids:
            outcomes.update(dry_run(storage, part.queue, part.ids))
        position = part.next
    refused = {word: count for word, count in outcomes.items() if word not in DONE}
    able = matching - sum(refused.values())
    return Preview(matching, able, refused, position is not None, max(matching, examined))


def run_now(storage: Storage, kind: str, selection: Selection, before: int) -> Iterator[Counter[str]]:
    """Do a bulk operation on single jobs in this process, and yield the outcomes of each part.

    Args:
        before: Storage's time in UTC milliseconds. Jobs that were enqueued or failed later are left alone.

    Raises OptionError for a wrong filter.
    """
    position: Position | None = _beginning(selection)
    while position is not None:
        part = _part(storage, kind, selection, position, before)
        yield Counter(ACTIONS[kind].call(storage, part.queue, part.ids) if part.ids else ())
        position = part.next


def begin(
    alias: str,
    kind: str,
    selection: Selection,
    *,
    user: str = "",
    rate: int | None = None,
    expected: int = 0,
    clock: Clock = SYSTEM_CLOCK,
) -> BulkOperation:
    """Plan a bulk operation, which a process that runs jobs does; a deletion can be undone for a while.

    Args:
        rate: Maximum number of jobs per second; None means no limit.

    Raises OptionError for a wrong filter.
    """
    if rate is not None and rate < 1:
        raise OptionError(f"rate: {rate!r} must be a positive number of jobs per second")
    _dead_letter_filter(selection)
    now = clock.now()
    delay = UNDO_TIME if kind in DELETIONS else 0
    return BulkOperation.objects.using(alias).create(
        kind=kind,
        filter=selection.as_json(),
        user=user,
        rate=rate,
        created_at=to_datetime(now),
        start_at=to_datetime(now + delay),
        expected=expected,
        place=_beginning(selection),
    )


def undo(alias: str, pk: int, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Cancel a bulk operation that has not begun; return False if it has begun or does not exist."""
    ended = {"state": BulkState.ABORTED, "finished_at": clock.now()}
    return bool(_open(alias).filter(pk=pk, state=BulkState.PLANNED).update(**ended))


def abort(alias: str, pk: int, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Stop a bulk operation; return False if it has ended."""
    ended = {"state": BulkState.ABORTED, "finished_at": clock.now(), "holder": "", "held_until": 0}
    return bool(_open(alias).filter(pk=pk).update(**ended))


class Bulk:
    """Runs the bulk operations of one database in a storage."""

    def __init__(self, storage: Storage, alias: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._storage = storage
        self._alias = alias
        self._clock = clock
        self._holder = token_hex(8)
        self._last = 0
        """Key of the operation of which the last part was done."""

    def work(self) -> int:
        """Do some parts of the due operations in turn; return the number of jobs that have an outcome now.

        At least one part is done, and none is begun after `MAX_ROUND_TIME`: the sweeps wait meanwhile.
        """
        now, until = self._clock.now(), self._clock.monotonic() + MAX_ROUND_TIME
        count = 0
        due = _open(self._alias).filter(Q(held_until__lte=now) | Q(holder=self._holder), start_at__lte=now)
        # Those after the last one come first, so that each operation gets its turn.
        rows = sorted(due.order_by("pk")[:PARTS_PER_SWEEP], key=lambda row: (row.pk <= self._last, row.pk))
        turns = deque((row.pk, self._parts(row)) for row in rows)
        while turns:
            pk, parts = turns.popleft()
            done = next(parts, None)
            if done is not None:
                self._last = pk
                count += done
                turns.append((pk, parts))
            if self._clock.monotonic() >= until:
                break
        return count

    def leave(self) -> None:
        """Release all rows, so that other processes can continue at once."""
        _open(self._alias).filter(holder=self._holder).update(holder="", held_until=0)

    def _take(self, row: BulkOperation) -> bool:
        now = self._clock.now()
        unchanged = _open(self._alias).filter(pk=row.pk, holder=row.holder, held_until=row.held_until)
        held = {"holder": self._holder, "held_until": now + HOLD_TIME, "state": BulkState.RUNNING}
        if row.started_at is None:
            held["started_at"] = now
        if not unchanged.update(**held):
            return False
        row.refresh_from_db(using=self._alias)
        return True

    def _parts(self, row: BulkOperation) -> Iterator[int]:
        """Do the parts of an operation one by one, and yield how many jobs each of them had."""
        if not self._take(row):
            return
        selection = Selection.from_json(row.filter)
        for _ in range(PARTS_PER_SWEEP):
            limit = self._allowed(row)
            if not limit:
                return
            outcomes, position = self._do_part(row, selection, limit)
            goes_on = self._save_progress(row, outcomes, position) and position is not None
            yield sum(outcomes.values())
            if not goes_on:
                return

    def _do_part(self, row: BulkOperation, selection: Selection, limit: int) -> PartResult:
        before = to_milliseconds(row.created_at)
        if row.kind == BulkKind.CLEAN:
            return self._clean(selection.queues[0], map(State, selection.states), before, limit)
        if row.kind == BulkKind.OBLITERATE:
            assert row.started_at is not None
            return self._obliterate(row, selection.queues[0], to_milliseconds(row.started_at), limit)
        part = _part(self._storage, row.kind, selection, row.place, before, limit)
        try:
            if selection.ids and row.kind in DELETIONS:
                outcomes: Sequence[str] = self._remove(part, selection, before)
            else:
                outcomes = ACTIONS[row.kind].call(self._storage, part.queue, part.ids) if part.ids else []
        except JobNotStoredError:
            outcomes = ["not_stored"] * len(part.ids)
        return Counter(outcomes), part.next

    def _remove(self, part: BulkPart, selection: Selection, before: int) -> list[str]:
        """Remove jobs by id, and return the outcomes; jobs that came later or were retried are skipped."""
        records = self._storage.reads.jobs(part.queue, part.ids)
        must_be_dead = selection.state == State.FAILED
        removable = [
            record.id
            for record in records
            if record is not None
            and record.created_at <= before
            and (record.state is State.FAILED or not must_be_dead)
        ]
        removed = REMOVE.apply(self._storage, part.queue, removable)
        return [
            removed.get(job_id, "not_found" if record is None else "changed")
            for job_id, record in zip(part.ids, records, strict=True)
        ]

    def _clean(self, queue: str, states: Iterable[State], before: int, limit: int) -> PartResult:
        count = self._storage.queues.clean(queue, frozenset(states), before + 1, limit)
        return Counter(removed=count), {"queue": 0, "after": None} if count else None

    def _obliterate(self, row: BulkOperation, queue: str, before: int, limit: int) -> PartResult:
        """Remove a part of a queue, and finally the queue itself if no job has arrived since the start."""
        active = self._storage.reads.counts(queue).get(State.ACTIVE, 0)
        if active and not row.looked_at:
            return Counter(active=active), None
        outcomes, position = self._clean(queue, set(State) - {State.ACTIVE}, before, limit)
        if position is None:
            left = sum(self._storage.reads.counts(queue).values())
            if left:
                return Counter(arrived=left), None
            self._storage.queues.obliterate(queue)
        return outcomes, position

    def _allowed(self, row: BulkOperation) -> int:
        """Return how many jobs the next part may have."""
        if row.rate is None:
            return JOBS_PER_CALL
        assert row.started_at is not None
        elapsed = max(0, self._clock.now() - to_milliseconds(row.started_at))
        return max(0, min(JOBS_PER_CALL, row.rate + elapsed * row.rate // 1_000 - row.looked_at))

    def _save_progress(self, row: BulkOperation, outcomes: Counter[str], position: Position | None) -> bool:
        """Note the result of a part; return False if another process has the row, or it was aborted."""
        now = self._clock.now()
        row.looked_at += sum(outcomes.values())
        row.done += sum(count for word, count in outcomes.items() if word in DONE)
        refused = Counter(row.refused)
        refused.update({word: count for word, count in outcomes.items() if word not in DONE})
        row.refused, row.place = dict(refused), position or {}
        changes: dict[str, Any] = {
            "looked_at": row.looked_at,
            "done": row.done,
            "refused": row.refused,
            "place": row.place,
            "held_until": now + HOLD_TIME,
        }
        if position is None:
            changes |= {"state": BulkState.DONE, "finished_at": now, "holder": "", "held_until": 0}
        held = BulkOperation.objects.using(self._alias).filter(pk=row.pk, holder=self._holder)
        return bool(held.update(**changes))


def _part(
    storage: Storage,
    kind: str,
    selection: Selection,
    position: Mapping[str, Any],
    before: int,
    limit: int = JOBS_PER_CALL,
) -> BulkPart:
    """Return the next jobs from a position: up to `limit` of one page, or of the given ids."""
    index, after = position["queue"], position["after"]
    if selection.ids:
        queue, start = selection.queues[index], after or 0
        ids = list(selection.ids[start : start + limit])
        return BulkPart(
            queue, ids, _next(selection, index, start + limit, start + limit < len(selection.ids))
        )
    if kind in (BulkKind.RETRY, BulkKind.PURGE):
        queue = selection.queues[index]
        page = storage.reads.dead_letter_page(queue, limit, after)
        wanted = _dead_letter_filter(selection)
        ids = [
            letter.id
            for letter in page.dead_letters
            if letter.entered_at <= before and wanted.matches(letter, page.at)
        ]
        if selection.is_narrow and ids:
            # A dead letter does not have its job's options.
            records = storage.reads.jobs(queue, ids)
            ids = [one.id for one in records if one is not None and selection.includes(one)]
        following = _next(selection, index, page.next, page.next is not None)
        return BulkPart(queue, ids, following, len(page.dead_letters))
    # `queue` of a position counts queues times states.
    states = selection.states or (selection.state,)
    queue, state = selection.queues[index // len(states)], states[index % len(states)]
    jobs = storage.reads.cursor_page(queue, State(state), limit, after, newest_first=False)
    ids = [record.id for record in jobs.jobs if record.created_at <= before and selection.includes(record)]
    following = _next(selection, index, jobs.next, jobs.next is not None, len(states))
    return BulkPart(queue, ids, following, len(jobs.jobs))


def _next(selection: Selection, index: int, after: Any, more: bool, states: int = 1) -> dict[str, Any] | None:
    if more:
        return {"queue": index, "after": after}
    return {"queue": index + 1, "after": None} if index + 1 < len(selection.queues) * states else None


def _beginning(selection: Selection) -> dict[str, Any]:
    """Return the position of the first part. Raises OptionError without queues."""
    if not selection.queues:
        raise OptionError("queues: name at least one")
    return {"queue": 0, "after": None}


def _dead_letter_filter(selection: Selection) -> DeadLetterFilter:
    return read_filter(**selection.dead_letters)


def _open(alias: str) -> "QuerySet[BulkOperation]":
    return BulkOperation.objects.using(alias).filter(state__in=(BulkState.PLANNED, BulkState.RUNNING))
