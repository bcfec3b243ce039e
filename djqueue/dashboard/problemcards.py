"""Problems as cards: what is wrong, since when, which objects have the problem, and what can be done.

`djqueue.operations.problems` finds them. This module leaves out what a user may not see, and puts the rest
into words with links and buttons.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from djqueue.core.overview import Evidence, Finding
from djqueue.core.states import State
from djqueue.dashboard import boards, rendering, rights
from djqueue.dashboard.site import DashboardSite
from djqueue.models import BulkKind
from djqueue.operations.healthchecks import HealthReport
from djqueue.operations.problems import Situation
from djqueue.operations.problems import problems as find_problems

SENTENCES = {
    "health.workers": (
        gettext_lazy("Queue %(queue)s has no worker."),
        ngettext_lazy(
            "%(count)d queue has no worker.",
            "%(count)d queues have no worker.",
            "count",
        ),
    ),
    "health.handlers": (
        gettext_lazy("No worker knows the job %(name)s."),
        ngettext_lazy(
            "No worker knows %(count)d kind of jobs.",
            "No worker knows %(count)d kinds of jobs.",
            "count",
        ),
    ),
    "health.silent": (
        gettext_lazy("Worker %(worker)s has stopped sending heartbeats."),
        ngettext_lazy(
            "%(count)d worker has stopped sending heartbeats.",
            "%(count)d workers have stopped sending heartbeats.",
            "count",
        ),
    ),
    "health.claims": (
        gettext_lazy("Workers with free slots start no jobs of %(queue)s."),
        ngettext_lazy(
            "Workers with free slots start no jobs of %(count)d queue.",
            "Workers with free slots start no jobs of %(count)d queues.",
            "count",
        ),
    ),
    "health.leases": (
        gettext_lazy("Jobs of lost workers are not taken back in %(queue)s."),
        ngettext_lazy(
            "Jobs of lost workers are not taken back in %(count)d queue.",
            "Jobs of lost workers are not taken back in %(count)d queues.",
            "count",
        ),
    ),
    "problem.failing": (
        gettext_lazy("%(share)s of the attempts of %(queue)s fail."),
        ngettext_lazy(
            "Attempts fail in %(count)d queue.",
            "Attempts fail in %(count)d queues.",
            "count",
        ),
    ),
    "problem.new_errors": (
        gettext_lazy("New since the deploy: %(error)s"),
        ngettext_lazy(
            "%(count)d error is new since the deploy.",
            "%(count)d errors are new since the deploy.",
            "count",
        ),
    ),
    "problem.late": (
        gettext_lazy("Jobs of %(queue)s start later than their target."),
        ngettext_lazy(
            "Jobs of %(count)d queue start later than their target.",
            "Jobs of %(count)d queues start later than their targets.",
            "count",
        ),
    ),
    "problem.stuck": (
        gettext_lazy("Job %(name)s runs for much longer than others."),
        ngettext_lazy(
            "%(count)d job runs for much longer than others.",
            "%(count)d jobs run for much longer than others.",
            "count",
        ),
    ),
    "problem.lost": (
        gettext_lazy("Attempts of %(queue)s were lost with their worker."),
        ngettext_lazy(
            "Attempts of %(count)d queue were lost with their worker.",
            "Attempts of %(count)d queues were lost with their worker.",
            "count",
        ),
    ),
    "problem.overdue": (
        gettext_lazy("Schedule %(name)s is overdue."),
        ngettext_lazy(
            "%(count)d schedule is overdue.",
            "%(count)d schedules are overdue.",
            "count",
        ),
    ),
    "problem.paused": (
        gettext_lazy("Queue %(queue)s is paused and has jobs."),
        ngettext_lazy(
            "%(count)d paused queue has jobs.",
            "%(count)d paused queues have jobs.",
            "count",
        ),
    ),
    "problem.held": (
        gettext_lazy("Jobs named %(name)s are held in queue %(queue)s."),
        ngettext_lazy(
            "%(count)d job type with jobs is held.",
            "%(count)d job types with jobs are held.",
            "count",
        ),
    ),
    "problem.versions": (
        gettext_lazy("Worker %(worker)s runs an older version of the project."),
        ngettext_lazy(
            "%(count)d worker runs an older version of the project.",
            "%(count)d workers run an older version of the project.",
            "count",
        ),
    ),
}
"""Sentences by the id of a finding: about one object, and about several."""
SHOWN = 5
"""Maximum objects of a problem that are listed."""
HINTS = {
    "health.workers": gettext_lazy("Start a worker with manage.py runworkers, or resume a quiet one."),
    "health.handlers": gettext_lazy(
        "Deploy the code that defines the job and restart manage.py runworkers, or cancel the jobs."
    ),
    "health.silent": gettext_lazy("See whether the process was killed, hangs or cannot reach the storage."),
    "health.claims": gettext_lazy("Look at the log of a worker and at its stacks, then restart the workers."),
    "health.leases": gettext_lazy("Start workers with manage.py runworkers: they take such jobs back."),
    "problem.failing": gettext_lazy("Look at the errors, and pause the queue if its jobs do damage."),
    "problem.new_errors": gettext_lazy("Fix the code or go back to the last version, then retry the jobs."),
    "problem.late": gettext_lazy("Add workers or slots, or raise the limit that holds the jobs back."),
    "problem.stuck": gettext_lazy("Dump the stacks of the worker, and cancel the job if it hangs."),
    "problem.lost": gettext_lazy("The jobs run again. The log says why the process ended."),
    "problem.overdue": gettext_lazy("Start workers with manage.py runworkers: they run the schedules."),
    "problem.versions": gettext_lazy("Unless a deploy is in progress, restart the workers that it left out."),
}
"""Remedies by the id of a finding."""


class ProblemAction(NamedTuple):
    """A button of a problem."""

    label: str
    url: str
    is_post: bool = False


class ProblemItem(NamedTuple):
    """An object that has a problem."""

    label: str
    url: str
    note: str = ""
    since: int | None = None
    """Start of the problem, in UTC milliseconds; None if unknown."""
    actions: tuple[ProblemAction, ...] = ()


class ProblemCard(NamedTuple):
    """A problem as a page shows it."""

    id: str
    is_bad: bool
    """Whether it is a problem; otherwise a warning."""
    sentence: str
    hint: str
    since: int | None
    items: tuple[ProblemItem, ...] = ()
    more: int = 0
    """Number of objects that are not listed."""
    is_english: bool = False
    """Whether the sentence is not translated."""

    @property
    def anchor(self) -> str:
        return self.id.replace(".", "-").replace("_", "-")


def cards(
    request: HttpRequest,
    site: DashboardSite,
    situation: Situation,
    report: HealthReport,
    workers: Sequence[str],
    pauses: dict[str, tuple[int, str]],
) -> list[ProblemCard]:
    """Return the problems that the user may see, the worst first.

    Args:
        workers: Ids of the workers that the user can see.
        pauses: Time and user of the pause of each queue, as far as they are recorded.
    """
    found = []
    sees_all = boards.sees_all(request)
    for finding in find_problems(situation, report.findings):
        shown = _visible_part(request, finding, workers, sees_all=sees_all)
        if shown is not None:
            found.append(_card(request, site, shown, pauses))
    hidden = [one for one in report.findings if not one.evidence]
    if hidden and not (sees_all and rights.may(request, rights.STORAGE)):
        found.append(ProblemCard("health.storage", True, _("The storage has problems."), "", None))
    return sorted(found, key=lambda card: (not card.is_bad, card.since or situation.at))


def _visible_part(
    request: HttpRequest, finding: Finding, workers: Sequence[str], *, sees_all: bool
) -> Finding | None:
    """Return a finding about the objects that the user can see; None if there are none."""
    if not finding.evidence:
        return finding if sees_all and rights.may(request, rights.STORAGE) else None
    kept = tuple(
        one
        for one in finding.evidence
        if (not one.worker or one.worker in workers)
        and (rights.sees(request, one.queue) if one.queue else bool(one.worker) or sees_all)
    )
    return finding._replace(evidence=kept) if kept else None


def _card(
    request: HttpRequest, site: DashboardSite, finding: Finding, pauses: dict[str, tuple[int, str]]
) -> ProblemCard:
    sentence = sentence_of(finding)
    return ProblemCard(
        finding.id,
        finding.level == "error",
        sentence or f"{finding.text[:1].upper()}{finding.text[1:]}",
        str(HINTS.get(finding.id, "")) or ("" if sentence else finding.hint),
        finding.since,
        tuple(_item(request, site, finding.id, one, pauses) for one in finding.evidence[:SHOWN]),
        max(0, len(finding.evidence) - SHOWN),
        not sentence,
    )


def link_of(site: DashboardSite, one: Evidence) -> str:
    """Return the URL of the page of an object."""
    if one.schedule is not None:
        return site.url("schedule", one.schedule)
    if one.worker:
        return site.url("worker", one.worker)
    if one.error:
        return site.url("error", one.queue, one.error.partition(",")[0])
    if one.name:
        return site.url("job_type", one.name)
    return site.url("queue", one.queue) if one.queue else site.url("status")


def sentence_of(finding: Finding) -> str:
    """Return a finding as a sentence in the user's language; empty if it has only the English one."""
    if finding.id not in SENTENCES or not finding.evidence:
        return ""
    one, several = SENTENCES[finding.id]
    count, first = len(finding.evidence), finding.evidence[0]
    if count > 1:
        return str(several % {"count": count})
    share = rendering.percent(first.share * 100)
    return str(one) % {**first._asdict(), "share": share, "error": first.text}


