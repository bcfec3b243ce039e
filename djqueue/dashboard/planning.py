"""Schedules as the pages show them: when they run next, and what became of their last runs."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.client import get_storage, registry
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.errors import DjqueueError, OptionError
from djqueue.core.states import LIVE, State
from djqueue.models import CronJob, JobState, ScheduleSource
from djqueue.operations.agenda import next_runs
from djqueue.operations.cron import job_id, options_of
from djqueue.schedules import Schedule

from . import cronwords, freshness, queries, rights, spans, tables
from .snapshot import CachedRead, snapshots
from .tables import rows_of

MOST = 500
"""Schedules that are listed."""
NEXT = 5
"""Next runs that are shown."""
LAST = 30
"""Last runs that are."""
GRACE = 90_000
"""Milliseconds after which a run that has not come is overdue."""
FRESH = 5_000
"""Milliseconds for which what became of runs is shown again."""
TRIES = 6
"""How often a search for past slots begins at another time."""
STEPS = 300
"""Slots that one such search goes through."""

ANY_DUE = "SELECT 1 FROM djqueue_cron_job WHERE enabled AND next_run_at < %s LIMIT 1"
ARGUMENTS = ("args", "kwargs")
"""Columns that no page shows."""

Outcomes = Mapping[tuple[str, str], State]
"""By queue and id; what is not there is no longer known."""


class PastRun(NamedTuple):
    """A slot that is over."""

    slot: int
    """UTC milliseconds."""
    id: str
    """Of its job."""
    state: State | None
    """None: the job is no longer kept, or the slot was left out."""

    @property
    def kind(self) -> str:
        """Of its bar."""
        if self.state is None:
            return "none"
        return "live" if self.state in LIVE else self.state.value

    @property
    def label(self) -> str:
        """Its state in words."""
        return _("no longer kept") if self.state is None else str(JobState(self.state.value).label)


class Planned(NamedTuple):
    """A schedule, with its next and its last runs."""

    row: CronJob
    queue: str
    """Which its jobs go to."""
    words: str
    """When it runs; empty if that cannot be told."""
    runs: list[int]
    """UTC milliseconds."""
    problem: str
    """Why they cannot be told."""
    is_overdue: bool
    is_known: bool
    """Whether a function is registered here under the job's name."""
    past: list[PastRun]
    """Oldest first."""

    @property
    def last(self) -> PastRun | None:
        """The last run."""
        return self.past[-1] if self.past else None

    @property
    def bars(self) -> list[tuple[str, float]]:
        """Of the last runs: those that failed are the tallest."""
        tall = {"completed": 0.6, "failed": 1.0, "cancelled": 0.8, "live": 0.35, "none": 0.1}
        return [(run.kind, tall[run.kind]) for run in self.past]

    @property
    def told(self) -> str:
        """The last runs in words."""
        count = len(self.past)
        said = ngettext("Last %(count)d run", "Last %(count)d runs", count) % {"count": count}
        labels = Counter(run.label for run in self.past)
        return f"{said}: " + ", ".join(f"{number} {label}" for label, number in labels.most_common())

    @property
    def can_be_edited(self) -> bool:
        """Whether it was made by hand, and not by code."""
        return self.row.source == ScheduleSource.HAND

    @property
    def can_be_deleted(self) -> bool:
        """Whether it would not come back."""
        return self.row.source != ScheduleSource.CODE

    @property
    def can_be_switched(self) -> bool:
        """Whether it may be on: what code declares no more stays off."""
        return self.row.enabled or self.row.source != ScheduleSource.WITHDRAWN


def visible(request: HttpRequest) -> list[CronJob]:
    """The schedules whose queues the user sees, by name."""
    return [row for row in _rows().order_by("name")[:MOST] if sees(request, row)]


def one(request: HttpRequest, pk: int) -> CronJob | None:
    """One of them; None if it is gone, or not for this user."""
    row = _rows().filter(pk=pk).first()
    return row if row is not None and sees(request, row) else None


def sees(request: HttpRequest, row: CronJob) -> bool:
    """Return whether the user may see the queue that the jobs of a schedule go to.

    If neither the row nor code in this process names that queue, only users who see every queue may.
    """
    if not rights.hides_queues():
        return True
    if not has_known_queue(row) and not queries.sees_all(request):
        return False
    return rights.sees(request, queue_of(row))


def has_known_queue(row: CronJob) -> bool:
    """Return whether this process can tell the queue of a schedule's jobs.

    A row without a queue uses the job's own, which only a process that has the job registered knows.
    """
    return bool(row.queue) or registry.find(row.job_name) is not None


def overdue(request: HttpRequest) -> list[CronJob]:
    """Those that are late, the latest first; found by the index of what is due."""
    return [row for row in snapshots.read("overdue", _overdue, fresh=FRESH).value if sees(request, row)]


