"""Enqueue jobs in as few calls as their queues, dependencies and bounds allow."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from djqueue.core import flow
from djqueue.core.capacity import full_error
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError, StorageError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import JobKey
from djqueue.core.states import State

from . import records
from .claiming import BULK
from .keyspace import Keyspace
from .records import pack_text, text
from .removing import all_of_jobs
from .roundtrips import ScriptCall, Steps
from .scripts import script


class Enqueueing:
    """Builds the calls of an enqueue."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._ids = IdSource()

    def steps(self, batches: Sequence[Batch], *, bounded: bool = True) -> Steps[list[EnqueueResult]]:
        for batch in batches:
            if batch.ids is not None and len(batch.ids) != len(batch.payloads):
                raise ValueError(f"expected one id per payload ({len(batch.payloads)}), got {len(batch.ids)}")
        if needed := flow.outside(batches):
            yield from self._check_dependencies(needed)
        new = {batch.queue for batch in batches} - self._keyspace.known
        if new:
            yield from self._keyspace.begin(new)
        waves = flow.waves(batches)
        if len(waves) == 1:
            return (yield from self._enqueue_together(batches, new, bounded))
        # Dependencies come first: no job exists without them, even if this process dies.
        found: dict[int, list[EnqueueResult]] = {}
        substitutes = flow.Substitutes()
        for wave in waves:
            some = [substitutes.in_(batches[place]) for place in wave]
            answers = iter((yield from self._enqueue_together(some, new, bounded)))
            for place in wave:
                found[place] = list(islice(answers, len(batches[place].payloads)))
                substitutes.note(batches[place], found[place])
        return [answer for place in range(len(batches)) for answer in found[place]]

    def _enqueue_together(
        self, batches: Sequence[Batch], new: set[str], bounded: bool
    ) -> Steps[list[EnqueueResult]]:
        """Enqueue batches that do not depend on each other."""
        parts = [
            part
            for batch in batches
            for part in self._parts(batch, listed=batch.queue in new, bounded=bounded)
        ]
        answers = yield [call for _, call in parts]
        # The queue was obliterated meanwhile: it has to be listed again before it gets jobs.
        missing = [place for place, answer in enumerate(answers) if answer[1] == b"unlisted"]
        if missing:
            calls = [parts[place][1] for place in missing]
            yield from self._keyspace.begin({call.queue.queue for call in calls})
            again = yield [call._replace(arguments=[b"1", *call.arguments[1:]]) for call in calls]
            for place, answer in zip(missing, again, strict=True):
                answers[place] = answer
        results: list[EnqueueResult] = []
        refused: StorageError | None = None
        for (ids, call), (_, replies) in zip(parts, answers, strict=True):
            queue = call.queue.queue
            if replies == 0:
                made = tuple.__new__
                results += [
                    made(EnqueueResult, (job_id, "queued", queue, None, None, None)) for job_id in ids
                ]
            elif replies == b"full":
                refused = refused or full_error(queue, self._keyspace.policy(queue).max_size, len(ids))
            else:
                results += [_enqueued(queue, reply) for reply in replies]
        for queue in {
            call.queue.queue for (_, call), answer in zip(parts, answers, strict=True) if answer[0]
        }:
            yield from self._keyspace.deliver(queue)
        if refused is not None:
            raise refused
        return results

    def _check_dependencies(self, keys: Sequence[JobKey]) -> Steps[None]:
        wanted: dict[str, list[str]] = {}
        for queue, job_id in keys:
            wanted.setdefault(queue, []).append(job_id)
        for queue, ids in wanted.items():
            for job_id, state in zip(ids, (yield from self._keyspace.states(queue, ids)), strict=True):
                if state is None:
                    raise OptionError(f"depends_on: queue {queue!r} has no job {job_id!r}")

    def _parts(self, batch: Batch, *, listed: bool, bounded: bool) -> Iterable[tuple[list[str], ScriptCall]]:
        keys, policy = self._keyspace.keys(batch.queue), self._keyspace.policy(batch.queue)
        bounded = bounded and policy.max_size is not None
        rest, start = records.envelope(batch), records.start(batch)
        plain = batch.ids is None and not start and rest[:1] == records.PLAIN and policy.max_size is None
        heading: list[Any] = [b"1" if listed else b"0", pack_text(batch.name)]
        if plain:
            heading.append(pack_text(batch.options.subject or ""))
        else:
            heading += (start, *self.heading(batch.queue, bounded=bounded))
        called = script("add" if plain else "enqueue")
        replicas = (self._keyspace.options.replicas or 0) if batch.options.durable else 0
        ids = batch.ids or self._ids.many(len(batch.payloads), SYSTEM_CLOCK.now())
        # A batch for a queue with a limit is one call: all of its jobs or none.
        size = max(1, len(ids)) if bounded else BULK
        for first in range(0, len(ids), size):
            mine = ids[first : first + size]
            arguments: list[Any] = [*heading]
            for job_id, payload in zip(mine, batch.payloads[first : first + size], strict=True):
                arguments += (pack_text(job_id), rest + payload)
            # New jobs have no leftovers of an earlier job with their id.
            touched = () if batch.ids is None else all_of_jobs(keys, mine)
            yield (
                mine,
                ScriptCall(called, keys, arguments, touched, replicas=replicas, ids=mine if replicas else ()),
            )

    def heading(self, queue: str, *, bounded: bool = True) -> list[Any]:
        """Return the configuration of a queue for `enqueue.lua`."""
        policy = self._keyspace.policy(queue)
        limit = policy.max_size if bounded and policy.max_size is not None else b""
        return [records.pack_groups(policy), limit, RANKS.get(policy.when_full, b""), policy.dead_letters.ttl]


RANKS = {"drop_oldest": b"o", "drop_lowest": b"l"}
"""Which jobs are dropped when a queue is full: see `room.lua`."""


def _enqueued(queue: str, reply: Sequence[Any]) -> EnqueueResult:
    status, job_id = text(reply[0]), text(reply[1])
    if status == "queued":
        return EnqueueResult(job_id, status, queue, replaced=text(reply[2]) if len(reply) > 2 else None)
    state = State(text(reply[2])) if len(reply) > 2 else None
    return EnqueueResult(job_id, status, queue, state, reply[3] if len(reply) > 3 else None)
