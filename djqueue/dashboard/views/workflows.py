"""Workflows: found among the newest jobs, drawn, and retried."""

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
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.states import LIVE, TERMINAL, State
from djqueue.dashboard import actions, audit, boards, flowcharts, jobsearch, rights, timelines
from djqueue.dashboard.reading import CachedRead, read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.storage.actions import RETRY

pages = Pages()
MAX_LISTED = 20
"""Maximum workflows in the list."""
MAX_JOBS_READ = 200
"""Maximum jobs read of each workflow, in the list and on a job's page."""
MAX_CANDIDATES = 1_000
"""Newest jobs of workflows that are considered for the list."""
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
    last: FlowNode
    """The first final job, which identifies the workflow."""
    others: int
    """The number of other final jobs."""

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
    last = graph.last()
    return Summary(graph, last[0], len(last) - 1)


def newest_workflows(request: HttpRequest, kind: str) -> CachedRead[list[Summary]]:
    """Return the newest workflows in a state, newest first."""
    lines = boards.board(request).value.lines
    names = tuple(line.name for line in lines)
    wanted: list[tuple[State, str]] = []
    for state in KINDS[kind]:
        counted = sorted((-line.count(state), line.name) for line in lines if line.count(state))
        wanted += [(state, name) for _, name in counted]
    key = ("workflows", kind, names, tuple(wanted))
    cached = read_cache.read(key, lambda: _graphs(wanted, WHOLE[kind], names), WORKFLOWS_FRESH)
    rows = sorted(map(summarize, cached.value), key=lambda row: -row.began_at)
    return CachedRead(rows, cached.at, cached.error)


@pages.show("workflows", "workflows/", rights.VIEW, gettext_lazy("Workflows"))
def listed(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List workflows of the newest jobs, or find the workflow of a job by its ID."""
    term = request.GET.get("id", "").strip()
    named = _named(request, site, term) if term else []
    if len(named) == 1:
        return HttpResponseRedirect(named[0][2])
    given = request.GET.get("state", "")
    kind = given if given in KINDS else "live"
    cached = newest_workflows(request, kind)
    context = {
        "rows": cached.value,
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
    title = summary.last.name or job_id
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


def _graphs(wanted: Sequence[tuple[State, str]], whole: State, seen: Sequence[str]) -> list[FlowGraph]:
    """Return the workflows in a state, found by jobs of these states and queues, without those of others."""
    left = _candidates(wanted)
    graphs: list[FlowGraph] = []
    known: set[JobKey] = set()
    while left and len(graphs) < MAX_LISTED:
        roots: list[JobKey] = []
        while left and len(roots) < MAX_LISTED:
            key, options = left.popleft()
            near = {key, *options.depends_on, *options.dependents}
            if known.isdisjoint(near):
                roots.append(key)
            known |= near
        for found in get_storage().reads.flows(roots, MAX_JOBS_READ) if roots else ():
            graph = found and found.only(lambda name: name in seen)
            keys = {node.key for node in graph.nodes} if graph else set()
            # Of a large workflow, other jobs may have been found before.
            is_new = not any(node.key in keys for one in graphs for node in one.nodes)
            if graph and len(keys) > 1 and is_new and graph.state() is whole:
                graphs.append(graph)
            known |= keys
    return graphs[:MAX_LISTED]


def _candidates(wanted: Sequence[tuple[State, str]]) -> deque[tuple[JobKey, JobOptions]]:
    """Return the newest jobs of these states and queues that have dependencies or dependents."""
    storage = get_storage()
    states, names = {state for state, _ in wanted}, {name for _, name in wanted}
    if not wanted:
        return deque()
    if states <= jobsearch.states_with_rows(storage):
        return deque(jobsearch.connected(sorted(names), sorted(states), MAX_CANDIDATES))
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
    return deque(((one.queue, one.id), one.options) for one in records)


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
