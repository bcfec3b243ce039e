"""Payloads that stay in the tables until their jobs are claimed."""

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from django.db import Error, connections

from djqueue import models
from djqueue.core.enginejob import EngineJob, PayloadSource
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.options import JobKey
from djqueue.core.shown import in_one_line
from djqueue.storage.tables import rows

logger = logging.getLogger("djqueue.scheduler")

TIMEOUT = 20.0
"""Seconds for which a caller waits for the database."""


class TablePayloads(PayloadSource):
    """Reads payloads on a thread of its own: claims run on an event loop, whose thread has no connection."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._thread = ThreadPoolExecutor(1, "djqueue-payloads")

    def close(self) -> None:
        """Close the connection and end the thread; again, do nothing."""
        with contextlib.suppress(RuntimeError):  # It has ended.
            self._thread.submit(self._close)
        self._thread.shutdown()

    def load(self, jobs: Sequence[EngineJob]) -> None:
        """Give jobs their payloads. The caller has the locks of the jobs."""
        wanted: dict[str, list[str]] = {}
        for job in jobs:
            if job.unloaded is self:
                wanted.setdefault(job.queue, []).append(job.id)
        try:
            found = self._thread.submit(self._read, wanted).result(TIMEOUT)
        except (Error, OSError, TimeoutError, RuntimeError) as error:
            raise StorageUnavailableError(
                f"database {self._alias!r} is unavailable, and payloads could not be read: "
                f"{in_one_line(error) or 'no answer in time'}"
            ) from error
        for job in jobs:
            if job.unloaded is self:
                self._give(job, found.get((job.queue, job.id)))

    def _give(self, job: EngineJob, row: tuple[int, bytes] | None) -> None:
        if row is None or row[0] != job.created_at:
            # It must not keep the jobs behind it from being claimed. Its handler fails to decode this.
            logger.error(
                "The row of job %s in queue %s was deleted or replaced while the job waited: its payload is "
                "lost.",
                job.id,
                job.queue,
            )
            job.payload = b""
        else:
            job.payload = row[1]

    def _read(self, wanted: dict[str, list[str]]) -> dict[JobKey, tuple[int, bytes]]:
        """Return payloads with the times of their enqueues."""
        found = {}
        try:
            for queue, ids in wanted.items():
                for chunk in rows.chunked(ids):
                    mine = models.Job.objects.using(self._alias).filter(queue=queue, job_id__in=chunk)
                    for job_id, created_at, payload in rows.raw_values(
                        mine, ("job_id", "created_at", "payload")
                    ):
                        found[queue, job_id] = created_at, bytes(payload)
        except Error:
            self._close()
            raise
        return found

    def _close(self) -> None:
        connections[self._alias].close()
