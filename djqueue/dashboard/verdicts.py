"""Why a job is not running, in a sentence, with its evidence to look at."""

from collections.abc import Callable
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue.core.explain import BlockingJob, Dependency, Explanation

SENTENCES = {
    "lease_of_dead_worker": gettext_lazy(
        "The worker that has it, %(worker)s, is gone. When its claim is over, it runs again."
    ),
    "paused": gettext_lazy("Its queue is paused: nothing of it starts until somebody resumes it."),
    "group_paused": gettext_lazy("Its group, %(group)s, is paused."),
    "delayed": gettext_lazy("Its time has not come."),
    "blocked": gettext_lazy("Jobs that it depends on have not ended."),
    "no_worker": gettext_lazy("No live worker serves its queue: start one with manage.py runworkers."),
    "no_handler": gettext_lazy(
        "No live worker of its queue knows the job %(name)s: is its code deployed where they run?"
    ),
    "group_rate": gettext_lazy("Its group, %(group)s, has begun as many jobs as its rate allows."),
    "group_busy": gettext_lazy("As many jobs of its group, %(group)s, run as may run at once: %(limit)s."),
    "behind_rate": gettext_lazy("Its queue has begun as many jobs as its rate allows."),
    "limiter_rate": gettext_lazy(
        "The limiter %(limiter)s, which its queue shares, has let as many begin as its rate allows."
    ),
    "limiter_full": gettext_lazy(
        "The limiter %(limiter)s, which its queue shares, has %(free)s of %(limit)s places left; "
        "it takes %(weight)s."
    ),
    "concurrency_full": gettext_lazy("As many jobs of its queue run as may run at once: %(limit)s."),
    "too_heavy": gettext_lazy(
        "It takes %(weight)s slots of its queue's concurrency, of which %(free)s are free."
    ),
    "workers_busy": gettext_lazy(
        "Every worker that could run it is busy: more slots, or more workers, help."
    ),
    "waiting_turn": gettext_lazy("Nothing holds it back: it is about to start."),
}
"""By the verdict's word; of a job that runs or has ended there is nothing to say."""
MANY = 10_000


class Reason(NamedTuple):
    """Why a job is not running, as its page shows it."""

    word: str
    sentence: str
    until: int | None
    """When that may be over by itself, in UTC milliseconds."""
    before: str
    """How many go first, in words; empty if none do, or nobody knows."""
    holders: tuple[BlockingJob, ...]
    unmet: tuple[Dependency, ...]
    workers: tuple[str, ...]


def reason(found: Explanation | None, sees: Callable[[str], bool]) -> Reason | None:
    """What to tell of an explanation; None if there is nothing to tell.

    sees: whether the viewer is to know of another queue; jobs of others are not named.
    """
    if found is None or found.verdict == "not_pending":
        return None
    known = SENTENCES.get(found.verdict)
    sentence = str(known) % found._asdict() if known is not None else found.verdict
    before = ""
    if found.before:
        sentence = _("Others are before it.") if found.verdict == "waiting_turn" else sentence
        said = ngettext("%(count)d job goes before it", "%(count)d jobs go before it", found.before)
        before = said % {"count": found.before}
        if found.before >= MANY:
            before = _("10,000 jobs or more go before it")
    holders = tuple(one for one in found.holders if not one.queue or sees(one.queue))
    unmet = tuple(one for one in found.unmet if sees(one.queue))
    return Reason(found.verdict, sentence, found.until, before, holders, unmet, found.workers)
