"""Questions that the result of an enqueue asks about its job later.

The core knows no storage: the client installs a `ResultReader`, which `EnqueueResult` calls.
"""

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .job import EnqueueResult


class ResultReader(ABC):
    """Reads the job of a result from the storage that has it."""

    @abstractmethod
    def wait(self, result: "EnqueueResult", timeout: float | timedelta) -> Any:
        """Wait until the job ends, and return its return value."""

    @abstractmethod
    async def await_(self, result: "EnqueueResult", timeout: float | timedelta) -> Any:
        """Async version of `wait`."""

    @abstractmethod
    def refresh(self, result: "EnqueueResult") -> "EnqueueResult":
        """Return the result with the current state of the job."""

    @abstractmethod
    async def arefresh(self, result: "EnqueueResult") -> "EnqueueResult":
        """Async version of `refresh`."""

    @abstractmethod
    def job(self, result: "EnqueueResult") -> Any:
        """Return the job, or None."""

    @abstractmethod
    async def ajob(self, result: "EnqueueResult") -> Any:
        """Async version of `job`."""


_installed: list[ResultReader] = []


def install(follower: ResultReader) -> None:
    """Install the reader that results use from now on."""
    _installed[:] = [follower]


def follower() -> ResultReader:
    """Return the installed reader. Raises ConfigurationError if the client has not been imported."""
    if not _installed:
        raise ConfigurationError(
            "this result cannot read its job, because djqueue.client is not imported: import djqueue.client, "
            "or use the storage's own methods"
        )
    return _installed[0]
