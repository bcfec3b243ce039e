"""Workflows: jobs that depend on one another, and their failed jobs."""

from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue.client import get_storage
from djqueue.core.flow import FlowGraph, FlowNode
from djqueue.core.states import State
from djqueue.dashboard import audit, flowcharts, flows, graphs, jobactions, queries, rights
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite

from .responses import job_not_found

pages = Pages()

LABELS = {
    "live": gettext_lazy("In progress"),
    "failed": gettext_lazy("Failed"),
    "completed": gettext_lazy("Completed"),
    "cancelled": gettext_lazy("Cancelled"),
}
"""Labels of `flows.KINDS`."""
NAMED = 5
"""Maximum dependencies named in a row of the table."""
FAILED = 50
"""Maximum failed jobs listed if the diagram groups jobs."""


class WorkflowRow(NamedTuple):
    """A box of the diagram as a row of a table."""

    step: int
    """Number of the layer, starting at 1."""
    node: FlowNode | None
    """None for several jobs."""
    size: int
    state: State | None
    before: list[FlowNode]
    more: int
    """The number of dependencies that are not named."""


@pages.show("flows", "flows/", rights.VIEW, gettext_lazy("Workflows"))
def listed(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List workflows of the newest jobs, or find the workflow of a job by its ID."""
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
    return site.render(request, "flows.html", _("Workflows"), context, tab="flows", read=cached)


@pages.show("flow", "flows/<djq:queue>/<djq:job_id>/", rights.VIEW)
def flow(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Show the workflow of a job as a diagram and a table."""
    crumbs = [site.crumb("flows")]
    whole = get_storage().reads.flow(queue, job_id)
    if whole is None:
        return job_not_found(request, site, queue, job_id, "flows", crumbs)
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
    """Retry the failed jobs of a workflow; those that depend on others are blocked again."""
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
        why = ", ".join(jobactions.refusals(answers)) or _("no failed job can be retried")
        messages.warning(request, _("Other jobs were not retried: %(why)s.") % {"why": why})
    return site.back(request, "flow", queue, job_id)


def _dry_run(roots: list[FlowNode], dependents: list[FlowNode]) -> dict[str, Any]:
    """Return what "Retry workflow" would do, and why it would skip jobs."""
    answers = _retried(roots, dependents, dry_run=True)
    done = {word: answers.pop(word) for word in jobactions.RETRY.done if word in answers}
    count = sum(done.values())
    label = ngettext("Retry workflow: %(count)d failed job", "Retry workflow: %(count)d failed jobs", count)
    return {
        "retriable": count,
        "blocked_again": done.get("blocked_again", 0),
        "retry_label": label % {"count": count},
        "refused": jobactions.refusals(answers),
    }


def _retried(roots: list[FlowNode], dependents: list[FlowNode], *, dry_run: bool) -> dict[str, int]:
    """Retry jobs, and return their number by answer.

    Dependents go first: they are blocked before the jobs that they wait for can fail again.
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
    """Return the queue, the state and the workflow URL of each job with this ID."""
    names = [line.name for line in queries.board(request).value.lines]
    return [
        (queue, state, site.url("flow", queue, job_id))
        for queue, state in get_storage().reads.find(job_id, names)
    ]
