"""The part of the executor that a process knows."""

from typing import TYPE_CHECKING, Any, Protocol

from djqueue.core.job import EnqueueResult, Outcome
from djqueue.runtime.runs import Run

if TYPE_CHECKING:
    from djqueue.runtime.emitting import RunItems

    from .jobprocess import JobProcess


class ProcessOwner(Protocol):
    """Learns what happens to a process, and answers it."""

    @property
    def enqueues(self) -> bool:
        """Whether it enqueues jobs for its processes, because they cannot reach the storage."""

    def on_ready(self, process: "JobProcess") -> None:
        """Note that a process has started, or has ended its job, and waits for one."""

    def on_outcome(self, process: "JobProcess", run: Run, outcome: Outcome) -> None:
        """Note that a process has ended a job."""

    def on_ended(self, process: "JobProcess") -> None:
        """Note that a process has ended, perhaps with its job."""

    async def records(self, run: Run) -> Any:
        """Return the records of the jobs that a job depends on."""

    def open_items(self, run: Run) -> "RunItems":
        """Begin the stream of a run that yields items."""

    async def enqueue(self, run: Run, request: bytes) -> list[EnqueueResult]:
        """Enqueue the jobs of a request.

        Raises FrameError if it is none, PermissionError with the object as `filename` if the permissions do
        not list it, DjqueueError if the jobs cannot be enqueued.
        """

    async def resolve(self, process: "JobProcess", name: str, port: int | None) -> list[tuple[int, str]]:
        """Return the addresses of a name for a process. Raises OSError."""

    def note_denied(self, process: "JobProcess", target: str) -> None:
        """Note an access that the permissions of the current job do not allow."""
