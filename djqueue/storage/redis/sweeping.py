"""Sweeps: one script for each queue, and removal of jobs in bounded steps."""

from collections.abc import Iterable, Sequence
from typing import Any

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Swept
from djqueue.core.policies import NO_RETENTION
from djqueue.core.states import State

from . import records
from .keys import JOB_KEYS, READ_KEYS, QueueKeys
from .keyspace import Keyspace, chunks, forget_if_many
from .limits import SharedLimits
from .metrics import Metrics
from .records import pack, pack_text, pairs, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .workers import RedisWorkers

SWEEP = 500
"""Jobs of each kind that one sweep handles."""
LOOKS = 20
"""Fruitless searches, of SWEEP records each, for records above a bound."""
EXPIRED = 50_000
"""Expired records that one sweep of a queue removes."""
SCANNED = 2_000
"""Approximate number of active jobs whose leases one sweep checks."""


class Removing:
    """Removes jobs by id, expired jobs, and jobs above the bounds of a queue."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._ranks: dict[tuple[str, State], int] = {}
        """Where the search for records above a bound continues."""

    def removed(
        self,
        keys: QueueKeys,
        ids: Sequence[str],
        mode: str,
        bound: int | str = "",
        states: Iterable[State] = (),
    ) -> Steps[list[Any]]:
        """Remove jobs as far as a mode of `remove.lua` allows; return 1 for each that was removed."""
        names = pack([state.value for state in states])
        heading = [mode, bound, names, records.pack_groups(self._keyspace.policy(keys.queue))]
        return (yield from self._keyspace.on_jobs("remove", keys.queue, ids, heading, JOB_KEYS))

    def bury_surplus(self, keys: QueueKeys) -> Steps[None]:
        """Remove dead letters above the maximum number."""
        [count] = yield [RedisCommand((b"ZCARD", keys.key("dead")))]
        overflow = count - self._keyspace.policy(keys.queue).dead_letters.max_entries
        while overflow > 0 and (buried := (yield from self.bury_oldest(keys, overflow))):
            overflow -= buried

    def bury_oldest(self, keys: QueueKeys, count: int) -> Steps[int]:
        """Remove the oldest dead letters above the maximum number."""
        limit = self._keyspace.policy(keys.queue).dead_letters.max_entries
        [ids] = yield [RedisCommand((b"ZRANGE", keys.key("dead"), 0, min(count, SWEEP) - 1))]
        return sum((yield from self.removed(keys, list(map(text, ids)), "dead", limit)))

    def expire(self, keys: QueueKeys, ids: list[str]) -> Steps[int]:
        """Remove up to `EXPIRED` expired records: a busy queue has thousands each second."""
        removed = 0
        while ids and removed < EXPIRED:
            arguments = [b"", b"", b"", *map(pack_text, ids)]
            [[_, gone]] = yield [ScriptCall(script("expire"), keys, arguments, keys.of_jobs(ids, READ_KEYS))]
            if gone < len(ids):
                # Dead letters, and records that others have removed meanwhile.
                gone += sum((yield from self.removed(keys, ids, "over")))
            removed += gone
            if len(ids) < SWEEP or not gone:
                break
            [expired] = yield [RedisCommand((b"ZRANGE", keys.key("finished"), 0, SWEEP - 1))]
            ids = list(map(text, expired))
        return removed

    def trim(self, keys: QueueKeys, state: State, limit: int | None, size: int | None) -> Steps[int]:
        """Remove records of one outcome above a number or size, as far as bounded searches find them."""
        if limit is None and size is None:
            return 0
        removed, rank_key, code = 0, (keys.queue, state), records.STATE_CODES[state]
        bounds: list[int | str] = ["" if bound is None else bound for bound in (limit, size)]
        looks = 0
        while looks < LOOKS and removed < EXPIRED:
            arguments = [code, *bounds, self._ranks.pop(rank_key, 0), SWEEP]
            [[following, ids]] = yield [ScriptCall(script("surplus"), keys, arguments, sequence=False)]
            gone = 0
            if ids:
                over = list(map(text, ids))
                if state is not State.FAILED:
                    arguments = [code, *bounds, *ids]
                    [[_, gone]] = yield [
                        ScriptCall(script("expire"), keys, arguments, keys.of_jobs(over, READ_KEYS))
                    ]
                for mode, bound in (("surplus", limit), ("heavy", size)) if gone < len(over) else ():
                    if bound is not None:
                        gone += sum((yield from self.removed(keys, over, mode, bound, {state})))
                removed += gone
            looks += not gone
            if following < 0:
                break
            forget_if_many(self._ranks)
            self._ranks[rank_key] = following
        return removed

    def trim_results(self, keys: QueueKeys, size: int) -> Steps[None]:
        """Remove results above a size, in bounded steps."""
        for _ in range(EXPIRED // SWEEP):
            arguments = [b"r", b"", size, 0, SWEEP]
            [[following, ids]] = yield [ScriptCall(script("surplus"), keys, arguments, sequence=False)]
            yield from self._forget_unneeded(keys, [f"r{text(job_id)}" for job_id in ids], b"surplus", size)
            if following < 0:
                break

    def forget_over(self, keys: QueueKeys, names: list[str]) -> Steps[None]:
        """Remove expired details of ended jobs, in bounded steps; `names` as in `unneeded.lua`."""
        for _ in range(EXPIRED // SWEEP):
            gone = yield from self._forget_unneeded(keys, names, b"over")
            if len(names) < SWEEP or not gone:
                return
            results, details = yield [
                RedisCommand((b"ZRANGE", keys.key(name), 0, SWEEP - 1)) for name in ("results", "details")
            ]
            names = [*(f"r{text(job_id)}" for job_id in results), *map(text, details)]

    def _forget_unneeded(
        self, keys: QueueKeys, names: list[str], mode: bytes, bound: int | bytes = b""
    ) -> Steps[int]:
        gone = 0
        for chunk in chunks(names):
            arguments = [mode, bound, *map(pack_text, chunk)]
            job_keys = keys.of_jobs(name[1:] for name in chunk)
            [[_, part]] = yield [ScriptCall(script("unneeded"), keys, arguments, job_keys)]
            gone += part
        return gone

    def delete_leftovers(self, keys: QueueKeys) -> Steps[None]:
        """Delete the keys of the jobs of an obliterated queue, also those that another process left."""
        [names] = yield [RedisCommand((b"SMEMBERS", keys.key("gone")))]
        for name in names:
            gone = keys.key(f"gone:{text(name)}")
            cursor = b"0"
            while True:
                [[cursor, leftovers]] = yield [RedisCommand((b"HSCAN", gone, cursor, b"COUNT", 500))]
                # Jobs that were enqueued again meanwhile keep their keys.
                yield from self.removed(keys, [text(job_id) for job_id, _ in pairs(leftovers)], "gone")
                if not int(cursor):
                    break
            yield [RedisCommand((b"UNLINK", gone)), RedisCommand((b"SREM", keys.key("gone"), name))]


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
        self._alive = pack([])
        """The live workers at the last sweep (MessagePack); the reason of a dead letter depends on them."""

    def steps(self) -> Steps[Swept]:
        """Sweep all queues, also if the server of some is away. Raises its error at the end."""
        failure: StorageUnavailableError | None = None
        swept = Swept()
        try:
            every = self._keyspace.every_policy
            for limiter in sorted({policy.limiter for policy in every if policy.limiter is not None}):
                yield from self._limits.pass_on(limiter)
            self._alive = pack([info.id for info in (yield from self._workers.live())])
        except StorageUnavailableError as error:
            failure = error
        names = yield from self._keyspace.last_names()
        if len(self._cursors) > len(names):
            self._cursors = {queue: self._cursors[queue] for queue in names if queue in self._cursors}
        for queue in names:
            if failure is not None and not self._keyspace.has_several_servers:
                break
            try:
                in_queue = yield from self._sweep(queue, self._alive)
            except StorageUnavailableError as error:
                failure = failure or error
            else:
                swept = Swept(*map(sum, zip(swept, in_queue, strict=True)))
        if failure is not None:
            raise failure
        return swept

    def _sweep(self, queue: str, alive: bytes) -> Steps[Swept]:
        keys, policy = self._keyspace.keys(queue), self._keyspace.policy(queue)
        dead, retention = policy.dead_letters, policy.retention
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
            retention.attempts.count,
            *records.pack_bounds(retention, dead),
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
        if retention is not NO_RETENTION:
            for state in (State.COMPLETED, State.CANCELLED):
                keep = retention.of(state)
                removed += yield from self._removing.trim(keys, state, keep.count, keep.bytes)
            if retention.results.bytes is not None:
                yield from self._removing.trim_results(keys, retention.results.bytes)
        if dead.max_bytes is not None:
            removed += yield from self._removing.trim(keys, State.FAILED, None, dead.max_bytes)
        if overflow:
            removed += yield from self._removing.bury_oldest(keys, overflow)
        yield from self._removing.delete_leftovers(keys)
        return Swept(promoted, stalled, expired, retried, removed)

    def _active(self, keys: QueueKeys) -> Steps[list[bytes]]:
        """Return some active jobs: one whose lease was lost with a part of the data gets a new one."""
        cursor = self._cursors.get(keys.queue, b"0")
        [[cursor, entries]] = yield [RedisCommand((b"HSCAN", keys.key("st"), cursor, b"COUNT", SCANNED))]
        self._cursors[keys.queue] = cursor
        return [job_id for job_id, st in pairs(entries) if st[:1] in b"aA"]