def _overdue() -> list[CronJob]:
    now = SYSTEM_CLOCK.now()
    if not tables.select(CronJob, ANY_DUE, (now - GRACE,)):
        return []
    late = _rows().filter(enabled=True, next_run_at__lt=to_datetime(now - GRACE)).order_by("next_run_at")
    return [row for row in late[:MOST] if _is_late(row, now)]


@lru_cache(maxsize=1)
def _columns() -> tuple[str, ...]:
    """Return the columns of a schedule that pages show."""
    return tuple(field.attname for field in CronJob._meta.concrete_fields if field.name not in ARGUMENTS)


def overdue_parts(request: HttpRequest) -> Hashable:
    """What the overview shows of schedules: see `freshness.Parts`."""
    return tuple((row.pk, row.name, row.next_run_at) for row in overdue(request))


def parts(request: HttpRequest) -> Hashable:
    """Return what the pages of schedules show of the rows that the user sees: see `freshness.Parts`.

    No page shows the arguments of a schedule, so they are left out: the tag of a page would confirm a
    guess of a hidden one.
    """
    rows = _rows().defer(*ARGUMENTS).order_by("name")[:MOST]
    return tuple(tuple(getattr(row, name) for name in _columns()) for row in rows if sees(request, row))


def planned(rows: Sequence[CronJob]) -> CachedRead[list[Planned]]:
    """Schedules with their runs: what became of the last ones is one read for each queue."""
    now = SYSTEM_CLOCK.now()
    slots = {row.pk: _past(row) for row in rows}
    wanted: dict[str, list[str]] = {}
    for row in rows:
        wanted.setdefault(queue_of(row), []).extend(job_id(row, slot) for slot in slots[row.pk])
    key = ("cron", *((row.pk, row.last_run_at) for row in rows))
    cached = snapshots.read(key, lambda: _outcomes(wanted), fresh=FRESH, versioned=True)
    found = [_planned(row, slots[row.pk], cached.value, now) for row in rows]
    return cached._replace(value=found)  # type: ignore[arg-type, return-value]


def changes_at(request: HttpRequest, shown: Sequence[Planned]) -> None:
    """Tell when one of these schedules is overdue, or its next runs are others."""
    for planned_one in shown:
        if planned_one.runs and not planned_one.is_overdue:
            freshness.limit(request, planned_one.runs[0])
            freshness.limit(request, planned_one.runs[0] + GRACE)


def queue_of(row: CronJob) -> str:
    """Which queue its jobs go to; empty if that cannot be told."""
    try:
        return options_of(row).queue or ""
    except DjqueueError:
        return row.queue


def words_of(row: CronJob) -> str:
    """When it runs, in words. Raises OptionError."""
    if row.every is not None:
        return _("Every %s") % spans.shown(row.timing().every or 0)
    return cronwords.words(row.schedule)


def upcoming(row: CronJob) -> list[int]:
    """Its next runs, in UTC milliseconds. Raises DjqueueError."""
    return [to_milliseconds(at) for at in islice(next_runs(row), NEXT)]


def _planned(row: CronJob, slots: Sequence[int], outcomes: Outcomes, now: int) -> Planned:
    queue, problem, runs, words = queue_of(row), "", [], ""
    try:
        words = words_of(row)
        runs = upcoming(row) if row.enabled else []
    except DjqueueError as error:
        problem = str(error)
    past = [PastRun(slot, job_id(row, slot), outcomes.get((queue, job_id(row, slot)))) for slot in slots]
    is_late = bool(runs) and runs[0] < now - GRACE
    return Planned(row, queue, words, runs, problem, is_late, row.job_name in registry.names(), past)


def _is_late(row: CronJob, now: int) -> bool:
    """With the jitter that its run has."""
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
    """Its last slots, oldest first: those that the ids of its jobs are made from."""
    most = min(LAST, row.executions)
    if row.last_run_at is None or not most:
        return ()
    try:
        return _slots(row.timing(), to_milliseconds(row.last_run_at), most)
    except OptionError:
        return ()


@lru_cache(maxsize=2_048)
def _slots(schedule: Schedule, last: int, most: int) -> tuple[int, ...]:
    """Up to so many slots that end with one: schedules only go forward, so it begins earlier and earlier."""
    following = schedule.next_slot(last)
    gap = following - last if following is not None else 86_400_000
    found, width, is_narrowed = [last], (most + 1) * gap, False
    for _attempt in range(TRIES):
        begin = max(0, last - width)
        slots = list(islice(_between(schedule, begin, last), STEPS))
        if not slots or slots[-1] != last:  # more of them than are gone through
            width, is_narrowed = width // 16, True
            continue
        found = slots[-most:]
        if len(found) == most or not begin or is_narrowed:
            break
        width *= 4
    return tuple(found)


def _between(schedule: Schedule, begin: int, last: int) -> Iterator[int]:
    slot = schedule.next_slot(begin)
    while slot is not None and slot <= last:
        yield slot
        slot = schedule.next_slot(slot)


def _rows() -> "QuerySet[CronJob]":
    return rows_of(CronJob)
