"""The arguments of jobs as a list shows them: on one line, redacted, and short."""

from typing import Any

from django.utils.translation import gettext as _

from djqueue.core.calls import is_call
from djqueue.core.errors import SerializationError
from djqueue.core.job import JobRecord

from . import redaction, rendering

LARGEST = 8_192
"""Bytes of a payload above which a list does not decode it; lists that read rows read one byte more."""
LENGTH = 80
"""Characters of the arguments of one job."""


def arguments(record: JobRecord) -> str:
    """What a job is called with, as in Python, without what redaction hides; never more than `LENGTH`."""
    if len(record.payload) > LARGEST:
        return _("too large for a list")
    try:
        value = redaction.payload(record, revealed=False)
    except SerializationError:
        return _("unreadable")
    return _cut(_line(value))


def _line(value: Any) -> str:
    """A call's arguments as they are written; anything else as a value."""
    if is_call(value):
        named = [f"{name}={_one_line(one)}" for name, one in value["kwargs"].items()]
        return ", ".join([*map(_one_line, value["args"]), *named])
    return _one_line(value)


def _one_line(value: Any) -> str:
    return " ".join(rendering.text(value, LENGTH * 4).split())


def _cut(text: str) -> str:
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 1]}…"
