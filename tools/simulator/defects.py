"""Fixes that a simulation can be run without, to show that it finds the defects that they are for."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

DATABASE = "djqueue.storage.journaled"
FIXES: dict[str, tuple[str, Any]] = {
    # A new scheduler takes every active job for one that was interrupted.
    "restart": (f"{DATABASE}.recovery._is_lost", lambda job, left_at, **rest: True),
    # A scheduler whose lease another process has goes on writing.
    "lease": (f"{DATABASE}.lease.SchedulerLease.hold", lambda self: None),
    # A new scheduler does not count the jobs that run in other processes against their groups.
    "groups": ("djqueue.core.groups.Groups.resume", lambda self, job: None),
}
"""What stands for each of them, by name: a target and what is put there."""


def without_fix(name: str) -> AbstractContextManager[Any]:
    """Take a fix away while this lasts. Raises KeyError for a name that is not known."""
    target, replacement = FIXES[name]
    return patch(target, replacement)
