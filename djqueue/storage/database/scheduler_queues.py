"""Controls of queues and limiters by the scheduler: in effect in the engine at once, and kept in the
tables.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Unpack

from djqueue import models
from djqueue.core.engine import Engine
from djqueue.core.errors import StorageError
from djqueue.core.groups import GroupLimit, GroupWords
from djqueue.core.limiter import UNSET, Rate, SetConcurrency, SetRate
from djqueue.core.options import MAX_INTEGER
from djqueue.core.sharing import LimiterState
from djqueue.core.states import State
from djqueue.storage.facets import Limiters, Queues
from djqueue.storage.tables.inspector import DatabaseInspector

from . import recovery
from .gate import JournalGate
from .inbox import NO_LIMIT, Inbox
from .journal import DatabaseJournal
from .modes import GroupModes
from .scheduler_jobs import SchedulerJobs

CLEAN_LIMIT = 1_000
"""Ended jobs removed at a time."""


class SchedulerQueues(Queues):
    """Controls of queues."""

    def __init__(
        self,
        alias: str,
        engine: Engine,
        journal: DatabaseJournal,
        gate: JournalGate,
        modes: GroupModes,
        inbox: Inbox,
        jobs: SchedulerJobs,
    ) -> None:
        self._alias = alias
        self._engine = engine
        self._journal = journal
        self._gate = gate
        self._modes = modes
        self._inbox = inbox
        self._jobs = jobs
        self._inspector = DatabaseInspector(alias)

    def names(self) -> list[str]:
        return sorted({*self._engine.queues.names(), *self._inspector.queues()})

    def pause(self, queue: str) -> None:
        self._gate.check()
        self._engine.queues.pause(queue)
        self._write_queue(queue)

    def resume(self, queue: str) -> None:
        self._gate.check()
        self._engine.queues.resume(queue)
        self._write_queue(queue)

    def is_paused(self, queue: str) -> bool:
        return self._engine.queues.is_paused(queue)

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._gate.check()
        self._engine.queues.set_limits(queue, rate, concurrency)
        self._write_queue(queue)

    def set_group_limit(self, queue: str, group: str | None, **overrides: Unpack[GroupWords]) -> None:
        self._gate.check()
        self._engine.queues.set_group_limit(queue, group, **overrides)
        self._write_group(queue, group)

    def pause_group(self, queue: str, group: str) -> None:
        self._gate.check()
        self._engine.queues.pause_group(queue, group)
        self._write_group(queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        self._gate.check()
        self._engine.queues.resume_group(queue, group)
        self._write_group(queue, group)

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        return self._engine.queues.group_limits(queue)

    def _write_queue(self, queue: str) -> None:
        rate, concurrency = self._engine.queues.limits(queue)
        policy = self._engine.context.policy(queue)
        if (rate, concurrency) == (policy.rate, policy.concurrency):
            # The limits of the settings are not written: they may be others after the next start.
            rate = concurrency = None
        self._journal.queue_changed(
            queue, (queue, self._engine.queues.is_paused(queue), *_limit_columns(rate, concurrency))
        )
        self._gate.flush(in_effect=f"queue {queue!r}")

    def _write_group(self, queue: str, group: str | None) -> None:
        self._modes.agree(queue)
        self._modes.note_group(queue, group)
        self._gate.flush(in_effect=f"queue {queue!r}")

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        self._gate.check()
        self._inbox.take_in_all()
        self._gate.flush()
        removed = self._clean_ended(queue, states, before, limit)
        others = states - {*recovery.ENDED}
        if others and (limit is None or removed < limit):
            left = None if limit is None else limit - removed
            parts = self._engine.queues.clean_in_parts(queue, frozenset(others), before, left)
            part: int | None = 0
            while part is not None:
                with self._journal.together():
                    part = next(parts, None)
                removed += part or 0
                self._gate.flush()
        return removed

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        self._gate.check()
        self._inbox.take_in_all()
        groups = {None, *self._engine.queues.group_limits(queue)}
        self._modes.forget(queue)
        with self._journal.together():
            removed = self._engine.queues.obliterate(queue, force=force)
        self._journal.queue_changed(queue, None)
        for group in groups:
            self._journal.group_changed((queue, group or ""), None)
        self._gate.flush()
        removed += self._clean_ended(queue, frozenset(recovery.ENDED), NO_LIMIT, None)
        with suppress(StorageError):  # Jobs that were enqueued and claimed in the meantime stay.
            # The queue itself, which came back with the last of its ended jobs.
            removed += self._engine.queues.obliterate(queue)
        self._gate.flush()
        return removed

    def _clean_ended(self, queue: str, states: frozenset[State], before: int, limit: int | None) -> int:
        removed = 0
        ended = [state.value for state in recovery.ENDED if state in states]
        jobs: Any = models.Job.objects.using(self._alias)
        while ended and (limit is None or removed < limit):
            found = jobs.filter(queue=queue, state__in=ended, finished_at__lt=before)
            count = CLEAN_LIMIT if limit is None else min(CLEAN_LIMIT, limit - removed)
            ids: Sequence[str] = list(
                found.order_by("finished_at", "id").values_list("job_id", flat=True)[:count]
            )
            gone = self._jobs.remove_ended(queue, ids, before)
            removed += gone
            self._gate.flush()
            if not gone:
                break
        return removed


class SchedulerLimiters(Limiters):
    """Shared limiters."""

    def __init__(self, engine: Engine, journal: DatabaseJournal, gate: JournalGate) -> None:
        self._engine = engine
        self._journal = journal
        self._gate = gate

    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._gate.check()
        self._engine.limiters.set(name, rate, concurrency)
        rate, concurrency, *_ = self._engine.limiters.state(name)
        policy = self._engine.context.limiter(name).policy
        # The limits of the settings are not written: they may be others after the next start.
        is_override = (rate, concurrency) != (policy.rate, policy.concurrency)
        self._journal.limiter_changed(
            name, (name, *_limit_columns(rate, concurrency)) if is_override else None
        )
        self._gate.flush(in_effect=f"limiter {name!r}")

    def state(self, name: str) -> LimiterState:
        return self._engine.limiters.state(name)


def _limit_columns(rate: Rate | None, concurrency: int | None) -> tuple[Any, Any, int | None]:
    capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
    return capacity, per, None if concurrency is None else min(concurrency, MAX_INTEGER)
