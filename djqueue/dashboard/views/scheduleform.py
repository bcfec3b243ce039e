"""Creating and editing schedules, with a preview of their next runs."""

from copy import copy
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import registry
from djqueue.core.errors import ArgumentsError, DjqueueError
from djqueue.core.units import to_datetime
from djqueue.dashboard import audit, jsontext, redaction, rights
from djqueue.dashboard.forms import ArgumentsField, DateTimeInput, TimeField
from djqueue.dashboard.outages import is_partial
from djqueue.dashboard.site import Crumb, DashboardSite, Pages
from djqueue.dashboard.tables import alias_of
from djqueue.dashboard.views import schedules
from djqueue.models import CronJob, ScheduleSource
from djqueue.operations.cronjobs import shown

pages = Pages()

if TYPE_CHECKING:
    ModelForm = forms.ModelForm[CronJob]
else:
    ModelForm = forms.ModelForm


class ScheduleForm(ModelForm):
    """A schedule. The model validates the fields."""

    class Meta:
        model = CronJob
        fields = (
            "name",
            "job_name",
            "queue",
            "enabled",
            "schedule",
            "every",
            "timezone",
            "jitter",
            "start_at",
            "end_at",
            "max_executions",
            "overlap",
            "missed",
            "missed_window",
            "blackouts",
            "on_blackout",
            "args",
            "kwargs",
        )
        widgets = {
            "start_at": DateTimeInput,
            "end_at": DateTimeInput,
            "blackouts": forms.Textarea(attrs={"rows": 3}),
        }
        field_classes = {"start_at": TimeField, "end_at": TimeField}

    args = ArgumentsField(
        kind=list,
        label=gettext_lazy("Positional arguments"),
        widget=forms.Textarea(attrs={"rows": 3, "class": "djq-mono"}),
    )
    kwargs = ArgumentsField(
        kind=dict,
        label=gettext_lazy("Keyword arguments"),
        widget=forms.Textarea(attrs={"rows": 3, "class": "djq-mono"}),
    )

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request = request
        row = self.instance
        self._job_name = row.job_name
        self._shown = shown_arguments(row)
        for name in jsontext.ARGUMENTS:
            self._arguments(name).show(getattr(row, name), self._shown[name], (name,))
            self.initial[name] = self._arguments(name).initial
        self.fields["job_name"].widget.attrs["list"] = "djq-names"
        for field in self.fields.values():
            field.show_hidden_initial = False  # the initial values are those of the row

    @property
    def hides(self) -> bool:
        """Whether part of the arguments is hidden."""
        return any(self._arguments(name).draft.hidden for name in jsontext.ARGUMENTS)

    def clean(self) -> dict[str, Any] | None:
        """Reject queues that the user can't see, and arguments that would expose a hidden value."""
        cleaned = super().clean()
        self._check_queue()
        if not {"job_name", *jsontext.ARGUMENTS} & self.errors.keys():
            self._check_kept()
            self._check_arguments()
        return cleaned

    def validate_unique(self) -> None:
        """Check that the name is free, without telling that a schedule of a hidden queue has it."""
        if rights.hides_queues() and self.data.get("djq_do") != "save":
            return  # a preview, which leaves no trace
        super().validate_unique()
        if rights.hides_queues() and self.has_error("name", "unique"):
            del self.errors["name"]
            self.add_error("name", _("This name isn't available. Choose another one."))

    def _check_arguments(self) -> None:
        """Check the arguments as enqueueing the job does."""
        call = {name: self.cleaned_data[name] for name in jsontext.ARGUMENTS}
        try:
            registry.check_arguments(self.cleaned_data.get("job_name", ""), [call])
        except ArgumentsError as error:
            self.add_error(None, str(error))

    def _check_queue(self) -> None:
        """Check the queue of the jobs, which may be the job's default."""
        row = CronJob(
            queue=self.cleaned_data.get("queue") or "", job_name=self.cleaned_data.get("job_name", "")
        )
        if "queue" in self.errors or schedules.sees_schedule(self._request, row):
            return
        if schedules.has_known_queue(row):
            self.add_error("queue", _("The queue doesn't exist or you don't have access."))
        else:
            self.add_error("queue", _("Enter a queue: this process doesn't know the job's default."))

    def _check_kept(self) -> None:
        """Check that hidden values that are kept stay hidden."""
        kept = {
            name: self._arguments(name).keeps(self.data.get(self.add_prefix(name), ""))
            for name in jsontext.ARGUMENTS
        }
        if not any(kept.values()):
            return
        name = self.cleaned_data["job_name"]
        if name != self._job_name:
            self.add_error("job_name", _("Hidden values can't be passed to another job. Enter new values."))
            return
        now = redaction.arguments(name, *(self.cleaned_data[part] for part in jsontext.ARGUMENTS))
        drafts = {part: self._arguments(part).draft for part in jsontext.ARGUMENTS}
        if jsontext.uncovers(self._shown, now, drafts, kept):
            self.add_error(None, _("These arguments would expose a hidden value. Enter a new value instead."))

    def _arguments(self, name: str) -> ArgumentsField:
        field = self.fields[name]
        assert isinstance(field, ArgumentsField)
        return field

    def changes(self) -> dict[str, Any]:
        """Return the old and the new value of each changed field, but not the values of arguments.

        Arguments count as changed if their text differs: comparing them with the old values would confirm the
        guess of a hidden one.
        """
        changed: dict[str, Any] = {}
        for name in self.changed_data:
            old, new = self.initial.get(name), getattr(self.instance, name)
            if old != new:
                changed[name] = "changed" if name in jsontext.ARGUMENTS else [_written(old), _written(new)]
        return changed


