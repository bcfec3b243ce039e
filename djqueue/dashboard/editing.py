"""The form that edits a job's arguments: what can be edited, by whom, and what is done with the result."""

import secrets
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from django import forms
from django.core.signing import BadSignature, Signer
from django.http import HttpRequest
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import registry
from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import SerializationError
from djqueue.core.ids import IdSource
from djqueue.core.job import JobRecord
from djqueue.core.states import PENDING, State

from . import jsontext, redaction, rights, versions
from .arguments import check_arguments
from .jsontext import Draft, MalformedError, NotEditableError
from .redaction import Hidden

UPDATE, RETRY, COPY = "update", "retry", "copy"
TAKES = {UPDATE: (rights.EDIT,), RETRY: (rights.EDIT, rights.RETRY), COPY: (rights.EDIT, rights.ENQUEUE)}
"""Uses of edited arguments, with the required permissions. They update a pending job, retry a failed job, and
enqueue a new job for any other finished job."""
ARGUMENTS = ("args", "kwargs")
LABELS: dict[str, Any] = {
    "args": gettext_lazy("Positional arguments"),
    "kwargs": gettext_lazy("Keyword arguments"),
    "payload": gettext_lazy("Payload"),
}
IDS = IdSource()
SEALED = versions.KEPT // 3
"""Milliseconds for which a seal is valid, less than the retention of previous payloads."""


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
    if all(rights.may(request, right) for right in TAKES[how]):
        return ""
    if how == RETRY:
        return _("Retrying a failed job with other arguments requires permission to retry jobs.")
    return _("Creating a new job from a finished one requires permission to enqueue jobs.")


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
    if isinstance(value, dict) and tuple(sorted(value)) == ARGUMENTS:
        if not isinstance(shown, dict) or shown.keys() != value.keys():
            shown = dict.fromkeys(ARGUMENTS, Hidden())
        drafts = {name: jsontext.write(value[name], shown[name], (name,)) for name in ARGUMENTS}
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
    return uncovers(found.shown, shown, found.drafts, kept)


def uncovers(before: Any, now: Any, drafts: Mapping[str, Draft], kept: Mapping[str, Collection[str]]) -> bool:
    """Return whether a hidden value that is kept would be visible.

    Args:
        before: The whole payload as the user sees it.
        now: The edited payload as the user would see it.
        kept: Placeholders in the edited text of each draft.
    """
    return any(
        mark in kept[name] and not _is_as_hidden(_at(now, path), _at(before, path))
        for name, draft in drafts.items()
        for mark, (path, _value) in draft.hidden.items()
    )


def _at(shown: Any, path: jsontext.Path) -> Any:
    for step in path:
        if isinstance(shown, Hidden):
            break
        try:
            shown = shown[step]
        except (KeyError, IndexError, TypeError):
            return Hidden()
    return shown


def _is_as_hidden(now: Any, before: Any) -> bool:
    return isinstance(now, Hidden) or repr(now) == repr(before)


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


class EditForm(forms.Form):
    """The arguments of a job as JSON."""

    seal = forms.CharField(widget=forms.HiddenInput, max_length=160)
    new_id = forms.CharField(widget=forms.HiddenInput, max_length=600)
    how = forms.ChoiceField(widget=forms.HiddenInput, choices=[(one, one) for one in TAKES])

    def __init__(self, record: JobRecord, found: Editable, data: Any = None) -> None:
        texts = {name: draft.text for name, draft in found.drafts.items()}
        known = {"seal": found.seal, "how": way(record.state), "new_id": _new_id(record)}
        super().__init__(data, initial={**texts, **known})
        self._record, self._found = record, found
        for name, draft in found.drafts.items():
            rows = min(30, max(3, draft.text.count("\n") + 2))
            self.fields[name] = forms.CharField(
                label=LABELS[name],
                max_length=jsontext.LONGEST,
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
        if self._found.is_checked and all(name in typed for name in ARGUMENTS):
            check_arguments(self._record.name, typed["args"], typed["kwargs"])
        return typed

    def typed(self) -> Any:
        """Return the edited payload."""
        if "payload" in self._found.drafts:
            return self.cleaned_data["payload"]
        return {name: self.cleaned_data[name] for name in ARGUMENTS}


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
    version = versions.latest(record.queue, record.id)
    bound = ascii((nonce, at, record.queue, record.id, version)).encode()
    message = bound + b"\n" + record.payload
    return salted_hmac("djqueue.dashboard.editing", message, algorithm="sha256").hexdigest()
