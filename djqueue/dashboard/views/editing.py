"""Editing a job's arguments: of a pending job, for a retry, or for a copy of a finished job.

Previous payloads are kept, and the job's page shows them.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.core.signing import BadSignature, Signer
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import envelope, get_storage, registry
from djqueue.client.sending import send
from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError, OptionError, QueueFullError, SerializationError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, JobRecord
from djqueue.core.states import PENDING, State
from djqueue.core.units import to_datetime
from djqueue.dashboard import audit, jsontext, redaction, rights, tables
from djqueue.dashboard.forms import check_arguments
from djqueue.dashboard.jsontext import Draft, MalformedError, NotEditableError
from djqueue.dashboard.redaction import Hidden
from djqueue.dashboard.site import Crumb, DashboardSite, Pages
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import JobState, PayloadVersion, Revision

pages = Pages()
VERSIONS_KEPT = 90 * 86_400_000
"""Retention of previous payloads, in milliseconds. Expired ones are deleted when another is stored."""
VERSIONS_SHOWN = 20
"""Maximum previous payloads on a job's page, newest first."""
VERSION_PARTS = """\
SELECT id, outcome FROM djqueue_payload_version
WHERE queue = %s AND (job_id = %s OR (copy_id = %s AND copy_id <> '')) ORDER BY id DESC LIMIT %s"""
UPDATE, RETRY, COPY = "update", "retry", "copy"
REQUIRED_PERMISSIONS = {
    UPDATE: (rights.EDIT,),
    RETRY: (rights.EDIT, rights.RETRY),
    COPY: (rights.EDIT, rights.ENQUEUE),
}
"""Uses of edited arguments, with the required permissions. They update a pending job, retry a failed job, and
enqueue a new job for any other finished job."""
FIELD_LABELS: dict[str, Any] = {
    "args": gettext_lazy("Positional arguments"),
    "kwargs": gettext_lazy("Keyword arguments"),
    "payload": gettext_lazy("Payload"),
}
IDS = IdSource()
SEALED = VERSIONS_KEPT // 3
"""Milliseconds for which a seal is valid, less than the retention of previous payloads."""
REVISIONS = {"updated": Revision.UPDATED, "retried": Revision.RETRIED, "copied": Revision.COPIED}
BUTTONS = {
    UPDATE: gettext_lazy("Change arguments"),
    RETRY: gettext_lazy("Retry with these arguments"),
    COPY: gettext_lazy("Enqueue new job with these arguments"),
}


class Editable(NamedTuple):
    """The payload of a job, prepared for editing."""

    drafts: dict[str, Draft]
    """`args` and `kwargs` of a `@job` function's job, otherwise `payload`."""
    is_checked: bool
    """Whether the function is registered in this process, so that its arguments can be checked."""
    shown: Any
    """The whole payload as the user may see it."""
    hides: bool
    """Whether part of the payload is hidden."""
    seal: str
    """A keyed digest of the payload, different for each rendering of the form."""


class EditForm(forms.Form):
    """The arguments of a job as JSON."""

    seal = forms.CharField(widget=forms.HiddenInput, max_length=160)
    new_id = forms.CharField(widget=forms.HiddenInput, max_length=600)
    how = forms.ChoiceField(widget=forms.HiddenInput, choices=[(one, one) for one in REQUIRED_PERMISSIONS])

    def __init__(self, record: JobRecord, found: Editable, data: Any = None) -> None:
        texts = {name: draft.text for name, draft in found.drafts.items()}
        known = {"seal": found.seal, "how": way(record.state), "new_id": _new_id(record)}
        super().__init__(data, initial={**texts, **known})
        self._record, self._found = record, found
        for name, draft in found.drafts.items():
            rows = min(30, max(3, draft.text.count("\n") + 2))
            self.fields[name] = forms.CharField(
                label=FIELD_LABELS[name],
                max_length=jsontext.MAX_LENGTH,
                strip=False,
                widget=forms.Textarea(attrs={"rows": rows, "spellcheck": "false", "class": "djq-mono"}),
            )
        self.order_fields([*found.drafts])

    def clean_new_id(self) -> str:
        """Check the signature of the new job's ID, which makes submitting the form twice enqueue one job."""
        try:
            found: str = _signer(self._record).unsign(self.cleaned_data["new_id"])
        except BadSignature:
            raise forms.ValidationError(_("The form is no longer valid. Reload the page.")) from None
        return found

    def clean(self) -> dict[str, Any]:
        """Parse the texts, and check that the function accepts the arguments."""
        typed: dict[str, Any] = self.cleaned_data
        for name, draft in self._found.drafts.items():
            if name in typed:
                try:
                    typed[name] = _read(name, typed[name], draft)
                except MalformedError as error:
                    self.add_error(name, str(error))
        if self._found.is_checked and all(name in typed for name in jsontext.ARGUMENTS):
            check_arguments(self._record.name, typed["args"], typed["kwargs"])
        return typed

    def typed(self) -> Any:
        """Return the edited payload."""
        if "payload" in self._found.drafts:
            return self.cleaned_data["payload"]
        return {name: self.cleaned_data[name] for name in jsontext.ARGUMENTS}


