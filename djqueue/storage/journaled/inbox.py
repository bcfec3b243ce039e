"""The inbox: jobs that producers in other processes have written, and that the scheduler reads."""

import logging
import threading
from collections.abc import Mapping, Sequence

from django.db import connections

from djqueue.core.clock import Clock
from djqueue.core.engine import Engine
from djqueue.core.enginejob import EngineJob, PayloadSource
from djqueue.core.errors import ConfigurationError
from djqueue.core.options import JobKey
from djqueue.core.shown import in_one_line
from djqueue.core.states import REUSABLE, State
from djqueue.storage.tables import rows

from . import recovery
from .endedjobs import EndedJobs
from .journal import DatabaseJournal, JournalGate
from .livejobs import TELL_EVERY, FreshJobs
from .modes import GroupModes

logger = logging.getLogger("djqueue.scheduler")

POLL = 1.0
"""Seconds between reads of the inbox, in case a wake-up was lost."""
PAGE = 2_000
"""Rows read at a time."""
NO_LIMIT = 2**62


class Inbox:
    """Reads the rows of producers: on its own thread when they notify it, and for operations that need
    them.
    """

    def __init__(
        self,
        alias: str,
        engine: Engine,
        journal: DatabaseJournal,
        gate: JournalGate,
        ended: EndedJobs,
        modes: GroupModes,
        clock: Clock,
        payloads: PayloadSource,
    ) -> None:
        self._alias = alias
        self._engine = engine
        self._journal = journal
        self._gate = gate
        self._ended = ended
        ended.take_arrived = self._take_left
        self._modes = modes
        self._fresh = FreshJobs(payloads)
        self._clock = clock
        self.lock = threading.RLock()
        """Held while rows are read."""
        self._taken: set[int] = set()
        """Numbers of rows that were read, but that the tables may still show in the inbox."""
        self.arrived = threading.Event()
        """Set when rows of other producers may have arrived."""
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="djqueue-inbox", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self.closing.set()
        self.arrived.set()
        if self.thread.is_alive():
            self.thread.join()

    def _watch(self) -> None:
        try:
            while not self.closing.is_set():
                self.arrived.wait(POLL)
                self.arrived.clear()
                try:
                    self.take_in_all()
                except Exception as error:
                    connections[self._alias].close()
                    if not self.closing.wait(POLL):
                        logger.warning("Could not read the inbox, retrying: %s", in_one_line(error))
                        self.arrived.set()
        finally:
            connections[self._alias].close()

    def take_in_all(self) -> None:
        """Read everything that producers have written."""
        if not self._gate.is_open:
            return  # Only the jobs of one operation may be loaded.
        taken, told, is_long = 0, 0, False
        while (count := self.take_in(is_long=is_long)) == PAGE and not self.closing.is_set():
            # Otherwise the next read would find the same rows.
            self._gate.flush()
            taken, is_long = taken + count, True
            if taken - told >= TELL_EVERY:
                told = taken
                logger.info("Reading the inbox: %s new jobs so far.", f"{taken:,}")

    def take_in(self, *, is_long: bool = False) -> int:
        """Read a page of the inbox; return the number of rows.

        Args:
            is_long: whether many rows are waiting: then their payloads stay in the table until they are
                claimed.
        """
        with self.lock:
            if is_long:
                found = recovery.more_arrived(self._alias, PAGE, self._fresh)
            else:
                found = recovery.arrived(self._alias, PAGE)
            last = max(found, default=0) if len(found) == PAGE else NO_LIMIT
            self._taken = {number for number in self._taken if number in found or number > last}
            self.take(found)
        return len(found)

    def take(self, jobs: Mapping[int, EngineJob]) -> None:
        """Add jobs, by the numbers of their rows, after the jobs that they depend on."""
        if not jobs:
            return
        with self.lock, self._ended.known(self._dependencies(jobs)):
            new = {number: job for number, job in jobs.items() if number not in self._taken}
            now = self._clock.now()
            for job in new.values():
                if job.state is State.WAITING and job.run_at > now:
                    # The producer's clock may be slightly ahead.
                    job.run_at = now
                    self._journal.changed(job)
            for queue in {job.queue for job in new.values()}:
                try:
                    self._modes.agree(queue)
                except ConfigurationError as error:
                    # Its jobs exist, so they run; the next start is refused.
                    logger.error("%s", error)
                    self._modes.accept(queue)
            replacing = set()
            for job in new.values():
                if job.process == rows.REPLACES_CANCELLED:
                    replacing.add((job.queue, job.id))
                job.process = ""
            self._engine.persistence.accept(new.values(), replacing)
            self._taken.update(new)

    def _dependencies(self, jobs: Mapping[int, EngineJob]) -> set[JobKey]:
        """Return the dependencies of these rows, except on one another; rows keep their order."""
        wanted = {key for job in jobs.values() for key in job.options.depends_on}
        if wanted:
            wanted.difference_update(
                (job.queue, job.id) for number, job in jobs.items() if number not in self._taken
            )
        return wanted

    def _take_left(self, jobs: Mapping[int, EngineJob]) -> None:
        """Add rows that others could read at the same time, so that their jobs may have ended since."""
        if not jobs:
            return
        with self.lock:
            left = recovery.left_in_inbox(self._alias, jobs)
            self.take({number: jobs[number] for number in sorted(left)})

    def take_successors(self, queue: str, ids: Sequence[str]) -> None:
        """Add new jobs with the ids of failed or cancelled ones, which their producers have enqueued."""
        if not self._gate.is_open:
            return
        states = zip(ids, self._engine.reads.states(queue, ids), strict=True)
        ended = [job_id for job_id, state in states if state in REUSABLE]
        if ended:
            self._take_left(recovery.succeeding(self._alias, queue, ended))
