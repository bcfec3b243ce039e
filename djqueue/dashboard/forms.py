"""Form fields for times and JSON, and checks of values that no storage or function accepts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.forms.utils import flatatt
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from djqueue.client import registry
from djqueue.core.errors import ArgumentsError
from djqueue.core.states import State
from djqueue.core.units import LATEST, to_milliseconds
from djqueue.dashboard import jsontext
from djqueue.dashboard.jsontext import Draft, MalformedError


class BadInputError(Exception):
    """A request has a value that no form of the dashboard sends. The message starts with the field's name."""


class DateTimeInput(forms.DateTimeInput):
    """The browser's own input of a date and time, to the second."""

    def __init__(self, attrs: dict[str, Any] | None = None) -> None:
        super().__init__({"type": "datetime-local", "step": "1", **(attrs or {})}, format="%Y-%m-%dT%H:%M:%S")


class NameSelect(forms.Select):
    """A choice of one of very many names: Django renders a template for each option."""

    def render(self, name: str, value: Any, attrs: Any = None, renderer: Any = None) -> SafeString:
        """Return the element."""
        options = format_html_join(
            "",
            '<option value="{}"{}>{}</option>',
            (
                (one, mark_safe(" selected") if one == (value or "") else "", label)
                for one, label in self.choices
            ),
        )
        attributes = flatatt(self.build_attrs(self.attrs, {**(attrs or {}), "name": name}))
        return format_html("<select{}>{}</select>", attributes, options)


class TimeField(forms.DateTimeField):
    """A time that the queue can store and every time zone can show."""

    def to_python(self, value: Any) -> datetime | None:
        """Return the time.

        Raises:
            ValidationError: The time is not between the years 1970 and 9997.
        """
        found = super().to_python(value)
        if found is not None:
            # Without USE_TZ, the time is naive; a day of slack covers all time zones.
            aware = found.replace(tzinfo=UTC) if timezone.is_naive(found) else found
            if not 0 <= to_milliseconds(aware) <= LATEST:
                raise ValidationError(_("Enter a time from 1970 to 9997."))
        return found


class ArgumentsField(forms.Field):
    """Arguments as plain JSON, with placeholders for hidden values: see `jsontext`."""

    widget = forms.Textarea

    def __init__(self, *, kind: type, **kwargs: Any) -> None:
        super().__init__(required=False, **kwargs)
        self.kind = kind
        self.draft = Draft("", {})
        self.path: jsontext.Path = ()

    def show(self, value: Any, shown: Any, path: jsontext.Path) -> None:
        """Set the initial value, of which only `shown` is visible."""
        self.path = path
        try:
            self.draft = jsontext.write(value, shown, path, tagged=False)
        except jsontext.NotEditableError:
            # The value can only be kept or replaced as a whole.
            self.draft = jsontext.hidden_whole(value, path)
        self.initial = self.draft.text

    def prepare_value(self, value: Any) -> Any:
        """Return the text of the form field."""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def to_python(self, value: Any) -> Any:
        """Return the value of a text, with hidden values in place of their placeholders.

        Raises:
            ValidationError: The text is not valid.
        """
        text = value if isinstance(value, str) else ""
        if not text.strip():
            return self.kind()
        try:
            read = jsontext.read(text, self.draft.hidden, self.path, tagged=False)
        except MalformedError as error:
            raise ValidationError(str(error)) from None
        if not isinstance(read, self.kind):
            raise ValidationError(_("Enter a JSON list.") if self.kind is list else _("Enter a JSON object."))
        return read

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Return whether the text was changed."""
        return bool((data or "").strip().replace("\r\n", "\n") != self.draft.text)

    def validate(self, value: Any) -> None:
        """Raise ValidationError if a text contains NUL, which PostgreSQL rejects in JSON columns."""
        super().validate(value)
        if any("\0" in text for text in _texts(value)):
            raise ValidationError(_("The value contains a NUL character."))

    def keeps(self, text: str) -> set[str]:
        """Return the placeholders that a valid text has kept."""
        return jsontext.placeholders(text) & self.draft.hidden.keys() if text.strip() else set()


def read_state(text: str) -> State | None:
    """Return the state with this name; None if there is none."""
    return State(text) if text in {state.value for state in State} else None


def check_request(request: HttpRequest, captured: Mapping[str, Any]) -> None:
    """Raise BadInputError if a parameter or path segment contains NUL, which PostgreSQL can't store."""
    pairs = [*captured.items()]
    for query in (request.GET, request.POST):
        pairs += [(name, value) for name, values in query.lists() for value in (name, *values)]
    for name, value in pairs:
        if isinstance(value, str) and "\0" in value:
            shown = name.replace("\0", "")
            raise BadInputError(f"{shown}: {_('The value contains a NUL character.')}")


def check_hidden(form: forms.BaseForm) -> None:
    """Raise BadInputError if a hidden field is not valid, because users can't correct it."""
    for field in form.hidden_fields():
        if field.errors:
            raise BadInputError(f"{field.name}: {' '.join(map(str, field.errors))}")


def check_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ValidationError if the function of a registered job does not accept the arguments."""
    try:
        registry.check_arguments(name, [{"args": args, "kwargs": kwargs}])
    except ArgumentsError as error:
        message = _("The job does not accept these arguments: %(error)s")
        raise ValidationError(message, params={"error": error}) from None


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, including keys."""
    parts = [value]
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += [*part.keys(), *part.values()]
