"""Workflows: listed, drawn, and retried."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.flow import FlowGraph, FlowNode
from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, TERMINAL, State
from djqueue.dashboard import actions, audit, boards, flowcharts, jobsearch, redaction, rights, timelines
from djqueue.dashboard.reading import CachedRead, read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.storage.actions import RETRY

pages = Pages()
MAX_LISTED = 20
"""Maximum workflows in the list."""
MAX_JOBS_READ = 200
"""Maximum jobs read of each workflow, in the list and on a job's page."""
MAX_CANDIDATES = 1_000
"""Jobs of workflows that are considered for one page of the list."""
MAX_SEARCHED = 50
"""Newest jobs of each queue and state that are searched for workflows, of a storage without tables."""
QUEUES = 20
"""Maximum queues searched in a storage without tables: those with most such jobs."""
WORKFLOWS_FRESH = 3_000
"""Milliseconds before the list is read again."""
MAX_NEIGHBORS = 50
"""Maximum dependencies and dependents named on a job's page."""
KINDS: dict[str, tuple[State, ...]] = {
    "live": (State.BLOCKED, State.ACTIVE, State.WAITING, State.DELAYED),
    "failed": (State.FAILED,),
    "completed": (State.COMPLETED,),
    "cancelled": (State.CANCELLED,),
}
"""States of jobs that are searched for workflows, by kind of list."""
WHOLE = {
    "live": State.ACTIVE,
    "failed": State.FAILED,
    "completed": State.COMPLETED,
    "cancelled": State.CANCELLED,
}
"""State of the whole workflow, by kind of list."""
LABELS = {
    "live": gettext_lazy("In progress"),
    "failed": gettext_lazy("Failed"),
    "completed": gettext_lazy("Completed"),
    "cancelled": gettext_lazy("Cancelled"),
}
"""Labels of `KINDS`."""
DEPENDENCIES_NAMED = 5
"""Maximum dependencies named in a row of the table."""
FAILED_LISTED = 50
"""Maximum failed jobs listed if the diagram groups jobs."""


class Summary(NamedTuple):
    """A workflow as a row of the list."""

    graph: FlowGraph
    first: FlowNode
    """The first job without dependencies, which names the workflow."""
    others: int
    """The number of other jobs without dependencies."""
    arguments: str = ""
    """Arguments of the first job in one line, if they were read."""

    @property
    def counts(self) -> list[tuple[State | None, int]]:
        """Jobs by state; None stands for removed jobs."""
        found = Counter(node.state for node in self.graph.nodes)
        return [(state, found[state]) for state in (*State, None) if found[state]]

    @property
    def total(self) -> int:
        return len(self.graph.nodes)

    @property
    def ended(self) -> int:
        return sum(node.state is None or node.state in TERMINAL for node in self.graph.nodes)

    @property
    def is_live(self) -> bool:
        """Whether a job is pending or active."""
        return any(node.state in LIVE for node in self.graph.nodes)

    @property
    def began_at(self) -> int:
        """Time at which the first job was enqueued, in UTC milliseconds."""
        return min((node.created_at for node in self.graph.nodes if node.created_at), default=0)

    @property
    def ended_at(self) -> int | None:
        """Time at which the last job finished; None while jobs are pending or active."""
        return None if self.is_live else max(node.finished_at for node in self.graph.nodes)

    @property
    def length(self) -> int | None:
        """Milliseconds from its start to its end; None while jobs are pending or active."""
        return None if self.ended_at is None else max(0, self.ended_at - self.began_at)


class WorkflowPage(NamedTuple):
    """A page of the list."""

    rows: list[Summary]
    """Workflows, newest first."""
    older: str = ""
    """Position of the next page; empty on the last page."""


class Around(NamedTuple):
    """The workflow of a job, for the job's page."""

    size: int
    cut: bool
    before: list[FlowNode]
    """Dependencies of the job."""
    after: list[FlowNode]
    """Known dependents of the job."""
    more_before: int
    """The number of dependencies that are not listed."""
    more_after: int


