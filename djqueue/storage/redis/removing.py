"""Removal of jobs and of records above the bounds of a queue, and scans of all jobs, in bounded steps."""

from collections.abc import Iterable, Sequence
from typing import Any

from djqueue.core.states import State

from ..redis import records
from .keys import QueueKeys
from .keyspace import PAGE, Keyspace, chunks
from .records import flat, pack, pack_text, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

SWEEP = 500
"""Jobs of each kind that one sweep handles."""
LOOKS = 20
"""Fruitless searches, of SWEEP records each, for records above a bound."""
EXPIRED = 50_000
"""Expired records that one sweep of a queue removes."""


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
        return (yield from self._keyspace.on_jobs("remove", keys.queue, ids, heading, all_of_jobs))

    def bury_surplus(self, keys: QueueKeys) -> Steps[None]:
        """Remove dead letters above the maximum number."""
        [there] = yield [RedisCommand((b"ZCARD", keys.key("dead")))]
        overflow = there - self._keyspace.policy(keys.queue).dead_letters.max_entries
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
            [[_, gone]] = yield [ScriptCall(script("expire"), keys, arguments, of_jobs(keys, ids))]
            if gone < len(ids):
                # Dead letters, and records that others have removed meanwhile.
                gone += sum((yield from self.removed(keys, ids, "over")))
            removed += gone
            if len(ids) < SWEEP or not gone:
                break
            [found] = yield [RedisCommand((b"ZRANGE", keys.key("finished"), 0, SWEEP - 1))]
            ids = list(map(text, found))
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
                some = list(map(text, ids))
                if state is not State.FAILED:
                    arguments = [code, *bounds, *ids]
                    [[_, gone]] = yield [ScriptCall(script("expire"), keys, arguments, of_jobs(keys, some))]
                for mode, bound in (("surplus", limit), ("heavy", size)) if gone < len(some) else ():
                    if bound is not None:
                        gone += sum((yield from self.removed(keys, some, mode, bound, {state})))
                removed += gone
            looks += not gone
            if following < 0:
                break
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
        for some in chunks(names):
            arguments = [mode, bound, *map(pack_text, some)]
            of_jobs = all_of_jobs(keys, [name[1:] for name in some])
            [[_, part]] = yield [ScriptCall(script("unneeded"), keys, arguments, of_jobs)]
            gone += part
        return gone

    def delete_leftovers(self, keys: QueueKeys) -> Steps[None]:
        """Delete the keys of the jobs of an obliterated queue, also those that another process left."""
        [names] = yield [RedisCommand((b"SMEMBERS", keys.key("gone")))]
        for name in names:
            gone = keys.key(f"gone:{text(name)}")
            cursor = b"0"
            while True:
                [[cursor, found]] = yield [RedisCommand((b"HSCAN", gone, cursor, b"COUNT", 500))]
                found = flat(found)
                # Jobs that were enqueued again meanwhile keep their keys.
                yield from self.removed(keys, list(map(text, found[::2])), "gone")
                if not int(cursor):
                    break
            yield [RedisCommand((b"UNLINK", gone)), RedisCommand((b"SREM", keys.key("gone"), name))]


def of_jobs(keys: QueueKeys, ids: Iterable[str]) -> list[bytes]:
    return [key for job_id in ids for key in (keys.result(job_id), keys.log_lines(job_id))]


def all_of_jobs(keys: QueueKeys, ids: Iterable[str]) -> list[bytes]:
    return [
        key for job_id in ids for key in (keys.result(job_id), keys.log_lines(job_id), keys.items(job_id))
    ]


class Scanning:
    """Finds the jobs of a queue that are in some states."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace

    def jobs(
        self, keys: QueueKeys, states: frozenset[State], before: int | None = None
    ) -> Steps[list[tuple[int, str]]]:
        """Return enqueue time and id of the jobs in some states, scanned a part at a time."""
        found: dict[str, int] = {}
        cursor = b"0"
        while True:
            cursor, some = yield from self.part(keys, states, before, cursor)
            found.update((job_id, created) for created, job_id in some)
            if cursor == b"0":
                return [(created, job_id) for job_id, created in found.items()]

    def part(
        self,
        keys: QueueKeys,
        states: frozenset[State],
        before: int | None,
        cursor: bytes,
        size: int = PAGE,
    ) -> Steps[tuple[bytes, list[tuple[int, str]]]]:
        """Return the next cursor (`0` at the end) and some jobs, some of them perhaps again."""
        codes = b"".join(records.STATE_CODES[state] for state in states)
        arguments = [cursor, size, codes, before if before is not None else b""]
        [[cursor, entries]] = yield [ScriptCall(script("scan"), keys, arguments, sequence=False)]
        return cursor, [(int(entries[at]), text(entries[at + 1])) for at in range(0, len(entries), 2)]
