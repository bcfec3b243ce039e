"""What crosses queues: messages of a queue's outbox, delivered at least once and applied once.

A script that has something to say to another queue puts it, numbered, into its own queue's outbox, in the
same step. Whoever sees that an outbox is not empty delivers it: the receiving script applies a message only
if its number is above that of the last one from there, and after that it is taken out. So any number of
processes may deliver at once, and any of them may die between any two steps.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack

from djqueue.core.queue import QueuePolicy

from .keys import QueueKeys
from .records import pack_delay, pack_groups, text
from .roundtrips import RedisCommand, ScriptCall, Steps
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
            [messages] = yield [RedisCommand((b"LRANGE", source.key("outbox"), 0, AT_ONCE - 1))]
            if not messages:
                break
            for target, arguments in _by_target(messages):
                into = keys(target or source.queue)
                [[left, is_unlisted]] = yield [_receive(source, into, policy(into.queue), arguments)]
                if is_unlisted:
                    yield from list_queues({into.queue})
                if left and into.queue != source.queue:
                    waiting.append(into)
            last, _, _ = _unpacked(messages[-1])
            [[left, _]] = yield [ScriptCall(script("sent"), source, [last])]
            if not left:
                break


def _by_target(messages: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Queues, '' for the own one, each with numbers and messages in turn: as few as will do."""
    found: dict[str, list[bytes]] = {}
    is_asking = False
    for number, target, what in map(_unpacked, messages):
        kind = _unpacked(what)[0]
        if kind == b"moved" or (kind == b"job" and is_asking):
            # Who is told of it goes after the job, which must be there by then; and the job after what it
            # has said to others from here.
            yield from found.items()
            found, is_asking = {}, False
        is_asking = is_asking or kind in (b"await", b"hold")
        found.setdefault(text(target), []).extend((number, what))
    yield from found.items()


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
            theirs += keys_of_given(target, [text(what)])
        elif kind == b"await":
            theirs += (target.result(text(what)), target.moved(text(what)))
        elif kind == b"fan":
            theirs.append(target.result(text(what)))
        elif kind in (b"unbind", b"hold"):
            theirs += [target.result(text(one)) for one in what]
    return ScriptCall(script("receive"), target, [*arguments, *messages], theirs)


def keys_of_given(queue: QueueKeys, ids: Iterable[str]) -> list[bytes]:
    """What of each job is in a key of its own, in a queue that it goes to or comes from."""
    return [
        key
        for one in ids
        for key in (queue.result(one), queue.log_lines(one), queue.items(one), queue.moved(one))
    ]


def _unpacked(packed: bytes) -> list[bytes]:
    found: list[bytes] = msgpack.unpackb(packed, raw=True)
    return found
