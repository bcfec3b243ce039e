"""Enqueue jobs in as few calls as their queues, dependencies and bounds allow."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from djqueue.core import flow
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import within
from djqueue.core.errors import OptionError, StorageError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.policies import full_error
from djqueue.core.states import State

from . import records
from .claiming import BULK
from .keyspace import Keyspace
from .records import pack_text, text
from .roundtrips import ScriptCall, Steps
from .scripts import script

Part = tuple[Sequence[str], ScriptCall]
"""A call, and the ids of its jobs."""
QUEUED = [0, 0]
"""The usual answer of `add.lua`: all jobs are new, and there is nothing else to do."""
FRAMES = 1_024
"""Maximum number of job types whose frames are kept."""


RANKS = {"drop_oldest": b"o", "drop_lowest": b"l"}
"""Which jobs are dropped when a queue is full: see `room.lua`."""


class Frame(NamedTuple):
    """The parts that the calls of a job type share."""

    options: JobOptions
    rest: bytes
    """The part that the jobs' records share: see `records.envelope`."""
    name: bytes
    plain_heading: tuple[bytes, ...]
    """The arguments of `add.lua` between the flag and the jobs."""
    is_plain: bool
    """True if `add.lua` takes new jobs that are due now."""


class Enqueueing:
    """Builds the calls of an enqueue."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._ids = IdSource()
        self._frames: dict[tuple[str, str, int], Frame] = {}

    def steps(self, batches: Sequence[Batch], *, bounded: bool = True) -> Steps[list[EnqueueResult]]:
        """Enqueue batches, dependencies first: see `Storage.enqueue`."""
        for batch in batches:
            batch.check_ids()
        if needed := flow.outside(batches):
            yield from self._check_dependencies(needed)
        new = {batch.queue for batch in batches} - self._keyspace.known
        if new:
            yield from self._keyspace.begin(new)
        waves = flow.waves(batches)
        if len(waves) == 1:
            return (yield from self._enqueue_together(batches, new, bounded))
        # Dependencies come first: no job exists without them, even if this process dies.
        results: dict[int, list[EnqueueResult]] = {}
        substitutes = flow.Substitutes()
        for wave in waves:
            together = [substitutes.in_(batches[position]) for position in wave]
            next_results = iter((yield from self._enqueue_together(together, new, bounded)))
            for position in wave:
                results[position] = list(islice(next_results, len(batches[position].payloads)))
                substitutes.note(batches[position], results[position])
        return [result for position in range(len(batches)) for result in results[position]]

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
        return (yield from self._results(parts, answers))

    def _results(self, parts: Sequence[Part], answers: list[Any]) -> Steps[list[EnqueueResult]]:
        # The queue was obliterated meanwhile: it has to be listed again before it gets jobs.
        missing = [position for position, answer in enumerate(answers) if answer[1] == b"unlisted"]
        if missing:
            calls = [parts[position][1] for position in missing]
            yield from self._keyspace.begin({call.queue.queue for call in calls})
            again = yield [call._replace(arguments=[b"1", *call.arguments[1:]]) for call in calls]
            for position, answer in zip(missing, again, strict=True):
                answers[position] = answer
        results: list[EnqueueResult] = []
        refused: StorageError | None = None
        for (ids, call), (_, replies) in zip(parts, answers, strict=True):
            queue = call.queue.queue
            if replies == 0:
                results += _queued(queue, ids)
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

    def direct(self, batch: Batch) -> Part | None:
        """Return the one call that enqueues a batch; None if `steps` has to."""
        if (
            batch.queue not in self._keyspace.known
            or batch.options.depends_on
            or not 0 < len(batch.payloads) <= BULK
            or (batch.ids is not None and len(batch.ids) != len(batch.payloads))
            or self._keyspace.policy(batch.queue).max_size is not None
        ):
            return None
        [part] = self._parts(batch, listed=False, bounded=False, trusted=True)
        return None if part[1].replicas else part

    def direct_results(self, part: Part, answer: Any) -> list[EnqueueResult]:
        """Return the results of the call of `direct`."""
        ids, call = part
        if answer == QUEUED:
            return _queued(call.queue.queue, ids)
        return self._keyspace.run_in_time(self._results([part], [answer]))

    async def adirect_results(self, part: Part, answer: Any) -> list[EnqueueResult]:
        """Async version of `direct_results`."""
        ids, call = part
        if answer == QUEUED:
            return _queued(call.queue.queue, ids)
        with within(self._keyspace.options.timeout):
            return await self._keyspace.arun(self._results([part], [answer]))

    def _check_dependencies(self, keys: Sequence[JobKey]) -> Steps[None]:
        by_queue: dict[str, list[str]] = {}
        for queue, job_id in keys:
            by_queue.setdefault(queue, []).append(job_id)
        for queue, ids in by_queue.items():
            for job_id, state in zip(ids, (yield from self._keyspace.states(queue, ids)), strict=True):
                if state is None:
                    raise OptionError(f"depends_on: queue {queue!r} has no job {job_id!r}")

    def _parts(self, batch: Batch, *, listed: bool, bounded: bool, trusted: bool = False) -> Iterable[Part]:
        """Yield the calls of a batch. trusted: fresh ids are new, since the batch comes once."""
        keys, policy = self._keyspace.keys(batch.queue), self._keyspace.policy(batch.queue)
        bounded = bounded and policy.max_size is not None
        frame = self._frame(batch)
        is_new = batch.ids is None or (trusted and batch.fresh)
        plain = is_new and frame.is_plain and not batch.delay and batch.run_at is None
        flag = b"1" if listed else b"0"
        if plain:
            heading, called = [flag, *frame.plain_heading], script("add")
        else:
            heading = [flag, frame.name, records.start(batch), *self.heading(batch.queue, bounded=bounded)]
            called = script("enqueue")
        replicas = (self._keyspace.options.replicas or 0) if batch.options.durable else 0
        ids, count = batch.ids, len(batch.payloads)
        if not ids:
            now = SYSTEM_CLOCK.now()
            ids = [self._ids.new(now)] if count == 1 else self._ids.many(count, now)
        rest = frame.rest
        # A batch for a queue with a limit is one call: all of its jobs or none.
        size = max(1, len(ids)) if bounded else BULK
        for first in range(0, len(ids), size):
            chunk = ids[first : first + size]
            rows: list[Any] = [None] * (2 * len(chunk))
            # New ids are ASCII, and encoded with the request.
            rows[::2] = chunk if batch.ids is None else map(pack_text, chunk)
            rows[1::2] = [rest + payload for payload in batch.payloads[first : first + size]]
            # New jobs have no leftovers of an earlier job with their id.
            touched = () if is_new else keys.of_jobs(chunk)
            yield (
                chunk,
                ScriptCall(
                    called, keys, heading + rows, touched, replicas=replicas, ids=chunk if replicas else ()
                ),
            )

    def _frame(self, batch: Batch) -> Frame:
        """Return the parts that the calls of a job type share, from a cache: its options are one object."""
        kind = (batch.queue, batch.name, id(batch.options))
        frame = self._frames.get(kind)
        if frame is None or frame.options is not batch.options:
            rest, name = records.envelope(batch), pack_text(batch.name)
            is_plain = rest[:1] == records.PLAIN and self._keyspace.policy(batch.queue).max_size is None
            heading = (name, pack_text(batch.options.subject or ""))
            if len(self._frames) >= FRAMES:
                self._frames.clear()
            frame = self._frames[kind] = Frame(batch.options, rest, name, heading, is_plain)
        return frame

    def heading(self, queue: str, *, bounded: bool = True) -> list[Any]:
        """Return the configuration of a queue for `enqueue.lua`."""
        policy = self._keyspace.policy(queue)
        limit = policy.max_size if bounded and policy.max_size is not None else b""
        return [records.pack_groups(policy), limit, RANKS.get(policy.when_full, b""), policy.dead_letters.ttl]


def _queued(queue: str, ids: Sequence[str]) -> list[EnqueueResult]:
    new = tuple.__new__
    return [new(EnqueueResult, (job_id, "queued", queue, None, None, None)) for job_id in ids]


def _enqueued(queue: str, reply: Sequence[Any]) -> EnqueueResult:
    status, job_id = text(reply[0]), text(reply[1])
    if status == "queued":
        return EnqueueResult(job_id, status, queue, replaced=text(reply[2]) if len(reply) > 2 else None)
    state = State(text(reply[2])) if len(reply) > 2 else None
    return EnqueueResult(job_id, status, queue, state, reply[3] if len(reply) > 3 else None)
