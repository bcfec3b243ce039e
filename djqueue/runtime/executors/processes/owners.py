"""The part of the executor that a process knows."""

from typing import TYPE_CHECKING, Any, Protocol

from djqueue.core.job import Outcome
from djqueue.runtime.runs import Run

if TYPE_CHECKING:
    from .jobprocess import JobProcess


class ProcessOwner(Protocol):
    """Learns what happens to a process."""

    def on_ready(self, process: "JobProcess") -> None:
        """Note that a process has started, or has ended its job, and waits for one."""

    def on_outcome(self, process: "JobProcess", run: Run, outcome: Outcome) -> None:
        """Note that a process has ended a job."""

    def on_ended(self, process: "JobProcess") -> None:
        """Note that a process has ended, perhaps with its job."""

    async def records(self, run: Run) -> Any:
        """Return the records of the jobs that a job depends on."""

    async def resolve(self, process: "JobProcess", name: str, port: int | None) -> list[tuple[int, str]]:
        """Return the addresses of a name for a process. Raises OSError."""

    def note_denied(self, process: "JobProcess", target: str) -> None:
        """Note an access that the permissions of the current job do not allow."""
