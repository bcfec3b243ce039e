"""Actions on jobs: on one job, on the jobs selected in a list, and bulk operations on all matching jobs.

The storage responds for each job. Workers perform deletions after a delay in which they can be undone.
"""

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from djqueue.client import get_storage
from djqueue.core.errorgroups import MARK_SIZE, MAX_FINGERPRINTS
from djqueue.core.errors import OptionError
from djqueue.core.options import MAX_INTEGER
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import audit, jobsearch, reading, rendering, rights, tables
from djqueue.dashboard.forms import DateTimeInput, NameSelect, TimeField
from djqueue.dashboard.jobsearch import JobFilter
from djqueue.dashboard.site import CONVERTER, Crumb, DashboardSite
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import BulkKind, BulkOperation, BulkState, JobState
from djqueue.operations import bulk
from djqueue.storage.actions import CANCEL, PROMOTE, RETRY, Action

DONE = {
    "cancelled": ngettext_lazy("%d job was cancelled.", "%d jobs were cancelled."),
    "requested": ngettext_lazy("%d active job was asked to stop.", "%d active jobs were asked to stop."),
    "promoted": ngettext_lazy("%d job is ready to run.", "%d jobs are ready to run."),
    "retried": ngettext_lazy("%d job will be retried.", "%d jobs will be retried."),
    "blocked_again": ngettext_lazy(
        "%d job is blocked until its dependencies complete.",
        "%d jobs are blocked until their dependencies complete.",
    ),
}
"""Messages with the number of jobs, by successful answer."""
REFUSALS = {
    "not_found": gettext_lazy("not found"),
    "changed": gettext_lazy("changed since"),
    "arrived": gettext_lazy("enqueued later"),
    "not_failed": gettext_lazy("no longer failed"),
    "not_delayed": gettext_lazy("no longer delayed"),
    "not_removed": gettext_lazy("active or not found"),
    "unique_key_taken": gettext_lazy("unique key in use"),
    "rejected": gettext_lazy("rejected arguments"),
    "not_stored": gettext_lazy("refused"),
    "dependency_gone": gettext_lazy("cancelled or removed dependency"),
    **{state.value: state.label for state in JobState},
}
"""Reasons why a job was skipped, by unsuccessful answer; an answer may be the job's state."""
LONGEST_ERROR = MAX_FINGERPRINTS * (2 * MARK_SIZE + 1)
"""Maximum characters of the fingerprints of an error, with their commas."""
ANY = "any"
"""Any state, if jobs are stored in tables."""
ALWAYS = ("queue", "id", "error")
"""Filters that every storage supports."""
UNDO_TAG = re.compile(r"djq-(undo|undo_clean)-(\d+)\Z")
"""A tag of a message: the page that undoes the deletion, and the key of the operation."""
MAX_OPEN = 100
"""Maximum pending deletions examined, newest first."""
OPEN_OPERATIONS = """\
SELECT id, kind, state FROM djqueue_bulk_operation WHERE state IN (%s, %s) ORDER BY id DESC LIMIT %s"""
"""Selects open operations, deletions and others."""
MAX_SELECTED = 200
"""Maximum jobs of one request, more than a page lists."""
IMMEDIATE = (RETRY, PROMOTE, CANCEL)
"""Actions without an undo period. Their pages have their names."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """A pending deletion."""

    operation: int
    kind: str
    at: int
    """Start time, in UTC milliseconds."""
    has_begun: bool

    @property
    def page(self) -> str:
        """The page that undoes the deletion."""
        return undo_page(self.kind)


class PendingDeletions:
    """All pending deletions."""

    def __init__(self, *, is_known_empty: bool = False) -> None:
        self._jobs: dict[tuple[str, str], Deletion] = {}
        self._queues: dict[str, list[Deletion]] = {}
        if is_known_empty:
            return
        kinds = rows_of(BulkOperation).filter(kind__in=bulk.DELETIONS)
        found = kinds.filter(state__in=(BulkState.PLANNED, BulkState.RUNNING)).order_by("-pk")[:MAX_OPEN]
        for row in found:
            has_begun = row.state == BulkState.RUNNING
            one = Deletion(row.pk, row.kind, to_milliseconds(row.start_at), has_begun)
            selection = bulk.Selection.from_json(row.filter)
            for queue in selection.queues:
                if selection.ids:
                    self._jobs.update(((queue, job_id), one) for job_id in selection.ids)
                elif row.kind in bulk.QUEUE_KINDS:
                    self._queues.setdefault(queue, []).append(one)

    def job(self, queue: str, job_id: str) -> Deletion | None:
        """Return the pending deletion of a job, if the job was selected by its ID."""
        return self._jobs.get((queue, job_id))

    def queue(self, name: str) -> list[Deletion]:
        """Return the pending deletions that cover a whole queue, newest first."""
        return self._queues.get(name, [])


class UndoButton(NamedTuple):
    """The undo button of a message."""

    page: str
    operation: int


class RateForm(forms.Form):
    """The rate of a bulk operation, and the number of jobs that its confirmation page showed."""

    rate = forms.IntegerField(
        label=gettext_lazy("Jobs per second"),
        required=False,
        min_value=1,
        max_value=100_000,
        help_text=gettext_lazy("Empty: no limit."),
    )
    expected = forms.IntegerField(
        required=False, min_value=0, max_value=MAX_INTEGER, widget=forms.HiddenInput
    )


class MatchForm(forms.Form):
    """Filters of jobs that actions on all matching jobs have, too."""

    id = forms.CharField(label=gettext_lazy("ID or ID prefix"), required=False, max_length=255)
    tag = forms.CharField(label=gettext_lazy("Tag"), required=False, max_length=255)
    worker = forms.CharField(label=gettext_lazy("Worker"), required=False, max_length=255)
    priority = forms.IntegerField(
        label=gettext_lazy("Priority"), required=False, min_value=-(2**31), max_value=2**31 - 1
    )
    since = TimeField(label=gettext_lazy("Enqueued after"), required=False, widget=DateTimeInput)
    until = TimeField(label=gettext_lazy("Enqueued before"), required=False, widget=DateTimeInput)

    def given(self) -> dict[str, Any]:
        """Return the filters that were given, as fields of `Selection`, if they are valid."""
        found = {name: self.cleaned_data.get(name) for name in MatchForm.base_fields}
        return {
            name: to_milliseconds(value) if name in ("since", "until") else value
            for name, value in found.items()
            if value not in (None, "")
        }


class FilterForm(MatchForm):
    """The filter of the list."""

    field_order = ("queue", "id", "name")
    queue = forms.CharField(label=gettext_lazy("Queue"), required=False, max_length=255)
    name = forms.CharField(label=gettext_lazy("Job"), required=False, max_length=255)
    argument = forms.CharField(
        label=gettext_lazy("Argument"),
        required=False,
        max_length=255,
        widget=forms.TextInput(attrs={"placeholder": "order_id:7"}),
    )
    error = forms.CharField(required=False, max_length=LONGEST_ERROR, widget=forms.HiddenInput)

    def __init__(self, *args: Any, queues: Sequence[str], has_rows: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["queue"].widget = NameSelect(choices=[("", _("all")), *((name, name) for name in queues)])
        self.fields["name"].widget.attrs["list"] = "djq-names"
        self.fields["id"].widget.attrs["data-djq-filter"] = True
        for name, field in self.fields.items():
            field.disabled = not has_rows and name not in ALWAYS
        if not has_rows:
            self.fields["id"].label = _("Full ID")

    def clean_argument(self) -> jobsearch.ArgumentFilter | None:
        try:
            return jobsearch.parse_argument(self.cleaned_data["argument"])
        except OptionError:
            raise forms.ValidationError(_("Use the form order_id:7, order.id:7 or args.0:7.")) from None

    def wanted(self, state: State | None) -> JobFilter:
        """Return the filter, ignoring fields that are not valid."""
        others = ("queue", "name", "argument")
        fields = {name: value for name in others if (value := self.cleaned_data.get(name)) not in (None, "")}
        return JobFilter(**fields, **self.given(), state=state)


def read_match(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters of a query string, as fields of `Selection`.

    Raises:
        OptionError: A filter is not valid.
    """
    form = MatchForm(given)
    if not form.is_valid():
        name, problems = next(iter(form.errors.items()))
        raise OptionError(f"{name}: {problems[0]}")
    return form.given()


