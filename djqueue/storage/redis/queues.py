"""Controls of queues as a whole."""

from collections.abc import Sequence
from typing import Any, Unpack

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import within
from djqueue.core.errors import StorageError
from djqueue.core.ids import IdSource
from djqueue.core.policies import UNSET, KeyLimit, KeyLimitChanges, SetConcurrency, SetRate
from djqueue.core.states import State
from djqueue.storage.facets import Queues

from . import records
from .keys import QueueKeys
from .keyspace import STEP, Keyspace, scan, scan_part
from .limits import SharedLimits
from .metrics import Metrics
from .records import pack_text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .sweeping import Removing


class RedisQueues(Queues):
    """Controls of queues, and removal of many jobs."""

    def __init__(
        self,
        keyspace: Keyspace,
        removing: Removing,
        limits: SharedLimits,
        metrics: Metrics,
    ) -> None:
        self._keyspace = keyspace
        self._removing = removing
        self._limits = limits
        self._metrics = metrics
        self._ids = IdSource()

    def names(self) -> list[str]:
        return self._keyspace.run(self._keyspace.names())

    def pause(self, queue: str) -> None:
        self._keyspace.run_in_time(self._control(queue, "pause"))

    def resume(self, queue: str) -> None:
        with within(self._keyspace.options.timeout):
            if queue in self.names():
                self._keyspace.run(self._control(queue, "resume"))

    def is_paused(self, queue: str) -> bool:
        return bool(
            self._keyspace.ask(RedisCommand((b"HEXISTS", self._keyspace.keys(queue).key("meta"), b"paused")))
        )

    def hold(self, queue: str, name: str, until: int | None, reason: str) -> None:
        words = pack_text(name), until or 0, pack_text(reason)
        self._keyspace.run_in_time(self._control(queue, "hold", *words))

    def release(self, queue: str, name: str) -> bool:
        with within(self._keyspace.options.timeout):
            return queue in self.names() and bool(
                self._keyspace.run(self._control(queue, "release", pack_text(name)))
            )

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        policy = self._keyspace.policy(queue)
        given = [int(rate is not UNSET), int(concurrency is not UNSET)]
        rate = policy.rate if rate is UNSET else rate
        concurrency = policy.concurrency if concurrency is UNSET else concurrency
        limits = records.pack_limits(rate, concurrency)
        self._keyspace.run_in_time(self._control(queue, "limit", *limits, *given))

    def set_key_limit(self, queue: str, key: str | None, **overrides: Unpack[KeyLimitChanges]) -> None:
        self._keyspace.run(self._group(queue, "limit", key, records.group_words(overrides)))

    def pause_key(self, queue: str, key: str) -> None:
        self._keyspace.run_in_time(self._group(queue, "pause", key))

    def resume_key(self, queue: str, key: str) -> None:
        with within(self._keyspace.options.timeout):
            if queue in self.names():
                self._keyspace.run(self._group(queue, "resume", key))

    def key_limits(self, queue: str) -> dict[str | None, KeyLimit]:
        return records.key_limits(
            self._keyspace.ask(RedisCommand((b"HGETALL", self._keyspace.keys(queue).key("groups"))))
        )

    def _group(
        self, queue: str, operation: str, group: str | None, words: Sequence[bytes] = ()
    ) -> Steps[None]:
        yield from self._keyspace.list_queues({queue})
        name = b"" if group is None else pack_text(group)
        heading = [operation, name, records.pack_groups(self._keyspace.policy(queue))]
        after = b""
        while True:
            [[_, after]] = yield [
                ScriptCall(script("group"), self._keyspace.keys(queue), [*heading, after, *words])
            ]
            if not after:
                return

    def _control(self, queue: str, operation: str, *arguments: Any) -> Steps[int]:
        # One round trip, in this order.
        *_, [_, reply] = yield [
            *self._keyspace.listing({queue}),
            ScriptCall(script("control"), self._keyspace.keys(queue), [operation, *arguments]),
        ]
        self._keyspace.cached_names.forget()
        self._keyspace.known.add(queue)
        return int(reply)

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        return self._keyspace.run(self._clean(queue, states - {State.ACTIVE}, before, limit))

    def _clean(self, queue: str, states: frozenset[State], before: int, limit: int | None) -> Steps[int]:
        if not states:
            return 0
        keys = self._keyspace.keys(queue)
        removed = 0
        if State.BLOCKED in states:
            # Dependents go first: otherwise they would end with their dependencies, and stay.
            [has_blocked] = yield [RedisCommand((b"HEXISTS", keys.key("meta"), b"b"))]
            jobs = (yield from scan(keys, frozenset({State.BLOCKED}), before)) if has_blocked else []
            newest_first = [job_id for _, job_id in sorted(jobs, reverse=True)]
            removed = yield from self._clean_these(keys, newest_first, before, states, limit)
        cursor = b"0"
        while limit is None or removed < limit:
            cursor, jobs = yield from scan_part(keys, states, before, cursor)
            left = None if limit is None else limit - removed
            ids = [job_id for _, job_id in jobs]
            removed += yield from self._clean_these(keys, ids, before, states, left)
            if cursor == b"0":
                break
        return removed

    def _clean_these(
        self, keys: QueueKeys, ids: Sequence[str], before: int, states: frozenset[State], limit: int | None
    ) -> Steps[int]:
        removed = 0
        while ids and (limit is None or removed < limit):
            size = STEP if limit is None else min(STEP, limit - removed)
            chunk, ids = ids[:size], ids[size:]
            removed += sum((yield from self._removing.removed(keys, chunk, "clean", before, states)))
        return removed

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        return self._keyspace.run(self._obliterate(queue, force))

    def _obliterate(self, queue: str, force: bool) -> Steps[int]:
        keys = self._keyspace.keys(queue)
        name = self._ids.new(SYSTEM_CLOCK.now())
        gone = keys.key(f"gone:{name}")
        [[left, (removed, tokens)]] = yield [
            ScriptCall(
                script("obliterate"),
                keys,
                [b"1" if force else b"0", name, pack_text(queue)],
                [gone, keys.key("gone"), *self._metrics.all_keys(keys)],
            )
        ]
        if removed < 0:
            raise StorageError(f"queue {queue!r} has active jobs: wait until they finish, or pass force=True")
        if left:
            yield from self._keyspace.deliver_soon(queue)
        yield from self._limits.lose(self._keyspace.policy(queue).limiter, queue, tokens)
        yield from self._removing.delete_leftovers(keys)
        yield [RedisCommand((b"SREM", self._keyspace.common.key("queues"), pack_text(queue)))]
        self._keyspace.known.discard(queue)
        self._keyspace.agreed.discard(queue)
        [is_there_again] = yield [RedisCommand((b"EXISTS", keys.key("meta")))]
        if is_there_again:
            yield from self._keyspace.list_queues({queue})
        return int(removed)
