"""`QueueHandle`: a queue's name and its storage, the base of the parts of `Queue`."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from djqueue.conf import get_settings
from djqueue.core.errors import OptionError
from djqueue.core.options import check_text
from djqueue.storage.base import Storage

from . import envelope
from .storages import get_storage

P = ParamSpec("P")
T = TypeVar("T")


class QueueHandle:
    """A queue of a storage (by default the configured one)."""

    def __init__(self, name: str, storage: Storage | None) -> None:
        self.name = check_text("queue", name)
        self._storage = storage

    @property
    def storage(self) -> Storage:
        """The storage of its jobs."""
        return self._storage if self._storage is not None else get_storage()

    def _check_target(self, to: str) -> None:
        envelope.check_queue(check_text("to", to), get_settings())
        if to == self.name:
            raise OptionError(f"to: the jobs are already in queue {to!r}; pass a different queue")

    async def _acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.storage.acall(method, *args, **kwargs)