def keep_version(request: HttpRequest, record: JobRecord, copy_id: str = "") -> PayloadVersion:
    """Store the payload of a job before it is replaced."""
    user: Any = request.user
    now = SYSTEM_CLOCK.now()
    rows_of(PayloadVersion).filter(at__lt=to_datetime(now - VERSIONS_KEPT)).delete()
    version = PayloadVersion(
        queue=record.queue,
        job_id=record.id,
        at=to_datetime(now),
        user=user.get_username() or "-",
        payload=record.payload,
        content_type=record.options.content_type,
        copy_id=copy_id,
    )
    version.save(using=alias_of(PayloadVersion))
    return version


def versions_of(queue: str, job_id: str) -> list[PayloadVersion]:
    """Return the previous payloads of a job, and of the job that it was copied from, newest first."""
    wanted = Q(job_id=job_id) | (Q(copy_id=job_id) & ~Q(copy_id=""))
    return list(rows_of(PayloadVersion).filter(wanted, queue=queue).order_by("-pk")[:VERSIONS_SHOWN])


def version_parts(queue: str, job_id: str) -> tuple[tuple[Any, ...], ...]:
    """Return what a job's page shows of previous payloads: see `reading.Parts`."""
    return tables.select(PayloadVersion, VERSION_PARTS, (queue, job_id, job_id, VERSIONS_SHOWN))


def latest_version(queue: str, job_id: str) -> int:
    """Return the key of the latest previous payload; 0 if the job was never edited."""
    rows = rows_of(PayloadVersion).filter(queue=queue, job_id=job_id, copy_id="")
    return rows.order_by("-pk").values_list("pk", flat=True).first() or 0


def way(state: State) -> str | None:
    """Return what is done with an edited job in this state; None for an active job, which can't be edited."""
    if state in PENDING:
        return UPDATE
    return {State.FAILED: RETRY, State.COMPLETED: COPY, State.CANCELLED: COPY}.get(state)


def refusal(request: HttpRequest, state: State) -> str:
    """Return why the user can't edit a job in this state; empty if they can."""
    how = way(state)
    if how is None:
        return _("Arguments of an active job can't be changed.")
    if all(rights.may(request, right) for right in REQUIRED_PERMISSIONS[how]):
        return ""
    if how == RETRY:
        return _("Retrying a failed job with other arguments requires permission to retry jobs.")
    return _("Creating a new job from a finished one requires permission to enqueue jobs.")


def editable(record: JobRecord) -> Editable:
    """Return the payload of a job, with hidden values replaced by placeholders.

    Raises:
        NotEditableError: The payload can't be edited; the message says why.
    """
    settings = get_settings()
    content_type = record.options.content_type
    try:
        value = decode(record.payload, content_type, accept=settings.accept_content)
        shown = redaction.payload(record, revealed=False)
    except SerializationError as error:
        raise NotEditableError(str(error)) from None
    if isinstance(value, dict) and value.keys() == {*jsontext.ARGUMENTS}:
        if not isinstance(shown, dict) or shown.keys() != value.keys():
            shown = dict.fromkeys(jsontext.ARGUMENTS, Hidden())
        drafts = {name: jsontext.write(value[name], shown[name], (name,)) for name in jsontext.ARGUMENTS}
        is_checked = registry.find(record.name) is not None
    else:
        drafts = {"payload": jsontext.write(value, shown)}
        is_checked = False
    hides = any(draft.hidden for draft in drafts.values())
    return Editable(drafts, is_checked, shown, hides, _seal(record))


def exposes(record: JobRecord, payload: bytes, found: Editable, texts: Mapping[str, str]) -> bool:
    """Return whether an edited payload would show a hidden value that it keeps.

    A job's own redact function may hide a value because of another value next to it.

    Args:
        texts: The edited texts, with placeholders for the values that are kept.
    """
    shown = redaction.payload(record._replace(payload=payload), revealed=False)
    kept = {name: jsontext.placeholders(texts[name]) for name in found.drafts}
    return jsontext.uncovers(found.shown, shown, found.drafts, kept)