def shown_arguments(row: CronJob) -> dict[str, Any]:
    """Return what may be seen of a schedule's arguments."""
    arguments = redaction.arguments(row.job_name, row.args, row.kwargs)
    if isinstance(arguments, dict) and arguments.keys() == set(jsontext.ARGUMENTS):
        return arguments
    return dict.fromkeys(jsontext.ARGUMENTS, redaction.Hidden())


@pages.show("schedule_new", "schedules/new/", rights.CRON)
def new(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show the form of a new schedule."""
    return _page(request, site, ScheduleForm(request, instance=CronJob()))


@pages.act("schedule_create", "schedules/create/", rights.CRON)
def create(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Create a schedule, or preview its runs."""
    return _save(request, site, CronJob(), "schedule_create")


@pages.show("schedule_edit", "schedules/<int:pk>/edit/", rights.CRON)
def edit(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Show the form of a schedule that was created on the dashboard."""
    row = schedules.find(request, pk)
    if row is None or row.source != ScheduleSource.HAND:
        return _refused(request, site, row)
    return _page(request, site, ScheduleForm(request, instance=row))


@pages.act("schedule_save", "schedules/<int:pk>/save/", rights.CRON)
def save(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Save a schedule, or preview its runs."""
    row = schedules.find(request, pk)
    if row is None or row.source != ScheduleSource.HAND:
        return _refused(request, site, row)
    return _save(request, site, row, "schedule_save")


def _save(request: HttpRequest, site: DashboardSite, row: CronJob, page: str) -> HttpResponse:
    form = ScheduleForm(request, request.POST, instance=row)
    if not form.is_valid() or request.POST.get("djq_do") != "save":
        return _page(request, site, form)
    row.save(using=alias_of(CronJob))
    if form.has_changed():
        audit.note(
            request, page, queue=schedules.queue_of(row), detail={"name": row.name, "changed": form.changes()}
        )
    if row.job_name not in registry.names():
        message = _("No handler is registered as %(name)s. Check the job name.")
        messages.warning(request, message % {"name": row.job_name})
    messages.success(request, _("Saved %(name)s.") % {"name": row.name})
    return site.back(request, "schedule", row.pk)


def _page(request: HttpRequest, site: DashboardSite, form: ScheduleForm) -> HttpResponse:
    row = form.instance
    context: dict[str, Any] = {
        "form": form,
        "row": row,
        "names": registry.names(),
        "save_url": site.url("schedule_save", row.pk) if row.pk else site.url("schedule_create"),
        "errors": _errors(form) if form.is_bound else [],
        **_preview(form),
    }
    crumbs = [site.crumb("schedules")]
    if row.pk:
        crumbs.append(Crumb(form.initial["name"], site.url("schedule", row.pk)))
    title = _("Edit schedule") if row.pk else _("Add schedule")
    # The preview of an incomplete form is a regular response.
    status = 400 if form.is_bound and form.errors and not is_partial(request) else 200
    return site.render(
        request, "schedule_form.html", title, context, tab="schedules", crumbs=crumbs, status=status
    )


def _errors(form: ScheduleForm) -> list[tuple[str, list[str]]]:
    """Return errors by the label of their field; the label is empty for the whole form."""
    return [
        (str(form[name].label) if name in form.fields else "", list(map(str, problems)))
        for name, problems in form.errors.items()
    ]


def _preview(form: ScheduleForm) -> dict[str, Any]:
    """Return the frequency and the next runs in the schedule's time zone."""
    if form.is_bound and not form.is_valid():
        return {}
    row = copy(form.instance)
    if not (row.schedule or row.every):
        return {}
    if form.is_bound:
        row.next_run_at = None  # computed from the edited fields
    try:
        runs = [shown(row, to_datetime(at)) for at in schedules.upcoming(row)]
        return {"words": schedules.words_of(row), "runs": runs}
    except DjqueueError as error:
        return {"problem": str(error)}


def _refused(request: HttpRequest, site: DashboardSite, row: CronJob | None) -> HttpResponse:
    if row is None:
        messages.warning(request, _("This schedule no longer exists."))
        return site.back(request, "schedules")
    messages.warning(request, _("This schedule is declared in code. Edit the code instead."))
    return site.back(request, "schedule", row.pk)


def _written(value: Any) -> Any:
    """Return a value as JSON represents it."""
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
