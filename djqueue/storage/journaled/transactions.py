"""Enqueue jobs in the caller's transaction."""

from collections.abc import Sequence

from djqueue.core.clock import Clock
from djqueue.core.engine import Engine
from djqueue.core.job import Batch
from djqueue.core.states import TERMINAL

from ..tables.dialects import Dialect
from .producer import Found, Inserter, Owner


class EngineInserter(Inserter):
    """Inserts rows for jobs, and looks up other jobs in the engine, which is ahead of the tables."""

    def __init__(self, dialect: Dialect, clock: Clock, engine: Engine) -> None:
        super().__init__(dialect, clock, lambda queue: engine.context.policy(queue))
        self._engine = engine

    def find_job(self, queue: str, job_id: str) -> Found | None:
        [record] = self._engine.reads.jobs(queue, [job_id])
        return None if record is None else (record.state, record.result)

    def find_owners(self, queue: str, key: str) -> list[Owner]:
        return [(job.id, job.state) for job in self._engine.reads.unique_owners(queue, key)]

    def have_ended(self, queue: str, ids: Sequence[str]) -> set[str]:
        states = self._engine.reads.states(queue, ids)
        return {job_id for job_id, state in zip(ids, states, strict=True) if state in TERMINAL}


def are_simple(batches: Sequence[Batch]) -> bool:
    """Return whether the tables can have none of these ids, and the jobs have no dependencies."""
    return all((batch.ids is None or batch.fresh) and not batch.options.depends_on for batch in batches)


def is_detached(batch: Batch) -> bool:
    """Return whether the caller asked for an enqueue outside its transaction."""
    return batch.options.durable is False


def is_durable(batches: Sequence[Batch]) -> bool:
    """Return whether the caller asked for an enqueue that waits for the disk."""
    return any(batch.options.durable for batch in batches)