def is_sealed(record: JobRecord, seal: str) -> bool:
    """Return whether a job still has the payload that it had when the form was rendered.

    An edit in between ends the seal even if it restored the payload: otherwise an edit with a guess,
    followed by a post of the old form, would confirm the guess.
    """
    nonce, _sep, rest = seal.partition(":")
    at, _sep, digest = rest.partition(":")
    if not (at.isascii() and at.isdecimal() and len(at) <= 15 and digest.isascii()):
        return False
    if not 0 <= SYSTEM_CLOCK.now() - int(at) < SEALED:
        return False
    return constant_time_compare(_digest(record, nonce, int(at)), digest)


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
    how = way(record.state)
    if how is not None and refusal(request, record.state):
        audit.note(request, "edit_now", queue=queue, job_id=job_id, refused=True)
        return _page(request, site, queue, job_id, record, status=403)
    try:
        draft = editable(record)
    except NotEditableError:
        return _page(request, site, queue, job_id, record)
    form = EditForm(record, draft, request.POST)
    if how is None or request.POST.get("how") != how:
        return _again(request, site, record, str(record.state))
    if not is_sealed(record, request.POST.get("seal", "")):
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
    if exposes(record, payload, draft, request.POST):
        form.add_error(None, _("These arguments would expose a hidden value. Enter a new value instead."))
        return _page(request, site, queue, job_id, record, form)
    version = keep_version(request, record, copy_id)
    try:
        if how == COPY:
            word = _copy(record, payload, copy_id)
        else:
            word = storage.jobs.replace_payload(queue, job_id, payload, record.payload, retry=how == RETRY)
    except DjqueueError as error:
        if isinstance(error, QueueFullError):
            version.delete()
        form.add_error(None, rights.reason(error))
        return _page(request, site, queue, job_id, record, form)
    if word not in REVISIONS:
        version.delete()
        fresh = storage.reads.jobs(queue, [job_id])[0]
        if fresh is None:
            return _page(request, site, queue, job_id, None)
        return _again(request, site, fresh, word)
    version.outcome = REVISIONS[word]
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


def _read(name: str, text: str, draft: Draft) -> Any:
    value = jsontext.read(text, draft.hidden, () if name == "payload" else (name,))
    if name == "args" and not isinstance(value, (list, tuple)):
        raise MalformedError(_("Enter a JSON list."))
    if name == "kwargs" and not isinstance(value, dict):
        raise MalformedError(_("Enter a JSON object."))
    return value


def _signer(record: JobRecord) -> Signer:
    return Signer(salt=f"djqueue.dashboard.editing:{record.queue}:{record.id}")


def _new_id(record: JobRecord) -> str:
    return _signer(record).sign(IDS.new(SYSTEM_CLOCK.now()))


def _seal(record: JobRecord) -> str:
    """Return a new seal: a nonce, the time, and a digest that covers both."""
    nonce, at = secrets.token_hex(16), SYSTEM_CLOCK.now()
    return f"{nonce}:{at}:{_digest(record, nonce, at)}"


def _digest(record: JobRecord, nonce: str, at: int) -> str:
    version = latest_version(record.queue, record.id)
    bound = ascii((nonce, at, record.queue, record.id, version)).encode()
    message = bound + b"\n" + record.payload
    return salted_hmac("djqueue.dashboard.editing", message, algorithm="sha256").hexdigest()


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
        message = _("Not saved: the job is now %(state)s.") % {"state": JobState(record.state.value).label}
    messages.warning(request, f"{message} {audit.last_action(record.queue, record.id)}".rstrip())
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
    crumbs = site.queue_crumbs(queue)
    texts = [request.POST[name] for name in FIELD_LABELS if name in request.POST]
    if record is None:
        return site.job_not_found(request, queue, job_id, "queues", crumbs)
    reason, found = refusal(request, record.state), None
    if not reason:
        try:
            found = editable(record)
        except NotEditableError as error:
            reason = _("Arguments can't be edited: %(why)s.") % {"why": str(error).rstrip(".")}
    if found is not None and form is None:
        form = EditForm(record, found)
        if is_old:
            for name in found.drafts:
                form.initial[name] = request.POST.get(name, form.initial[name])
    context: dict[str, Any] = {
        "job": record,
        "form": form if found is not None else None,
        "found": found,
        "refusal": reason,
        "typed": texts if found is None else [],
        "now": [draft.text for draft in found.drafts.values()] if found is not None and is_old else [],
        "how": way(record.state),
        "label": BUTTONS.get(way(record.state) or ""),
    }
    crumbs.append(Crumb(record.name, site.url("job", queue, job_id)))
    title = _("Edit arguments")
    return site.render(request, "edit.html", title, context, tab="queues", crumbs=crumbs, status=status)
