"""`Limiter`: limits that several queues share."""

from datetime import timedelta
from typing import Any

from djqueue.conf import get_settings, parse_rate
from djqueue.core.errors import OptionError
from djqueue.core.options import MAX_INTEGER, check_text
from djqueue.core.overview import LimiterState
from djqueue.core.policies import UNSET, Unset
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage

from .steps import asynchronous
from .storages import get_storage

RateValue = str | tuple[int, float | timedelta]
"""A rate as users write it: `"100/s"`, or (count, seconds)."""


def read_limits(call: str, rate: Any, concurrency: Any) -> dict[str, Any]:
    """Return the limits that were given, checked. Raises OptionError, ConfigurationError."""
    limits: dict[str, Any] = {}
    if rate is not UNSET:
        limits["rate"] = None if rate is None else parse_rate(rate)
    if concurrency is not UNSET:
        limits["concurrency"] = check_count("concurrency", concurrency)
    if not limits:
        raise OptionError(f"{call}: expected rate, concurrency or both; None removes a limit")
    return limits


def check_count(name: str, value: Any) -> int | None:
    """Return a limit of a number, checked; None for no limit. Raises OptionError."""
    if value is None or (type(value) is int and 1 <= value <= MAX_INTEGER):
        return value
    raise OptionError(f"{name}: must be a positive whole number; got {value!r}")


class Limiter:
    """A limiter of `DJQUEUE["LIMITERS"]`, in a storage (by default the configured one).

    Raises OptionError if the settings have no limiter with this name.
    """

    def __init__(self, name: str, *, storage: Storage | None = None) -> None:
        self.name = check_text("limiter", name)
        known = get_settings().limiters
        if storage is None and name not in known:
            raise OptionError(f"limiter: {name!r} is not in DJQUEUE['LIMITERS']{nearest(name, known)}")
        self._storage = storage

    def __repr__(self) -> str:
        return f"<Limiter {self.name}>"

    @property
    def storage(self) -> Storage:
        """The storage of its queues."""
        return self._storage if self._storage is not None else get_storage()

    def set(self, *, rate: RateValue | Unset | None = UNSET, concurrency: int | Unset | None = UNSET) -> None:
        """Limit the starts (`"100/s"`, or (count, seconds)) and the active jobs of all its queues together.

        None removes a limit; a limit that is not given is unchanged. Changes apply to all processes at once,
        and survive restarts.

        Raises OptionError, ConfigurationError, StorageError.
        """
        self.storage.limiters.set(self.name, **read_limits("set", rate, concurrency))

    aset = asynchronous(set)  # noqa: A003 - the method above is meant

    def state(self) -> LimiterState:
        """Return the limits, and how much of them is in use and free."""
        return self.storage.limiters.state(self.name)

    astate = asynchronous(state)
