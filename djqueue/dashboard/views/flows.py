"""Flows: jobs that depend on one another, how far they are, and those of them that failed."""

from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue.client import get_storage
from djqueue.core.graph import FlowGraph, FlowNode
from djqueue.core.states import State
from djqueue.dashboard import audit, flowcharts, flows, graphs, jobactions, queries, rights
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite

pages = Pages()

LABELS = {
    "live": gettext_lazy("In progress"),
    "failed": gettext_lazy("Failed"),
    "completed": gettext_lazy("Completed"),
    "cancelled": gettext_lazy("Cancelled"),
}
"""Of `flows.KINDS`."""
NAMED = 5
"""Jobs before one that a row of the table names."""
FAILED = 50
"""Failed jobs that are listed where the drawing shows several as one."""


class WorkflowRow(NamedTuple):
    """A box of the drawing in words."""

    step: int
    """Which layer it is in; 1 is the first."""
    node: FlowNode | None
    """None: it is several jobs."""
    size: int
    state: State | None
    before: list[FlowNode]
    more: int
    """How many before it are not named."""


@pages.show("flows", "flows/", rights.VIEW, gettext_lazy("Workflows"))
def listed(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Flows of the newest jobs; and that of any job by its id."""
    term = request.GET.get("id", "").strip()
    found = _named(request, site, term) if term else []
    if len(found) == 1:
        return HttpResponseRedirect(found[0][2])
    given = request.GET.get("state", "")
    kind = given if given in flows.KINDS else "live"
    cached = flows.newest(request, kind)
    context = {
        "rows": cached.value,
        "kind": kind,
        "kinds": [(one, label, site.url("flows", state=one)) for one, label in LABELS.items()],
        "term": term,
        "found": found,
        "each": flows.EACH,
        "most": flows.LISTED,
    }
    return site.render(
        request, "flows.html", _("Workflows"), context, tab="flows", as_of=cached.at, away=cached.away
    )


@pages.show("flow", "flows/<djq:queue>/<djq:job_id>/", rights.VIEW)
def flow(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """The flow around a job, drawn and in words."""
    crumbs = [Crumb(str(_("Workflows")), site.url("flows"))]
    whole = get_storage().reads.flow(queue, job_id)
    if whole is None:
        gone = {"queue": queue, "job_id": job_id}
        return site.render(
            request, "gone.html", _("Job not found"), gone, tab="flows", crumbs=crumbs, status=404
        )
    graph = flows.visible(request, whole)
    drawing = graphs.draw(graph)
    roots, dependents = flows.failed(request, whole)
    summary = flows.summary(graph)
    context = {
        "summary": summary,
        "counts": [(state, flowcharts.word(state), count) for state, count in summary.counts],
        "root": graph.nodes[graph.root],
        "svg": flowcharts.svg(graph, drawing, lambda node: site.url("job", *node.key)),
        "drawing": drawing,
        "rows": _rows(graph, drawing),
        "failed": [*roots, *dependents][:FAILED] if drawing.collapsed else [],
        **_dry_run(roots, dependents),
    }
    title = summary.last.name or job_id
    return site.render(request, "flow.html", title, context, tab="flows", crumbs=crumbs)


@pages.act("flow_retry", "flows/<djq:queue>/<djq:job_id>/retry/", rights.RETRY)
def retry(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Retry the failed roots of a workflow; the jobs that failed with them are blocked behind them again."""
    graph = get_storage().reads.flow(queue, job_id)
    roots, dependents = flows.failed(request, graph) if graph is not None else ([], [])
    answers = _retried(roots, dependents, dry_run=False)
    done = {word: answers.pop(word) for word in jobactions.RETRY.done if word in answers}
    if done:
        detail = {"refused": answers}
        count = sum(done.values())
        audit.note(request, "flow_retry", queue=queue, job_id=job_id, count=count, detail=detail)
        messages.success(request, " ".join(jobactions.RETRY.done[word] % many for word, many in done.items()))
    if answers or not done:
        why = ", ".join(_refusals(answers)) or _("no failed job can be retried")
        messages.warning(request, _("Other jobs were not retried: %(why)s.") % {"why": why})
    return site.back(request, "flow", queue, job_id)


def _dry_run(roots: list[FlowNode], dependents: list[FlowNode]) -> dict[str, Any]:
    """What "Retry workflow" would do, and why not with all."""
    answers = _retried(roots, dependents, dry_run=True)
    done = {word: answers.pop(word) for word in jobactions.RETRY.done if word in answers}
    count = sum(done.values())
    label = ngettext("Retry workflow: %(count)d failed job", "Retry workflow: %(count)d failed jobs", count)
    return {
        "retriable": count,
        "blocked_again": done.get("blocked_again", 0),
        "retry_label": label % {"count": count},
        "refused": _refusals(answers),
    }


def _retried(roots: list[FlowNode], dependents: list[FlowNode], *, dry_run: bool) -> dict[str, int]:
    """What became of jobs that are retried, by the storage's words.

    Dependents go first: a root that fails again at once finds them behind it.
    """
    answers: dict[str, int] = {}
    for nodes in (dependents, roots):
        by_queue: dict[str, list[str]] = {}
        for node in nodes:
            by_queue.setdefault(node.queue, []).append(node.id)
        for queue, ids in by_queue.items():
            for answer in get_storage().jobs.retry(queue, ids, dry_run=dry_run):
                answers[answer] = answers.get(answer, 0) + 1
    return answers


def _refusals(answers: dict[str, int]) -> list[str]:
    return [str(jobactions.REFUSALS.get(word, f"%d {word}")) % count for word, count in answers.items()]


def _rows(graph: FlowGraph, drawing: graphs.Drawing) -> list[WorkflowRow]:
    rows = []
    for box in drawing.in_order():
        one = len(box.nodes) == 1
        before = graph.before(box.nodes[0]) if one else []
        node = graph.nodes[box.nodes[0]] if one else None
        more = max(0, len(before) - NAMED)
        rows.append(WorkflowRow(box.layer + 1, node, len(box.nodes), box.state, before[:NAMED], more))
    return rows


def _named(request: HttpRequest, site: DashboardSite, job_id: str) -> list[tuple[str, State, str]]:
    """Where a whole id is: queue, state, address of its flow."""
    names = [line.name for line in queries.board(request).value.lines]
    return [
        (queue, state, site.url("flow", queue, job_id))
        for queue, state in get_storage().reads.find(job_id, names)
    ]
