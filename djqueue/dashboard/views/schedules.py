"""Schedules: the list, one schedule with its next and past runs, and actions on schedules.

Cron expressions are described in plain language.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.text import capfirst, get_text_list
from django.utils.translation import get_language, gettext_lazy, ngettext
from django.utils.translation import gettext as _

from djqueue.client import get_storage, registry
from djqueue.client.sending import enqueue
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError, OptionError
from djqueue.core.job import JobRecord
from djqueue.core.logs import Log
from djqueue.core.metrics import MINUTE
from djqueue.core.states import LIVE, State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import audit, boards, reading, rendering, rights
from djqueue.dashboard.jsontext import ARGUMENTS
from djqueue.dashboard.reading import CachedRead, read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.dashboard.timelines import Axis, PlacedBar, Timeline, TimelineRow
from djqueue.models import CronJob, JobState, ScheduleSource
from djqueue.operations.cronjobs import OVERDUE_AFTER, batch_of, job_id, next_runs, options_of
from djqueue.schedules import Schedule
from djqueue.schedules.expressions import LAST_DAY, LAST_WORKDAY, Fields, fields_of

logger = Log("djqueue.cron")
pages = Pages()
HOUR = 60 * MINUTE
MAX_LISTED = 500
"""Maximum schedules in the list."""
NEXT_RUNS = 5
"""Next runs shown."""
PAST_RUNS = 30
"""Past runs shown."""
OUTCOMES_FRESH = 5_000
"""Milliseconds before outcomes are read again."""
MAX_SEARCHES = 6
"""Maximum attempts to find past slots, each with another start time."""
MAX_STEPS = 300
"""Maximum slots examined per attempt."""
STRIP_ROWS = 20
"""Maximum schedules on the strip: those that run next."""
STRIP_HOURS = 24
"""Hours that the strip shows before and after the present."""
STRIP_RUNS = 48
"""Maximum next runs that the strip shows one by one; more of them are a band."""
Outcomes = Mapping[tuple[str, str], State]
"""States by queue and job ID. Removed jobs are missing."""
MAX_TIMES = 6
"""Maximum times of a day that are listed one by one."""


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
    return [row for row in rows_of(CronJob).order_by("name")[:MAX_LISTED] if sees_schedule(request, row)]


def find(request: HttpRequest, pk: int) -> CronJob | None:
    """Return a schedule; None if it doesn't exist or the user can't see it."""
    row = rows_of(CronJob).filter(pk=pk).first()
    return row if row is not None and sees_schedule(request, row) else None


def sees_schedule(request: HttpRequest, row: CronJob) -> bool:
    """Return whether the user can see the queue of a schedule's jobs.

    If this process can't tell the queue, only users who can see every queue may.
    """
    if not rights.hides_queues():
        return True
    if not has_known_queue(row) and not boards.sees_all(request):
        return False
    return rights.sees(request, queue_of(row))


def has_known_queue(row: CronJob) -> bool:
    """Return whether this process can tell the queue of a schedule's jobs.

    A row without a queue uses the job's default, which only a process with the job's handler knows.
    """
    return bool(row.queue) or registry.find(row.job_name) is not None


def schedule_parts(request: HttpRequest) -> Hashable:
    """Return what pages show of schedules: see `reading.Parts`.

    Arguments are left out: the tag of a page would confirm the guess of a hidden value.
    """
    rows = rows_of(CronJob).defer(*ARGUMENTS).order_by("name")[:MAX_LISTED]
    return tuple(
        tuple(getattr(row, name) for name in _columns()) for row in rows if sees_schedule(request, row)
    )


def rows_for(rows: Sequence[CronJob]) -> CachedRead[list[ScheduleRow]]:
    """Return schedules with their runs, using one read per queue for the outcomes."""
    now = SYSTEM_CLOCK.now()
    slots = {row.pk: _past(row) for row in rows}
    wanted: dict[str, list[str]] = {}
    for row in rows:
        wanted.setdefault(queue_of(row), []).extend(job_id(row, slot) for slot in slots[row.pk])
    key = ("schedules", *((row.pk, row.last_run_at) for row in rows))
    cached = read_cache.read(key, lambda: _outcomes(wanted), fresh=OUTCOMES_FRESH, versioned=True)
    found = [_row(row, slots[row.pk], cached.value, now) for row in rows]
    return cached._replace(value=found)  # type: ignore[arg-type, return-value]


def changes_at(request: HttpRequest, shown: Sequence[ScheduleRow]) -> None:
    """Let a page expire when one of these schedules runs next or becomes overdue."""
    for row in shown:
        if row.runs and not row.is_overdue:
            reading.expire_at(request, row.runs[0])
            reading.expire_at(request, row.runs[0] + OVERDUE_AFTER)


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
        return _("Every %s") % rendering.duration(row.timing().every or 0)
    return describe_cron(row.schedule)


def upcoming(row: CronJob) -> list[int]:
    """Return the next runs, in UTC milliseconds.

    Raises:
        DjqueueError: The schedule is not valid.
    """
    return list(_runs(row, NEXT_RUNS))


@pages.show("schedules", "schedules/", rights.VIEW, gettext_lazy("Schedules"), schedule_parts)
def cron(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List all schedules, by next run."""
    cached = rows_for(visible(request))
    rows = sorted(
        cached.value, key=lambda one: (not one.row.enabled, one.runs[:1] or [1 << 62], one.row.name)
    )
    changes_at(request, rows)
    context = {"schedules": rows, "limit": MAX_LISTED, "strip": strip(site, rows, SYSTEM_CLOCK.now())}
    return site.render(request, "schedules.html", _("Schedules"), context, tab="schedules", read=cached)


