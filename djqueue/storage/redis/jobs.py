"""Changes of single jobs."""

from collections.abc import Iterable, Sequence
from typing import Any

from djqueue.core.job import CancelResult
from djqueue.core.options import JobKey
from djqueue.core.policies import KEYED
from djqueue.core.states import REUSABLE, TERMINAL, State
from djqueue.storage.facets import Jobs

from . import records
from .keys import MOVING_KEYS
from .keyspace import PAGE, STEP, Keyspace, chunks
from .records import pack_text, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .sweeping import Removing


class RedisJobs(Jobs):
    """Changes of single jobs, each a script on their queue."""

    def __init__(self, keyspace: Keyspace, removing: Removing) -> None:
        self._keyspace = keyspace
        self._removing = removing

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        heading = [pack_text(reason), records.pack_groups(self._keyspace.policy(queue))]
        replies = self._keyspace.run(self._keyspace.on_jobs("cancel", queue, ids, heading))
        return [CancelResult(job_id, text(reply)) for job_id, reply in zip(ids, replies, strict=True)]

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        return self._moved(queue, ids, [b"promoted", b""])

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        return self._moved(queue, ids, [b"rescheduled", run_at])

    def _moved(self, queue: str, ids: Sequence[str], heading: list[Any]) -> list[bool]:
        heading = [*heading, records.pack_groups(self._keyspace.policy(queue))]
        return [
            reply == 1 for reply in self._keyspace.run(self._keyspace.on_jobs("move", queue, ids, heading))
        ]

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        heading = [
            b"" if priority is None else priority,
            b"0" if payload is None else b"1",
            payload or b"",
            records.pack_groups(self._keyspace.policy(queue)),
        ]
        return [
            reply == 1 for reply in self._keyspace.run(self._keyspace.on_jobs("update", queue, ids, heading))
        ]

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        heading = [b"1" if retry else b"0", payload, old, records.pack_groups(self._keyspace.policy(queue))]
        return text(self._keyspace.run(self._keyspace.on_jobs("replace_payload", queue, [id], heading))[0])

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        return self._keyspace.run(self._retried(queue, ids, dry_run=dry_run))

    def _retried(self, queue: str, ids: Sequence[str], *, dry_run: bool) -> Steps[list[str]]:
        heading = [b"d" if dry_run else b"0", records.pack_groups(self._keyspace.policy(queue))]
        replies = yield from self._keyspace.on_jobs(
            "retry", queue, ids, heading, step=PAGE if dry_run else STEP
        )
        unmet = {position: _keys(reply) for position, reply in enumerate(replies) if isinstance(reply, list)}
        words = ["" if position in unmet else text(reply) for position, reply in enumerate(replies)]
        states = yield from self._states_of({key for keys in unmet.values() for key in keys})
        by_mode: dict[bytes, list[int]] = {}
        for position, keys in unmet.items():
            met = {states[key] for key in keys}
            is_met = met == {State.COMPLETED}
            if None in met or State.CANCELLED in met:
                words[position] = "dependency_gone"
            elif dry_run:
                words[position] = "retried" if is_met else "blocked_again"
            else:
                by_mode.setdefault(b"w" if is_met else b"b", []).append(position)
        for mode, positions in by_mode.items():
            heading[0] = mode
            replies = yield from self._keyspace.on_jobs(
                "retry", queue, [ids[position] for position in positions], heading
            )
            for position, reply in zip(positions, replies, strict=True):
                words[position] = text(reply)
        return words

    def _states_of(self, keys: Iterable[JobKey]) -> Steps[dict[JobKey, State | None]]:
        """Return the states of jobs, following recent moves; None for a job that is gone."""
        current = {key: key for key in keys}
        states: dict[JobKey, State | None] = {}
        while current:
            queues: dict[str, list[JobKey]] = {}
            for key, place_now in current.items():
                queues.setdefault(place_now[0], []).append(key)
            missing = []
            for queue, keys_in_queue in queues.items():
                states_in_queue = yield from self._keyspace.states(
                    queue, [current[key][1] for key in keys_in_queue]
                )
                states.update(zip(keys_in_queue, states_in_queue, strict=True))
                missing += [key for key in keys_in_queue if states[key] is None]
            calls: list[ScriptCall | RedisCommand] = [
                RedisCommand((b"GET", self._keyspace.keys(current[key][0]).moved(current[key][1])))
                for key in missing
            ]
            targets = (yield calls) if calls else []
            moved = zip(missing, targets, strict=True)
            current = {key: (text(target), key[1]) for key, target in moved if target is not None}
        return states

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        keys = self._keyspace.keys(queue)
        if ended_before is None:
            replies = self._keyspace.run(self._removing.removed(keys, ids, "any"))
        else:
            replies = self._keyspace.run(self._removing.removed(keys, ids, "clean", ended_before, TERMINAL))
        return [reply == 1 for reply in replies]

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """Move jobs after a check for obstacles. A job that meets one later goes back."""
        if to == queue:
            raise ValueError(f"the jobs are already in queue {queue!r}; pass a different queue")
        return [word for chunk in chunks(ids) for word in self._keyspace.run(self._given(queue, chunk, to))]

    def _given(self, queue: str, ids: Sequence[str], to: str) -> Steps[list[str]]:
        heading = [pack_text(to), records.pack_groups(self._keyspace.policy(queue))]
        looks = yield from self._keyspace.on_jobs("give", queue, ids, [b"look", *heading], MOVING_KEYS)
        words = [text(word) for word, *_ in looks]
        pending = [position for position, word in enumerate(words) if word == "moved"]
        if pending:
            yield from self._keyspace.agree({to} - self._keyspace.agreed)
        if self._keyspace.policy(to).key_mode == KEYED:
            words = [
                "concurrency_key_needed" if word == "moved" and not look[3] else word
                for word, look in zip(words, looks, strict=True)
            ]
            pending = [position for position in pending if words[position] == "moved"]
        if not pending:
            return words
        moving = [part for position in pending for part in (pack_text(ids[position]), *looks[position][1:3])]
        [[_, rivals]] = yield [ScriptCall(script("rivals"), self._keyspace.keys(to), moving)]
        for position, rival in zip(pending, rivals, strict=True):
            words[position] = text(rival) or "moved"
        moving = [position for position in pending if words[position] == "moved"]
        if not moving:
            return words
        # Its mode and bounds apply from the first job on.
        yield from (
            self._keyspace.list_queues({to}) if to in self._keyspace.agreed else self._keyspace.begin({to})
        )
        moving_ids = [ids[position] for position in moving]
        replies = yield from self._keyspace.on_jobs(
            "give", queue, moving_ids, [b"give", *heading], MOVING_KEYS
        )
        for position, reply in zip(moving, replies, strict=True):
            words[position] = text(reply)
        states = yield from self._keyspace.states(to, moving_ids)
        yield from self._keyspace.deliver_soon(to)
        states_back = yield from self._keyspace.states(queue, moving_ids)
        for position, reply, state, returned in zip(moving, replies, states, states_back, strict=True):
            if reply == b"moved" and returned is not None:
                is_taken = state not in (None, *REUSABLE) or looks[position][2]
                words[position] = "duplicate" if is_taken else "unique_key_taken"
        if any(looks[position][2] for position in moving):
            yield from self._removing.bury_surplus(self._keyspace.keys(to))
        return words


def _keys(reply: Sequence[Any]) -> list[JobKey]:
    """Return pairs of queue and id from a reply that lists them in turn."""
    words = list(map(text, reply))
    return list(zip(words[::2], words[1::2], strict=True))
