"""Schedules of jobs."""

from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import islice

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy as _

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import rendering
from djqueue.models import CronJob

from . import gate
from .base import ReadOnlyAdmin, time_column

NEXT_RUNS = 5
"""Next runs that a page shows."""


@admin.register(CronJob)
class CronJobAdmin(ReadOnlyAdmin):
    """Schedules, with their next and last runs."""

    visible_rows = staticmethod(gate.schedules)
    dashboard_page = "cron"
    list_display = (
        "name",
        "enabled",
        "schedule_shown",
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
        (_("Schedule"), {"fields": ("schedule", "every", "timezone", "jitter")}),
        (_("Limits"), {"fields": ("start_at", "end_at", "max_executions")}),
        (_("Options"), {"fields": ("overlap", "missed", "missed_window", "blackouts", "on_blackout")}),
        (_("Arguments"), {"fields": ("args_shown", "kwargs_shown")}),
        (_("Runs"), {"fields": ("next_runs", "last_run", "executions", "last_skipped", "source")}),
    )

    last_run = time_column(CronJob, "last_run_at")

    def row_url(self, request: HttpRequest, row: CronJob) -> str:
        """Return the URL of the schedule's page on the dashboard."""
        return self.dashboard_url(request, "schedule", row.pk)

    @admin.display(description=_("schedule"))
    def schedule_shown(self, row: CronJob) -> str:
        """Show the cron expression or the interval, and the time zone below."""
        return format_html("{}<br><small>{}</small>", row.schedule or f"every {row.every}", row.timezone)

    @admin.display(description=_("next run"), ordering="next_run_at")
    def next_run(self, row: CronJob) -> str:
        """Show the next run, with its jitter."""
        at = row.next_run_at
        try:
            fires = None if at is None else row.timing().fires_at(to_milliseconds(at), row.name)
        except DjqueueError as error:
            return str(error)
        return rendering.NOTHING if fires is None else _due_or(rendering.moment, to_datetime(fires))

    @admin.display(description=_("next runs"))
    def next_runs(self, row: CronJob) -> str:
        """Show the next runs, with their jitter, in the schedule's time zone."""
        from djqueue.operations.agenda import next_runs

        if not row.enabled:
            return rendering.NOTHING
        try:
            shown = partial(rendering.moment_in, zone=row.timezone)
            runs = [(_due_or(shown, at),) for at in islice(next_runs(row), NEXT_RUNS)]
        except DjqueueError as error:
            return str(error)
        return format_html_join(mark_safe("<br>"), "{}", runs) or rendering.NOTHING

    @admin.display(description=_("last skipped run"))
    def last_skipped(self, row: CronJob) -> str:
        """Show the last run that enqueued no job, and why."""
        if row.skipped_at is None:
            return rendering.NOTHING
        return format_html("{}: {}", rendering.moment_in(row.skipped_at, row.timezone), row.skip_reason)

    @admin.display(description=_("positional arguments"))
    def args_shown(self, row: CronJob) -> str:
        """Show the positional arguments without their hidden values."""
        return _arguments(row, "args")

    @admin.display(description=_("keyword arguments"))
    def kwargs_shown(self, row: CronJob) -> str:
        """Show the keyword arguments without their hidden values."""
        return _arguments(row, "kwargs")


def _due_or(shown: Callable[[datetime], str], at: datetime) -> str:
    return str(_("due, waits for a worker")) if at <= to_datetime(SYSTEM_CLOCK.now()) else shown(at)


def _arguments(row: CronJob, name: str) -> str:
    from djqueue.dashboard.views.scheduleform import shown_arguments

    return rendering.preformatted(rendering.text(shown_arguments(row)[name]))
