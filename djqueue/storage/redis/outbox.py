"""What crosses queues: messages of a queue's outbox, delivered at least once and applied once.

A script that has something to say to another queue puts it, numbered, into its own queue's outbox, in the
same step. Whoever sees that an outbox is not empty delivers it: the receiving script applies a message only
if its number is above that of the last one from there, and after that it is taken out. So any number of
processes may deliver at once, and any of them may die between any two steps.
"""

from collections.abc import Callable

import msgpack

from djqueue.core.queue import QueuePolicy

from .keys import QueueKeys
from .records import text
from .roundtrips import Call, Command, Steps
from .scripts import script

AT_ONCE = 100
"""Messages that are read at a time."""


def deliver(
    first: QueueKeys,
    keys: Callable[[str], QueueKeys],
    policy: Callable[[str], QueuePolicy],
    list_queues: Callable[[set[str]], Steps[None]],
) -> Steps[None]:
    """Deliver a queue's outbox, and those of the queues that answer."""
    waiting = [first]
    while waiting:
        source = waiting.pop()
        while True:
            [messages] = yield [Command((b"LRANGE", source.key("outbox"), 0, AT_ONCE - 1))]
            if not messages:
                break
            numbers = []
            by_target: dict[str, list[bytes]] = {}
            for message in messages:
                number, target, what = msgpack.unpackb(message, raw=True)
                numbers.append(number)
                by_target.setdefault(text(target) or source.queue, []).extend((number, what))
            for target, arguments in by_target.items():
                [[left, is_unlisted]] = yield [_receive(source, keys(target), policy(target), arguments)]
                if is_unlisted:
                    yield from list_queues({target})
                if left and target != source.queue:
                    waiting.append(keys(target))
            yield [Call(script("sent"), source, [numbers[-1]])]


def _receive(source: QueueKeys, target: QueueKeys, policy: QueuePolicy, messages: list[bytes]) -> Call:
    dead = policy.dead_letters
    arguments = [
        source.queue,
        target.queue,
        policy.group_concurrency,
        dead.ttl,
        dead.auto_retries,
        dead.auto_retry_delay,
    ]
    given = [text(what[1]) for what in map(_unpacked, messages[1::2]) if what[0] == b"job"]
    theirs = [key for job_id in given for key in (target.result(job_id), target.log_lines(job_id))]
    return Call(script("receive"), target, [*arguments, *messages], theirs)


def _unpacked(what: bytes) -> list[bytes]:
    found: list[bytes] = msgpack.unpackb(what, raw=True)
    return found
