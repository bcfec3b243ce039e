"""Metrics of a period and the previous one, by queue and by job."""

import csv
import io
import json
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.metrics import BOUNDS, Bucket
from djqueue.core.units import to_datetime
from djqueue.dashboard import annotations, queries, rights, rollups
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.queries import ended, merged, nothing
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.snapshot import CachedRead, snapshots

pages = Pages()

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000


class MetricWindow(NamedTuple):
    """A period, and the step of its charts."""

    word: str
    label: object
    length: int
    """Milliseconds, like `step`."""
    step: int


WINDOWS = (
    MetricWindow("hour", gettext_lazy("1 hour"), HOUR, MINUTE),
    MetricWindow("6h", gettext_lazy("6 hours"), 6 * HOUR, 5 * MINUTE),
    MetricWindow("day", gettext_lazy("24 hours"), DAY, 15 * MINUTE),
    MetricWindow("week", gettext_lazy("7 days"), 7 * DAY, 2 * HOUR),
    MetricWindow("month", gettext_lazy("30 days"), 30 * DAY, 12 * HOUR),
    MetricWindow("quarter", gettext_lazy("90 days"), 90 * DAY, DAY),
)
COUNTS = ("enqueued", "started", "completed", "retried", "failed", "cancelled", "stalled")


class MetricRow(NamedTuple):
    """A queue or job name in the period and in the previous one."""

    label: str
    now: Bucket
    before: Bucket

    @property
    def change(self) -> float | None:
        """Percentage by which the number of finished jobs changed."""
        now, before = ended(self.now), ended(self.before)
        return (now - before) / before * 100 if before else None

    @property
    def failing(self) -> float:
        """Percentage of finished jobs that failed."""
        total = ended(self.now)
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


@pages.show("metrics", "metrics/", rights.VIEW, gettext_lazy("Metrics"))
def metrics(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show charts and tables of a period."""
    queue = request.GET.get("queue", "")
    cached = _report(request, _window(request), queue)
    report = cached.value
    here = {"queue": queue, "window": report.window.word}
    names = [line.name for line in queries.board(request).value.lines]
    seen = [name for name in names if queue in ("", name)]
    context = {
        "report": report,
        "rolled": rollups.within(report.start, report.end, report.window.step, seen),
        "series": report.series,
        "annotations": annotations.within(report.series),
        "queue": queue,
        "queues": names,
        "windows": WINDOWS,
        "histogram": _histogram(report.total),
        "csv_url": site.url("metrics_export", **here, format="csv"),
        "json_url": site.url("metrics_export", **here, format="json"),
    }
    return site.render(request, "metrics.html", _("Metrics"), context, tab="metrics", read=cached)


@pages.show("metrics_export", "metrics/export/", rights.VIEW)
def export(request: HttpRequest, _site: DashboardSite) -> HttpResponse:
    """Export the steps of a period as CSV or JSON."""
    report = _report(request, _window(request), request.GET.get("queue", "")).value
    rows = [
        {
            "start": to_datetime(bucket.start).isoformat(),
            **{name: getattr(bucket, name) for name in COUNTS},
            **{f"wait_p{part}_ms": bucket.wait.percentile(part / 100) for part in (50, 95, 99)},
            **{f"run_p{part}_ms": bucket.run.percentile(part / 100) for part in (50, 95, 99)},
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


def _window(request: HttpRequest) -> MetricWindow:
    chosen = request.GET.get("window", "")
    return next((one for one in WINDOWS if one.word == chosen), WINDOWS[0])


def _report(request: HttpRequest, window: MetricWindow, queue: str) -> CachedRead[MetricReport]:
    board = queries.board(request).value
    names = [line.name for line in board.lines if queue in ("", line.name)]
    key = ("metrics", window.word, *names)
    return snapshots.read(key, lambda: _read(window, names, board.at), fresh=5_000, versioned=True)


def _read(window: MetricWindow, queues: list[str], at: int) -> MetricReport:
    end = at // window.step * window.step + window.step
    start = end - window.length
    storage = get_storage()
    by_queue = storage.reads.series(queues, start, end, window.step)
    earlier = storage.reads.series(queues, start - window.length, start, window.step)
    by_name = storage.reads.series(queues, start, end, window.step, by_name=True)
    earlier_by_name = storage.reads.series(queues, start - window.length, start, window.step, by_name=True)
    steps: dict[int, list[Bucket]] = {
        at: [nothing("", at, window.step)] for at in range(start, end, window.step)
    }
    for bucket in by_queue:
        steps[bucket.start].append(bucket)
    return MetricReport(
        window,
        start,
        end,
        [merged(buckets) for buckets in steps.values()],
        _rows(by_queue, earlier, attrgetter("queue"), window),
        _rows(by_name, earlier_by_name, attrgetter("name"), window),
        merged([nothing("", start, window.length), *by_queue]),
    )


def _rows(
    now: list[Bucket], before: list[Bucket], of: Callable[[Bucket], str], window: MetricWindow
) -> list[MetricRow]:
    sums: dict[str, tuple[list[Bucket], list[Bucket]]] = {}
    for index, buckets in enumerate((now, before)):
        for bucket in buckets:
            empty = [nothing("", bucket.start, window.length)]
            sums.setdefault(of(bucket), (empty, [*empty]))[index].append(bucket)
    rows = [MetricRow(label, merged(these), merged(those)) for label, (these, those) in sums.items()]
    rows = [row for row in rows if ended(row.now) or row.now.enqueued]
    return sorted(rows, key=lambda row: (-ended(row.now), row.label))


def _histogram(total: Bucket) -> list[tuple[int, int | None, int, int]]:
    """Return number, upper bound in milliseconds (None: slower), waits and runs of each class."""
    bounds = [*BOUNDS, None]
    return [
        (index, bound, waits, runs)
        for index, (bound, waits, runs) in enumerate(
            zip(bounds, total.wait.counts, total.run.counts, strict=True), 1
        )
    ]
