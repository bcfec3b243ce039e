"""Schedules as the pages show them: their next runs, and the outcomes of past runs."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.client import get_storage, registry
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.errors import DjqueueError, OptionError
from djqueue.core.states import LIVE, State
from djqueue.models import CronJob, JobState, ScheduleSource
from djqueue.operations.cronjobs import job_id, next_runs, options_of
from djqueue.schedules import Schedule

from . import crondescription, freshness, queries, rights, spans, tables
from .snapshot import CachedRead, snapshots
from .tables import rows_of

LIMIT = 500
"""Maximum schedules in the list."""
NEXT = 5
"""Next runs shown."""
LAST = 30
"""Past runs shown."""
GRACE = 90_000
"""Milliseconds after which a missing run is overdue."""
FRESH = 5_000
"""Milliseconds before outcomes are read again."""
TRIES = 6
"""Maximum attempts to find past slots, each with another start time."""
STEPS = 300
"""Maximum slots examined per attempt."""

ANY_DUE = "SELECT 1 FROM djqueue_cron_job WHERE enabled AND next_run_at < %s LIMIT 1"
ARGUMENTS = ("args", "kwargs")
"""Columns that no page shows."""

Outcomes = Mapping[tuple[str, str], State]
"""States by queue and job ID. Removed jobs are missing."""


class PastRun(NamedTuple):
    """A slot in the past."""

    slot: int
    """UTC milliseconds."""
    id: str
    """ID of the job."""
    state: State | None
    """None if the job was removed, or the slot was skipped."""

    @property
    def kind(self) -> str:
        if self.state is None:
            return "none"
        return "live" if self.state in LIVE else self.state.value

    @property
    def label(self) -> str:
        return _("no longer kept") if self.state is None else str(JobState(self.state.value).label)


class ScheduleRow(NamedTuple):
    """A schedule with its next and past runs."""

    row: CronJob
    queue: str
    """Queue of the schedule's jobs."""
    words: str
    """Frequency as text; empty if unknown."""
    runs: list[int]
    """Next runs, in UTC milliseconds."""
    problem: str
    """Why the next runs are unknown."""
    is_due: bool
    """Whether the first of these waits for a worker."""
    is_overdue: bool
    is_known: bool
    """Whether this process has a handler of this name."""
    past: list[PastRun]
    """Oldest first."""

    @property
    def last(self) -> PastRun | None:
        return self.past[-1] if self.past else None

    @property
    def bars(self) -> list[tuple[str, float]]:
        """The bars of past runs; failed runs are the tallest."""
        tall = {"completed": 0.6, "failed": 1.0, "cancelled": 0.8, "live": 0.35, "none": 0.1}
        return [(run.kind, tall[run.kind]) for run in self.past]

    @property
    def summary(self) -> str:
        """The past runs as text."""
        count = len(self.past)
        text = ngettext("Last %(count)d run", "Last %(count)d runs", count) % {"count": count}
        labels = Counter(run.label for run in self.past)
        return f"{text}: " + ", ".join(f"{number} {label}" for label, number in labels.most_common())

    @property
    def can_be_edited(self) -> bool:
        """Whether the schedule was created on the dashboard."""
        return self.row.source == ScheduleSource.HAND

    @property
    def can_be_deleted(self) -> bool:
        """Whether the schedule can be deleted. Code would declare its own schedules again."""
        return self.row.source != ScheduleSource.CODE

    @property
    def can_be_switched(self) -> bool:
        """Whether the schedule can be switched. One that code no longer declares stays disabled."""
        return self.row.enabled or self.row.source != ScheduleSource.WITHDRAWN


def visible(request: HttpRequest) -> list[CronJob]:
    """Return the schedules whose queues the user can see, by name."""
    return [row for row in rows_of(CronJob).order_by("name")[:LIMIT] if sees(request, row)]


def one(request: HttpRequest, pk: int) -> CronJob | None:
    """Return a schedule; None if it doesn't exist or the user can't see it."""
    row = rows_of(CronJob).filter(pk=pk).first()
    return row if row is not None and sees(request, row) else None


def sees(request: HttpRequest, row: CronJob) -> bool:
    """Return whether the user can see the queue of a schedule's jobs.

    If this process can't tell the queue, only users who can see every queue may.
    """
    if not rights.hides_queues():
        return True
    if not has_known_queue(row) and not queries.sees_all(request):
        return False
    return rights.sees(request, queue_of(row))


def has_known_queue(row: CronJob) -> bool:
    """Return whether this process can tell the queue of a schedule's jobs.

    A row without a queue uses the job's default, which only a process with the job's handler knows.
    """
    return bool(row.queue) or registry.find(row.job_name) is not None


def overdue(request: HttpRequest) -> list[CronJob]:
    """Return the overdue schedules that the user can see, the most overdue first."""
    return [row for row in snapshots.read("overdue", _overdue, fresh=FRESH).value if sees(request, row)]


def _overdue() -> list[CronJob]:
    now = SYSTEM_CLOCK.now()
    if not tables.select(CronJob, ANY_DUE, (now - GRACE,)):
        return []
    late = (
        rows_of(CronJob)
        .filter(enabled=True, next_run_at__lt=to_datetime(now - GRACE))
        .order_by("next_run_at")
    )
    return [row for row in late[:LIMIT] if _is_late(row, now)]


