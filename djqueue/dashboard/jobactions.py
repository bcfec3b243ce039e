"""What can be done to jobs, on whichever page: each through the storage, which answers for each job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.admin.models import CHANGE, DELETION
from django.utils.translation import gettext_lazy, gettext_noop, ngettext_lazy

from djqueue.core import states
from djqueue.core.states import State
from djqueue.storage.base import Storage

Answers = list[str]
"""A word for each job: one of `JobAction.done`, or why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAction:
    """Something that the storage does to jobs of one queue.

    permission: the one that it takes, without its model.
    call: (storage, queue, ids) -> a word for each.
    legal: whether a job in this state is worth asking for.
    done: for each word of success, the sentence with the number of jobs.
    log: what the admin's log says; `flag` is its kind of entry.
    """

    permission: str
    call: Callable[[Storage, str, Sequence[str]], Answers]
    legal: Callable[[State], bool]
    done: dict[str, Any]
    log: str
    flag: int = CHANGE


def _can(transition: str) -> Callable[[State], bool]:
    return lambda state: transition in states.actions(state)


CANCEL = JobAction(
    permission="cancel",
    call=lambda storage, queue, ids: [answer.status for answer in storage.jobs.cancel(queue, ids)],
    legal=_can("cancel"),
    done={
        "cancelled": ngettext_lazy("%d job was cancelled.", "%d jobs were cancelled."),
        "requested": ngettext_lazy("%d active job was asked to stop.", "%d active jobs were asked to stop."),
    },
    log=gettext_noop("Cancelled."),
)
PROMOTE = JobAction(
    permission="promote",
    call=lambda storage, queue, ids: [
        "promoted" if promoted else "not_delayed" for promoted in storage.jobs.promote(queue, ids)
    ],
    legal=_can("promote"),
    done={"promoted": ngettext_lazy("%d job is ready to run.", "%d jobs are ready to run.")},
    log=gettext_noop("Promoted."),
)
RETRY = JobAction(
    permission="retry",
    call=lambda storage, queue, ids: storage.jobs.retry(queue, ids),
    legal=_can("retry_dead"),
    done={
        "retried": ngettext_lazy("%d job will be retried.", "%d jobs will be retried."),
        "blocked_again": ngettext_lazy(
            "%d job is blocked until its dependencies complete.",
            "%d jobs are blocked until their dependencies complete.",
        ),
    },
    log=gettext_noop("Retried."),
)
REMOVE = JobAction(
    permission="delete",
    call=lambda storage, queue, ids: [
        "removed" if removed else "not_removed" for removed in storage.jobs.remove(queue, ids)
    ],
    legal=lambda state: state is not State.ACTIVE,
    done={"removed": ngettext_lazy("%d job was deleted.", "%d jobs were deleted.")},
    log="",
    flag=DELETION,
)

REFUSALS = {
    "waiting": gettext_lazy("%d waiting"),
    "delayed": gettext_lazy("%d delayed"),
    "blocked": gettext_lazy("%d blocked"),
    "active": gettext_lazy("%d active"),
    "completed": gettext_lazy("%d completed"),
    "failed": gettext_lazy("%d failed"),
    "cancelled": gettext_lazy("%d cancelled"),
    "not_found": gettext_lazy("%d not found"),
    "changed": gettext_lazy("%d changed since"),
    "arrived": gettext_lazy("%d enqueued later"),
    "not_failed": gettext_lazy("%d no longer failed"),
    "not_delayed": gettext_lazy("%d no longer delayed"),
    "not_removed": gettext_lazy("%d active or not found"),
    "unique_key_taken": gettext_lazy("%d with a unique key in use"),
    "rejected": gettext_lazy("%d with rejected arguments"),
    "dependency_gone": gettext_lazy("%d with a cancelled or removed dependency"),
}
"""Why it was not done, with the number of jobs."""
