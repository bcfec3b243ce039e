"""Jobs that failed for good."""

from functools import partialmethod

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from djqueue.dashboard import rendering
from djqueue.dashboard.verbs import REMOVE, RETRY
from djqueue.models import DeadLetter

from .base import JobRowsAdmin, time_column
from .filters import NameFilter, QueueFilter, ReasonFilter
from .jobs import ID_OR_NAME, SteeredAdmin


@admin.register(DeadLetter)
class DeadLetterAdmin(SteeredAdmin):
    """Dead letters: why, and again."""

    list_display = ("job_id", "name", "queue", "reason_shown", "error_line", "entered", "kept_until")
    list_filter = (ReasonFilter, QueueFilter, NameFilter)
    search_fields = ("job_id", "name")
    search_help_text = ID_OR_NAME
    verbs = {"retry_jobs": RETRY, "delete_selected": REMOVE}
    actions = tuple(verbs)
    buttons = {"retry_jobs": _("Retry")}
    fields = (
        "job_link",
        "name",
        "queue",
        "reason_shown",
        "error_type",
        "error_shown",
        "entered",
        "kept_until",
        "retries",
        "next_retry",
    )

    entered = time_column(DeadLetter, "entered_at")
    kept_until = time_column(DeadLetter, "expires_at")
    next_retry = time_column(DeadLetter, "next_retry_at")

    has_retry_permission = partialmethod(JobRowsAdmin.may, "retry")

    @admin.action(permissions=["retry"], description=_("Retry selected %(verbose_name_plural)s"))
    def retry_jobs(self, request: HttpRequest, queryset: QuerySet[DeadLetter]) -> HttpResponse | None:
        """Back to waiting."""
        return self.act("retry_jobs", request, queryset)

    @admin.display(description=_("reason"))
    def reason_shown(self, letter: DeadLetter) -> str:
        """In words."""
        return rendering.reason(letter.reason)

    @admin.display(description=_("error"))
    def error_line(self, letter: DeadLetter) -> str:
        """The exception's type, and what it said first."""
        return rendering.error_line(letter)

    @admin.display(description=_("error message"))
    def error_shown(self, letter: DeadLetter) -> str:
        """All that the exception said."""
        return rendering.preformatted(letter.error_message)
