"""Sweeps: one script for each queue, and removal in bounded steps."""

from djqueue.core.job import Swept
from djqueue.core.policies import NO_RETENTION
from djqueue.core.states import State

from . import records
from .keys import QueueKeys
from .keyspace import Keyspace
from .limits import SharedLimits
from .metrics import Metrics
from .records import flat, pack, text
from .removing import SWEEP, Removing
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .workers import RedisWorkers

SCANNED = 2_000
"""Approximate number of active jobs whose leases one sweep checks."""


class Sweeping:
    """Sweeps all queues."""

    def __init__(
        self,
        keyspace: Keyspace,
        removing: Removing,
        limits: SharedLimits,
        metrics: Metrics,
        workers: RedisWorkers,
    ) -> None:
        self._keyspace = keyspace
        self._removing = removing
        self._limits = limits
        self._metrics = metrics
        self._workers = workers
        self._cursors: dict[str, bytes] = {}
        """Cursor of the check of active jobs, by queue."""

    def steps(self) -> Steps[Swept]:
        every = self._keyspace.every_policy
        for limiter in sorted({policy.limiter for policy in every if policy.limiter is not None}):
            yield from self._limits.pass_on(limiter)
        alive = pack([info.id for info in (yield from self._workers.live())])
        swept = Swept()
        for queue in (yield from self._keyspace.names()):
            swept = Swept(*map(sum, zip(swept, (yield from self._sweep(queue, alive)), strict=True)))
        return swept

    def _sweep(self, queue: str, alive: bytes) -> Steps[Swept]:
        keys, policy = self._keyspace.keys(queue), self._keyspace.policy(queue)
        dead, kept = policy.dead_letters, policy.retention
        tiers, buckets = self._metrics.present(keys)
        arguments = [
            policy.lease,
            records.pack_groups(policy),
            dead.ttl,
            dead.auto_retries,
            records.pack_delay(dead.auto_retry_delay),
            dead.max_entries,
            SWEEP,
            alive,
            kept.attempts.count,
            *records.pack_bounds(kept, dead),
            tiers,
            *(yield from self._active(keys)),
        ]
        [[left, reply]] = yield [ScriptCall(script("sweep"), keys, arguments, buckets)]
        promoted, stalled, expired, retried, overflow, over, tokens, unneeded = reply
        yield from self._limits.lose(policy.limiter, queue, tokens)
        if left:
            yield from self._keyspace.deliver(queue)
        removed = yield from self._removing.expire(keys, list(map(text, over)))
        yield from self._removing.forget_over(keys, list(map(text, unneeded)))
        if kept is not NO_RETENTION:
            for state in (State.COMPLETED, State.CANCELLED):
                keep = kept.of(state)
                removed += yield from self._removing.trim(keys, state, keep.count, keep.bytes)
            if kept.results.bytes is not None:
                yield from self._removing.trim_results(keys, kept.results.bytes)
        if dead.max_bytes is not None:
            removed += yield from self._removing.trim(keys, State.FAILED, None, dead.max_bytes)
        if overflow:
            removed += yield from self._removing.bury_oldest(keys, overflow)
        yield from self._removing.delete_leftovers(keys)
        return Swept(promoted, stalled, expired, retried, removed)

    def _active(self, keys: QueueKeys) -> Steps[list[bytes]]:
        """Return some active jobs: one whose lease was lost with a part of the data gets a new one."""
        cursor = self._cursors.get(keys.queue, b"0")
        [[cursor, found]] = yield [RedisCommand((b"HSCAN", keys.key("st"), cursor, b"COUNT", SCANNED))]
        self._cursors[keys.queue] = cursor
        found = flat(found)
        return [found[at] for at in range(0, len(found), 2) if found[at + 1][:1] in b"aA"]
