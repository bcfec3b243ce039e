"""Writes of a snapshot: all of it, or nothing, whenever the process is killed.

A restore goes through three phases, which a hash records with its name and its queues:

    staging     The jobs are stored in chunks, in a list in each queue. Nothing else has changed. At the end
                the queues are closed: their scripts refuse every request.
    publishing  Each queue is cleared, and filled from its chunks. A chunk is removed in the step that adds
                its jobs, so any process can go on after a crash. This phase begins in one step, with which
                the restore is decided.
    opening     Everything is in place, and the queues are opened.

The next restore first ends an interrupted one: it undoes one that was staging, and completes any other.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from djqueue.core.enginejob import EngineJob, end_without_record
from djqueue.core.errors import RestoreInProgressError
from djqueue.core.job import DeadLetterRecord
from djqueue.core.policies import KeyLimit
from djqueue.core.states import State
from djqueue.storage.snapshots import LimiterSettings, QueueSettings, ScheduleRows, schedules_replaced
from djqueue.storage.snapshotspool import SnapshotSpool, SpooledJob

from . import records
from .enqueueing import RANKS
from .keys import QueueKeys
from .keyspace import Keyspace
from .limits import SharedLimits
from .metrics import Metrics
from .records import NUMBER, pack, pack_raw, pack_text, unpack
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .sweeping import Removing

STAGING, PUBLISHING, OPENING = b"staging", b"publishing", b"opening"
LOCK = 30_000
"""Milliseconds after its last step at which a restore counts as interrupted."""
REPLACEMENT_TTL = 7 * 86_400_000
"""Milliseconds for which reads of the storage can find that everything was replaced meanwhile."""
CHUNK_JOBS = 100
CHUNK_BYTES = 500_000
"""Approximate limits of a chunk, which one script adds in a few milliseconds."""
CLOSED, CLEARED = b"closed", b"cleared"
"""Values of the key that closes a queue: before and after the queue is cleared."""
CODES = {State.COMPLETED: b"c", State.FAILED: b"f", State.CANCELLED: b"x"}


class OpenKeys(QueueKeys):
    """The keys of a queue for the scripts of a restore, which its own closing does not stop."""

    def key(self, name: str) -> bytes:
        return super().key("unrestricted" if name == "restoring" else name)


class Restore:
    """One restore, or the completion of an interrupted one.

    Args:
        keyspace, limits, removing, metrics: Of the storage.
        limiters: Names of the shared limiters.
        schedules: Where the schedules are.
    """

    def __init__(
        self,
        keyspace: Keyspace,
        limits: SharedLimits,
        removing: Removing,
        metrics: Metrics,
        limiters: Iterable[str],
        schedules: ScheduleRows | None,
    ) -> None:
        self._keyspace = keyspace
        self._limits = limits
        self._removing = removing
        self._metrics = metrics
        self._limiters = sorted(limiters)
        self._schedules = schedules
        self._name = os.urandom(8).hex().encode()
        self._marker = keyspace.common.key("restore")
        self._lock = keyspace.common.key("restore:lock")

    # Who restores.

    def __enter__(self) -> "Restore":
        words = (b"SET", self._lock, self._name, b"NX", b"PX", LOCK)
        if not self._ask(*words):
            raise RestoreInProgressError(
                "another process is writing a snapshot to this storage: wait until it ends. If it was "
                f"killed, try again in {LOCK // 1_000} s"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._ask(b"GET", self._lock) == self._name:
            self._ask(b"DEL", self._lock)

    def _ask(self, *words: Any) -> Any:
        return self._keyspace.ask(RedisCommand(words))

    def _renew(self) -> None:
        if self._ask(b"GET", self._lock) != self._name:
            raise RestoreInProgressError("another process has taken over this restore")
        self._ask(b"PEXPIRE", self._lock, LOCK)

    # The phases.

    def is_open(self) -> bool:
        """Return whether there is a restore that has not ended, which may be running."""
        return bool(self._ask(b"EXISTS", self._marker))

    def was_interrupted(self) -> bool:
        """Return whether there is a restore whose process has not taken a step for as long as `LOCK`."""
        # The lock is released last.
        return self.is_open() and not self._ask(b"EXISTS", self._lock)

    def end_interrupted(self) -> bool:
        """Undo or complete an interrupted restore; return whether one was completed."""
        marker = self._ask(b"HMGET", self._marker, b"name", b"phase", b"queues")
        if marker[0] is None:
            return False
        name, self._name = self._name, marker[0]
        self._ask(b"SET", self._lock, self._name, b"XX", b"PX", LOCK)
        if marker[1] == STAGING:
            self.undo()
        else:
            self.publish(list(unpack(marker[2])))
        self._name = name
        self._ask(b"SET", self._lock, self._name, b"PX", LOCK)
        return bool(marker[1] != STAGING)

    def stage(self, spool: SnapshotSpool) -> list[str]:
        """Store everything, and close the queues; return their names."""
        queues = sorted({*spool.names(), *self._names()})
        others = {
            "limiters": [limiter.record() for limiter in spool.limiters],
            "schedules": list(spool.schedules),
        }
        fields = (b"name", self._name, b"phase", STAGING, b"queues", pack(queues), b"others", pack(others))
        self._ask(b"HSET", self._marker, *fields)
        for queue in spool.names():
            self._stage(queue, spool)
        while True:
            closed = [self._keyspace.common, *map(self._keyspace.keys, queues)]
            for keys in closed:
                self._ask(b"SET", keys.key("restoring"), CLOSED)
                self._ask(b"HDEL", keys.key("meta"), b"plain")  # see `finish_and_claim_plain.lua`
            if not (new := sorted({*self._names()} - {*queues})):
                return queues
            queues += new
            self._ask(b"HSET", self._marker, b"queues", pack(queues))

    def _names(self) -> list[str]:
        return self._keyspace.run(self._keyspace.names())

    def _stage(self, queue: str, spool: SnapshotSpool) -> None:
        keys = self._keyspace.keys(queue)
        staged = keys.key("restore")
        settings = spool.queues.get(queue, QueueSettings())
        letters = {
            letter.id: (number, letter)
            for number, letter in enumerate(_flat(spool.letters(CHUNK_JOBS, queue)), 1)
        }
        for chunk in _chunks(spool, queue, letters):
            self._renew()
            ids = pack([entry[0] for entry in chunk])
            self._ask(b"RPUSH", staged, ids, pack_raw(chunk))
        self._ask(b"SET", keys.key("restore:settings"), pack([settings.record(), len(letters)]))

    def decide(self) -> None:
        """Begin to publish: from now on the restore is completed by whoever comes next."""
        self._move_on(PUBLISHING)

    def _move_on(self, phase: bytes) -> None:
        call = ScriptCall(script("restoring"), self._keyspace.common, [self._name, phase], sequence=False)
        if not self._keyspace.ask(call):
            raise RestoreInProgressError("another process has taken over this restore")

    def publish(self, queues: Sequence[str]) -> None:
        """Replace the contents of all queues, and open them. May be repeated."""
        replaced = self._keyspace.common.key("replaced")
        self._ask(b"SET", replaced, os.urandom(8).hex().encode(), b"PX", REPLACEMENT_TTL)
        if self._ask(b"HGET", self._marker, b"phase") == PUBLISHING:
            for queue in queues:
                self._publish(queue)
            others = unpack(self._ask(b"HGET", self._marker, b"others"))
            self._set_limiters([LimiterSettings.of(record) for record in others["limiters"]])
            with schedules_replaced(self._schedules, others["schedules"]):
                pass
            self._move_on(OPENING)
        self._open(queues)
        self._move_on(b"")
        for queue in self._names():
            # Dependents ask for what they wait for.
            self._keyspace.run(self._keyspace.deliver(queue))
            self._keyspace.run(self._removing.delete_leftovers(self._keyspace.keys(queue)))

    def undo(self) -> None:
        """Delete what was staged, and open the queues, if this restore has begun."""
        marker = self._ask(b"HMGET", self._marker, b"name", b"queues")
        if marker[0] != self._name:
            return
        queues: list[str] = list(unpack(marker[1]))
        self._move_on(STAGING)  # Nothing was published, even if the reply to `decide` was lost.
        for queue in queues:
            keys = self._keyspace.keys(queue)
            self._ask(b"UNLINK", keys.key("restore"), keys.key("restore:settings"))
        self._open(queues)
        self._move_on(b"")

    def _publish(self, queue: str) -> None:
        self._renew()
        keys = OpenKeys(self._keyspace.options.prefix, queue)
        closing = self._keyspace.keys(queue).key("restoring")
        packed = self._ask(b"GET", keys.key("restore:settings"))
        self._keyspace.run(self._clear(keys, closing, [] if packed is None else self._fields(queue, packed)))
        staged = keys.key("restore")
        heading = [
            records.pack_groups(self._keyspace.policy(queue)),
            RANKS.get(self._keyspace.policy(queue).when_full, b"")
            if self._keyspace.policy(queue).max_size is not None
            else b"",
        ]
        while (ids := self._ask(b"LINDEX", staged, 0)) is not None:
            call = ScriptCall(script("restore"), keys, [*heading, ids], keys.of_jobs(unpack(ids)))
            self._keyspace.ask(call)
            self._renew()
        common = self._keyspace.common
        if packed is None:
            self._ask(b"SREM", common.key("queues"), pack_text(queue))
        else:
            self._ask(b"SADD", common.key("queues"), pack_text(queue))
        self._ask(b"HDEL", common.key("mirror"), pack_text(queue))
        self._keyspace.agreed.discard(queue)
        self._keyspace.known.discard(queue)
        self._keyspace.cached_names.forget()

    def _clear(self, keys: QueueKeys, closing: bytes, fields: Sequence[Any]) -> Steps[None]:
        """Clear a queue, unless that was done before, and set its settings."""
        name = os.urandom(8).hex()
        theirs = [closing, keys.key(f"gone:{name}"), keys.key("gone"), *self._metrics.all_keys(keys)]
        yield [ScriptCall(script("clear"), keys, [CLOSED, CLEARED, name, *fields], theirs)]

    def _fields(self, queue: str, packed: bytes) -> list[Any]:
        """Return what is set on a queue: the fields of `meta`, an empty value, and those of `groups`."""
        record, deaths = unpack(packed)
        settings = QueueSettings.of(queue, record)
        policy = self._keyspace.policy(queue)
        fields: list[Any] = [b"group_revision", 1]
        fields += (b"mode", settings.key_mode) if settings.key_mode else ()
        bounds = records.pack_bounds(policy.retention, policy.dead_letters)
        for name, value in zip(records.BOUNDS, bounds, strict=True):
            fields += (name, value) if value else ()
        fields += (b"paused", 1) if settings.paused else ()
        fields += (b"holds", records.pack_holds(settings.holds), b"held", 2) if settings.holds else ()
        fields += (b"deaths", deaths) if deaths else ()
        if settings.limits is not None:
            capacity, per, concurrency = records.pack_limits(*settings.limits)
            fields += (b"limited", 1, b"capacity", capacity, b"per", per, b"concurrency", concurrency)
        fields += (b"", b"")
        for group, limit in settings.key_limits.items():
            fields += (pack_text(group), _group_row(limit))
        return fields

    def _set_limiters(self, limiters: Sequence[LimiterSettings]) -> None:
        given = {limiter.name: limiter for limiter in limiters}
        for name in sorted({*self._limiters, *given}):
            if (limiter := given.get(name)) is None:
                self._ask(b"DEL", self._keyspace.limiter(name).key("overrides"))
            else:
                steps = self._limits.change(name, limiter.rate, limiter.concurrency)
                self._keyspace.run(steps)

    def _open(self, queues: Sequence[str]) -> None:
        for queue in queues:
            keys = self._keyspace.keys(queue)
            self._ask(b"DEL", keys.key("restoring"), keys.key("restore:settings"))
            self._ask(self._keyspace.publish, keys.wake.encode(), b"")
            self._ask(self._keyspace.publish, self._keyspace.common.new_queues.encode(), pack_text(queue))
        self._ask(b"DEL", self._keyspace.common.key("restoring"))


def _group_row(limit: KeyLimit) -> bytes:
    """Encode the overrides of a group: see `ready.lua`."""
    rate = limit.rate
    words = (limit.concurrency, None if rate is None else rate.capacity, None if rate is None else rate.per)
    parts = ["" if word is None else str(word) for word in (*words, limit.weight)]
    return ("1" if limit.paused else "0").encode() + "/".join(parts).encode()


def _flat(pages: Iterable[Sequence[DeadLetterRecord]]) -> Iterator[DeadLetterRecord]:
    for page in pages:
        yield from page


Letters = dict[str, tuple[int, DeadLetterRecord]]


def _chunks(spool: SnapshotSpool, queue: str, letters: Letters) -> Iterator[list[list[Any]]]:
    chunk: list[list[Any]] = []
    size = 0
    for page in spool.jobs(CHUNK_JOBS, queue):
        for entry in page:
            values = _values(spool, entry, letters)
            chunk.append(values)
            size += _size(values)
            if len(chunk) >= CHUNK_JOBS or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _size(values: Sequence[Any]) -> int:
    return sum(len(part) if isinstance(part, bytes) else 0 for part in values) + sum(
        len(one) for part in values if isinstance(part, list) for one in part if isinstance(one, bytes)
    )


def _values(spool: SnapshotSpool, entry: SpooledJob, letters: Letters) -> list[Any]:
    """Return a job as `restore.lua` reads it."""
    job, retries = entry
    name, options = pack_text(job.name), records.pack_options(job.options)
    flag = records.flag_of(job.options)
    heading = flag + len(name).to_bytes(2) + name + records.SIZE.pack(len(options)) + options
    is_ended = job.state in CODES
    stream = job.stream
    letter: Any = False
    if job.state is State.FAILED:
        number, dead = letters[job.id]
        letter = [records.pack_dead_letter(dead), number, dead.expires_at]
    needed: list[list[str]] = []
    unmet: list[list[str]] = []
    if job.options.depends_on and not is_ended:
        states = spool.states(job.options.depends_on)
        if job.state is State.BLOCKED:
            missing = end_without_record(job, states.values())
            if missing is not State.COMPLETED:
                # The dependent learns from their queues that they are gone.
                states |= dict.fromkeys(set(job.options.depends_on) - states.keys(), missing)
        needed = [list(key) for key in states]
        if job.state is State.BLOCKED:
            unmet = [list(key) for key, state in states.items() if state is not State.COMPLETED]
    return [
        job.id,
        NUMBER.pack(job.created_at),
        heading + job.payload,
        CODES.get(job.state, b"w"),
        False if _is_untouched(job, retries, flag) else _body(job, retries),
        job.finished_at,
        records.pack_history(job.history) if job.history else False,
        False if job.progress is None else records.pack_progress(job.progress),
        [records.pack_line(at, line) for at, line in job.logs] if job.logs else False,
        list(stream.items) if stream is not None and stream.items else False,
        False if job.result is None or job.state is not State.COMPLETED else job.result,
        letter,
        needed,
        unmet,
    ]


def _is_untouched(job: EngineJob, retries: int, flag: bytes) -> bool:
    """Return whether a job waits as it was enqueued."""
    return (
        flag == records.PLAIN
        and job.state is State.WAITING
        and job.run_at == job.created_at
        and not (job.attempts or job.failures or job.stalls or job.started_at or job.worker or retries)
        and not (job.reason or job.error or job.stream)
    )


def _body(job: EngineJob, retries: int) -> list[Any]:
    error = job.error or ("", "", "")
    counts = [job.attempts, job.failures, job.stalls, job.worker, job.started_at, job.run_at]
    body = [*counts, job.reason, *error, 0, retries]
    return body if job.stream is None else [*body, job.stream.count]
