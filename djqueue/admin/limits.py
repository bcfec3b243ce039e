"""What was said to groups and to shared limiters, and what is marked in charts."""

from typing import Any

from django.contrib import admin
from django.urls import reverse
from django.utils.html import format_html_join
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from djqueue.conf import get_settings
from djqueue.core.limiter import Rate
from djqueue.dashboard import limits, rendering
from djqueue.models import Annotation, Dashboard, GroupState, LimiterState

from . import gate
from .base import StoredAdmin, time_column


class LimitedAdmin(StoredAdmin):
    """Rows with a rate."""

    @admin.display(description=_("starts"))
    def rate(self, row: Any) -> str:
        """The most jobs that start in a time."""
        if row.rate_capacity is None or row.rate_per is None:
            return rendering.NOTHING
        return str(limits.written(Rate(row.rate_capacity, row.rate_per)))

    def queue_link(self, queue: str, text: str = "", **query: str) -> str:
        """A queue's page on this site's dashboard, if it has one."""
        if not self.admin_site.is_registered(Dashboard):
            return queue
        url = reverse(f"{self.admin_site.name}:djqueue_dashboard_queue", args=[queue])
        return rendering.link(url, text or queue, **query)


@admin.register(GroupState)
class GroupStateAdmin(LimitedAdmin):
    """Groups to which something was said; without a name: what was said to all of a queue."""

    seen = staticmethod(gate.by_queue)
    dashboard_page = "queues"
    list_display = ("group_shown", "queue_shown", "paused", "concurrency", "rate", "weight", "mode")
    list_filter = ("paused",)
    search_fields = ("^queue", "^group")
    search_help_text = _("The beginning of a queue's or a group's name.")
    fields = ("queue_shown", "group_shown", "paused", "concurrency", "rate", "weight", "mode", "steer")

    @admin.display(description=_("group"))
    def group_shown(self, row: GroupState) -> str:
        """Its name."""
        return row.group or _now("all groups")

    @admin.display(description=_("queue"))
    def queue_shown(self, row: GroupState) -> str:
        """With its page."""
        return self.queue_link(row.queue)

    @admin.display(description=_("dashboard"))
    def steer(self, row: GroupState) -> str:
        """Where it is steered."""
        return self.queue_link(row.queue, _now("Open in the dashboard"), group=row.group)


@admin.register(LimiterState)
class LimiterStateAdmin(LimitedAdmin):
    """Shared limiters to which something was said while their queues ran."""

    seen = staticmethod(gate.limiters)
    dashboard_page = "queues"
    list_display = ("name", "concurrency", "rate")
    search_fields = ("^name",)
    search_help_text = _("The beginning of a limiter's name.")
    ordering = ("name",)
    fields = ("name", "concurrency", "rate", "queues")

    @admin.display(description=_("queues"))
    def queues(self, row: LimiterState) -> str:
        """Those that share it, each with its page."""
        names = sorted(name for name, one in get_settings().queues.items() if one.limiter == row.name)
        return format_html_join(", ", "{}", ((self.queue_link(name),) for name in names)) or rendering.NOTHING


@admin.register(Annotation)
class MarkAdmin(StoredAdmin):
    """Deploys, and what was marked by hand."""

    seen = staticmethod(gate.everything)
    dashboard_page = "metrics"
    list_display = ("label", "marked")
    search_fields = ("^label",)
    search_help_text = _("The beginning of a label.")
    fields = ("label", "marked")

    marked = time_column(Annotation, "at")