class WorkflowRow(NamedTuple):
    """A box of the diagram as a row of a table."""

    step: int
    """Number of the layer, starting at 1."""
    node: FlowNode | None
    """None for several jobs."""
    size: int
    label: str
    """Name of the job, or of several with their number."""
    states: str
    state: State | None
    before: list[FlowNode]
    more: int
    """The number of dependencies that are not named."""


def visible_part(request: HttpRequest, graph: FlowGraph) -> FlowGraph:
    """Return a workflow without jobs that the user can't see."""
    return graph.only(lambda name: rights.sees(request, name))


def failed_jobs(request: HttpRequest, graph: FlowGraph) -> tuple[list[FlowNode], list[FlowNode]]:
    """Return the visible jobs of `FlowGraph.failed`, which needs the whole workflow."""
    able, early = graph.failed()
    seen = {node.key for node in visible_part(request, graph).nodes}
    return [node for node in able if node.key in seen], [node for node in early if node.key in seen]


def around(request: HttpRequest, queue: str, job_id: str) -> Around | None:
    """Return the workflow of a job; None if the job has neither dependencies nor dependents."""
    whole = get_storage().reads.flow(queue, job_id, MAX_JOBS_READ)
    graph = whole and visible_part(request, whole)
    if graph is None or len(graph.nodes) < 2:
        return None
    before, after = graph.before(graph.root), graph.after(graph.root)
    return Around(
        len(graph.nodes),
        graph.cut,
        before[:MAX_NEIGHBORS],
        after[:MAX_NEIGHBORS],
        max(0, len(before) - MAX_NEIGHBORS),
        max(0, len(after) - MAX_NEIGHBORS),
    )


def summarize(graph: FlowGraph) -> Summary:
    """Summarize a workflow."""
    first = graph.first()
    return Summary(graph, first[0], len(first) - 1)


def workflows_in(request: HttpRequest, kind: str, at: str) -> CachedRead[WorkflowPage]:
    """Return the workflows in a state at a position."""
    lines = boards.board(request).value.lines
    names = tuple(line.name for line in lines)
    wanted: list[tuple[State, str]] = []
    for state in KINDS[kind]:
        counted = sorted((-line.count(state), line.name) for line in lines if line.count(state))
        wanted += [(state, name) for _, name in counted]
    key = ("workflows", kind, names, tuple(wanted), at)
    return read_cache.read(key, lambda: _page(wanted, WHOLE[kind], names, at), WORKFLOWS_FRESH)