def _item(
    request: HttpRequest, site: DashboardSite, problem: str, one: Evidence, pauses: dict[str, tuple[int, str]]
) -> ProblemItem:
    count = one.size
    values = {"count": rendering.number(count), "queue": one.queue, "worker": one.worker}
    offers: list[ProblemAction] = []

    def offer(page: str, label: str, *args: Any, **query: Any) -> None:
        if site.may_open(request, page):
            is_post = site.pages[page].method == "POST"
            offers.append(ProblemAction(label, site.url(page, *args, **query), is_post))

    if problem == "problem.stuck":
        offer("worker_dump", _("Dump stacks"), one.worker)
        offer("cancel", _("Cancel job"), one.queue, one.job)
        url = site.url("job", one.queue, one.job)
        return ProblemItem(one.name, url, _("in %(queue)s on %(worker)s") % values, one.since, tuple(offers))
    if one.schedule is not None:
        offer("schedule_run", _("Run now"), one.schedule)
        return ProblemItem(one.name, link_of(site, one), "", one.since, tuple(offers))
    if one.worker:
        if problem == "health.silent":
            offer("worker_dump", _("Dump stacks"), one.worker)
        active = ngettext("%(count)s active job", "%(count)s active jobs", count) % values
        return ProblemItem(one.worker, link_of(site, one), one.text or active, one.since, tuple(offers))
    if one.error:
        query = {"queue": one.queue, "fingerprint": one.error}
        key = one.error.partition(",")[0]
        offer("errors_preview", _("Retry…"), **query, kind=BulkKind.RETRY)
        offer("jobs", _("Show jobs"), queue=one.queue, error=one.error, state=State.FAILED.value)
        offer("error_resolve", _("Resolve"), one.queue, key)
        offer("hold", _("Hold job type"), one.queue, one.name)
        note = ngettext(
            "%(count)s failed attempt in %(queue)s", "%(count)s failed attempts in %(queue)s", count
        )
        return ProblemItem(one.text, link_of(site, one), note % values, one.since, tuple(offers))
    if problem == "health.handlers":
        query = {"queue": one.queue, "state": State.WAITING.value, "name": one.name}
        offer("all_cancel", _("Cancel jobs…"), **query)
        note = ngettext("%(count)s job waiting in %(queue)s", "%(count)s jobs waiting in %(queue)s", count)
        return ProblemItem(one.name, site.url("jobs", **query), note % values, one.since, tuple(offers))
    if problem == "problem.held":
        offer("release", _("Release"), one.queue, one.name)
        note = ngettext("%(count)s job waiting in %(queue)s", "%(count)s jobs waiting in %(queue)s", count)
        note = ": ".join(filter(None, (note % values, one.text)))
        return ProblemItem(one.name, site.url("job_type", one.name), note, one.since, tuple(offers))
    since = one.since
    note = ngettext("%(count)s job waiting", "%(count)s jobs waiting", count) % values
    if problem == "problem.paused":
        note = ngettext("%(count)s pending job", "%(count)s pending jobs", count) % values
        if one.queue in pauses:
            since, user = pauses[one.queue]
            note += f", {_('paused by %(user)s') % {'user': user}}"
        offer("resume", _("Resume"), one.queue)
    elif problem == "problem.failing":
        share = rendering.percent(one.share * 100)
        if one.before is not None:
            before = rendering.percent(one.before * 100)
            note = _("%(share)s of attempts fail, %(before)s before") % {"share": share, "before": before}
        elif since is not None:
            note = _("%(share)s of attempts fail") % {"share": share}
        else:
            note = _("%(share)s of attempts fail, for over an hour") % {"share": share}
        offer("errors", _("Show errors"), queue=one.queue)
        offer("pause", _("Pause queue"), one.queue)
    elif problem == "problem.lost":
        note = ngettext("%(count)s attempt", "%(count)s attempts", count) % values
        offer("workers", _("Show workers"))
    else:
        offer("jobs", _("Show jobs"), queue=one.queue, state=State.WAITING.value)
        offer("pause", _("Pause queue"), one.queue)
    return ProblemItem(one.queue, site.url("queue", one.queue), note, since, tuple(offers))
