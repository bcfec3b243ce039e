"""Queues and workers."""

from collections.abc import Iterable

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_milliseconds
from djqueue.dashboard import rendering
from djqueue.models import QueueState, WorkerState

from . import gate
from .base import StoredAdmin, time_column

WORKER_TTL = 60_000
"""Milliseconds after which a silent worker is probably gone."""


@admin.register(QueueState)
class QueueStateAdmin(StoredAdmin):
    """Queues that were ever paused or limited."""

    seen = staticmethod(gate.queue_states)
    dashboard_page = "queues"
    list_display = ("name", "paused", "rate", "concurrency")
    list_filter = ("paused",)
    search_fields = ("^name",)
    search_help_text = _("The beginning of a queue's name.")
    ordering = ("name",)
    fields = ("name", "paused", "rate", "concurrency")

    def links_of(self, request: HttpRequest, row: QueueState) -> Iterable[tuple[str, str]]:
        """Return the address of the queue's page, where it is paused and limited."""
        return [(_now("Open in the dashboard"), self.dashboard_url(request, "queue", row.name))]

    @admin.display(description=_("starts"))
    def rate(self, row: QueueState) -> str:
        """The most jobs that start in a time."""
        if row.rate_capacity is None or row.rate_per is None:
            return _now("no limit")
        return _now("%(count)d in %(seconds)g s") % {
            "count": row.rate_capacity,
            "seconds": row.rate_per / 1_000,
        }


@admin.register(WorkerState)
class WorkerStateAdmin(StoredAdmin):
    """Workers, as they last reported themselves."""

    seen = staticmethod(gate.workers)
    dashboard_page = "workers"
    list_display = (
        "worker_id",
        "state_shown",
        "host",
        "pid",
        "queues_shown",
        "active",
        "concurrency",
        "started",
        "last_seen",
    )
    search_fields = ("^worker_id", "^host")
    search_help_text = _("The beginning of a worker's id or host.")
    ordering = ("-seen_at",)
    unlisted = ("names",)
    fields = (
        "worker_id",
        "state_shown",
        "host",
        "pid",
        "queues_shown",
        "names_shown",
        "active",
        "concurrency",
        "started",
        "last_seen",
    )

    started = time_column(WorkerState, "started_at")
    last_seen = time_column(WorkerState, "seen_at")

    def links_of(self, request: HttpRequest, row: WorkerState) -> Iterable[tuple[str, str]]:
        """Return the address of the worker's page, where it is stopped."""
        return [(_now("Open in the dashboard"), self.dashboard_url(request, "worker", row.worker_id))]

    @admin.display(description=_("state"))
    def state_shown(self, worker: WorkerState) -> str:
        """What it said, and whether it is silent since."""
        states = {"running": _now("running"), "stopping": _now("stopping")}
        state = str(states.get(worker.state, worker.state))
        if SYSTEM_CLOCK.now() - to_milliseconds(worker.seen_at) <= WORKER_TTL:
            return state
        return rendering.noted(state, _now("silent for more than a minute"))

    @admin.display(description=_("queues"))
    def queues_shown(self, worker: WorkerState) -> str:
        """What it takes jobs from."""
        return _now("all") if worker.queues is None else ", ".join(worker.queues)

    @admin.display(description=_("job names"))
    def names_shown(self, worker: WorkerState) -> str:
        """What it has handlers for."""
        return rendering.preformatted("\n".join(worker.names))
