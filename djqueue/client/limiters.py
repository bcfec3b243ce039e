"""`Limiter`: what several queues share."""

from typing import Any

from djqueue.conf import get_settings, parse_rate
from djqueue.core.errors import OptionError
from djqueue.core.options import MAX_INTEGER, check_text
from djqueue.core.sharing import LimiterState
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage

from .storages import get_storage

UNCHANGED: Any = object()
"""An argument that was not given: what it stands for stays as it is."""


def read_limits(call: str, rate: Any, concurrency: Any) -> dict[str, Any]:
    """The limits that were given, checked. Raises OptionError, ConfigurationError."""
    given: dict[str, Any] = {}
    if rate is not UNCHANGED:
        given["rate"] = None if rate is None else parse_rate(rate)
    if concurrency is not UNCHANGED:
        if concurrency is not None and (type(concurrency) is not int or not 1 <= concurrency <= MAX_INTEGER):
            raise OptionError(f"concurrency: must be a positive whole number; got {concurrency!r}")
        given["concurrency"] = concurrency
    if not given:
        raise OptionError(f"{call}: expected rate, concurrency or both; None removes a limit")
    return given


class Limiter:
    """One of `DJQUEUE["LIMITERS"]`, in a storage (the settings' one unless given).

    Raises OptionError if it is not one of them.
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
        """Where its queues are."""
        return self._storage if self._storage is not None else get_storage()

    def set(self, *, rate: Any = UNCHANGED, concurrency: Any = UNCHANGED) -> None:
        """Limit what its queues together start (`"100/s"`, or (count, seconds)) and have active at once.

        A limit that is not given stays as it is; None removes it. It counts at once, for all processes, and
        after a restart.

        Raises OptionError, ConfigurationError, StorageError.
        """
        self.storage.limiters.set(self.name, **read_limits("set", rate, concurrency))

    async def aset(self, *, rate: Any = UNCHANGED, concurrency: Any = UNCHANGED) -> None:
        """See `set`."""
        await self.storage.acall(self.set, rate=rate, concurrency=concurrency)

    def state(self) -> LimiterState:
        """What is allowed, and what is used and free at the moment."""
        return self.storage.limiters.state(self.name)

    async def astate(self) -> LimiterState:
        """See `state`."""
        return await self.storage.acall(self.state)
