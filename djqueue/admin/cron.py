"""Jobs by schedule: the one table that is edited here."""

import logging
from itertools import islice
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop, ngettext

from djqueue.client import get_storage, registry
from djqueue.client.sending import enqueue
from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.errors import DjqueueError
from djqueue.dashboard import rendering
from djqueue.dashboard.tables import alias_of
from djqueue.models import CronJob, ScheduleSource
from djqueue.operations.agenda import next_runs, shown
from djqueue.operations.cron import batch_of

from .actions import record
from .base import ModelAdmin, time_column

logger = logging.getLogger("djqueue.cron")

RUNS = ("next_runs", "last_run", "executions", "left_out", "source")
LINE = mark_safe("<br>")
SHOWN = 5
"""Runs to come that the form shows."""


@admin.register(CronJob)
class CronJobAdmin(ModelAdmin):
    """Schedules. Whoever fires them sees a change at the next look, about a second later."""

    actions = ("run_now", "enable", "disable")
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
        (_("With"), {"fields": ("args", "kwargs")}),
        (_("Runs"), {"fields": RUNS}),
    )
    readonly_fields = RUNS

    last_run = time_column(CronJob, "last_run_at")

    class Media:
        css = {"all": ["djqueue/djqueue.css"]}

    @admin.display(description=_("schedule"))
    def when(self, row: CronJob) -> str:
        """The line, or the interval, and below it the zone."""
        return format_html("{}<br><small>{}</small>", row.schedule or f"every {row.every}", row.timezone)

    @admin.display(description=_("next run"), ordering="next_run_at")
    def next_run(self, row: CronJob) -> str:
        """With its jitter."""
        at = row.next_run_at
        if at is not None:
            at = to_datetime(row.timing().fires_at(to_milliseconds(at), row.name))
        return rendering.moment(at)

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

    def get_fieldsets(self, request: HttpRequest, obj: CronJob | None = None) -> Any:
        """A new one has no runs yet."""
        return self.fieldsets[:-1] if obj is None else self.fieldsets

    def get_queryset(self, request: HttpRequest) -> Any:
        """Of the storage's database."""
        return super().get_queryset(request).using(alias_of(CronJob))

    def get_readonly_fields(self, request: HttpRequest, obj: CronJob | None = None) -> Any:
        """Of a schedule that code declares, everything but whether it is switched on."""
        if obj is None or obj.source == ScheduleSource.HAND:
            return self.readonly_fields
        every: list[Any] = [name for _title, group in self.fieldsets for name in group["fields"]]
        return [name for name in every if name != "enabled" or obj.source == ScheduleSource.WITHDRAWN]

    def has_delete_permission(self, request: HttpRequest, obj: CronJob | None = None) -> bool:
        """Not for what code declares: it would come back."""
        if obj is not None and obj.source == ScheduleSource.CODE:
            return False
        return super().has_delete_permission(request, obj)

    def has_run_permission(self, request: HttpRequest) -> bool:
        """Whether the user may enqueue a job of a schedule now."""
        user: Any = request.user
        return bool(user.has_perm("djqueue.run_cronjob"))

    def save_model(self, request: HttpRequest, obj: CronJob, form: Any, change: bool) -> None:
        """With a word if the job is not known here: it may be known to the workers."""
        obj.save(using=alias_of(CronJob))
        if obj.job_name not in registry.names():
            said = _now("No handler is registered here as %(name)s: check the job's name.")
            messages.warning(request, said % {"name": obj.job_name})

    @admin.action(permissions=["run"], description=_("Run selected cron jobs now"))
    def run_now(self, request: HttpRequest, rows: "QuerySet[CronJob]") -> None:
        """Enqueue a job of each, whatever its schedule says."""
        done = []
        for row in rows.order_by("pk"):
            try:
                enqueue(get_storage(), batch_of(row, None))
            except DjqueueError as error:
                _refuse(request, row, error)
            except Exception as error:
                # Of the project's own middleware.
                logger.exception("The cron job %s was not enqueued.", row.name)
                _refuse(request, row, error)
            else:
                done.append(row)
        if done:
            said = ngettext("%d job was enqueued.", "%d jobs were enqueued.", len(done))
            messages.success(request, said % len(done))
        record(request, done, CHANGE, gettext_noop("Run now."))

    @admin.action(permissions=["change"], description=_("Switch selected cron jobs on"))
    def enable(self, request: HttpRequest, rows: "QuerySet[CronJob]") -> None:
        """What passed while they were off is not made up for."""
        if rows.filter(source=ScheduleSource.WITHDRAWN).exists():
            messages.warning(request, _now("What code declares no more stays off."))
        self._switch(request, rows.exclude(source=ScheduleSource.WITHDRAWN), on=True)

    @admin.action(permissions=["change"], description=_("Switch selected cron jobs off"))
    def disable(self, request: HttpRequest, rows: "QuerySet[CronJob]") -> None:
        """They stay, and enqueue nothing."""
        self._switch(request, rows, on=False)

    def _switch(self, request: HttpRequest, rows: "QuerySet[CronJob]", *, on: bool) -> None:
        done = []
        for row in rows.exclude(enabled=on).order_by("pk"):
            row.enabled = on
            try:
                row.save(update_fields=["enabled"])
            except DjqueueError as error:
                _refuse(request, row, error)
            else:
                done.append(row)
        if on:
            said = ngettext("%d cron job was switched on.", "%d cron jobs were switched on.", len(done))
        else:
            said = ngettext("%d cron job was switched off.", "%d cron jobs were switched off.", len(done))
        messages.success(request, said % len(done))
        record(request, done, CHANGE, gettext_noop("Switched on.") if on else gettext_noop("Switched off."))


def _refuse(request: HttpRequest, row: CronJob, error: Exception) -> None:
    messages.error(request, f"{row.name}: {error}")
