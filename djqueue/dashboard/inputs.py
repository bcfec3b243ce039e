"""What a page is given: form fields for times and JSON, and the refusal of what no storage can take."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _

from djqueue.core.states import State

from . import jsontext
from .jsontext import Draft, MalformedError

EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(9998, 1, 1, tzinfo=UTC)
"""A time later than this leaves Python's calendar in some time zone, or with a minute added."""


def read_state(text: str) -> State | None:
    """Return the state with this name; None if there is none."""
    return State(text) if text in {state.value for state in State} else None


class BadInputError(Exception):
    """A request has a value that no form of ours sends; the message begins with the name of its field."""


def check(request: HttpRequest, captured: Mapping[str, Any]) -> None:
    """Raise BadInputError if a parameter, or a part of the path, has a NUL: PostgreSQL stores none."""
    found = [*captured.items()]
    for given in (request.GET, request.POST):
        found += [(name, value) for name, values in given.lists() for value in (name, *values)]
    for name, value in found:
        if isinstance(value, str) and "\0" in value:
            shown = name.replace("\0", "")
            raise BadInputError(f"{shown}: {_('The value contains a NUL character.')}")


def check_hidden(form: forms.BaseForm) -> None:
    """Raise BadInputError if something is wrong with a hidden field: nobody can correct that on the page."""
    for field in form.hidden_fields():
        if field.errors:
            raise BadInputError(f"{field.name}: {' '.join(map(str, field.errors))}")


class DateTimeInput(forms.DateTimeInput):
    """The browser's own input of a date and time, to the second."""

    def __init__(self, attrs: dict[str, Any] | None = None) -> None:
        super().__init__({"type": "datetime-local", "step": "1", **(attrs or {})}, format="%Y-%m-%dT%H:%M:%S")


class TimeField(forms.DateTimeField):
    """A time that the queue can store, and every time zone can show."""

    def to_python(self, value: Any) -> datetime | None:
        """Return the time. Raises ValidationError outside of the years from 1970 to 9997."""
        found = super().to_python(value)
        if found is not None:
            # Without USE_TZ it has no time zone; a day of slack covers all of them.
            aware = found.replace(tzinfo=UTC) if timezone.is_naive(found) else found
            if not EARLIEST <= aware <= LATEST:
                raise ValidationError(_("Enter a time from 1970 to 9997."))
        return found


class ArgumentsField(forms.Field):
    """Arguments as plain JSON, in which what is hidden from the viewer is a mark: see `jsontext`."""

    widget = forms.Textarea

    def __init__(self, *, kind: type, **kwargs: Any) -> None:
        super().__init__(required=False, **kwargs)
        self.kind = kind
        self.draft = Draft("", {})
        self.path: jsontext.Path = ()

    def show(self, value: Any, shown: Any, path: jsontext.Path) -> None:
        """Set the value that the form begins with, of which only `shown` is to be seen."""
        self.path = path
        try:
            self.draft = jsontext.write(value, shown, path, tagged=False)
        except jsontext.NotEditableError:
            # As a whole it can be kept, or be replaced.
            self.draft = jsontext.hidden_whole(value, path)
        self.initial = self.draft.text

    def prepare_value(self, value: Any) -> Any:
        """Return the text that the form has."""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def to_python(self, value: Any) -> Any:
        """Return the value of a text, hidden values in the place of their marks. Raises ValidationError."""
        text = value if isinstance(value, str) else ""
        if not text.strip():
            return self.kind()
        try:
            return jsontext.read(text, self.draft.hidden, self.path, tagged=False)
        except MalformedError as error:
            raise ValidationError(str(error)) from None

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Return whether the text is another one."""
        return bool((data or "").strip().replace("\r\n", "\n") != self.draft.text)

    def validate(self, value: Any) -> None:
        """Raise ValidationError for a text with a NUL, which PostgreSQL refuses in a column of JSON."""
        super().validate(value)
        if any("\0" in text for text in _texts(value)):
            raise ValidationError(_("The value contains a NUL character."))

    def keeps(self, text: str) -> set[str]:
        """Return the marks that a text which was read has kept."""
        return jsontext.placeholders(text) & self.draft.hidden.keys() if text.strip() else set()


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON, keys too."""
    parts = [value]
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += [*part.keys(), *part.values()]
