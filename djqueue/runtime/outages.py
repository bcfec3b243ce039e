"""Times in which the storage does not answer: one line in the log for each, whatever was asked of it."""

import logging
from collections.abc import Callable
from threading import Lock

from djqueue.core.errors import StorageUnavailableError

logger = logging.getLogger("djqueue.worker")

PATIENCE = 5_000
"""Milliseconds after which an outage is more than a restart: it is logged before it is over."""

WORK = "claim and finish"
"""The operation that a worker repeats all the time: it ends an outage of others that are not tried again."""
RETRIED_WITHIN = 5_000
"""Milliseconds for which a failed operation keeps an outage open: it may never be tried again."""


class OutageLog:
    """What a worker logs of a storage that fails. All methods may be called from any thread.

    A storage that is away, such as a scheduler that is restarted, is an outage: one line is logged when it is
    over, and one before that if it lasts. It is over when every operation that failed works again, or has not
    been tried for a while: some calls of a storage that is slow, or away in part, succeed all the time. Any
    other error is a fault, and is logged with its traceback.
    """

    def __init__(self, worker_id: str, monotonic: Callable[[], int]) -> None:
        self._worker_id = worker_id
        self._monotonic = monotonic
        self._lock = Lock()
        self._faulty: set[str] = set()
        """Operations whose last try ended with a fault."""
        self._away: dict[str, int] = {}
        """Operations whose last try found the storage away, with the time of that."""
        self._since = 0
        self._answered_at: int | None = None
        """When the first operation worked after the last failure."""
        self._is_logged = False

    def failed(self, operation: str, error: BaseException) -> None:
        """An operation of the storage failed."""
        if isinstance(error, StorageUnavailableError):
            self._note_away(operation, error)
            return
        with self._lock:
            is_new = operation not in self._faulty
            self._faulty.add(operation)
        if is_new:
            logger.error(
                "Worker %s: the storage failed (%s); retrying until the operation succeeds: %s",
                self._worker_id,
                operation,
                error,
                exc_info=error,
            )

    def worked(self, operation: str) -> None:
        """An operation of the storage worked."""
        if not self._faulty and not self._away:
            return
        with self._lock:
            was_faulty = operation in self._faulty
            self._faulty.discard(operation)
            ends = operation in self._away or (operation == WORK and bool(self._away))
            is_over = ends and self._is_over_with(operation)
        if was_faulty:
            logger.warning("Worker %s: the storage works again (%s)", self._worker_id, operation)
        if is_over:
            logger.log(
                logging.WARNING if self._is_logged else logging.INFO,
                "Worker %s: the storage is available again after %.1f s; reporting the jobs that ended "
                "meanwhile",
                self._worker_id,
                ((self._answered_at or self._since) - self._since) / 1_000,
            )

    def _is_over_with(self, operation: str) -> bool:
        """Note that an operation works again; return whether that ends the outage."""
        now = self._monotonic()
        self._away.pop(operation, None)
        if self._answered_at is None:
            self._answered_at = now
        if any(now - failed_at < RETRIED_WITHIN for failed_at in self._away.values()):
            return False
        self._away.clear()
        return True

    def _note_away(self, operation: str, error: StorageUnavailableError) -> None:
        now = self._monotonic()
        with self._lock:
            if not self._away:
                self._since, self._is_logged = now, False
            self._away[operation] = now
            self._answered_at = None
            lasts = now - self._since >= PATIENCE and not self._is_logged
            self._is_logged = self._is_logged or lasts
        if lasts:
            logger.warning(
                "Worker %s: the storage has been unavailable for %.1f s (%s: %s); running jobs continue, "
                "and their results are reported when the storage is available again",
                self._worker_id,
                (now - self._since) / 1_000,
                operation,
                error,
            )
