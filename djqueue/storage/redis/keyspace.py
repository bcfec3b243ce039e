"""The queues of one deployment: their keys, policies and listing, and steps shared by operations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from djqueue.core.deadlines import within
from djqueue.core.errors import RestoreInProgressError
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.base import T

from . import outbox, records
from .keys import CommonKeys, QueueKeys, keys_of, limiter_keys_of
from .namecache import NameCache
from .options import RedisOptions
from .records import STATES, pack_text, text
from .roundtrips import RedisCommand, Roundtrips, ScriptCall, Steps
from .scripts import script

PAGE = 1_000
"""Ids or records of one reading call."""
STEP = 200
"""Jobs that one script changes: it takes a few milliseconds and blocks the server."""


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
        """Queues whose recorded group mode matches the configured one."""
        self.cached_names = NameCache()
        self._roundtrips = roundtrips
        self.publish = roundtrips.publish
        """The command that publishes a message."""

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

    def names(self) -> Steps[list[str]]:
        [names] = yield [RedisCommand((b"SMEMBERS", self.common.key("queues")))]
        return sorted(map(text, names))

    def recent_names(self) -> Steps[list[str]]:
        """Return the names of all queues, which a claim may take from the cache."""
        names = self.cached_names.get()
        if names is None:
            changes = self.cached_names.changes
            names = yield from self.names()
            self.cached_names.put(names, changes)
        return names

    def states(self, queue: str, ids: Sequence[str]) -> Steps[list[State | None]]:
        found: list[State | None] = []
        for some in chunks(ids):
            call = ScriptCall(script("states"), self.keys(queue), [*map(pack_text, some)], sequence=False)
            [codes] = yield [call]
            found += [STATES.get(code) for code in codes]
        return found

    def on_jobs(
        self,
        name: str,
        queue: str,
        ids: Sequence[str],
        heading: list[Any],
        their_keys: Callable[[QueueKeys, Sequence[str]], list[bytes]] | None = None,
        step: int = STEP,
    ) -> Steps[list[Any]]:
        keys = self.keys(queue)
        replies: list[Any] = []
        for some in chunks(ids, step):
            arguments = [*heading, *map(pack_text, some)]
            theirs = their_keys(keys, some) if their_keys is not None else ()
            [[left, answers]] = yield [ScriptCall(script(name), keys, arguments, theirs)]
            replies += answers
            if left:
                yield from self.deliver(queue)
        return replies

    def deliver(self, queue: str) -> Steps[None]:
        yield from outbox.deliver(self.keys(queue), self.keys, self.policy, self.list_queues)

    def begin(self, queues: set[str]) -> Steps[None]:
        """List queues that may be new, then check and record their group modes."""
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
        """Check that queues are used in their recorded group mode.

        record: record the mode of existing queues that have none; new: also of those that do not exist.
        """
        names = list(queues)
        calls: list[ScriptCall | RedisCommand] = []
        for queue in names:
            words = [self.policy(queue).group_mode if record else b"", b"1" if new else b"0"]
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
                commands.append(RedisCommand((b"HSET", self.keys(queue).key("meta"), *pairs)))
            agreed.append(queue)
        if commands:
            yield commands
        self.agreed.update(agreed)

    def agree_once(self, queues: Sequence[str]) -> Steps[None]:
        if not self.agreed.issuperset(queues):
            yield from self.agree(set(queues) - self.agreed)


def answer(call: ScriptCall | RedisCommand) -> Steps[Any]:
    """Make one call, and return its reply."""
    [reply] = yield [call]
    return reply


def answers(calls: list[ScriptCall | RedisCommand]) -> Steps[list[Any]]:
    """Make calls in one round trip, and return their replies."""
    replies = yield calls
    return list(replies)


def chunks(values: Sequence[T], size: int = PAGE) -> Iterable[Sequence[T]]:
    return (values[start : start + size] for start in range(0, len(values), size))
