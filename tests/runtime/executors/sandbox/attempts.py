"""Attempts to leave the sandbox, each with the conditions under which the same action works."""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pytest

from djqueue.core.permissions import NOTHING, Permissions
from djqueue.runtime.executors.sandbox.apply import missing_layers
from tests.runtime.executors.sandbox.harness import NOBODY, USERS, Result, inside, run

Place = TypeVar("Place")
REFUSED = frozenset({errno.EPERM, errno.EACCES})
MISSING = missing_layers(NOTHING)
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason="; ".join(str(layer) for layer in MISSING) or "-")


USER = pytest.mark.parametrize("user", USERS)
"""Runs a test as root and as an ordinary user."""
WITHOUT = None
"""In place of permissions: the action works only outside any sandbox."""

__all__ = ["NOBODY", "USER", "WITHOUT", "Attempt", "each", "named", "needs_sandbox"]


@dataclass(frozen=True)
class Attempt(Generic[Place]):
    """An action in a place that a test has made, and who may do it."""

    name: str
    action: Callable[[Place], Any]
    refused_with: Callable[[Place], Permissions]
    works_with: Callable[[Place], Permissions] | None
    """Permissions with which it works; None: it works outside the sandbox only."""
    errors: frozenset[int] = REFUSED
    works_for: tuple[str, ...] = ("root", "nobody", "user")
    """Users for whom it works at all: some things only root can do."""
    check: Callable[[Place], bool] = field(default=lambda _: True)
    """Whether the attempt has left no trace."""

    def is_refused(self, place: Place, user: str) -> None:
        """Fail unless the sandbox refuses the action."""
        result = inside(lambda: self.action(place), self.refused_with(place), user=user)
        assert not result.is_ok, f"the sandbox allowed it: {result}"
        assert result.errno in self.errors, result
        assert self.check(place)

    def works(self, place: Place, user: str) -> None:
        """Fail unless the action works where it is allowed."""
        if user not in self.works_for:
            pytest.skip(f"{user} can't do this without a sandbox either")
        result: Result
        if self.works_with is None:
            result = run(lambda: self.action(place), user=user)
        else:
            result = inside(lambda: self.action(place), self.works_with(place), user=user)
        assert result.is_ok, result


def each(attempts: list[Attempt[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Parametrize a test with attempts, as every user."""
    return lambda test: USER(pytest.mark.parametrize("attempt", attempts, ids=name_of)(test))


def named(attempts: list[Attempt[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test with attempts; all but the first in the sandbox's lane only."""
    return pytest.mark.parametrize("attempt", attempts, ids=name_of)


def name_of(attempt: Attempt[Any]) -> str:
    return attempt.name
