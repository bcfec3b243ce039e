"""Editing a job's arguments: of a pending job, for a retry, or for a copy of a finished job."""

from dataclasses import replace
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import envelope, get_storage
from djqueue.client.sending import send
from djqueue.conf import get_settings
from djqueue.core.errors import DjqueueError, OptionError, QueueFullError, SerializationError
from djqueue.core.job import Batch, JobRecord
from djqueue.dashboard import audit, auditlog, editing, rights, versions
from djqueue.dashboard.editing import COPY, RETRY, EditForm
from djqueue.dashboard.jsontext import NotEditableError
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.models import Revision

from .responses import job_not_found, queue_crumbs

pages = Pages()

OUTCOMES = {"updated": Revision.UPDATED, "retried": Revision.RETRIED, "copied": Revision.COPIED}
LABELS = {
    editing.UPDATE: gettext_lazy("Change arguments"),
    editing.RETRY: gettext_lazy("Retry with these arguments"),
    editing.COPY: gettext_lazy("Enqueue new job with these arguments"),
}


@pages.show("edit", "jobs/<djq:queue>/<djq:job_id>/edit/", rights.EDIT)
def edit(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Show the form."""
    record = get_storage().reads.jobs(queue, [job_id])[0]
    return _page(request, site, queue, job_id, record)


@pages.act("edit_now", "jobs/<djq:queue>/<djq:job_id>/edit/now/", rights.EDIT)
def edit_now(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Apply the form if the job has not changed since; otherwise show it again with the input."""
    storage = get_storage()
    record = storage.reads.jobs(queue, [job_id])[0]
    if record is None:
        return _page(request, site, queue, job_id, None)
    how = editing.way(record.state)
    if how is not None and editing.refusal(request, record.state):
        audit.note(request, "edit_now", queue=queue, job_id=job_id, refused=True)
        return _page(request, site, queue, job_id, record, status=403)
    try:
        found = editing.editable(record)
    except NotEditableError:
        return _page(request, site, queue, job_id, record)
    form = EditForm(record, found, request.POST)
    if how is None or request.POST.get("how") != how:
        return _again(request, site, record, str(record.state))
    if not editing.is_sealed(record, request.POST.get("seal", "")):
        return _again(request, site, record, "changed")
    if not form.is_valid():
        return _page(request, site, queue, job_id, record, form, status=400)
    copy_id = form.cleaned_data["new_id"] if how == COPY else ""
    try:
        payload = envelope.encoder(record.options.content_type, get_settings())(form.typed())
        envelope.check_size(record.options, record.name, [payload])
    except (OptionError, SerializationError) as error:
        form.add_error(None, str(error))
        return _page(request, site, queue, job_id, record, form)
    if editing.exposes(record, payload, found, request.POST):
        form.add_error(None, _("These arguments would expose a hidden value. Enter a new value instead."))
        return _page(request, site, queue, job_id, record, form)
    version = versions.keep(request, record, copy_id)
    try:
        if how == COPY:
            word = _copy(record, payload, copy_id)
        else:
            word = storage.jobs.replace_payload(queue, job_id, payload, record.payload, retry=how == RETRY)
    except DjqueueError as error:
        if isinstance(error, QueueFullError):
            version.delete()
        form.add_error(None, str(error))
        return _page(request, site, queue, job_id, record, form)
    if word not in OUTCOMES:
        version.delete()
        fresh = storage.reads.jobs(queue, [job_id])[0]
        if fresh is None:
            return _page(request, site, queue, job_id, None)
        return _again(request, site, fresh, word)
    version.outcome = OUTCOMES[word]
    version.save(update_fields=["outcome"])
    detail = {"how": word, "version": version.pk, **({"copy": copy_id} if copy_id else {})}
    audit.note(request, "edit_now", queue=queue, job_id=job_id, count=1, detail=detail)
    done = {
        "updated": _("Arguments changed. The previous arguments are kept."),
        "retried": _("The job will be retried with the new arguments. The previous arguments are kept."),
        "copied": _("Enqueued a new job with these arguments."),
    }
    if word == "retried" and record.reason == "dependency_failed":
        done[word] = _("The job will run with the new arguments when its dependencies complete.")
    messages.success(request, done[word])
    return site.back(request, "job", queue, copy_id or job_id)


def _copy(record: JobRecord, payload: bytes, copy_id: str) -> str:
    """Enqueue a copy of a finished job, without its dependencies, which have finished as well."""
    options = replace(record.options, depends_on=(), dependents=(), rejected=None)
    [answer] = send(get_storage(), [Batch(record.queue, record.name, options, [payload], [copy_id])])
    if answer.status == "queued":
        return "copied"
    # The form was submitted twice, or another job has the unique key.
    return "copied_already" if answer.id == copy_id else "unique_key_taken"


def _again(request: HttpRequest, site: DashboardSite, record: JobRecord, word: str) -> HttpResponse:
    """Show the form for the job as it is now, with the input and the reason."""
    if word == "copied_already":
        message = _("The new job was already enqueued.")
    elif word == "unique_key_taken":
        message = _("Not saved: another job has the same unique key.")
    elif word == "changed":
        message = _("Not saved: the arguments have changed since this form was opened.")
    else:
        message = _("Not saved: the job is now %(state)s.") % {"state": record.state}
    messages.warning(request, f"{message} {auditlog.last_action(record.queue, record.id)}".rstrip())
    return _page(request, site, record.queue, record.id, record, is_old=True)


def _page(
    request: HttpRequest,
    site: DashboardSite,
    queue: str,
    job_id: str,
    record: JobRecord | None,
    form: EditForm | None = None,
    *,
    is_old: bool = False,
    status: int = 200,
) -> HttpResponse:
    crumbs = queue_crumbs(site, queue)
    typed = [request.POST[name] for name in editing.LABELS if name in request.POST]
    if record is None:
        return job_not_found(request, site, queue, job_id, "queues", crumbs)
    refusal, found = editing.refusal(request, record.state), None
    if not refusal:
        try:
            found = editing.editable(record)
        except NotEditableError as error:
            refusal = _("Arguments can't be edited: %(why)s.") % {"why": str(error).rstrip(".")}
    if found is not None and form is None:
        form = EditForm(record, found)
        if is_old:
            for name in found.drafts:
                form.initial[name] = request.POST.get(name, form.initial[name])
    context: dict[str, Any] = {
        "job": record,
        "form": form if found is not None else None,
        "found": found,
        "refusal": refusal,
        "typed": typed if found is None else [],
        "now": [draft.text for draft in found.drafts.values()] if found is not None and is_old else [],
        "how": editing.way(record.state),
        "label": LABELS.get(editing.way(record.state) or ""),
    }
    crumbs.append(Crumb(record.name, site.url("job", queue, job_id)))
    title = _("Edit arguments")
    return site.render(request, "edit.html", title, context, tab="queues", crumbs=crumbs, status=status)
