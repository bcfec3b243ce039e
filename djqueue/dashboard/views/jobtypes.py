"""The list of job types: metrics of a period and the previous one, by job and by queue, and hourly rollups.

Rollups include jobs that the storage has removed.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from django.db import Error, transaction
from django.db.models import Max, Sum
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage, registry
from djqueue.client.declarations import RegisteredJob
from djqueue.core.errors import DjqueueError
from djqueue.core.logs import Log
from djqueue.core.metrics import BOUNDS, OTHERS, Bucket, Histogram
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import boards, charts, rights
from djqueue.dashboard.boards import empty_bucket, jobs_ended, sum_of
from djqueue.dashboard.reading import CachedRead, read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.storage import sparktables

logger = Log("djqueue.dashboard")
pages = Pages()
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
COUNTS = ("enqueued", "started", "completed", "retried", "failed", "cancelled", "stalled")
ROLLUPS_FRESH = 60_000
"""Milliseconds before rollups are read again; they are written once an hour."""
ROLLUP_COUNTS = ("enqueued", "completed", "failed", "retried")
ROLLUP_TIMES = ("wait_p50", "wait_p95", "wait_p99", "run_p50", "run_p95", "run_p99")
MAX_REASONS = 2_000
"""Maximum rollups whose failure reasons are added up: those with most failures."""


class MetricWindow(NamedTuple):
    """A period, and the step of its charts."""

    word: str
    label: object
    length: int
    """Milliseconds, like `step`."""
    step: int


class MetricRow(NamedTuple):
    """A queue or job name in the period and in the previous one."""

    label: str
    now: Bucket
    before: Bucket

    @property
    def change(self) -> float | None:
        """Percentage by which the number of finished jobs changed."""
        now, before = jobs_ended(self.now), jobs_ended(self.before)
        return (now - before) / before * 100 if before else None

    @property
    def failing(self) -> float:
        """Percentage of finished jobs that failed."""
        total = jobs_ended(self.now)
        return self.now.failed / total * 100 if total else 0.0


class MetricReport(NamedTuple):
    """A period compared with the previous one."""

    window: MetricWindow
    start: int
    end: int
    series: list[Bucket]
    queues: list[MetricRow]
    names: list[MetricRow]
    total: Bucket


class RollupStep(NamedTuple):
    """The counts and times of one step of a chart."""

    start: int
    """UTC milliseconds."""
    counts: tuple[int, ...]
    """The sum of each of `COUNTS`."""
    times: tuple[int | None, ...]
    """The longest of each of `TIMES`, in milliseconds."""


class Rolled(NamedTuple):
    """The rollups of a period, and why jobs failed in it."""

    step: int
    """Milliseconds."""
    steps: list[RollupStep]
    reasons: list[tuple[str, int]]
    """Most frequent first."""


WINDOWS = (
    MetricWindow("hour", gettext_lazy("1 hour"), HOUR, MINUTE),
    MetricWindow("6h", gettext_lazy("6 hours"), 6 * HOUR, 5 * MINUTE),
    MetricWindow("day", gettext_lazy("24 hours"), DAY, 15 * MINUTE),
    MetricWindow("week", gettext_lazy("7 days"), 7 * DAY, 2 * HOUR),
    MetricWindow("month", gettext_lazy("30 days"), 30 * DAY, 12 * HOUR),
    MetricWindow("quarter", gettext_lazy("90 days"), 90 * DAY, DAY),
)


@pages.show("job_types", "job-types/", rights.VIEW, gettext_lazy("Job types"))
def job_types(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List the job types with their metrics in a period, and those that did not run in it."""
    queue = request.GET.get("queue", "")
    cached = _report(request, window_of(request), queue)
    report = cached.value
    here = {"queue": queue, "window": report.window.word}
    names = [line.name for line in boards.board(request).value.lines]
    ran = {row.label for row in report.names}
    seen = [name for name in names if queue in ("", name)]
    context = {
        "report": report,
        "rolled": rollups_within(report.start, report.end, report.window.step, seen),
        "series": report.series,
        "annotations": charts.annotations_within(report.series),
        "queue": queue,
        "queues": names,
        "idle": [name for name in visible_names(request) if name not in ran] if not queue else [],
        "others": OTHERS,
        "windows": WINDOWS,
        "period": _("hour") if report.window.length == HOUR else report.window.label,
        "histogram": _histogram(report.total),
        "csv_url": site.url("job_types_export", **here, format="csv"),
        "json_url": site.url("job_types_export", **here, format="json"),
    }
    return site.render(request, "job_types.html", _("Job types"), context, tab="job_types", read=cached)


