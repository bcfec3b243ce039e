"""Actions on jobs, for every page that offers them. The storage responds for each job."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy, ngettext_lazy

from djqueue.core.states import State
from djqueue.operations import actions
from djqueue.storage.base import Storage

from . import rights

Answers = list[str]
"""One answer per job: a key of `JobAction.done`, or of `REFUSALS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAction:
    """An action that the storage performs on jobs of one queue.

    Attributes:
        call: Performs the action on the jobs of a queue, and returns their answers.
        legal: Whether the action may succeed for jobs in a state.
        done: Messages with the number of jobs, by successful answer.
    """

    call: Callable[[Storage, str, Sequence[str]], Answers]
    legal: Callable[[State], bool]
    done: dict[str, Any]


CANCEL = JobAction(
    call=actions.CANCEL.call,
    legal=actions.CANCEL.is_legal,
    done={
        "cancelled": ngettext_lazy("%d job was cancelled.", "%d jobs were cancelled."),
        "requested": ngettext_lazy("%d active job was asked to stop.", "%d active jobs were asked to stop."),
    },
)
PROMOTE = JobAction(
    call=actions.PROMOTE.call,
    legal=actions.PROMOTE.is_legal,
    done={"promoted": ngettext_lazy("%d job is ready to run.", "%d jobs are ready to run.")},
)
RETRY = JobAction(
    call=actions.RETRY.call,
    legal=actions.RETRY.is_legal,
    done={
        "retried": ngettext_lazy("%d job will be retried.", "%d jobs will be retried."),
        "blocked_again": ngettext_lazy(
            "%d job is blocked until its dependencies complete.",
            "%d jobs are blocked until their dependencies complete.",
        ),
    },
)
REMOVE = JobAction(
    call=actions.REMOVE.call,
    legal=actions.REMOVE.is_legal,
    done={"removed": ngettext_lazy("%d job was deleted.", "%d jobs were deleted.")},
)
IMMEDIATE = (
    ("retry", RETRY, rights.RETRY),
    ("promote", PROMOTE, rights.EDIT),
    ("cancel", CANCEL, rights.CANCEL),
)
"""Actions without an undo period: the page of each, and the required permission."""

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
"""Reasons with the number of jobs, by unsuccessful answer."""


def refusals(counts: Mapping[str, int]) -> list[str]:
    """Return why jobs were skipped: a phrase with the number of jobs for each answer."""
    return [str(REFUSALS.get(answer, f"%d {answer}")) % count for answer, count in counts.items()]


def refusal(answer: str) -> str:
    """Return why one job was skipped."""
    return str(REFUSALS.get(answer, answer)).replace("%d ", "")
