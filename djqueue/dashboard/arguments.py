"""Arguments of jobs: checked against a function's signature, and shown on one line of a list."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from djqueue.client import registry
from djqueue.core.errors import SerializationError
from djqueue.core.job import JobRecord, is_call

from . import redaction, rendering

LARGEST = 8_192
"""Largest payload, in bytes, that a list decodes. Lists that read rows read one byte more."""
LENGTH = 80
"""Maximum characters shown of one job's arguments."""


def check_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ValidationError if the function of a registered job does not accept the arguments."""
    try:
        inspect.signature(registry.get(name).function).bind(*args, **kwargs)
    except TypeError as error:
        message = _("The job does not accept these arguments: %(error)s.")
        raise ValidationError(message, params={"error": error}) from None


def one_line(record: JobRecord) -> str:
    """Return a job's redacted arguments in Python syntax, cut to `LENGTH` characters."""
    if len(record.payload) > LARGEST:
        return _("too large to list")
    try:
        value = redaction.payload(record, revealed=False)
    except SerializationError:
        return _("unreadable")
    return _cut(_line(value))


def _line(value: Any) -> str:
    """Return the arguments of a call, or any other payload as a value."""
    if is_call(value):
        named = [f"{name}={_flat(one)}" for name, one in value["kwargs"].items()]
        return ", ".join([*map(_flat, value["args"]), *named])
    return _flat(value)


def _flat(value: Any) -> str:
    return " ".join(rendering.text(value, LENGTH * 4).split())


def _cut(text: str) -> str:
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 1]}…"
