"""Jobs by schedule: a list, whose rows are changed on the dashboard."""

from collections.abc import Iterable
from itertools import islice

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.errors import DjqueueError
from djqueue.dashboard import rendering
from djqueue.dashboard.views.schedules import shown_arguments
from djqueue.models import CronJob
from djqueue.operations.agenda import next_runs, shown

from . import gate
from .base import StoredAdmin, time_column

LINE = mark_safe("<br>")
SHOWN = 5
"""Runs to come that a page shows."""


@admin.register(CronJob)
class CronJobAdmin(StoredAdmin):
    """Schedules."""

    seen = staticmethod(gate.schedules)
    is_raw = False
    dashboard_page = "cron"
    list_display = (
        "name",
        "enabled",
        "when",
        "next_run",
        "last_run",
        "executions",
        "job_name",
        "queue",
        "source",
    )
    list_filter = ("enabled", "source")
    search_fields = ("name", "job_name")
    ordering = ("name",)
    fieldsets = (
        (None, {"fields": ("name", "job_name", "queue", "enabled")}),
        (_("When"), {"fields": ("schedule", "every", "timezone", "jitter")}),
        (_("Limits"), {"fields": ("start_at", "end_at", "max_executions")}),
        (_("Otherwise"), {"fields": ("overlap", "missed", "missed_window", "blackouts", "on_blackout")}),
        (_("With"), {"fields": ("args_shown", "kwargs_shown")}),
        (_("Runs"), {"fields": ("next_runs", "last_run", "executions", "left_out", "source")}),
    )

    last_run = time_column(CronJob, "last_run_at")

    def links_of(self, request: HttpRequest, row: CronJob) -> Iterable[tuple[str, str]]:
        """Return the address of the schedule's page, where it is changed."""
        return [(_now("Open in the dashboard"), self.dashboard_url(request, "schedule", row.pk))]

    @admin.display(description=_("schedule"))
    def when(self, row: CronJob) -> str:
        """The line, or the interval, and below it the zone."""
        return format_html("{}<br><small>{}</small>", row.schedule or f"every {row.every}", row.timezone)

    @admin.display(description=_("next run"), ordering="next_run_at")
    def next_run(self, row: CronJob) -> str:
        """With its jitter."""
        at = row.next_run_at
        try:
            fires = None if at is None else row.timing().fires_at(to_milliseconds(at), row.name)
        except DjqueueError as error:
            return str(error)
        return rendering.moment(None if fires is None else to_datetime(fires))

    @admin.display(description=_("next runs"))
    def next_runs(self, row: CronJob) -> str:
        """Some of them, with their jitter, on the clocks of the schedule's zone."""
        if not row.enabled:
            return rendering.NOTHING
        try:
            runs = [(at.isoformat(), shown(row, at)) for at in islice(next_runs(row), SHOWN)]
        except DjqueueError as error:
            return str(error)
        return format_html_join(LINE, '<time datetime="{}">{}</time>', runs) or rendering.NOTHING

    @admin.display(description=_("last left out"))
    def left_out(self, row: CronJob) -> str:
        """The last run that has no job, and why."""
        if row.skipped_at is None:
            return rendering.NOTHING
        return f"{shown(row, row.skipped_at)}: {row.skip_reason}"

    @admin.display(description=_("positional arguments"))
    def args_shown(self, row: CronJob) -> str:
        """The list, without its hidden values."""
        return _part(row, "args")

    @admin.display(description=_("keyword arguments"))
    def kwargs_shown(self, row: CronJob) -> str:
        """The object, without its hidden values."""
        return _part(row, "kwargs")


def _part(row: CronJob, name: str) -> str:
    return rendering.preformatted(rendering.text(shown_arguments(row)[name]))
