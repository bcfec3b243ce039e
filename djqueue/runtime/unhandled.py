"""Warns about waiting jobs that no live worker can run."""

from collections.abc import Sequence

from djqueue.core.unhandled import unhandled

from .workercontext import WorkerContext

EVERY = 10_000
"""Milliseconds between two looks."""
AGAIN = 3_600_000
"""Milliseconds after which the same name is logged again."""
MOST = 20
"""Names that one look logs: those with most jobs."""


class UnhandledWatch:
    """Looks for such jobs in the queues of one worker, and logs each name once an hour."""

    def __init__(self, worker_context: WorkerContext, queues: Sequence[str] | None) -> None:
        self._storage = worker_context.storage
        self._clock = worker_context.clock
        self._tell = worker_context.tell
        self._queues = queues
        # Workers that are started together need a moment to register.
        self._looked_at = worker_context.clock.monotonic()
        self._logged: dict[tuple[str, str], int] = {}

    def look(self) -> None:
        """Look, unless that was done a moment ago. Raises what the storage raises."""
        now = self._clock.monotonic()
        if now - self._looked_at < EVERY:
            return
        self._looked_at = now
        rows = self._storage.reads.overview(self._queues).queues
        self._logged = {key: at for key, at in self._logged.items() if now - at < AGAIN}
        if not any(row.names for row in rows):
            return
        for one in unhandled(rows, self._storage.workers.all())[:MOST]:
            if (one.queue, one.name) not in self._logged:
                self._logged[one.queue, one.name] = now
                self._tell.no_worker_knows(one)
