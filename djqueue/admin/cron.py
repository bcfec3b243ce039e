"""Jobs by schedule: the one table that is edited here."""

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from djqueue.client import registry
from djqueue.models import CronJob

from .base import ModelAdmin, time_column
from .tables import alias_of


@admin.register(CronJob)
class CronJobAdmin(ModelAdmin):
    """Schedules. The scheduler sees a change at its next look at them."""

    list_display = (
        "name",
        "job_name",
        "queue",
        "schedule",
        "timezone",
        "enabled",
        "next_run",
        "last_run",
        "executions",
    )
    list_filter = ("enabled",)
    search_fields = ("name", "job_name")
    ordering = ("name",)
    fieldsets = (
        (None, {"fields": ("name", "job_name", "queue", "enabled")}),
        (_("When"), {"fields": ("schedule", "timezone")}),
        (_("With"), {"fields": ("args", "kwargs")}),
        (_("Runs"), {"fields": ("next_run", "last_run", "executions")}),
    )
    readonly_fields = ("next_run", "last_run", "executions")

    next_run = time_column(CronJob, "next_run_at")
    last_run = time_column(CronJob, "last_run_at")

    class Media:
        css = {"all": ["djqueue/djqueue.css"]}

    def get_queryset(self, request: HttpRequest) -> Any:
        """Of the storage's database."""
        return super().get_queryset(request).using(alias_of(CronJob))

    def save_model(self, request: HttpRequest, obj: CronJob, form: Any, change: bool) -> None:
        """With a word if the job is not known here: it may be known to the workers."""
        obj.save(using=alias_of(CronJob))
        if obj.job_name not in registry.names():
            said = _now("No handler is registered here as %(name)s: check the job's name.")
            messages.warning(request, said % {"name": obj.job_name})