@pages.show("job_types_export", "job-types/all/export/", rights.VIEW)
def export(request: HttpRequest, _site: DashboardSite) -> HttpResponse:
    """Export the steps of a period as CSV or JSON."""
    report = _report(request, window_of(request), request.GET.get("queue", "")).value
    rows = [
        {
            "start": to_datetime(bucket.start).isoformat(),
            **{name: getattr(bucket, name) for name in COUNTS},
            **{f"wait_p{part}_ms": _milliseconds(bucket.wait, part) for part in (50, 95, 99)},
            **{f"run_p{part}_ms": _milliseconds(bucket.run, part) for part in (50, 95, 99)},
        }
        for bucket in report.series
    ]
    if request.GET.get("format") == "json":
        return HttpResponse(json.dumps(rows), content_type="application/json")
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["start"])
    writer.writeheader()
    writer.writerows(rows)
    response = HttpResponse(text.getvalue(), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="metrics.csv"'
    return response


def rollups_within(start: int, end: int, step: int, queues: Sequence[str]) -> Rolled | None:
    """Return the rollups of queues in a period; None if there are none, or no table."""
    step = max(step, HOUR)
    start = start // step * step
    if end - start < 2 * step:
        return None
    key = ("rollups", start, end, step, *queues)
    return read_cache.read(key, lambda: _read_rollups(start, end, step, queues), ROLLUPS_FRESH).value


def visible_names(request: HttpRequest) -> list[str]:
    """Return the names of the jobs registered in this process whose queue the user can see."""
    return sorted(name for name, job_type in registry.all().items() if sees_type(request, job_type))


def sees_type(request: HttpRequest, job_type: RegisteredJob) -> bool:
    """Return whether the user can see the queue of a registered job."""
    return not rights.hides_queues() or rights.sees(request, queue_of(job_type))


def queue_of(job_type: RegisteredJob) -> str:
    """Return the queue of a registered job; empty if the settings do not have it."""
    try:
        return job_type.options.queue or ""
    except DjqueueError:
        return ""


def window_of(request: HttpRequest) -> MetricWindow:
    """Return the period that a query string chooses."""
    chosen = request.GET.get("window", "")
    return next((one for one in WINDOWS if one.word == chosen), WINDOWS[0])


def _report(request: HttpRequest, window: MetricWindow, queue: str) -> CachedRead[MetricReport]:
    board = boards.board(request).value
    names = [line.name for line in board.lines if queue in ("", line.name)]
    key = ("job_types", window.word, *names)
    return read_cache.read(key, lambda: _read(window, names, board.at), fresh=5_000, versioned=True)


def _read(window: MetricWindow, queues: list[str], at: int) -> MetricReport:
    end = at // window.step * window.step + window.step
    start = end - window.length
    storage = get_storage()
    by_queue = storage.reads.series(queues, start, end, window.step)
    earlier = storage.reads.series(queues, start - window.length, start, window.step)
    by_name = storage.reads.series(queues, start, end, window.step, by_name=True)
    earlier_by_name = storage.reads.series(queues, start - window.length, start, window.step, by_name=True)
    steps: dict[int, list[Bucket]] = {
        at: [empty_bucket("", at, window.step)] for at in range(start, end, window.step)
    }
    for bucket in by_queue:
        steps[bucket.start].append(bucket)
    return MetricReport(
        window,
        start,
        end,
        [sum_of(buckets) for buckets in steps.values()],
        _rows(by_queue, earlier, attrgetter("queue"), window),
        _rows(by_name, earlier_by_name, attrgetter("name"), window),
        sum_of([empty_bucket("", start, window.length), *by_queue]),
    )


def _rows(
    now: list[Bucket], before: list[Bucket], of: Callable[[Bucket], str], window: MetricWindow
) -> list[MetricRow]:
    sums: dict[str, tuple[list[Bucket], list[Bucket]]] = {}
    for index, buckets in enumerate((now, before)):
        for bucket in buckets:
            empty = [empty_bucket("", bucket.start, window.length)]
            sums.setdefault(of(bucket), (empty, [*empty]))[index].append(bucket)
    rows = [MetricRow(label, sum_of(these), sum_of(those)) for label, (these, those) in sums.items()]
    rows = [row for row in rows if jobs_ended(row.now) or row.now.enqueued]
    return sorted(rows, key=lambda row: (-jobs_ended(row.now), row.label))


def _milliseconds(times: Histogram, part: int) -> float | None:
    found = times.percentile(part / 100)
    return None if found is None else found.milliseconds


def _histogram(total: Bucket) -> list[tuple[int, int | None, int, int]]:
    """Return number, upper bound in milliseconds (None: slower), waits and runs of each class up to the last
    that has any.
    """
    times = [*zip((*BOUNDS, None), total.wait.counts, total.run.counts, strict=True)]
    used = max((index for index, (_, waits, runs) in enumerate(times, 1) if waits or runs), default=0)
    return [(index, *one) for index, one in enumerate(times[:used], 1)]


def _read_rollups(start: int, end: int, step: int, queues: Sequence[str]) -> Rolled | None:
    if not sparktables.are_installed():
        return None
    model = sparktables.spark_model("Rollup")
    rows = rows_of(model).filter(hour__gte=to_datetime(start), hour__lt=to_datetime(end), queue__in=queues)
    sums = {name: Sum(name) for name in ROLLUP_COUNTS} | {name: Max(name) for name in ROLLUP_TIMES}
    try:
        # A missing table must not end a transaction around the request.
        with transaction.atomic(using=alias_of(model)):
            hours = list(
                rows.order_by().values("hour").annotate(**{f"of_{name}": sums[name] for name in sums})
            )
            failed = rows.filter(failed__gt=0).order_by("-failed", "-hour").values_list("reasons", flat=True)
            reasons = list(failed[:MAX_REASONS]) if hours else []
    except Error as error:
        logger.debug("Could not read the rollups; the page shows none: %s", error)
        return None
    if not hours:
        return None
    steps = {
        at: RollupStep(at, (0,) * len(ROLLUP_COUNTS), (None,) * len(ROLLUP_TIMES))
        for at in range(start, end, step)
    }
    for hour in hours:
        at = to_milliseconds(hour["hour"]) // step * step
        steps[at] = _added(steps[at], hour)
    total = Counter[str]()
    for counts in reasons:
        total.update(counts)
    return Rolled(step, list(steps.values()), sorted(total.items(), key=lambda pair: (-pair[1], pair[0])))


def _added(step: RollupStep, hour: Mapping[str, Any]) -> RollupStep:
    counts = tuple(
        had + (hour[f"of_{name}"] or 0) for had, name in zip(step.counts, ROLLUP_COUNTS, strict=True)
    )
    times = tuple(
        _longer(had, hour[f"of_{name}"]) for had, name in zip(step.times, ROLLUP_TIMES, strict=True)
    )
    return step._replace(counts=counts, times=times)


def _longer(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