def strip(site: DashboardSite, rows: Sequence[ScheduleRow], now: int) -> Timeline | None:
    """Return the last and the next runs of schedules on one axis; None if there are none."""
    now = now // MINUTE * MINUTE
    length = STRIP_HOURS * HOUR
    axis = Axis(now - length, now + length)
    shown: list[TimelineRow] = []
    more = 0
    for one in rows:
        if len(shown) == STRIP_ROWS:
            # Their runs are not computed, as this takes long.
            more += bool(one.past or one.runs)
        elif spans := [*_past_spans(site, one, axis, now), *_next_spans(one, axis, now)]:
            shown.append(TimelineRow(one.row.name, site.url("schedule", one.row.pk), spans))
    if not shown:
        return None
    ticks = [
        (axis.place(at), rendering.clock(to_datetime(at)))
        for at in range(-(-(now - length) // HOUR) * HOUR, now + length, 6 * HOUR)
    ]
    return Timeline(shown, ticks, axis.place(now), more)


@pages.show("schedule", "schedules/<int:pk>/", rights.VIEW, parts=schedule_parts)
def schedule(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Show a schedule with the outcomes of its last runs."""
    crumbs = [site.crumb("schedules")]
    row = find(request, pk)
    if row is None:
        title, text = _("Schedule not found"), _("Schedule not found.")
        return site.not_found(request, title, text, tab="schedules", crumbs=crumbs)
    cached = rows_for([row])
    [one] = cached.value
    changes_at(request, [one])
    context = {"one": one, "history": list(reversed(_history(one)))}
    return site.render(
        request, "schedule.html", row.name, context, tab="schedules", crumbs=crumbs, read=cached
    )


@pages.act("schedule_run", "schedules/<int:pk>/run/", rights.CRON)
def run(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Enqueue a job of the schedule now."""
    row = find(request, pk)
    if row is None:
        return _gone(request, site)
    try:
        results = enqueue(get_storage(), batch_of(row, None))
    except DjqueueError:
        raise
    except Exception as error:
        # Raised by the project's middleware.
        logger.exception("Schedule %s: its job was not enqueued.", row.name)
        messages.error(request, _("The action failed: %(error)s") % {"error": error})
        return site.back(request, "schedules")
    for result in results:
        audit.note(
            request, "schedule_run", queue=result.queue, job_id=result.id, count=1, detail={"name": row.name}
        )
    messages.success(request, _("Enqueued a job for %(name)s.") % {"name": row.name})
    return site.back(request, "schedules")


@pages.act("schedule_switch", "schedules/<int:pk>/switch/", rights.CRON)
def switch(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Enable or disable the schedule. Runs missed while disabled are not made up for."""
    row = find(request, pk)
    if row is None:
        return _gone(request, site)
    on = request.POST.get("on") == "1"
    [one] = rows_for([row]).value
    if on and not one.can_be_switched:
        messages.warning(request, _("A schedule no longer declared in code can't be enabled."))
        return site.back(request, "schedules")
    if row.enabled != on:
        row.enabled = on
        row.save(using=alias_of(CronJob), update_fields=["enabled"])
        audit.note(
            request,
            "schedule_switch",
            queue=one.queue,
            detail={"name": row.name, "old": {"enabled": not on}, "new": {"enabled": on}},
        )
    message = _("Enabled %(name)s.") if on else _("Disabled %(name)s.")
    messages.success(request, message % {"name": row.name})
    return site.back(request, "schedules")


@pages.act("schedule_delete", "schedules/<int:pk>/delete/", rights.CRON)
def delete(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Delete the schedule; its jobs are kept. Entering its name confirms the deletion."""
    row = find(request, pk)
    if row is None:
        return _gone(request, site)
    [one] = rows_for([row]).value
    if not one.can_be_deleted:
        messages.warning(
            request, _("A schedule declared in code can't be deleted. Disable the schedule instead.")
        )
        return site.back(request, "schedule", pk)
    if request.POST.get("confirm") != row.name:
        messages.warning(request, _("Enter the schedule's name to confirm."))
        return site.back(request, "schedule", pk)
    row.delete(using=alias_of(CronJob))
    audit.note(request, "schedule_delete", queue=one.queue, detail={"name": row.name, "job": row.job_name})
    messages.success(request, _("Deleted %(name)s.") % {"name": row.name})
    return site.back(request, "schedules")


def describe_cron(expression: str) -> str:
    """Describe a cron expression.

    Raises:
        OptionError: The expression is not valid; checked before any of it is expanded.
    """
    return _describe_cron(expression, get_language())


@lru_cache(maxsize=1)
def _columns() -> tuple[str, ...]:
    """Return the columns that pages show."""
    return tuple(field.attname for field in CronJob._meta.concrete_fields if field.name not in ARGUMENTS)


def _row(row: CronJob, slots: Sequence[int], outcomes: Outcomes, now: int) -> ScheduleRow:
    queue, problem, runs, words = queue_of(row), "", [], ""
    try:
        words = words_of(row)
        runs = upcoming(row) if row.enabled else []
    except DjqueueError as error:
        problem = str(error)
    past = [PastRun(slot, job_id(row, slot), outcomes.get((queue, job_id(row, slot)))) for slot in slots]
    is_due, is_late = (bool(runs) and runs[0] <= now - late for late in (0, OVERDUE_AFTER))
    is_known = row.job_name in registry.names()
    return ScheduleRow(row, queue, words, runs, problem, is_due, is_late, is_known, past)


def _runs(row: CronJob, limit: int) -> Iterator[int]:
    return (to_milliseconds(at) for at in islice(next_runs(row), limit))


def _past_spans(site: DashboardSite, one: ScheduleRow, axis: Axis, now: int) -> list[PlacedBar]:
    spans = []
    for run in one.past:
        if run.slot >= now - STRIP_HOURS * HOUR:
            at, url = _at(run.slot), site.url("job", one.queue, run.id) if run.state is not None else ""
            spans.append(axis.span(run.kind, run.slot, run.slot, f"{at}: {run.label}", url))
    return spans


def _next_spans(one: ScheduleRow, axis: Axis, now: int) -> list[PlacedBar]:
    """Return the next runs, or a band if they are many."""
    if not one.runs:
        return []
    end = now + STRIP_HOURS * HOUR
    runs = list(takewhile(lambda at: at < end, _runs(one.row, STRIP_RUNS + 1)))
    if len(runs) > STRIP_RUNS:
        return [axis.span("next", max(now, runs[0]), end, one.words)]
    return [axis.span("next", at, at, f"{_at(at)}: {_('planned')}") for at in runs]


def _at(slot: int) -> str:
    return rendering.local(to_datetime(slot))


def _outcomes(wanted: Mapping[str, Sequence[str]]) -> Outcomes:
    outcomes: dict[tuple[str, str], State] = {}
    for queue, ids in wanted.items():
        if queue and ids:
            states = get_storage().reads.states(queue, ids)
            outcomes.update({(queue, one): state for one, state in zip(ids, states, strict=True) if state})
    return outcomes


def _past(row: CronJob) -> tuple[int, ...]:
    """Return the past slots, oldest first, from which the IDs of jobs are made."""
    limit = min(PAST_RUNS, row.executions)
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
    past, width, is_narrowed = [last], (limit + 1) * gap, False
    for _attempt in range(MAX_SEARCHES):
        begin = max(0, last - width)
        slots = list(islice(_between(schedule, begin, last), MAX_STEPS))
        if not slots or slots[-1] != last:  # more slots than are examined
            width, is_narrowed = width // 16, True
            continue
        past = slots[-limit:]
        if len(past) == limit or not begin or is_narrowed:
            break
        width *= 4
    return tuple(past)


def _between(schedule: Schedule, begin: int, last: int) -> Iterator[int]:
    slot = schedule.next_slot(begin)
    while slot is not None and slot <= last:
        yield slot
        slot = schedule.next_slot(slot)


def _history(one: ScheduleRow) -> list[tuple[PastRun, JobRecord | None]]:
    """Return the last runs with their jobs, if still kept; oldest first."""
    ids = [run.id for run in one.past]
    records = get_storage().reads.jobs(one.queue, ids) if ids and one.queue else [None] * len(ids)
    return list(zip(one.past, records, strict=True))


def _gone(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    messages.warning(request, _("This schedule no longer exists."))
    return site.back(request, "schedules")


@lru_cache(maxsize=1024)
def _describe_cron(expression: str, _language: str | None) -> str:
    fields = fields_of(expression)
    parts = [_describe_time(fields), _describe_day(fields), _describe_month(fields)]
    return str(capfirst(", ".join(filter(None, parts))))


def _describe_time(fields: Fields) -> str:
    seconds, minutes, hours = (sorted(one) for one in (fields.seconds, fields.minutes, fields.hours))
    if seconds != [0]:
        at = ngettext("at second %s", "at seconds %s", len(seconds))
        parts = [_within(seconds, 60, _("every second"), _("every %s seconds"), at)]
        if len(minutes) < 60:
            parts.append(ngettext("in minute %s", "in minutes %s", len(minutes)) % _listed(minutes))
        return ", ".join(parts + _hours(hours))
    if len(minutes) * len(hours) <= MAX_TIMES and len(hours) < 24:
        times = [f"{hour:02}:{minute:02}" for hour in hours for minute in minutes]
        return _("at %s") % get_text_list(times, _("and"))
    if minutes == [0] and (step := _step(hours, 24)):
        return _("every hour") if step == 1 else _("every %s hours") % step
    at = ngettext("at minute %s", "at minutes %s", len(minutes))
    parts = [_within(minutes, 60, _("every minute"), _("every %s minutes"), at)]
    return ", ".join(parts + _hours(hours))


def _hours(hours: Sequence[int]) -> list[str]:
    if len(hours) == 24:
        return []
    return [ngettext("in hour %s", "in hours %s", len(hours)) % _listed(hours)]


def _within(values: Sequence[int], all_of: int, every: str, each: str, at: str) -> str:
    step = _step(values, all_of)
    if step:
        return every if step == 1 else each % step
    return at % _listed(values)


def _step(values: Sequence[int], all_of: int) -> int:
    """Return the step of values that repeat forever, such as those of `*/5`; 0 if there is none."""
    steps = {later - earlier for earlier, later in pairwise([*values, values[0] + all_of])}
    return steps.pop() if len(steps) == 1 and values[0] == 0 and len(values) > 1 else 0


def _describe_day(fields: Fields) -> str:
    is_any_day, is_any_weekday = len(fields.days) == 31, len(fields.weekdays) == 7
    days, weekdays = _days(fields.days), _weekdays(fields.weekdays)
    if is_any_day and is_any_weekday:
        return _("every day") if len(fields.hours) < 24 else ""
    # Either field may match, so if one allows any day, every day matches.
    if not fields.is_both and (is_any_day or is_any_weekday):
        return _("every day")
    if is_any_weekday:
        return days
    if is_any_day:
        # "Monday to Friday" needs no preposition, unlike "on Monday".
        return _weekdays(fields.weekdays, "%s") if len(fields.weekdays) > 2 else weekdays
    if fields.is_both:
        return _("%(days)s if that is %(weekdays)s") % {"days": days, "weekdays": weekdays}
    return _("%(days)s, or %(weekdays)s") % {"days": days, "weekdays": weekdays}


def _days(days: Iterable[int]) -> str:
    named = {LAST_DAY: _("on the last day of the month"), LAST_WORKDAY: _("on the last workday of the month")}
    plain = sorted(set(days) - named.keys())
    day = ngettext("on day %s of the month", "on days %s of the month", len(plain))
    parts = [day % _listed(plain)] if plain else []
    parts += [text for day, text in named.items() if day in days]
    return get_text_list(parts, _("and"))


def _weekdays(weekdays: Iterable[int | tuple[int, int]], on: str = "") -> str:
    # Weeks start on Monday.
    plain = sorted((one + 6) % 7 for one in weekdays if isinstance(one, int))
    parts = [(on or _("on %s")) % _listed(plain, [str(WEEKDAYS[day]) for day in range(7)])] if plain else []
    for day, which in sorted(one for one in weekdays if isinstance(one, tuple)):
        name = WEEKDAYS[(day + 6) % 7]
        if which == LAST_DAY:
            parts.append(_("on the last %(weekday)s of the month") % {"weekday": name})
        else:
            text = _("on %(weekday)s no. %(number)d of the month")
            parts.append(text % {"weekday": name, "number": which})
    return get_text_list(parts, _("and"))


def _describe_month(fields: Fields) -> str:
    months = sorted(fields.months)
    if len(months) == 12:
        return ""
    return _("in %s") % _listed(months, ["", *(str(MONTHS[month]) for month in range(1, 13))])


def _listed(values: Sequence[int], names: Sequence[str] = ()) -> str:
    """Return values as text, with three or more in a row as a range."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts: list[str] = []
    for run in runs:
        shown = [names[value] if names else str(value) for value in run]
        if len(run) > 2:
            shown = [_("%(first)s to %(last)s") % {"first": shown[0], "last": shown[-1]}]
        parts += shown
    return get_text_list(parts, _("and"))
