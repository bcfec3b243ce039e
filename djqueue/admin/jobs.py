"""Jobs, and what belongs to them."""

from functools import partialmethod
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from djqueue.codecs import MSGPACK
from djqueue.core.states import State
from djqueue.dashboard import rendering
from djqueue.dashboard.tables import rows_of
from djqueue.dashboard.verbs import CANCEL, PROMOTE, REMOVE, RETRY, Verb
from djqueue.models import DeadLetter, Job, JobAttempt, JobLog, JobResult

from .actions import ask_before_deletion, run
from .base import JobRowsAdmin, time_column
from .filters import NameFilter, OutcomeFilter, QueueFilter

ID_OR_NAME = _("A job id; or the beginning of one, or of a job's name, among the newest 100,000 rows.")
BELONGINGS = 200
"""Attempts, and log lines, that a job's page shows: the newest."""


class SteeredAdmin(JobRowsAdmin):
    """Rows of jobs on which the user can act."""

    verbs: dict[str, Verb] = {}
    """By the names of the actions that do them to one row."""

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """The user's right, where the storage would not refuse."""
        return self.may("delete", request) and (obj is None or self.is_legal("delete_selected", obj))

    def is_legal(self, action: str, row: Any) -> bool:
        """See `StoredAdmin.is_legal`."""
        return self.verbs[action].legal(State(getattr(row, "state", State.FAILED)))

    def act(self, action: str, request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse | None:
        """Do an action to rows, if the user may; back to the page that it came from."""
        verb = self.verbs[action]
        if not self.may(verb.permission, request):
            raise PermissionDenied
        run(request, verb, rows)
        single = request.POST.get("djq_row")
        return HttpResponseRedirect(self.url("change", single)) if single else None

    @admin.action(permissions=["delete"], description=_("Delete selected %(verbose_name_plural)s"))
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Instead of Django's own, which would delete the rows behind the storage's back."""
        if request.POST.get("post"):
            return self.act("delete_selected", request, queryset)
        if not self.has_delete_permission(request):
            raise PermissionDenied
        return ask_before_deletion(self, request, queryset)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Django's question; its answer goes to the storage."""
        row = self.get_object(request, unquote(object_id))
        if request.method != "POST" or row is None:
            return super().delete_view(request, object_id, extra_context)
        if not self.has_delete_permission(request, row):
            raise PermissionDenied
        if run(request, self.verbs["delete_selected"], self.only(request, row)):
            return HttpResponseRedirect(self.url("changelist"))
        return HttpResponseRedirect(self.url("change", row.pk))

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Through the storage."""
        run(request, self.verbs["delete_selected"], self.only(request, obj))

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Through the storage."""
        run(request, self.verbs["delete_selected"], queryset)

    def only(self, request: HttpRequest, row: Model) -> QuerySet[Any]:
        """One row as a queryset."""
        return self.get_queryset(request).filter(pk=row.pk)


@admin.register(Job)
class JobAdmin(SteeredAdmin):
    """Jobs in every state."""

    list_display = (
        "job_id",
        "state_shown",
        "name",
        "queue",
        "attempts",
        "error_short",
        "created",
        "finished",
    )
    list_filter = ("state", QueueFilter, NameFilter)
    search_fields = ("job_id", "name")
    search_help_text = ID_OR_NAME
    unlisted = ("payload", "options", "progress", "error_message", "traceback")
    verbs = {
        "cancel_jobs": CANCEL,
        "promote_jobs": PROMOTE,
        "retry_jobs": RETRY,
        "delete_selected": REMOVE,
    }
    actions = tuple(verbs)
    buttons = {
        "cancel_jobs": _("Cancel"),
        "promote_jobs": _("Run now"),
        "retry_jobs": _("Retry"),
    }
    fieldsets = (
        (None, {"fields": ("state_shown", "name", "queue", "job_id", "reason_shown", "dead_letter")}),
        (_("Error"), {"fields": ("error_type", "error_shown", "traceback_shown")}),
        (_("Payload and result"), {"fields": ("payload_shown", "result_shown", "progress_shown")}),
        (
            _("Times"),
            {"fields": ("created", "not_before", "started", "finished", "kept_until")},
        ),
        (
            _("Runs"),
            {"fields": ("attempts", "failures", "stalls", "worker", "items", "attempts_shown", "log_shown")},
        ),
        (
            _("Options"),
            {"fields": ("priority", "unique_key", "group", "subject", "content_type", "options_shown")},
        ),
    )

    created = time_column(Job, "created_at")
    not_before = time_column(Job, "run_at")
    started = time_column(Job, "started_at")
    finished = time_column(Job, "finished_at")
    kept_until = time_column(Job, "expires_at")

    has_cancel_permission = partialmethod(JobRowsAdmin.may, "cancel")
    has_promote_permission = partialmethod(JobRowsAdmin.may, "promote")
    has_retry_permission = partialmethod(JobRowsAdmin.may, "retry")

    def get_fieldsets(self, request: HttpRequest, obj: Job | None = None) -> Any:
        """Without the error where there is none."""
        fieldsets = super().get_fieldsets(request, obj)
        if obj is not None and not (obj.error_type or obj.error_message or obj.traceback):
            return [entry for entry in fieldsets if "error_shown" not in entry[1]["fields"]]
        return fieldsets

    @admin.action(permissions=["cancel"], description=_("Cancel selected %(verbose_name_plural)s"))
    def cancel_jobs(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Pending jobs never start, active ones are asked to stop."""
        return self.act("cancel_jobs", request, queryset)

    @admin.action(permissions=["promote"], description=_("Run selected delayed jobs now"))
    def promote_jobs(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Delayed jobs to waiting."""
        return self.act("promote_jobs", request, queryset)

    @admin.action(permissions=["retry"], description=_("Retry selected failed jobs"))
    def retry_jobs(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Dead letters to waiting."""
        return self.act("retry_jobs", request, queryset)

    @admin.display(description=_("state"))
    def state_shown(self, job: Job) -> str:
        """The state as a label, and a word if no worker here would take the job."""
        return rendering.job_state(job)

    @admin.display(description=_("reason"))
    def reason_shown(self, job: Job) -> str:
        """Why it failed, or was cancelled."""
        return rendering.reason(job.reason) or rendering.NOTHING

    @admin.display(description=_("error"))
    def error_short(self, job: Job) -> str:
        """The exception's class, without its module."""
        return job.error_type.rpartition(".")[2] or rendering.NOTHING

    @admin.display(description=_("dead letter"))
    def dead_letter(self, job: Job) -> str:
        """Why it failed for good, with a link."""
        if job.state != State.FAILED:
            return rendering.NOTHING
        letter = rows_of(DeadLetter).filter(queue=job.queue, job_id=job.job_id).first()
        if letter is None:
            return rendering.NOTHING
        reason = rendering.reason(letter.reason)
        if not self.admin_site.is_registered(DeadLetter):
            return reason
        return rendering.link(self.url("change", letter.pk, model=DeadLetter), reason)

    @admin.display(description=_("error message"))
    def error_shown(self, job: Job) -> str:
        """What the handler's exception said."""
        return rendering.preformatted(job.error_message)

    @admin.display(description=_("traceback"))
    def traceback_shown(self, job: Job) -> str:
        """Where it was raised."""
        return rendering.preformatted(job.traceback, end=True)

    @admin.display(description=_("payload"))
    def payload_shown(self, job: Job) -> str:
        """What the handler is given."""
        return rendering.decoded(job.payload, job.content_type)

    @admin.display(description=_("result"))
    def result_shown(self, job: Job) -> str:
        """What the handler returned."""
        if job.state != State.COMPLETED:
            return rendering.NOTHING
        row = rows_of(JobResult).filter(queue=job.queue, job_id=job.job_id).first()
        if row is None:
            return _now("no longer kept")
        return rendering.decoded(row.result, row.content_type)

    @admin.display(description=_("progress"))
    def progress_shown(self, job: Job) -> str:
        """What the handler reported last."""
        return rendering.decoded(job.progress, MSGPACK)

    @admin.display(description=_("options that differ from their defaults"))
    def options_shown(self, job: Job) -> str:
        """How it is to be run; times in milliseconds."""
        return rendering.decoded(job.options, MSGPACK)

    @admin.display(description=_("runs without success"))
    def attempts_shown(self, job: Job) -> str:
        """The runs that did not complete the job, newest first."""
        runs = rows_of(JobAttempt).filter(queue=job.queue, job_id=job.job_id)
        return rendering.attempts(list(runs.defer("traceback").order_by("-id")[:BELONGINGS]), BELONGINGS)

    @admin.display(description=_("log"))
    def log_shown(self, job: Job) -> str:
        """What the handlers logged for it, oldest first."""
        lines = rows_of(JobLog).filter(queue=job.queue, job_id=job.job_id)
        return rendering.log(list(lines.order_by("-id")[:BELONGINGS])[::-1], BELONGINGS)


@admin.register(JobResult)
class JobResultAdmin(JobRowsAdmin):
    """What completed jobs returned."""

    list_display = ("job_id", "queue", "content_type", "completed", "kept_until")
    list_filter = (QueueFilter,)
    search_fields = ("job_id",)
    unlisted = ("result",)
    fields = ("job_link", "queue", "content_type", "result_shown", "completed", "kept_until")

    completed = time_column(JobResult, "completed_at")
    kept_until = time_column(JobResult, "expires_at")

    @admin.display(description=_("result"))
    def result_shown(self, row: JobResult) -> str:
        """The value."""
        return rendering.decoded(row.result, row.content_type)


@admin.register(JobAttempt)
class JobAttemptAdmin(JobRowsAdmin):
    """Runs that did not complete their jobs."""

    list_display = (
        "job_id",
        "queue",
        "attempt",
        "outcome_shown",
        "error_type",
        "worker",
        "started",
        "finished",
    )
    list_filter = (OutcomeFilter, QueueFilter)
    search_fields = ("job_id",)
    unlisted = ("error_message", "traceback")
    fields = (
        "job_link",
        "queue",
        "attempt",
        "outcome_shown",
        "worker",
        "started",
        "finished",
        "error_type",
        "error_shown",
        "traceback_shown",
    )

    started = time_column(JobAttempt, "started_at")
    finished = time_column(JobAttempt, "finished_at")

    @admin.display(description=_("outcome"))
    def outcome_shown(self, row: JobAttempt) -> str:
        """How it ended."""
        return rendering.outcome(row.outcome)

    @admin.display(description=_("error message"))
    def error_shown(self, row: JobAttempt) -> str:
        """What the handler's exception said."""
        return rendering.preformatted(row.error_message)

    @admin.display(description=_("traceback"))
    def traceback_shown(self, row: JobAttempt) -> str:
        """Where it was raised."""
        return rendering.preformatted(row.traceback, end=True)


@admin.register(JobLog)
class JobLogAdmin(JobRowsAdmin):
    """Lines that handlers logged."""

    list_display = ("time", "line_shown", "job_id", "queue")
    list_filter = (QueueFilter,)
    search_fields = ("job_id",)
    fields = ("job_link", "queue", "time", "line_whole")

    time = time_column(JobLog, "at")

    @admin.display(description=_("line"))
    def line_shown(self, row: JobLog) -> str:
        """Its beginning."""
        return rendering.first_line(row.line)

    @admin.display(description=_("line"))
    def line_whole(self, row: JobLog) -> str:
        """All of it."""
        return rendering.preformatted(row.line)
