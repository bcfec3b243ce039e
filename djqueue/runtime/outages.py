"""Outages of the storage: one log record for each, whichever operations failed."""

import logging
from collections.abc import Callable
from threading import Lock

from djqueue.core.errors import StorageUnavailableError

logger = logging.getLogger("djqueue.worker")

PATIENCE = 5_000
"""Milliseconds after which an outage is logged before it is over: it is longer than a restart."""

WORK = "claim and finish"
"""The operation that a worker repeats all the time. Its success also ends the outage of operations that are
not retried."""
RETRIED_WITHIN = 5_000
"""Milliseconds for which a failed operation keeps an outage open, because it may never be retried."""


class OutageLog:
    """Logs the failures of a worker's storage. All methods may be called from any thread.

    An unavailable storage, such as a scheduler during its restart, is an outage: one record is logged when it
    is over, and one before that if it lasts. It is over when every operation that failed works again, or has
    not been retried for a while: a slow or partly unavailable storage still answers some calls. Any other
    error is a fault, and is logged with its traceback.
    """

    def __init__(self, worker_id: str, monotonic: Callable[[], int]) -> None:
        self._worker_id = worker_id
        self._monotonic = monotonic
        self._lock = Lock()
        self._faulty: set[str] = set()
        """Operations whose last call raised a fault."""
        self._unavailable: dict[str, int] = {}
        """Operations whose last call found the storage unavailable, with the time of that call."""
        self._since = 0
        self._answered_at: int | None = None
        """Time of the first success after the last failure."""
        self._is_logged = False

    def failed(self, operation: str, error: BaseException) -> None:
        """Note that an operation of the storage failed."""
        if isinstance(error, StorageUnavailableError):
            self._note_unavailable(operation, error)
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
        """Note that an operation of the storage worked."""
        if not self._faulty and not self._unavailable:
            return
        with self._lock:
            was_faulty = operation in self._faulty
            self._faulty.discard(operation)
            ends = operation in self._unavailable or (operation == WORK and bool(self._unavailable))
            is_over = ends and self._is_over_with(operation)
        if was_faulty:
            logger.warning("Worker %s: the storage works again (%s)", self._worker_id, operation)
        if is_over:
            logger.log(
                logging.WARNING if self._is_logged else logging.INFO,
                "Worker %s: the storage is available again after %.1f s; reporting the jobs that finished "
                "meanwhile",
                self._worker_id,
                ((self._answered_at or self._since) - self._since) / 1_000,
            )

    def _is_over_with(self, operation: str) -> bool:
        """Note that an operation works again; return whether that ends the outage."""
        now = self._monotonic()
        self._unavailable.pop(operation, None)
        if self._answered_at is None:
            self._answered_at = now
        if any(now - failed_at < RETRIED_WITHIN for failed_at in self._unavailable.values()):
            return False
        self._unavailable.clear()
        return True

    def _note_unavailable(self, operation: str, error: StorageUnavailableError) -> None:
        now = self._monotonic()
        with self._lock:
            if not self._unavailable:
                self._since, self._is_logged = now, False
            self._unavailable[operation] = now
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
