"""Versions: whether anything that a page shows has changed, without reading it again."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from hashlib import blake2b
from itertools import count
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from .job import Claims, WorkerInfo

S = TypeVar("S", bound="HasChanges")
P = ParamSpec("P")
T = TypeVar("T")


class ChangeCounter:
    """Counts changes. Any thread may bump it, after the change.

    A reader that reads the number before the state, and finds the same number later, has missed nothing.
    """

    __slots__ = ("_numbers", "value")

    def __init__(self) -> None:
        self._numbers = count(1)
        self.value = 0

    def bump(self) -> None:
        """Record a change."""
        self.value = next(self._numbers)


class HasChanges(Protocol):
    """A part of the engine whose operations change the answers of reads."""

    @property
    def changes(self) -> ChangeCounter:
        """The engine's counter of changes."""


def counted(operation: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Count every call of an operation as a change.

    Claims also promote and expire jobs, which shows in the sizes of queues.
    """
    return _counting(operation, lambda _args, _answer: True)


def counted_if_answered(operation: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Count a call of an operation as a change unless its answer is empty."""
    return _counting(
        operation, lambda _args, answer: bool(answer.jobs if isinstance(answer, Claims) else answer)
    )


def counted_unless_empty(
    position: int,
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Count a call of an operation as a change unless its argument at this position is empty."""

    def decorate(operation: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        return _counting(operation, lambda args, _answer: len(args) <= position or bool(args[position]))

    return decorate


def _counting(
    operation: Callable[Concatenate[S, P], T], has_changed: Callable[[tuple[Any, ...], T], bool]
) -> Callable[Concatenate[S, P], T]:
    @wraps(operation)
    def counting(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            answer = operation(self, *args, **kwargs)
        except BaseException:
            self.changes.bump()  # A part of it may have been done.
            raise
        if has_changed(args, answer):
            self.changes.bump()
        return answer

    return counting


def version_of(parts: Iterable[Any], workers: Sequence[WorkerInfo]) -> str:
    """Return the version of these parts and of the workers, without what only the list of workers shows."""
    digest = blake2b(repr([*parts]).encode(errors="surrogatepass"), digest_size=12)
    for one in sorted(workers, key=lambda info: info.id):
        shown = one._replace(seen_at=0, rss=0, jobs=())
        digest.update(repr(tuple(shown)).encode(errors="surrogatepass"))
    return digest.hexdigest()
