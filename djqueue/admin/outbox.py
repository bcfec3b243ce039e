"""Jobs on their way to Redis."""

from django.contrib import admin

from djqueue.models import OutboxJob

from . import gate
from .base import StoredAdmin, time_column


@admin.register(OutboxJob)
class OutboxJobAdmin(StoredAdmin):
    """Rows that no relay has taken to Redis yet."""

    seen = staticmethod(gate.by_distinct_queue)
    list_display = ("name", "job_id", "queue", "enqueued", "not_before")
    ordering = ("id",)
    unlisted = ("payload", "options")
    fields = ("name", "job_id", "queue", "enqueued", "not_before")

    enqueued = time_column(OutboxJob, "created_at")
    not_before = time_column(OutboxJob, "run_at")
