"""The last hour on one time axis: deploys, lost attempts, pauses, bulk operations, backlog and failures."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from django.db import Error
from django.db.models import Model
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.logs import Log
from djqueue.core.metrics import MINUTE, Bucket
from djqueue.core.units import to_milliseconds
from djqueue.dashboard import boards, rendering, rights
from djqueue.dashboard.charts import ChartAnnotation
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.tables import rows_of
from djqueue.dashboard.timelines import Axis, Bar
from djqueue.dashboard.views.history import ACTION_LABELS
from djqueue.models import AuditEvent, BulkKind, BulkOperation
from djqueue.operations.problems import failing

logger = Log("djqueue.dashboard")
FRESH = 5_000
"""Milliseconds before the activity is read again."""
CHANGES = ("pause", "resume", "hold", "release", "limits", "limiter", "pause_key", "resume_key", "key_limits")
"""Actions on queues that change what starts."""
NEWEST = 500
"""Newest rows of the activity that are searched."""
MAX_OPERATIONS = 50
"""Newest bulk operations that are searched."""
OPERATIONS_FRESH = 15_000
"""Milliseconds before bulk operations are read again."""
TICKS = 6
"""Labels of the time axis."""


class Change(NamedTuple):
    """A change of what starts, by a user."""

    at: int
    """UTC milliseconds."""
    action: str
    """One of `CHANGES`."""
    queue: str
    user: str


class Operation(NamedTuple):
    """A bulk operation."""

    pk: int
    kind: str
    begun: int
    """UTC milliseconds."""
    over: int | None
    """None if it is not over."""
    queues: tuple[str, ...]


class StripMark(NamedTuple):
    """A moment or a period on the axis."""

    left: str
    """Start in percent of the axis, and `width` of a period."""
    width: str
    label: str
    url: str
    kind: str


class StripRow(NamedTuple):
    """A row of the strip."""

    label: str
    marks: tuple[StripMark, ...] = ()
    bars: tuple[Bar, ...] = ()
    kind: str = ""
    note: str = ""
    """The row as text."""


class Strip(NamedTuple):
    """The strip."""

    rows: tuple[StripRow, ...]
    ticks: tuple[tuple[str, int], ...]
    """Place in percent, and time in UTC milliseconds."""


def changes(request: HttpRequest) -> list[Change]:
    """Return the newest changes to queues that the user can see, newest first."""
    known = read_cache.read("changes", _read_changes, fresh=FRESH).value
    return [one for one in known if rights.sees(request, one.queue)]


def operations(request: HttpRequest) -> list[Operation]:
    """Return the bulk operations of the last hour on queues that the user can see, newest first."""
    known = read_cache.read("operations", _read_operations, fresh=OPERATIONS_FRESH).value
    return [one for one in known if rights.sees_each(request, one.queues)]


def parts(_request: HttpRequest) -> Hashable:
    """Return what the strip shows beyond the storage's data: see `reading.Parts`."""
    return tuple(read_cache.read("changes", _read_changes, fresh=FRESH).value)


def pauses(known: Sequence[Change]) -> dict[str, tuple[int, str]]:
    """Return time and user of the last pause of each queue, if no user has resumed it since."""
    last: dict[str, Change] = {}
    for one in known:
        if one.action in ("pause", "resume"):
            last.setdefault(one.queue, one)
    return {queue: (one.at, one.user) for queue, one in last.items() if one.action == "pause"}


def backlog(pending: int, buckets: Sequence[Bucket]) -> list[int]:
    """Return the number of jobs that had not ended at the end of each minute, from the current number.

    Jobs that were moved or removed, and dead letters that were retried, are not counted.
    """
    sizes = []
    for bucket in reversed(buckets):
        sizes.append(max(0, pending))
        pending -= bucket.enqueued - bucket.completed - bucket.failed - bucket.cancelled
    return sizes[::-1]


def strip(
    site: DashboardSite,
    known: Sequence[Change],
    begun: Sequence[Operation],
    series: Sequence[Bucket],
    annotations: Sequence[ChartAnnotation],
    pending: int,
) -> Strip | None:
    """Return the strip of the last hour; None without queues."""
    if not series:
        return None
    start, end = series[0].start, series[-1].start + series[-1].step
    axis = Axis(start, end)
    lost = [bucket for bucket in series if bucket.stalled]
    sizes, rates = backlog(pending, series), [failing([bucket]) for bucket in series]
    rows = (
        StripRow(
            _("Deploys"),
            tuple(
                StripMark(axis.place(one.at), "", one.label, site.url("job_types"), "deploy")
                for one in annotations
            ),
        ),
        StripRow(
            _("Lost attempts"),
            tuple(
                StripMark(axis.place(one.start), "", _lost(one.stalled), site.url("workers"), "lost")
                for one in lost
            ),
        ),
        StripRow(
            _("Pauses, limits"),
            tuple(
                StripMark(
                    axis.place(at),
                    "",
                    f"{ACTION_LABELS[action]}: {queue} ({user})",
                    site.url("queue", queue) if queue else site.url("history"),
                    "resume" if action in ("resume", "resume_key", "release") else "pause",
                )
                for at, action, queue, user in known
                if at >= start
            ),
        ),
        StripRow(
            _("Bulk operations"),
            tuple(
                StripMark(
                    axis.place(max(start, one.begun)),
                    axis.width(max(start, one.begun), end if one.over is None else one.over),
                    str(BulkKind(one.kind).label),
                    site.url("operation", one.pk),
                    "operation",
                )
                for one in begun
            ),
        ),
        StripRow(
            _("Backlog"),
            bars=axis.bars(sizes, max(sizes)),
            kind="backlog",
            note=_("about %(least)s to %(most)s")
            % {
                "least": rendering.number(min(sizes)),
                "most": rendering.number(max(sizes)),
            },
        ),
        StripRow(
            _("Failing"),
            bars=axis.bars(rates, max(0.1, *rates)),
            kind="failing",
            note=_("up to %(rate)s") % {"rate": rendering.percent(max(rates) * 100)},
        ),
    )
    step = (end - start) // TICKS // MINUTE * MINUTE
    ticks = tuple((axis.place(start + at * step), start + at * step) for at in range(TICKS))
    return Strip(rows, ticks)


def _lost(count: int) -> str:
    text = ngettext("%(count)s attempt lost", "%(count)s attempts lost", count)
    return text % {"count": rendering.number(count)}


def _read_changes() -> list[Change]:
    columns = ("at", "action", "queue", "user", "refused")
    newest = _newest(AuditEvent, NEWEST, columns)
    return [
        Change(to_milliseconds(at), action, queue, user)
        for at, action, queue, user, refused in newest
        if action in CHANGES and not refused
    ]


def _read_operations() -> list[Operation]:
    start = SYSTEM_CLOCK.now() - boards.CHART_MINUTES * MINUTE
    newest = _newest(BulkOperation, MAX_OPERATIONS, ("pk", "kind", "created_at", "finished_at", "filter"))
    return [
        Operation(pk, kind, to_milliseconds(begun), over and to_milliseconds(over), tuple(given["queues"]))
        for pk, kind, begun, over, given in newest
        if over is None or to_milliseconds(over) >= start
    ]


def _newest(model: type[Model], limit: int, columns: Sequence[str]) -> list[Any]:
    try:
        return list(rows_of(model).order_by("-pk").values_list(*columns)[:limit])
    except Error as error:
        logger.debug("Could not read the activity; the page shows none: %s", error)
        return []
