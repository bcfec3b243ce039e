"""Calls of scripts and commands, as the steps of operations yield them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from .keys import QueueKeys
from .scripts import Script

READS = frozenset({b"GET", b"HGET", b"HMGET"})
"""Read commands that are sent together; the key is their first argument."""
NAMED_IDS = 20
"""Maximum number of job ids that an error names."""


class ScriptCall(NamedTuple):
    """A call of a script. A script without a request sequence only reads, or may be repeated."""

    script: Script
    queue: QueueKeys
    arguments: Sequence[Any]
    """The script's own arguments."""
    keys: Sequence[bytes] = ()
    """Keys after those that the script declares."""
    sequence: bool = True
    replicas: int = 0
    """Number of replicas that must confirm its changes."""
    ids: Sequence[str] = ()
    """Ids of the enqueued jobs, if replicas must confirm them: the ids may be generated."""


class RedisCommand(NamedTuple):
    """A Redis command that only reads, or may be repeated."""

    words: tuple[Any, ...]


def only_reads(call: ScriptCall | RedisCommand) -> bool:
    return not call.sequence if isinstance(call, ScriptCall) else call.words[0] in READS


def is_replicated(call: ScriptCall | RedisCommand) -> TypeGuard[ScriptCall]:
    return isinstance(call, ScriptCall) and call.replicas > 0


def named(ids: Sequence[str]) -> str:
    """Return the ids for the end of a message; only the first ones if there are many."""
    if not ids:
        return ""
    more = f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else ""
    return f" Ids: {', '.join(ids[:NAMED_IDS])}{more}."


def has_sequence(call: ScriptCall | RedisCommand) -> bool:
    return isinstance(call, ScriptCall) and call.sequence


def whole(call: ScriptCall | RedisCommand, words: list[Any]) -> list[Any]:
    """Return the call with the script's text: the server has restarted and does not know it."""
    assert isinstance(call, ScriptCall)
    return [b"EVAL", call.script.text, *words[2:]]