def shown_match(given: Mapping[str, Any]) -> tuple[dict[str, str], list[tuple[Any, Any]]]:
    """Return the filters of a query string as they were given, and with their labels."""
    query = {name: given[name] for name in MatchForm.base_fields if given.get(name)}
    return query, [(MatchForm.base_fields[name].label, value) for name, value in query.items()]


def stored_match(stored: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the filters of an operation's row, with their labels."""
    found = {name: stored.get(name) for name in MatchForm.base_fields}
    return [
        (
            MatchForm.base_fields[name].label,
            rendering.local(to_datetime(value)) if name in ("since", "until") else value,
        )
        for name, value in found.items()
        if value not in (None, "")
    ]


def refusals(counts: Mapping[str, int]) -> list[str]:
    """Return why jobs were skipped: a reason with the number of jobs for each answer."""
    return [f"{refusal(answer)} ({count})" for answer, count in counts.items()]


def refusal(answer: str) -> str:
    """Return why one job was skipped."""
    return str(REFUSALS.get(answer, answer))


def pending_deletions(request: HttpRequest) -> PendingDeletions:
    """Return the pending deletions, read once per request."""
    return reading.once_per_request(request, "deletions", PendingDeletions)


def deletion_parts(request: HttpRequest) -> Hashable:
    """Return what a page of jobs shows of deletions: see `reading.Parts`."""
    operations = tables.select(
        BulkOperation, OPEN_OPERATIONS, (BulkState.PLANNED.value, BulkState.RUNNING.value, MAX_OPEN)
    )
    if not operations:
        reading.set_for_request(request, "deletions", PendingDeletions(is_known_empty=True))
    return operations


def begin_deletion(
    request: HttpRequest, kind: BulkKind, queue: str, expected: int, message: str, **which: Any
) -> BulkOperation:
    """Schedule a deletion, and show a message with an undo button.

    Args:
        message: What will be deleted, as a sentence.
        which: `ids`, `state` and `states` of the selection.
    """
    selection = bulk.Selection((queue,), **which)
    user: Any = request.user
    row = bulk.begin(alias_of(BulkOperation), kind, selection, user=user.get_username(), expected=expected)
    if not get_storage().workers.all():
        waits = _("No worker is running. The deletion starts once a worker does.")
        message = f"{message} {waits}"
    messages.success(request, message, extra_tags=f"djq-{undo_page(kind)}-{row.pk}")
    return row


def undo_page(kind: str) -> str:
    """Return the page that undoes a kind of deletion."""
    return "undo_clean" if kind in bulk.QUEUE_KINDS else "undo"


def undo_button(message: Any) -> UndoButton | None:
    """Return the undo button of a message, if the message has one."""
    for tag in (message.extra_tags or "").split():
        if match := UNDO_TAG.match(tag):
            return UndoButton(match[1], int(match[2]))
    return None


def selected_jobs(request: HttpRequest) -> dict[str, list[str]]:
    """Return the IDs of the selected jobs, by queue, without queues that the user can't see."""
    selected: dict[str, list[str]] = {}
    for value in request.POST.getlist("job")[:MAX_SELECTED]:
        queue, _slash, job_id = value.partition("/")
        name = CONVERTER.to_python(queue)
        if job_id and rights.sees(request, name):
            selected.setdefault(name, []).append(CONVERTER.to_python(job_id))
    return selected


def act_on_selection(request: HttpRequest, page: str, action: Action) -> None:
    """Apply an action to each selected job, show the outcome, and record it, one row per queue."""
    answers: Counter[str] = Counter()
    for queue, ids in selected_jobs(request).items():
        queue_answers = action.call(get_storage(), queue, ids)
        done = [job_id for job_id, answer in zip(ids, queue_answers, strict=True) if answer in action.done]
        if done:
            detail = {"jobs": [[queue, job_id] for job_id in done]}
            audit.note(request, page, queue=queue, count=len(done), detail=detail)
        answers.update(queue_answers)
    for answer, count in answers.items():
        if answer in action.done:
            messages.success(request, DONE[answer] % count)
        else:
            why = refusals({answer: count})[0]
            messages.warning(request, _("Skipped: %(why)s.") % {"why": why})
    if not answers:
        messages.warning(request, _("No jobs were selected."))


def delete_selection(request: HttpRequest, page: str, message: Any, nothing: str, **which: Any) -> None:
    """Schedule the deletion of the selected jobs.

    Args:
        message: What will be deleted: a plural string with `count` and `queue`.
        nothing: Message if no job is selected.
        which: `state` of the selection.
    """
    selected = selected_jobs(request)
    for queue, ids in selected.items():
        text = message % {"count": len(ids), "queue": queue}
        row = begin_deletion(request, BulkKind.DELETE, queue, len(ids), text, ids=tuple(ids), **which)
        detail = {"operation": row.pk, "jobs": [[queue, job_id] for job_id in ids]}
        audit.note(request, page, queue=queue, count=len(ids), detail=detail)
    if not selected:
        messages.warning(request, nothing)


def job_changed(
    request: HttpRequest, site: DashboardSite, answer: str, queue: str, job_id: str
) -> HttpResponse:
    """Redirect to a job that was not changed, with the reason and the last recorded action on it."""
    text = _("Action not applied, because the job has changed: %(why)s.") % {"why": refusal(answer)}
    messages.warning(request, f"{text} {audit.last_action(queue, job_id)}".rstrip())
    return site.back(request, "job", queue, job_id)


def confirm_bulk(
    request: HttpRequest,
    site: DashboardSite,
    form: forms.Form,
    preview: bulk.Preview | None,
    title: str,
    tab: str,
    crumbs: Sequence[Crumb],
    **context: Any,
) -> HttpResponse:
    """Render the confirmation page of a bulk operation.

    Args:
        preview: Counts of the matching jobs; None if they could not be counted.
        context: See `live/bulk_confirm.html`.
    """
    shown = {
        "form": form,
        "found": preview,
        "can_begin": bool(preview and (preview.able or preview.capped)),
        "refused": refusals(preview.refused) if preview else [],
        **context,
    }
    status = 400 if form.is_bound and form.errors and request.method == "POST" else 200
    return site.render(request, "bulk_confirm.html", title, shown, tab=tab, crumbs=crumbs, status=status)


def begin_bulk(
    request: HttpRequest,
    site: DashboardSite,
    page: str,
    kind: str,
    selection: bulk.Selection,
    form: forms.Form,
    **detail: Any,
) -> HttpResponse:
    """Start the operation of a valid form, record it, and redirect to its page."""
    row = bulk.begin(
        alias_of(BulkOperation),
        kind,
        selection,
        user=request.user.get_username(),
        rate=form.cleaned_data["rate"],
        expected=form.cleaned_data["expected"] or 0,
    )
    detail = {"operation": row.pk, "kind": kind, **detail, **row.filter}
    audit.note(request, page, count=row.expected, detail=detail)
    messages.success(request, _("Bulk operation started. Workers process the jobs in the background."))
    return site.back(request, "operation", row.pk)
