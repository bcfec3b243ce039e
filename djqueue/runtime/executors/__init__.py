"""Executors: where and how handlers run."""

from typing import TYPE_CHECKING, Protocol

from .inline import InlineExecutor

if TYPE_CHECKING:
    from djqueue.core.job import Outcome, ProcessInfo
    from djqueue.runtime.runs import Run, Stop

__all__ = ["Executor", "InlineExecutor"]


class Executor(Protocol):
    """Runs the handlers of the jobs that a worker has claimed.

    An executor is created on the worker's loop. It ends every run that it starts with `Runs.settle`, and
    then wakes the claim loop with `WakeEvent.run_ended`. A run that has been settled elsewhere stays so.
    """

    def start(self, run: "Run") -> None:
        """Start a run. Called on the loop; the run may have ended when this returns."""

    def stop(self, run: "Run", reason: "Stop") -> None:
        """Ask a run to stop: set its event, and interrupt it if possible. From any thread."""

    def release_waiting(self) -> None:
        """Return jobs that have been claimed, and whose handlers have not been called, to their queues."""

    def kill(self) -> None:
        """End the runs that have not stopped in time, as far as possible."""

    def give_up(self, run: "Run") -> "Outcome":
        """Return the outcome of a run that has not stopped in time."""

    def process_infos(self) -> "tuple[ProcessInfo, ...]":
        """Return the processes in which jobs run beside this one. From any thread."""

    def close(self) -> None:
        """Release threads and connections. Called when the worker has ended."""
