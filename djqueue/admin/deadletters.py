"""Jobs that failed for good."""

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from djqueue.dashboard import rendering
from djqueue.models import DeadLetter

from .base import JobRowsAdmin, time_column
from .filters import NameFilter, QueueFilter, ReasonFilter
from .jobs import ID_OR_NAME


@admin.register(DeadLetter)
class DeadLetterAdmin(JobRowsAdmin):
    """Dead letters, with their reasons."""

    is_raw = False
    dashboard_page = "dead_letters"
    list_display = ("job_id", "name", "queue", "reason_shown", "error_line", "entered", "kept_until")
    list_filter = (ReasonFilter, QueueFilter, NameFilter)
    search_fields = ("job_id", "name")
    search_help_text = ID_OR_NAME
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
