"""The queues of one deployment: their keys, policies and names, and steps that operations share."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

import msgpack

from djqueue.core.deadlines import within
from djqueue.core.errors import RestoreInProgressError, StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.core.threads import after_fork
from djqueue.storage.base import T
from djqueue.storage.export import PAGE_BYTES

from . import records
from .keys import MOVING_KEYS, RESULT, CommonKeys, QueueKeys, keys_of, limiter_keys_of
from .options import RedisOptions
from .records import STATE_CODES, STATES, pack_delay, pack_groups, pack_text, text
from .roundtrips import RedisCommand, Roundtrips, ScriptCall, Steps
from .scripts import script

NAMES_TTL = 5.0
"""Seconds after which the names are listed again, in case that a message was lost."""
LEFT_TO_SWEEPS = 5.0
"""Seconds for which only sweeps deliver a queue's messages after that failed: others would wait for the
server of another queue again and again."""
MESSAGES = 100
"""Messages of an outbox that are read at a time."""
PAGE = 1_000
"""Ids or records of one reading call."""
REMEMBERED = 10_000
"""Queues about which a process remembers something that it can find out again."""
STEP = 200
"""Jobs that one script changes: it takes a few milliseconds and blocks the server."""
logger = Log("djqueue.redis")


class Keyspace:
    """The queues of a storage.

    Steps are generators: they yield lists of calls, each sent in one round trip, and receive the replies.
    """

    def __init__(
        self,
        options: RedisOptions,
        roundtrips: Roundtrips,
        policies: Mapping[str, QueuePolicy],
        default_policy: QueuePolicy,
    ) -> None:
        self.options = options
        self.common = CommonKeys(options.prefix)
        self.policies = policies
        self.default_policy = default_policy
        self.known: set[str] = set()
        """Queues that this process has listed."""
        self.agreed: set[str] = set()
        """Queues whose recorded key mode matches the configured one."""
        self.cached_names = NameCache()
        self._undelivered: dict[str, float] = {}
        """Monotonic seconds until which the messages of a queue are left to sweeps, after a failure."""
        self._roundtrips = roundtrips
        self.publish = roundtrips.publish
        """The command that publishes a message."""
        self.has_several_servers = roundtrips.has_several_servers
        """True if one of the queues' servers may be away while others are not."""

    def keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue."""
        return keys_of(self.options.prefix, queue)

    def limiter(self, name: str) -> QueueKeys:
        """Return the keys of a shared limiter."""
        return limiter_keys_of(self.options.prefix, name)

    def policy(self, queue: str) -> QueuePolicy:
        """Return the policy of a queue."""
        return self.policies.get(queue, self.default_policy)

    @property
    def every_policy(self) -> tuple[QueuePolicy, ...]:
        """All policies that any queue may have."""
        return (*self.policies.values(), self.default_policy)

    def run(self, steps: Steps[T]) -> T:
        """Run the steps of an operation."""
        return self._roundtrips.run(steps)

    async def arun(self, steps: Steps[T]) -> T:
        """Async version of `run`."""
        return await self._roundtrips.arun(steps)

    def run_in_time(self, steps: Steps[T]) -> T:
        """Run an operation whose round trips may take TIMEOUT in total."""
        with within(self.options.timeout):
            return self.run(steps)

    def ask(self, call: ScriptCall | RedisCommand) -> Any:
        """Make one call, and return its reply."""
        return self.run(answer(call))

    def names(self) -> Steps[list[str]]:
        [names] = yield [RedisCommand((b"SMEMBERS", self.common.key("queues")))]
        self.cached_names.last = sorted(map(text, names))
        return self.cached_names.last

    def recent_names(self) -> Steps[list[str]]:
        """Return the names of all queues, which a claim may take from the cache."""
        names = self.cached_names.get()
        if names is None:
            changes = self.cached_names.changes
            names = yield from self.last_names()
            self.cached_names.put(names, changes)
        return names

    def last_names(self) -> Steps[list[str]]:
        """Return the names of all queues; if only their server is away, the last known names."""
        last = self.cached_names.last if self.has_several_servers else []
        if last and self._roundtrips.is_away(self.common.prefix):
            return last  # heartbeats ask that server again and again
        try:
            return (yield from self.names())
        except StorageUnavailableError:
            if not last:
                raise
            return last

    def states(self, queue: str, ids: Sequence[str]) -> Steps[list[State | None]]:
        states: list[State | None] = []
        for chunk in chunks(ids):
            call = ScriptCall(script("states"), self.keys(queue), [*map(pack_text, chunk)], sequence=False)
            [codes] = yield [call]
            states += [STATES.get(code) for code in codes]
        return states

    def on_jobs(
        self,
        name: str,
        queue: str,
        ids: Sequence[str],
        heading: list[Any],
        kinds: str = "",
        step: int = STEP,
    ) -> Steps[list[Any]]:
        """Run a script on jobs, in bounded steps, and return its reply for each.

        kinds: of the keys that each job has of its own and the script uses.
        """
        keys = self.keys(queue)
        replies: list[Any] = []
        for chunk in chunks(ids, step):
            arguments = [*heading, *map(pack_text, chunk)]
            call = ScriptCall(script(name), keys, arguments, keys.of_jobs(chunk, kinds))
            [[left, answers]] = yield [call]
            replies += answers
            if left:
                yield from self.deliver_soon(queue)
        return replies

    def deliver_soon(self, queue: str) -> Steps[None]:
        """Deliver the messages of a queue, after the call that wrote them.

        That call has succeeded. If the server of another queue is away, or the caller's time is over, the
        next sweep delivers what is left.
        """
        if monotonic() < self._undelivered.get(queue, 0.0):
            return
        try:
            yield from self.deliver(queue)
        except StorageUnavailableError as error:
            self._undelivered[queue] = monotonic() + LEFT_TO_SWEEPS
            logger.debug("Messages of queue %r are left to the next sweep: %s", queue, error)
        else:
            self._undelivered.pop(queue, None)

    def deliver(self, queue: str) -> Steps[None]:
        """Deliver the messages of a queue to others, and those of queues that reply.

        A message is delivered at least once, and applied once. A script writes it, with a number, to the
        outbox of its own queue, in the same step as the change. Any process that sees it delivers it. The
        receiving script applies only messages with higher numbers than the last one from that queue; then
        they are removed from the outbox. Processes may deliver concurrently, and may die between two steps.
        """
        waiting = [self.keys(queue)]
        while waiting:
            source = waiting.pop()
            while True:
                [messages] = yield [RedisCommand((b"LRANGE", source.key("outbox"), 0, MESSAGES - 1))]
                if not messages:
                    break
                for target, arguments in _by_target(messages):
                    into = self.keys(target or source.queue)
                    call = _receive(source, into, self.policy(into.queue), arguments)
                    [[left, is_unlisted]] = yield [call]
                    if is_unlisted:
                        yield from self.list_queues({into.queue})
                    if left and into.queue != source.queue:
                        waiting.append(into)
                last, _, _ = _unpacked(messages[-1])
                [[left, _]] = yield [ScriptCall(script("sent"), source, [last])]
                if not left:
                    break

    def begin(self, queues: set[str]) -> Steps[None]:
        """List queues that may be new, then check and record their key modes."""
        yield from self.check_open()
        yield from self.list_queues(queues)
        self.known -= queues
        yield from self.agree(queues, new=True)
        self.known |= queues

    def check_open(self) -> Steps[None]:
        """Raise RestoreInProgressError while the queues are closed for a restore."""
        [is_closed] = yield [RedisCommand((b"EXISTS", self.common.key("restoring")))]
        if is_closed:
            raise RestoreInProgressError()

    def list_queues(self, queues: set[str]) -> Steps[None]:
        """List queues, and notify the workers that serve all queues."""
        yield self.listing(queues)
        self.cached_names.forget()
        forget_if_many(self.known)
        self.known |= queues

    def listing(self, queues: set[str]) -> list[ScriptCall | RedisCommand]:
        return [
            RedisCommand((b"SADD", self.common.key("queues"), *map(pack_text, queues))),
            *(
                RedisCommand((self.publish, self.common.new_queues.encode(), pack_text(queue)))
                for queue in queues
            ),
        ]

    def agree(self, queues: Iterable[str], *, record: bool = True, new: bool = False) -> Steps[None]:
        """Check that queues are used in their recorded key mode.

        record: record the mode of existing queues that have none; new: also of those that do not exist.
        """
        names = list(queues)
        calls: list[ScriptCall | RedisCommand] = []
        for queue in names:
            words = [self.policy(queue).key_mode if record else b"", b"1" if new else b"0"]
            calls.append(ScriptCall(script("check_group_mode"), self.keys(queue), words, sequence=False))
        answers = (yield calls) if calls else []
        commands: list[ScriptCall | RedisCommand] = []
        agreed: list[str] = []
        for queue, recorded in zip(names, answers, strict=True):
            if not recorded:
                continue
            policy = self.policy(queue)
            policy.check_mode(queue, text(recorded))
            bounds = records.pack_bounds(policy.retention, policy.dead_letters)
            if record and any(bounds):
                # Sweeps record the bounds, too; here they apply from the first job on.
                pairs = [
                    part for pair in zip(records.BOUNDS, bounds, strict=True) if pair[1] for part in pair
                ]
                pairs += (b"plain", b"")  # see `finish_and_claim_plain.lua`
                commands.append(RedisCommand((b"HSET", self.keys(queue).key("meta"), *pairs)))
            agreed.append(queue)
        if commands:
            yield commands
        forget_if_many(self.agreed)
        self.agreed.update(agreed)

    def agree_once(self, queues: Sequence[str]) -> Steps[None]:
        if not self.agreed.issuperset(queues):
            yield from self.agree(set(queues) - self.agreed)


class NameCache:
    """The names of all queues, kept while messages announce new ones: each claim would list them again."""

    def __init__(self) -> None:
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._names: list[str] | None = None
        self.last: list[str] = []
        """The names that were listed last."""
        self._until = 0.0
        self._followers = 0
        self.changes = 0
        """Number of times that the names may have changed."""

    def follow(self) -> None:
        """Note that messages about new queues arrive from now on."""
        with self._lock:
            self._followers += 1
            self._drop()

    def unfollow(self) -> None:
        """Note that a subscriber no longer gets these messages."""
        with self._lock:
            self._followers -= 1

    def forget(self) -> None:
        """Drop the names: there is a new queue, or a message about one may have been missed."""
        with self._lock:
            self._drop()

    def get(self) -> list[str] | None:
        """Return the names; None if they have to be listed."""
        if self._followers <= 0 or monotonic() >= self._until:
            return None
        return self._names

    def put(self, names: list[str], changes: int) -> None:
        """Remember names.

        changes: `changes` before they were listed. If there were more since, a new queue may be missing.
        """
        with self._lock:
            if changes == self.changes:
                self._names, self._until = names, monotonic() + NAMES_TTL

    def _drop(self) -> None:
        self.changes += 1
        self._names = None


def forget_if_many(*remembered: set[Any] | dict[Any, Any]) -> None:
    """Empty what a process remembers about queues if there are many: names may come and go for ever."""
    for one in remembered:
        if len(one) >= REMEMBERED:
            one.clear()


def answer(call: ScriptCall | RedisCommand) -> Steps[Any]:
    """Make one call, and return its reply."""
    [reply] = yield [call]
    return reply


def answers(calls: list[ScriptCall | RedisCommand]) -> Steps[list[Any]]:
    """Make calls in one round trip, and return their replies."""
    replies = yield calls
    return list(replies)


def in_calls(name: str, keys: QueueKeys, ids: Sequence[str], kinds: str = "") -> Steps[list[Any]]:
    """Return what a script reads of jobs, in calls of about `PAGE_BYTES`.

    name: a script that gets the number of bytes, and returns a list for the first of the jobs.
    kinds: of the keys of each job, which the script reads; by default it gets the ids.
    """
    found: list[Any] = []
    limit = len(ids)
    while len(found) < len(ids):
        chunk = ids[len(found) : len(found) + limit]
        arguments = [PAGE_BYTES, *(() if kinds else map(pack_text, chunk))]
        call = ScriptCall(script(name), keys, arguments, keys.of_jobs(chunk, kinds), sequence=False)
        [replies] = yield [call]
        found += replies
        limit = 2 * len(replies)
    return found


def scan(
    keys: QueueKeys, states: frozenset[State], before: int | None = None
) -> Steps[list[tuple[int, str]]]:
    """Return enqueue time and id of the jobs of a queue in some states, scanned a part at a time.

    before: only jobs that were enqueued, or have ended, before a time.
    """
    created_at: dict[str, int] = {}
    cursor = b"0"
    while True:
        cursor, jobs = yield from scan_part(keys, states, before, cursor)
        created_at.update((job_id, created) for created, job_id in jobs)
        if cursor == b"0":
            return [(created, job_id) for job_id, created in created_at.items()]


def scan_part(
    keys: QueueKeys, states: frozenset[State], before: int | None, cursor: bytes, size: int = PAGE
) -> Steps[tuple[bytes, list[tuple[int, str]]]]:
    """Return the next cursor (`0` at the end) and some jobs, some of them perhaps again."""
    codes = b"".join(STATE_CODES[state] for state in states)
    arguments = [cursor, size, PAGE_BYTES, codes, before if before is not None else b""]
    [[cursor, entries]] = yield [ScriptCall(script("scan"), keys, arguments, sequence=False)]
    return cursor, [(int(entries[at]), text(entries[at + 1])) for at in range(0, len(entries), 2)]


def chunks(values: Sequence[T], size: int = PAGE) -> Iterable[Sequence[T]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _by_target(messages: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Group numbers and messages by target queue ('' for the queue itself), as far as order allows."""
    by_target: dict[str, list[bytes]] = {}
    is_asking = False
    for number, target, what in map(_unpacked, messages):
        kind = _unpacked(what)[0]
        if kind == b"moved" or (kind == b"job" and is_asking):
            # A job arrives after the messages that it sent from here, and before those that announce it.
            yield from by_target.items()
            by_target, is_asking = {}, False
        is_asking = is_asking or kind in (b"await", b"hold")
        by_target.setdefault(text(target), []).extend((number, what))
    yield from by_target.items()


def _receive(source: QueueKeys, target: QueueKeys, policy: QueuePolicy, messages: list[bytes]) -> ScriptCall:
    dead = policy.dead_letters
    arguments = [
        source.queue,
        target.queue,
        pack_groups(policy),
        dead.ttl,
        dead.auto_retries,
        pack_delay(dead.auto_retry_delay),
    ]
    theirs: list[bytes] = []
    what: Any
    for kind, what, *_ in map(_unpacked, messages[1::2]):
        if kind == b"job":
            theirs += target.of_jobs([text(what)], MOVING_KEYS)
        elif kind == b"await":
            theirs += (target.result(text(what)), target.moved(text(what)))
        elif kind == b"fan":
            theirs.append(target.result(text(what)))
        elif kind in (b"unbind", b"hold"):
            theirs += target.of_jobs(map(text, what), RESULT)
    return ScriptCall(script("receive"), target, [*arguments, *messages], theirs)


def _unpacked(packed: bytes) -> list[bytes]:
    found: list[bytes] = msgpack.unpackb(packed, raw=True)
    return found
