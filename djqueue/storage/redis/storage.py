"""`RedisStorage`: the storage contract on Redis or Valkey, one script for each transition."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import redis

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadlines import Outage, within
from djqueue.core.job import (
    Batch,
    ClaimRequest,
    Emission,
    EnqueueResult,
    Finished,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    Swept,
)
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.overview import Finding
from djqueue.core.policies import LimiterPolicy, QueuePolicy
from djqueue.storage import backpressure
from djqueue.storage.base import Storage
from djqueue.storage.capabilities import Capabilities, NoTransactions
from djqueue.storage.facets import EventHandler, Unsubscribe
from djqueue.storage.staging import AbandonedPlans

from . import health
from .bulkwrites import RedisBulkWriteReports, RedisStaging
from .changes import ChangeStream, RedisFeed
from .claiming import Claiming
from .connections import Connections
from .enqueueing import EnqueueCall, Enqueueing
from .export import RedisExport
from .health import Marker
from .jobs import RedisJobs
from .keyspace import Keyspace
from .limits import RedisLimiters, SharedLimits
from .metrics import Metrics
from .options import RedisOptions
from .queues import RedisQueues
from .reads import RedisReads
from .roundtrips import Roundtrips, ScriptCall
from .snapshots import RedisSnapshots
from .subscriptions import RedisEvents
from .sweeping import Removing, Sweeping
from .workers import RedisWorkers

if TYPE_CHECKING:
    from djqueue.storage.outbox import OutboxTable

KEYS_PER_SCAN = 1_000
JOBS_PER_SECOND = 10_000
"""Jobs and dependencies of one enqueue for which it gets another second."""


class RedisStorage(Storage):
    """Jobs in Redis 7.0 or newer, or Valkey: one node, Sentinel, or Cluster.

    Args:
        policies: The policies of single queues; `default_policy` applies to the others.
        limiters: Limiters that queues may share.
        clock: Replaces Redis's time, for tests.
        metrics: How long metrics are kept.
        options: Where Redis is, and how it is used: see `RedisOptions` and `Connections`.
    """

    events: RedisEvents

    def __init__(
        self,
        *,
        policies: Mapping[str, QueuePolicy] | None = None,
        default_policy: QueuePolicy | None = None,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        clock: Clock | None = None,
        metrics: Tiers = DEFAULT_TIERS,
        **options: Any,
    ) -> None:
        given = {name.upper(): value for name, value in options.items()}
        self.options = RedisOptions.read(given)
        self._connections = Connections(given)
        if self.options.replicas is None:
            default = 1 if self._connections.watch is not None else 0
            self.options = replace(self.options, replicas=default)
        self._clock = clock or SYSTEM_CLOCK
        self._roundtrips = Roundtrips(
            self._connections, self.options.timeout, self.options.stream, self.notify_incidents, clock
        )
        keyspace = self._keyspace = Keyspace(
            self.options,
            self._roundtrips,
            dict(policies or {}),
            default_policy or QueuePolicy(lease=self.options.lease),
        )
        self.keys, self.policy = keyspace.keys, keyspace.policy
        self._limits = SharedLimits(
            self.options.prefix,
            limiters or {},
            keyspace.keys,
            self._roundtrips.publish,
            int(self.options.timeout * 1_000),
        )
        metric_store = Metrics(keyspace.keys, keyspace.names, metrics, self._clock)
        removing = Removing(keyspace)
        self._enqueueing = Enqueueing(keyspace)
        self._claiming = Claiming(keyspace, self._limits, removing)
        self.events = RedisEvents(
            self._connections,
            self._roundtrips,
            keyspace.common,
            keyspace.keys,
            lambda: self.queues.names(),
            keyspace.cached_names,
            self._claiming.looks.note_wake,
        )
        self.jobs = RedisJobs(keyspace, removing)
        self.queues = RedisQueues(keyspace, removing, self._limits, metric_store)
        self.limiters = RedisLimiters(keyspace, self._limits)
        self.workers = workers = RedisWorkers(keyspace, self.events, metric_store)
        self.reads = RedisReads(keyspace, self._connections, self._limits, metric_store, workers)
        self.snapshots = RedisSnapshots(
            keyspace, self._limits, removing, workers, metric_store, self._clock.now
        )
        self._staging = RedisStaging(keyspace, self._enqueueing.heading)
        self._bulk_writes = RedisBulkWriteReports(keyspace.run, keyspace.common, self._clock)
        self._abandoned = AbandonedPlans(self._staging, self._bulk_writes, self.reads.counts)
        self._sweeping = Sweeping(keyspace, removing, self._limits, metric_store, workers)
        self._marker = Marker(keyspace, self._connections, self._clock.now)
        self._hasty: Roundtrips | None = None
        """Round trips that fail soon, for jobs that can be written to the outbox instead."""
        self.outbox: OutboxTable | None = None
        """Enqueues jobs if a queue has OUTBOX."""
        if any(policy.outbox for policy in keyspace.every_policy):
            self.outbox = self._outbox(given, clock)
        self._may_block = any(policy.when_full == "block" for policy in keyspace.every_policy)

    def _outbox(self, given: dict[str, Any], clock: Clock | None) -> "OutboxTable":
        # Import late: other processes, such as Spark's executors, may lack Django.
        from djqueue.storage import outbox

        patience = min(outbox.REPLY_TIMEOUT, self.options.timeout)
        connections = Connections({**given, "TIMEOUT": patience})
        hasty = Roundtrips(connections, patience, self.options.stream, self.notify_incidents, clock)
        direct, steps = self._roundtrips, self._enqueueing.steps
        self._hasty = hasty
        return outbox.OutboxTable(
            lambda queue: self.policy(queue).outbox,
            lambda batches: direct.run(steps(batches)),
            lambda batches: direct.arun(steps(batches)),
            lambda batches: hasty.run(steps(batches)),
            lambda batches: hasty.arun(steps(batches)),
            server="Redis",
            clock=clock,
        )

    @cached_property
    def capabilities(self) -> Capabilities:
        keyspace, mirror = self._keyspace, self.options.mirror
        names = self.queues.names
        return Capabilities(
            max_in_flight=2,
            mirrored_states=frozenset() if mirror is None else mirror.states,
            transactions=NoTransactions() if self.outbox is None else self.outbox,
            enqueue_directly=self.enqueue_directly,
            has_outbox=self.outbox is not None,
            changes=None
            if mirror is None
            else ChangeStream(keyspace, mirror, self.options.stream, self._connections),
            staging=self._staging,
            bulk_writes=self._bulk_writes,
            export=RedisExport(keyspace.run, keyspace.keys, names),
            feed=RedisFeed(keyspace.run, keyspace.keys, names) if self.options.stream else None,
        )

    @property
    def outage(self) -> Outage | None:
        return self._roundtrips.outage

    # In tests.

    @classmethod
    def options_in_tests(cls, options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        return {**options, "prefix": f"{options.get('prefix', '')}{prefix}"}

    def discard(self) -> None:
        client: Any = self._connections.sync()
        pattern = re.sub(r"([][*?^\\])", r"\\\1", self.options.prefix) + "*"
        with suppress(redis.RedisError, OSError):  # The keys of a server that is away stay.
            for key in client.scan_iter(pattern, count=KEYS_PER_SCAN):
                client.unlink(key)

    # Connections.

    def connect(self) -> None:
        """Check the server and the recorded modes of queues.

        Raises StorageError if the server is too old, and RestoreInProgressError during a restore.
        """
        self._keyspace.run(self._keyspace.check_open())
        self._keyspace.run(self._keyspace.agree(self._keyspace.policies, record=False))
        health.refuse_old(self._connections)

    def close(self) -> None:
        self.events.close()
        if self._hasty is not None:
            self._hasty.close()
        self._roundtrips.close()

    def describe(self) -> str:
        return self._connections.describe()

    def probe(self) -> Sequence[Finding]:
        return self._marker.look()

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        self._check(batches)
        if self._may_block:
            return backpressure.enqueue(self.events, self.policy, batches, self._enqueue_at_once)
        return self._enqueue_at_once(batches)

    def enqueue_each(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[EnqueueResult]]]:
        if self._may_block or self.outbox is not None or self._connections.is_cluster:
            yield from super().enqueue_each(batches)
            return
        source = iter(batches)
        parts: deque[tuple[Batch, EnqueueCall]] = deque()
        other: list[Batch] = []

        def calls() -> Iterator[ScriptCall]:
            """Yield the calls of batches up to the first one that takes several steps."""
            for batch in source:
                self._check([batch])
                part = self._enqueueing.direct(batch)
                if part is None:
                    other.append(batch)
                    return
                parts.append((batch, part))
                _, call = part
                yield call

        while True:
            for answer in self._roundtrips.stream(calls()):
                batch, part = parts.popleft()
                yield batch, self._enqueueing.direct_results(part, answer)
            if not other:
                return
            batch = other.pop()
            yield batch, self._enqueue_at_once([batch])

    def _enqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        part = self._enqueueing.direct(batches[0]) if len(batches) == 1 and self.outbox is None else None
        watching = self.events.take_deferred(batches)
        if watching and part is not None and not self._connections.is_cluster:
            _, enqueue = part
            *_, answer = self._roundtrips.stream([*watching, enqueue])
            return self._enqueueing.direct_results(part, answer)
        for call in watching:
            self._roundtrips.call(call)
        if self.outbox is not None:
            return self.outbox.enqueue(batches)
        if part is not None:
            _, enqueue = part
            return self._enqueueing.direct_results(part, self._roundtrips.call(enqueue))
        with within(self._patience(batches)):
            return self._keyspace.run(self._enqueueing.steps(batches))

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        self._check(batches)
        if self._may_block:
            return await backpressure.aenqueue(self, self.policy, batches, self._aenqueue_at_once)
        return await self._aenqueue_at_once(batches)

    async def _aenqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self.outbox is not None:
            return await self.outbox.aenqueue(batches)
        if len(batches) == 1 and (part := self._enqueueing.direct(batches[0])) is not None:
            _, enqueue = part
            return await self._enqueueing.adirect_results(part, await self._roundtrips.acall(enqueue))
        with within(self._patience(batches)):
            return await self._keyspace.arun(self._enqueueing.steps(batches))

    def enqueue_directly(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs without the outbox, and without limits on the size of queues."""
        return self._keyspace.run(self._enqueueing.steps(batches, bounded=False))

    def _patience(self, batches: Sequence[Batch]) -> float:
        """Return the seconds that an enqueue may take, with all its round trips."""
        count = sum(len(batch.payloads) * (1 + len(batch.options.depends_on)) for batch in batches)
        return self.options.timeout + count / JOBS_PER_SECOND

    def _check(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.policy(batch.queue).check_batch(batch)

    # Attempts.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return self._keyspace.run(self._claiming.finish(outcomes, then))

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return await self._keyspace.arun(self._claiming.finish(outcomes, then, may_postpone=True))

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        return self._keyspace.run(self._claiming.renew(leases))

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        return self._keyspace.run(self._claiming.report(reports))

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        return self._keyspace.run(self._claiming.emit(emissions))

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        return self.events.listen(None if queues is None else list(queues), wake)

    def subscribe_new(self, queue: str, handler: EventHandler, job_id: str) -> Unsubscribe:
        return self.events.subscribe(queue, handler, job_id, with_enqueue=True)

    def sweep(self) -> Swept:
        swept: Swept = self._keyspace.run(self._sweeping.steps())
        self._abandoned.sweep()
        return swept
