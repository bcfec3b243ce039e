"""True if anything that a page shows has changed, without looking at it."""

from collections.abc import Iterable, Sequence
from functools import wraps
from hashlib import blake2b
from itertools import count
from typing import Any, TypeVar

from .job import Claims, WorkerInfo

C = TypeVar("C", bound=type)


class ChangeCounter:
    """Counts changes. Any thread may bump it, after the change.

    Who reads first the number and then the state, and later finds the same number, has missed nothing.
    """

    __slots__ = ("_numbers", "value")

    def __init__(self) -> None:
        self._numbers = count(1)
        self.value = 0

    def bump(self) -> None:
        """Something has changed."""
        self.value = next(self._numbers)


ALWAYS, IF_ANSWERED = "always", "if answered"
CHANGES: dict[str, str | int] = {
    "enqueue": 0,
    "claim": IF_ANSWERED,
    "finish": 0,
    "report": 0,
    "emit": 0,
    "cancel": 1,
    "promote": 1,
    "reschedule": 1,
    "update": 1,
    "replace_payload": ALWAYS,
    "retry": 1,
    "remove": 1,
    "move": 1,
    "configure": ALWAYS,
    "set_limits": ALWAYS,
    "set_group_limit": ALWAYS,
    "pause_group": ALWAYS,
    "resume_group": ALWAYS,
    "pause": ALWAYS,
    "resume": ALWAYS,
    "clean": IF_ANSWERED,
    "clean_in_parts": ALWAYS,
    "obliterate": ALWAYS,
    "set_limiter": ALWAYS,
    "note_kept": ALWAYS,
    "restore": ALWAYS,
    "accept": ALWAYS,
    "hold": ALWAYS,
    "put_off": IF_ANSWERED,
    "forget_belongings": IF_ANSWERED,
    "evict": 0,
}
"""Operations of the engine that change what reads answer; each with the position of the argument that is
empty, or with whether the answer is, if a call has changed nothing. What a claim does beside claiming shows
in the sizes of queues.
"""
NOT_COUNTED = frozenset(
    {"renew", "pass_turns_on", "take_back", "news", "announce", "settle", "bind", "follow"}
)
"""Operations whose changes no page shows, or that are a part of another operation."""


def counted(cls: C) -> C:
    """Have the engine's `changes` count what its operations change."""
    for name, when in CHANGES.items():
        setattr(cls, name, _counting(getattr(cls, name), when))
    return cls


def _counting(operation: Any, when: str | int) -> Any:
    @wraps(operation)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = operation(self, *args, **kwargs)
        except BaseException:
            self.changes.bump()  # a part of it may have been done
            raise
        if when == IF_ANSWERED:
            has_changed = bool(answer.jobs if isinstance(answer, Claims) else answer)
        else:
            has_changed = not isinstance(when, int) or len(args) <= when or bool(args[when])
        if has_changed:
            self.changes.bump()
        return answer

    return counting


def version_of(parts: Iterable[Any], workers: Sequence[WorkerInfo]) -> str:
    """Return the version of these parts and of the workers, as pages except the list of workers show it."""
    digest = blake2b(repr([*parts]).encode(errors="surrogatepass"), digest_size=12)
    for one in sorted(workers, key=lambda info: info.id):
        shown = one._replace(seen_at=0, rss=0, jobs=())
        digest.update(repr(tuple(shown)).encode(errors="surrogatepass"))
    return digest.hexdigest()
