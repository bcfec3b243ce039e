"""Queues and workers."""

from functools import partialmethod
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_milliseconds
from djqueue.core.errors import DjqueueError
from djqueue.dashboard import rendering
from djqueue.dashboard.tables import rows_of
from djqueue.models import Job, QueueState, WorkerState

from .actions import record
from .base import StoredAdmin, time_column
from .filters import MOST_QUEUES, used_queues

WORKER_TTL = 60_000
"""Milliseconds after which a silent worker is probably gone."""


class QueueForm(forms.ModelForm):  # type: ignore[type-arg]
    """Which queue to pause, of those that jobs or the settings name."""

    name = forms.ChoiceField(
        label=_("Queue"), help_text=_("One that has had jobs, or that the settings name.")
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        paused = rows_of(QueueState).filter(paused=True).values_list("name", flat=True)
        names = sorted({*used_queues(Job, MOST_QUEUES), *get_settings().queues}.difference(paused))
        self.fields["name"].choices = [(name, name) for name in names]  # type: ignore[attr-defined]

    def validate_unique(self) -> None:
        """A queue that was paused once has a row, and may be paused again."""


@admin.register(QueueState)
class QueueStateAdmin(StoredAdmin):
    """Queues that were ever paused or limited. To add one is to pause it."""

    list_display = ("name", "paused", "rate", "concurrency")
    list_filter = ("paused",)
    search_fields = ("^name",)
    search_help_text = _("The beginning of a queue's name.")
    ordering = ("name",)
    actions = ("pause_queues", "resume_queues")
    buttons = {"pause_queues": _("Pause"), "resume_queues": _("Resume")}
    form = QueueForm
    fields = ("name", "paused", "rate", "concurrency")

    has_pause_permission = partialmethod(StoredAdmin.may, "pause")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """To pause a queue."""
        return self.may("pause", request)

    def get_fields(self, request: HttpRequest, obj: QueueState | None = None) -> Any:
        """To pause a queue, its name is enough."""
        return ("name",) if obj is None else super().get_fields(request, obj)

    def add_view(
        self,
        request: HttpRequest,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Pause a queue. Its row is written by the storage."""
        if request.method == "POST":
            if not self.has_add_permission(request):
                raise PermissionDenied
            form = self.get_form(request)(request.POST)
            if form.is_valid():
                self._steer(request, [QueueState(name=form.cleaned_data["name"])], paused=True)
                return HttpResponseRedirect(self.url("changelist"))
        context = {
            "title": _now("Pause a queue"),
            "show_save_and_add_another": False,
            "show_save_and_continue": False,
        }
        return super().add_view(request, form_url, {**context, **(extra_context or {})})

    def is_legal(self, action: str, row: Any) -> bool:
        """See `StoredAdmin.is_legal`."""
        return bool(row.paused) is (action == "resume_queues")

    @admin.action(permissions=["pause"], description=_("Pause selected %(verbose_name_plural)s"))
    def pause_queues(self, request: HttpRequest, queryset: QuerySet[QueueState]) -> HttpResponse | None:
        """Nothing of them starts any more; what runs goes on."""
        return self._act(request, queryset, paused=True)

    @admin.action(permissions=["pause"], description=_("Resume selected %(verbose_name_plural)s"))
    def resume_queues(self, request: HttpRequest, queryset: QuerySet[QueueState]) -> HttpResponse | None:
        """The end of a pause."""
        return self._act(request, queryset, paused=False)

    @admin.display(description=_("starts"))
    def rate(self, row: QueueState) -> str:
        """The most jobs that start in a time."""
        if row.rate_capacity is None or row.rate_per is None:
            return _now("no limit")
        return _now("%(count)d in %(seconds)g s") % {
            "count": row.rate_capacity,
            "seconds": row.rate_per / 1_000,
        }

    def _act(self, request: HttpRequest, rows: QuerySet[QueueState], *, paused: bool) -> HttpResponse | None:
        if not self.may("pause", request):
            raise PermissionDenied
        self._steer(request, list(rows), paused=paused)
        single = request.POST.get("djq_row")
        return HttpResponseRedirect(self.url("change", single)) if single else None

    def _steer(self, request: HttpRequest, rows: list[QueueState], *, paused: bool) -> None:
        done: list[QueueState] = []
        try:
            storage = get_storage()
            verb = storage.pause if paused else storage.resume
            for row in rows:
                verb(row.name)
                done.append(row)
        except DjqueueError as error:
            said = _now("The storage did not do it: %(error)s")
            messages.error(request, said % {"error": error})
        count = len(done)
        if done and paused:
            said = ngettext("%d queue was paused.", "%d queues were paused.", count)
            messages.success(request, said % count)
        elif done:
            said = ngettext("%d queue was resumed.", "%d queues were resumed.", count)
            messages.success(request, said % count)
        record(request, done, CHANGE, "Paused." if paused else "Resumed.")


@admin.register(WorkerState)
class WorkerStateAdmin(StoredAdmin):
    """Workers, as they last reported themselves."""

    list_display = (
        "worker_id",
        "state_shown",
        "host",
        "pid",
        "queues_shown",
        "active",
        "concurrency",
        "started",
        "seen",
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
        "seen",
    )

    started = time_column(WorkerState, "started_at")
    seen = time_column(WorkerState, "seen_at")

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
