"""A model field for the package's one form of time."""

from datetime import datetime
from typing import Any

from django.db import models
from django.utils import timezone

from .core.durations import to_datetime, to_milliseconds


class MillisecondsField(models.DateTimeField):  # type: ignore[type-arg]
    """An aware datetime outside, UTC milliseconds in a BIGINT column inside.

    A DateTimeField by class, so that the admin shows and filters it as one; an integer in SQL, so that
    the journal writes it without conversion. Lookups by parts of a date (`__year`) are not offered.
    """

    def get_internal_type(self) -> str:
        """The column of a BigIntegerField, with its converters."""
        return "BigIntegerField"

    def from_db_value(self, value: int | None, *_: Any) -> datetime | None:
        """Milliseconds to an aware datetime in UTC."""
        return None if value is None else to_datetime(value)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> int | None:
        """An aware datetime, or milliseconds, to milliseconds."""
        if value is None or isinstance(value, int):
            return value
        if not prepared:
            value = self.get_prep_value(value)
        if timezone.is_naive(value):  # in a project without time zones: it means the project's own
            value = timezone.make_aware(value)
        return to_milliseconds(value)

    def get_prep_value(self, value: Any) -> Any:
        """As for a datetime; milliseconds are passed on."""
        return value if isinstance(value, int) else super().get_prep_value(value)

    def get_transform(self, lookup_name: str) -> None:
        """None: the parts of a date that a DateTimeField offers would be taken of a bare number."""