@lru_cache(maxsize=1)
def _columns() -> tuple[str, ...]:
    """Return the columns that pages show."""
    return tuple(field.attname for field in CronJob._meta.concrete_fields if field.name not in ARGUMENTS)


def overdue_parts(request: HttpRequest) -> Hashable:
    """Return what the overview shows of schedules: see `freshness.Parts`."""
    return tuple((row.pk, row.name, row.next_run_at) for row in overdue(request))


def parts(request: HttpRequest) -> Hashable:
    """Return what pages show of schedules: see `freshness.Parts`.

    Arguments are left out: the tag of a page would confirm the guess of a hidden value.
    """
    rows = rows_of(CronJob).defer(*ARGUMENTS).order_by("name")[:LIMIT]
    return tuple(tuple(getattr(row, name) for name in _columns()) for row in rows if sees(request, row))


def rows_for(rows: Sequence[CronJob]) -> CachedRead[list[ScheduleRow]]:
    """Return schedules with their runs, using one read per queue for the outcomes."""
    now = SYSTEM_CLOCK.now()
    slots = {row.pk: _past(row) for row in rows}
    wanted: dict[str, list[str]] = {}
    for row in rows:
        wanted.setdefault(queue_of(row), []).extend(job_id(row, slot) for slot in slots[row.pk])
    key = ("cron", *((row.pk, row.last_run_at) for row in rows))
    cached = snapshots.read(key, lambda: _outcomes(wanted), fresh=FRESH, versioned=True)
    found = [_row(row, slots[row.pk], cached.value, now) for row in rows]
    return cached._replace(value=found)  # type: ignore[arg-type, return-value]


def changes_at(request: HttpRequest, shown: Sequence[ScheduleRow]) -> None:
    """Let a page expire when one of these schedules runs next or becomes overdue."""
    for row in shown:
        if row.runs and not row.is_overdue:
            freshness.limit(request, row.runs[0])
            freshness.limit(request, row.runs[0] + GRACE)


def queue_of(row: CronJob) -> str:
    """Return the queue of a schedule's jobs; empty if unknown."""
    try:
        return options_of(row).queue or ""
    except DjqueueError:
        return row.queue


def words_of(row: CronJob) -> str:
    """Return the frequency of a schedule as text.

    Raises:
        OptionError: The schedule is not valid.
    """
    if row.every is not None:
        return _("Every %s") % spans.shown(row.timing().every or 0)
    return crondescription.describe(row.schedule)


def upcoming(row: CronJob) -> list[int]:
    """Return the next runs, in UTC milliseconds.

    Raises:
        DjqueueError: The schedule is not valid.
    """
    return [to_milliseconds(at) for at in islice(next_runs(row), NEXT)]


def _row(row: CronJob, slots: Sequence[int], outcomes: Outcomes, now: int) -> ScheduleRow:
    queue, problem, runs, words = queue_of(row), "", [], ""
    try:
        words = words_of(row)
        runs = upcoming(row) if row.enabled else []
    except DjqueueError as error:
        problem = str(error)
    past = [PastRun(slot, job_id(row, slot), outcomes.get((queue, job_id(row, slot)))) for slot in slots]
    is_due, is_late = (bool(runs) and runs[0] <= now - late for late in (0, GRACE))
    is_known = row.job_name in registry.names()
    return ScheduleRow(row, queue, words, runs, problem, is_due, is_late, is_known, past)


def _is_late(row: CronJob, now: int) -> bool:
    """Return whether a run is overdue, including its jitter."""
    try:
        assert row.next_run_at is not None
        return row.timing().fires_at(to_milliseconds(row.next_run_at), row.name) < now - GRACE
    except DjqueueError:
        return False


def _outcomes(wanted: Mapping[str, Sequence[str]]) -> Outcomes:
    found: dict[tuple[str, str], State] = {}
    for queue, ids in wanted.items():
        if queue and ids:
            states = get_storage().reads.states(queue, ids)
            found.update({(queue, one): state for one, state in zip(ids, states, strict=True) if state})
    return found


def _past(row: CronJob) -> tuple[int, ...]:
    """Return the past slots, oldest first, from which the IDs of jobs are made."""
    limit = min(LAST, row.executions)
    if row.last_run_at is None or not limit:
        return ()
    try:
        return _slots(row.timing(), to_milliseconds(row.last_run_at), limit)
    except OptionError:
        return ()


@lru_cache(maxsize=2_048)
def _slots(schedule: Schedule, last: int, limit: int) -> tuple[int, ...]:
    """Return up to `limit` slots that end with the last one.

    Schedules can only be stepped forward, so the search starts earlier and earlier.
    """
    following = schedule.next_slot(last)
    gap = following - last if following is not None else 86_400_000
    found, width, is_narrowed = [last], (limit + 1) * gap, False
    for _attempt in range(TRIES):
        begin = max(0, last - width)
        slots = list(islice(_between(schedule, begin, last), STEPS))
        if not slots or slots[-1] != last:  # more slots than are examined
            width, is_narrowed = width // 16, True
            continue
        found = slots[-limit:]
        if len(found) == limit or not begin or is_narrowed:
            break
        width *= 4
    return tuple(found)


def _between(schedule: Schedule, begin: int, last: int) -> Iterator[int]:
    slot = schedule.next_slot(begin)
    while slot is not None and slot <= last:
        yield slot
        slot = schedule.next_slot(slot)
