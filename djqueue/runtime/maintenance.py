"""What time does to jobs, asked of the storage about once a second."""

from collections.abc import Callable, Sequence

from djqueue.storage.chores import chores_of

from .periodic import Periodic
from .unhandled import UnhandledWatch
from .workercontext import WorkerContext

INTERVAL = 1.0
"""Seconds between two rounds, on average; several workers do not keep in step."""
GRACE = 5.0
"""Seconds that the worker's end waits for a round that is under way."""


class Maintenance:
    """Any number of workers may do it: a second round finds nothing to do."""

    def __init__(
        self, worker_context: WorkerContext, queues: Sequence[str] | None, on_exit: Callable[[], None] | None
    ) -> None:
        self._storage = worker_context.storage
        self._random = worker_context.random
        self._tell = worker_context.tell
        self._chores = {
            "maintain": lambda: worker_context.storage.sweep(),
            **chores_of(worker_context.storage),
            "unhandled": UnhandledWatch(worker_context, queues).look,
        }
        self._thread = Periodic("djqueue-maintenance", self._seconds, self._round, on_exit)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a round under way is waited for, but not for ever."""
        self._thread.stop()
        self._thread.join(GRACE)

    def _round(self) -> None:
        for part, chore in self._chores.items():
            try:
                chore()
            except Exception as error:
                self._tell.away(part, error)
            else:
                self._tell.back(part)

    def _seconds(self) -> float:
        return INTERVAL * self._random.uniform(0.8, 1.2)
