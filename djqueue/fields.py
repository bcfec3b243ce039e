"""The model field for times, and the length of names."""

from datetime import datetime
from typing import Any

from django.db import models
from django.utils import timezone

from .core.units import to_datetime, to_milliseconds

NAME_LENGTH = 255
"""Maximum length of names, ids and keys."""


class MillisecondsField(models.DateTimeField):  # type: ignore[type-arg]
    """An aware datetime in Python, UTC milliseconds in a BIGINT column.

    It subclasses DateTimeField so that the admin displays and filters it as one. The column is an integer so
    that the journal writes it without conversion. Lookups by parts of a date (`__year`) are not supported.
    """

    def get_internal_type(self) -> str:
        """Return BigIntegerField, for its column type and converters."""
        return "BigIntegerField"

    def from_db_value(self, value: int | None, *_: Any) -> datetime | None:
        """Convert milliseconds to an aware datetime in UTC."""
        return None if value is None else to_datetime(value)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> int | None:
        """Convert a datetime to milliseconds; return milliseconds unchanged."""
        if value is None or isinstance(value, int):
            return value
        if not prepared:
            value = self.get_prep_value(value)
        if timezone.is_naive(value):  # Without USE_TZ: in the time zone of the project.
            value = timezone.make_aware(value)
        return to_milliseconds(value)

    def get_prep_value(self, value: Any) -> Any:
        """Prepare a datetime as DateTimeField does; return milliseconds unchanged."""
        return value if isinstance(value, int) else super().get_prep_value(value)

    def get_transform(self, lookup_name: str) -> None:
        """Return None: the transforms of a DateTimeField would extract date parts from a number."""
