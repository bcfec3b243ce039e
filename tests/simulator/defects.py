"""Fixes that a simulation can be run without, to show that it finds the defects that they are for."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

DATABASE = "djqueue.storage.database"
FIXES: dict[str, tuple[str, Any]] = {
    # A new scheduler takes every active job for one that was interrupted.
    "restart": (f"{DATABASE}.recovery._is_lost", lambda job, left_at, **rest: True),
    # A scheduler whose lease another process has goes on writing.
    "lease": (f"{DATABASE}.lease.SchedulerLease.hold", lambda self: None),
    # Any token ends the present claim of a job.
    "token": ("djqueue.core.engine.Engine._finish_one", None),
}
"""What stands for each of them, by name: a target and what is put there."""


def without_fix(name: str) -> AbstractContextManager[Any]:
    """Take a fix away while this lasts. Raises KeyError for a name that is not known."""
    if name == "token":
        return _without_tokens()
    target, replacement = FIXES[name]
    return patch(target, replacement)


def _without_tokens() -> AbstractContextManager[Any]:
    from djqueue.core.engine import Engine

    finish_one = Engine._finish_one

    def finish_any(self: Any, outcome: Any, now: int, changes: Any) -> bool:
        for place in self.processing:
            for token, job in place.active.items():
                if (job.queue, job.id) == (outcome.queue, outcome.id):
                    return finish_one(self, outcome._replace(token=token), now, changes)
        return finish_one(self, outcome, now, changes)

    return patch.object(Engine, "_finish_one", finish_any)
