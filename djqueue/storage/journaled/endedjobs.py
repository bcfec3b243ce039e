"""Jobs that have ended are in the tables alone; an operation that concerns one has the engine know it
meanwhile.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from djqueue.core.engine import Engine
from djqueue.core.enginejob import EngineJob
from djqueue.core.options import JobKey

from . import recovery
from .journal import DatabaseJournal

MANY = 10_000
"""Ended jobs waiting to be evicted at which new operations wait for running ones first, but not for long."""
PATIENCE = 1.0
"""Seconds for which they wait."""


class EndedJobs:
    """Loads ended jobs for operations, and evicts them from the engine when no operation uses them."""

    def __init__(self, alias: str, engine: Engine, journal: DatabaseJournal) -> None:
        self._alias = alias
        self._engine = engine
        self._journal = journal
        self.lock = threading.Condition()
        """Held while the engine and the tables are asked for ids, and while ended jobs are evicted; never
        while a callback runs."""
        self.take_arrived: Callable[[Mapping[int, EngineJob]], None]
        """Takes in rows of producers that were found with them: the inbox's."""
        self._operations = 0
        """Number of operations that use looked-up ids; until they end, no job is evicted."""
        self._evictable: list[EngineJob] = []

    @contextmanager
    def known(self, keys: Iterable[JobKey]) -> Iterator[None]:
        """Keep these jobs, if they exist, in the engine during the block."""
        with self.lock:
            if len(self._evictable) > MANY:
                self.lock.wait_for(lambda: not self._operations, PATIENCE)
            self._operations += 1
            try:
                found = recovery.find(self._alias, self._engine, self._journal, keys)
                self._engine.persistence.restore(found.ended, stored=True)
                self._evictable += found.ended
            except BaseException:
                self._done()
                raise
        try:
            self.take_arrived(found.arrived)
            yield
        finally:
            with self.lock:
                self._done()

    def written(self, ended: list[EngineJob]) -> None:
        """Evict jobs whose ends are committed."""
        with self.lock:
            self._evictable += ended
            self._evict()

    def _done(self) -> None:
        self._operations -= 1
        self._evict()

    def _evict(self) -> None:
        if not self._operations:
            ended, self._evictable = self._evictable, []
            self._engine.persistence.evict(ended)
            self.lock.notify_all()
