"""Values that several parts of one response need, read once per request."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from django.http import HttpRequest

T = TypeVar("T")

ATTRIBUTE = "_djqueue_cache"


def cached(request: HttpRequest, key: Hashable, read: Callable[[], T]) -> T:
    """Return the value of a key, calling `read` the first time only."""
    values: dict[Hashable, T] = request.__dict__.setdefault(ATTRIBUTE, {})
    if key not in values:
        values[key] = read()
    return values[key]


def store(request: HttpRequest, key: Hashable, value: object) -> None:
    """Set the value of a key for the rest of the request."""
    request.__dict__.setdefault(ATTRIBUTE, {})[key] = value
