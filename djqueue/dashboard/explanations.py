"""Explains why a job is not running: a sentence and its evidence."""

from collections.abc import Callable
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue.core.explain import BlockingJob, Dependency, Explanation

SENTENCES = {
    "lease_of_dead_worker": gettext_lazy(
        "Worker %(worker)s has stopped responding. The job is retried when the lease expires."
    ),
    "paused": gettext_lazy("The queue is paused. No job starts until the queue is resumed."),
    "group_paused": gettext_lazy("Group %(group)s is paused."),
    "delayed": gettext_lazy("The job is scheduled for later."),
    "blocked": gettext_lazy("The job waits for unfinished dependencies."),
    "no_worker": gettext_lazy("No live worker serves the queue. Start one with manage.py runworkers."),
    "no_handler": gettext_lazy(
        "No live worker of the queue has a handler for %(name)s. Deploy the code that defines the job."
    ),
    "group_rate": gettext_lazy("Group %(group)s has reached its rate limit."),
    "group_busy": gettext_lazy("Group %(group)s has reached its concurrency limit of %(limit)s."),
    "behind_rate": gettext_lazy("The queue has reached its rate limit."),
    "limiter_rate": gettext_lazy("The shared limiter %(limiter)s has reached its rate limit."),
    "limiter_full": gettext_lazy(
        "The shared limiter %(limiter)s has %(free)s of %(limit)s slots free; the job needs %(weight)s."
    ),
    "concurrency_full": gettext_lazy("The queue has reached its concurrency limit of %(limit)s."),
    "too_heavy": gettext_lazy("The job needs %(weight)s slots; the queue has %(free)s free."),
    "workers_busy": gettext_lazy("Every worker that can run the job is busy. Add slots or workers."),
    "waiting_turn": gettext_lazy("The job is about to start."),
}
"""Sentences by verdict. Active and finished jobs have none."""
MANY = 10_000


class Reason(NamedTuple):
    """The explanation on a job's page."""

    word: str
    sentence: str
    until: int | None
    """Time at which the reason is expected to clear, in UTC milliseconds."""
    before: str
    """Number of jobs ahead, as text; empty if there are none or the number is unknown."""
    holders: tuple[BlockingJob, ...]
    unmet: tuple[Dependency, ...]
    workers: tuple[str, ...]


def reason(found: Explanation | None, sees: Callable[[str], bool]) -> Reason | None:
    """Return an explanation as text; None if there is nothing to explain.

    Args:
        sees: Whether the user can see a queue; jobs of other queues are not named.
    """
    if found is None or found.verdict == "not_pending":
        return None
    known = SENTENCES.get(found.verdict)
    sentence = str(known) % found._asdict() if known is not None else found.verdict
    before = ""
    if found.before:
        sentence = _("Other jobs are ahead.") if found.verdict == "waiting_turn" else sentence
        said = ngettext("%(count)d job is ahead", "%(count)d jobs are ahead", found.before)
        before = said % {"count": found.before}
        if found.before >= MANY:
            before = _("10,000 or more jobs are ahead")
    holders = tuple(one for one in found.holders if not one.queue or sees(one.queue))
    unmet = tuple(one for one in found.unmet if sees(one.queue))
    return Reason(found.verdict, sentence, found.until, before, holders, unmet, found.workers)
