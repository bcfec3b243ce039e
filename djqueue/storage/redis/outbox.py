"""Messages between queues, delivered at least once and applied once.

A script writes a message to another queue, with a number, to the outbox of its own queue, in the same step as
the change. Any process that sees a message delivers it. The receiving script applies only messages with
higher numbers than the last one from that queue; then they are removed from the outbox. Processes may deliver
concurrently, and may die between any two steps.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack

from djqueue.core.policies import QueuePolicy

from .keys import QueueKeys
from .records import pack_delay, pack_groups, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

AT_ONCE = 100
"""Messages read at a time."""


def deliver(
    first: QueueKeys,
    keys: Callable[[str], QueueKeys],
    policy: Callable[[str], QueuePolicy],
    list_queues: Callable[[set[str]], Steps[None]],
) -> Steps[None]:
    """Deliver the messages of a queue, and those of queues that reply."""
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
    """Group numbers and messages by target queue ('' for the queue itself), as far as order allows."""
    found: dict[str, list[bytes]] = {}
    is_asking = False
    for number, target, what in map(_unpacked, messages):
        kind = _unpacked(what)[0]
        if kind == b"moved" or (kind == b"job" and is_asking):
            # A job arrives after the messages that it sent from here, and before those that announce it.
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
    """Return the keys that each job has of its own, in the queue that it moves to or from."""
    return [
        key
        for one in ids
        for key in (queue.result(one), queue.log_lines(one), queue.items(one), queue.moved(one))
    ]


def _unpacked(packed: bytes) -> list[bytes]:
    found: list[bytes] = msgpack.unpackb(packed, raw=True)
    return found