@pages.show("workflows", "workflows/", rights.VIEW, gettext_lazy("Workflows"))
def listed(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List workflows, or find the workflow of a job by its ID."""
    term = request.GET.get("id", "").strip()
    named = _named(request, site, term) if term else []
    if len(named) == 1:
        return HttpResponseRedirect(named[0][2])
    given = request.GET.get("state", "")
    kind = given if given in KINDS else "live"
    at = request.GET.get("at", "")
    cached = workflows_in(request, kind, at)
    older = cached.value.older
    context = {
        "rows": cached.value.rows,
        "newest": site.url("workflows", state=kind) if at else "",
        "older": older and site.url("workflows", state=kind, at=older),
        "is_sample": not jobsearch.states_with_rows(get_storage()),
        "kind": kind,
        "kinds": [(one, label, site.url("workflows", state=one)) for one, label in LABELS.items()],
        "term": term,
        "found": named,
        "most": MAX_LISTED,
    }
    return site.render(request, "workflows.html", _("Workflows"), context, tab="workflows", read=cached)


@pages.show("workflow", "workflows/<djq:queue>/<djq:job_id>/", rights.VIEW)
def flow(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Show the workflow of a job as a diagram and a table."""
    crumbs = [site.crumb("workflows")]
    whole = get_storage().reads.flow(queue, job_id)
    if whole is None:
        return site.job_not_found(request, queue, job_id, "workflows", crumbs)
    graph = visible_part(request, whole)
    is_each = request.GET.get("each") == "1"
    drawing = flowcharts.draw(graph, fold=not is_each)
    each_url, folded_url = site.url("workflow", queue, job_id, each="1"), site.url("workflow", queue, job_id)
    roots, dependents = failed_jobs(request, whole)
    summary = summarize(graph)
    context = {
        "summary": summary,
        "counts": [(state, flowcharts.word(state), count) for state, count in summary.counts],
        "root": graph.nodes[graph.root],
        "svg": flowcharts.svg(graph, drawing, lambda node: site.url("job", *node.key), each_url),
        "drawing": drawing,
        "folding_url": each_url if drawing.folded else folded_url if is_each else "",
        "times": timelines.of_workflow(
            graph, drawing, SYSTEM_CLOCK.now(), lambda node: site.url("job", *node.key)
        ),
        "causes": flowcharts.causes(graph)[:FAILED_LISTED],
        "rows": _rows(graph, drawing),
        "failed": [*roots, *dependents][:FAILED_LISTED] if drawing.collapsed or drawing.folded else [],
        **_dry_run(roots, dependents),
    }
    title = summary.first.name or job_id
    return site.render(request, "workflow.html", title, context, tab="workflows", crumbs=crumbs)


@pages.act("workflow_retry", "workflows/<djq:queue>/<djq:job_id>/retry/", RETRY.permission)
def retry(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Retry the failed jobs of a workflow; those that depend on others are blocked again."""
    graph = get_storage().reads.flow(queue, job_id)
    roots, dependents = failed_jobs(request, graph) if graph is not None else ([], [])
    answers = _retried(roots, dependents, dry_run=False)
    done = {word: answers.pop(word) for word in actions.DONE if word in answers}
    if done:
        detail = {"refused": answers}
        count = sum(done.values())
        audit.note(request, "workflow_retry", queue=queue, job_id=job_id, count=count, detail=detail)
        messages.success(request, " ".join(actions.DONE[word] % count_of for word, count_of in done.items()))
    if answers or not done:
        why = ", ".join(actions.refusals(answers)) or _("no failed job can be retried")
        messages.warning(request, _("Other jobs were not retried: %(why)s.") % {"why": why})
    return site.back(request, "workflow", queue, job_id)


def _page(wanted: Sequence[tuple[State, str]], whole: State, seen: Sequence[str], at: str) -> WorkflowPage:
    """Return the workflows in a state, found by jobs of these states and queues, without those of others.

    A workflow is on the page of the newest of these jobs.
    """
    states = sorted({state for state, _ in wanted})
    # Of a workflow that goes on or has completed, a job with dependencies has such a state, too.
    with_roots = whole in (State.FAILED, State.CANCELLED)
    candidates, older = _candidates(wanted, states, at, with_roots=with_roots)
    left = deque(candidates)
    graphs: list[FlowGraph] = []
    known: set[JobKey] = set()
    following: jobsearch.ConnectedJob | None = None
    while left and len(graphs) < MAX_LISTED:
        roots: list[jobsearch.ConnectedJob] = []
        while left and len(roots) < MAX_LISTED:
            one = left.popleft()
            near = {one.key, *one.options.depends_on, *one.options.dependents}
            if known.isdisjoint(near):
                roots.append(one)
            known |= near
        found = get_storage().reads.flows([one.key for one in roots], MAX_JOBS_READ) if roots else []
        shown = [flow and flow.only(lambda name: name in seen) for flow in found]
        earlier = jobsearch.newer(
            (key for graph in shown if graph for key in _deciding(graph, with_roots=with_roots)), states, at
        )
        for root, graph in zip(roots, shown, strict=True):
            keys = {node.key for node in graph.nodes} if graph else set()
            # Of a large workflow, other jobs may have been found before.
            is_new = earlier.isdisjoint(keys) and not any(
                node.key in keys for one in graphs for node in one.nodes
            )
            if graph and len(keys) > 1 and is_new and graph.state() is whole:
                if len(graphs) == MAX_LISTED:
                    following = root
                    break
                graphs.append(graph)
            known |= keys
    following = following or next((one for one in left if one.key not in known), None)
    if following is not None and following.pk:
        older = f"<{following.pk + 1}"
    return WorkflowPage(_summaries(graphs), older)


def _deciding(graph: FlowGraph, *, with_roots: bool) -> list[JobKey]:
    """Return the jobs of a workflow by which it can be found."""
    if with_roots:
        return [node.key for node in graph.nodes]
    return [graph.nodes[edge.after].key for edge in graph.edges]


def _summaries(graphs: Sequence[FlowGraph]) -> list[Summary]:
    """Summarize workflows with the arguments of their first jobs, newest first."""
    rows = sorted(map(summarize, graphs), key=lambda row: -row.began_at)
    by_queue: dict[str, list[str]] = {}
    for row in rows:
        by_queue.setdefault(row.first.queue, []).append(row.first.id)
    lines = {
        (queue, id): redaction.payload_line(record)
        for queue, ids in by_queue.items()
        for id, record in zip(ids, get_storage().reads.jobs(queue, ids), strict=True)
        if record is not None
    }
    return [row._replace(arguments=lines.get(row.first.key, "")) for row in rows]


def _candidates(
    wanted: Sequence[tuple[State, str]], states: Sequence[State], at: str, *, with_roots: bool
) -> tuple[list[jobsearch.ConnectedJob], str]:
    """Return jobs of these states and queues that have dependencies or dependents, newest first, and the
    position of older ones.
    """
    storage = get_storage()
    if not wanted:
        return [], ""
    if jobsearch.states_with_rows(storage).issuperset(states):
        names = sorted({name for _, name in wanted})
        return jobsearch.connected(names, states, MAX_CANDIDATES, at, with_roots=with_roots)
    of_state: dict[State, list[str]] = {}
    for state, name in wanted:
        of_state.setdefault(state, []).append(name)
    records = [
        one
        for state, queues in of_state.items()
        for name in queues[:QUEUES]
        for one in storage.reads.cursor_page(name, state, MAX_SEARCHED).jobs
        if one.options.depends_on or one.options.dependents
    ]
    records.sort(key=lambda one: -one.created_at)
    return [jobsearch.ConnectedJob((one.queue, one.id), one.options) for one in records], ""


def _dry_run(roots: list[FlowNode], dependents: list[FlowNode]) -> dict[str, Any]:
    """Return what "Retry workflow" would do, and why it would skip jobs."""
    answers = _retried(roots, dependents, dry_run=True)
    done = {word: answers.pop(word) for word in actions.DONE if word in answers}
    count = sum(done.values())
    label = ngettext("Retry workflow: %(count)d failed job", "Retry workflow: %(count)d failed jobs", count)
    return {
        "retriable": count,
        "blocked_again": done.get("blocked_again", 0),
        "retry_label": label % {"count": count},
        "refused": actions.refusals(answers),
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


def _rows(graph: FlowGraph, drawing: flowcharts.Drawing) -> list[WorkflowRow]:
    rows = []
    for box in drawing.in_order():
        one = len(box.nodes) == 1
        before = graph.before(box.nodes[0]) if one else []
        node = graph.nodes[box.nodes[0]] if one else None
        more = max(0, len(before) - DEPENDENCIES_NAMED)
        rows.append(
            WorkflowRow(
                box.layer + 1,
                node,
                len(box.nodes),
                flowcharts.label_of(box, graph),
                flowcharts.states_of(box, graph),
                box.state,
                before[:DEPENDENCIES_NAMED],
                more,
            )
        )
    return rows


def _named(request: HttpRequest, site: DashboardSite, job_id: str) -> list[tuple[str, State, str]]:
    """Return the queue, the state and the workflow URL of each job with this ID."""
    names = [line.name for line in boards.board(request).value.lines]
    return [
        (queue, state, site.url("workflow", queue, job_id))
        for queue, state in get_storage().reads.find(job_id, names)
    ]
