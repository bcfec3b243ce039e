"""Workflows: the list, the graph, the retry of failed jobs, and the neighbors of a job."""

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from djqueue import Queue, chain, chord
from djqueue.client import get_storage
from djqueue.core.states import State
from djqueue.dashboard import flowcharts, rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.views import workflows
from djqueue.models import AuditEvent
from djqueue.testing.factories import claim, completing, failing, finish
from tests.dashboard.visiting import PAGES, address, logged_in, one_with, visit
from tests.statements import recorded
from tests.support import eventually

pytestmark = pytest.mark.django_db(transaction=True)

BY_NAME = {page.name: page for page in PAGES}


def hides_books(request, queue):
    return queue != "books"


@pytest.fixture
def viewer():
    return logged_in(one_with(rights.VIEW))


@pytest.fixture
def retrier():
    return logged_in(one_with(rights.VIEW, rights.RETRY))


@pytest.fixture(autouse=True, params=["memory", "database"])
def storage(request, settings, viewer, retrier):
    # Users first: SQLite lets nobody begin to write in the middle of a transaction while another one does.
    if request.param == "memory":
        settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
    storage = get_storage()
    storage.connect()
    return storage


@pytest.fixture
def pages():
    """Two pages that a book waits for; the first of them is the job of the addresses."""
    emails, books = Queue("emails"), Queue("books")
    first = emails.node(1, name="fetch", id="job-1")
    second = emails.node(2, name="fetch", id="job-2")
    chord([first, second], then=books.node(3, name="merge", id="book")).enqueue()


def work(storage, kind="complete", slots=1, **given):
    claimed = claim(storage, slots, names=["fetch", "merge"], **given)
    finish(storage, *(completing(one) if kind == "complete" else failing(one, "timeout") for one in claimed))
    return [one.id for one in claimed]


def page(client, name="workflow", **query):
    read_cache.clear()
    return client.get(address(BY_NAME[name], **query)).content.decode()


def svg_of(html):
    html = html[html.index('<svg class="djq-workflow"') :]
    return ElementTree.fromstring(html[: html.index("</svg>") + 6])


def test_workflow_is_shown_from_each_of_its_jobs(pages, viewer):
    html = page(viewer)
    drawn = svg_of(html)
    assert [link.find("title").text for link in drawn.iter("a")] == [
        "fetch, waiting, emails job-1",
        "fetch, waiting, emails job-2",
        "merge, blocked, books book",
    ]
    assert len(list(drawn.iter("path"))) == 2
    assert "<title>merge" in html
    assert "Show as table" in html
    assert "style=" not in html[html.index('id="djq-live"') :]
    assert "Workflow of 3 jobs" in html


def test_job_without_workflow_says_so(viewer):
    Queue("emails").enqueue(1, id="job-1")
    html = page(viewer)
    assert "This job has no dependencies" in html
    assert '<svg class="djq-workflow"' not in html
    assert viewer.get(address(BY_NAME["job"])).content.decode().count("<h2>Workflow</h2>") == 0


def test_unknown_job_has_no_workflow(viewer):
    response = viewer.get(address(BY_NAME["workflow"]))
    assert response.status_code == 404
    assert "Job job-1 was not found" in response.content.decode()


def test_list_shows_first_job_and_progress_of_workflow(storage, pages, viewer):
    assert "1/3" not in page(viewer, "workflows")
    work(storage)

    html = page(viewer, "workflows")

    assert html.count("data-djq-row") == 1
    assert ">fetch</a>" in html
    assert "and 1 other" in html
    assert re.search(r'class="djq-note djq-mono">1</span>', html)
    assert "1/3" in html
    assert "No matching workflows" in page(viewer, "workflows", state="failed")


def test_finished_workflow_is_listed_as_finished(storage, pages, viewer):
    while work(storage):
        pass
    assert "No matching workflows" in page(viewer, "workflows")
    html = page(viewer, "workflows", state="completed")
    assert html.count("data-djq-row") == 1
    assert "3/3" in html


def test_jobs_without_workflow_are_not_listed(storage, viewer):
    Queue("emails").enqueue_many(range(3))
    assert "data-djq-row" not in page(viewer, "workflows")


def test_workflow_is_found_by_id_of_its_job(pages, viewer):
    response = viewer.get(address(BY_NAME["workflows"], id="job-1"))
    assert response["Location"] == address(BY_NAME["workflow"])
    assert "No job with this ID was found" in page(viewer, "workflows", id="nobody")


def test_retry_of_workflow_runs_failed_roots_and_blocks_the_rest(storage, pages, retrier):
    work(storage, "fail", slots=2)
    html = page(retrier)
    assert ">Retry workflow: 3 failed jobs</button>" in html
    assert "1 failed job is blocked until its dependencies complete" in html

    visit(retrier, BY_NAME["workflow_retry"])

    said = "2 jobs will be retried. 1 job is blocked until its dependencies complete."
    assert said in page(retrier)
    event = AuditEvent.objects.get(action="workflow_retry")
    assert (event.queue, event.job_id, event.count) == ("emails", "job-1", 3)
    assert storage.reads.states("emails", ["job-1", "job-2"]) == [State.WAITING] * 2
    assert storage.reads.states("books", ["book"]) == [State.BLOCKED]
    assert "Retry workflow" not in page(retrier)

    work(storage, slots=2)
    assert storage.reads.states("books", ["book"]) == [State.WAITING]


def test_workflow_whose_roots_fail_again_is_retried_as_a_whole(storage, pages, retrier):
    for _ in range(2):
        work(storage, "fail", slots=2)
        assert storage.reads.states("books", ["book"]) == [State.FAILED]
        visit(retrier, BY_NAME["workflow_retry"])
    assert storage.reads.states("books", ["book"]) == [State.BLOCKED]


def test_second_retry_of_workflow_finds_no_failed_jobs(storage, pages, retrier):
    work(storage, "fail", slots=2)
    visit(retrier, BY_NAME["workflow_retry"])
    visit(retrier, BY_NAME["workflow_retry"])
    assert AuditEvent.objects.filter(action="workflow_retry").count() == 1
    assert "no failed job can be retried" in page(retrier)


def test_retry_is_not_offered_without_permission(storage, pages, viewer):
    work(storage, "fail", slots=2)
    assert "Retry workflow" not in page(viewer)


def test_page_lists_jobs_that_cannot_be_retried(storage, retrier):
    emails = Queue("emails")
    first = emails.node(1, name="fetch", id="job-1", unique_key="one")
    chain(first, emails.node(2, name="merge")).enqueue()
    work(storage, "fail", slots=1)
    emails.enqueue(3, unique_key="one", delay=1_000)
    html = page(retrier)
    assert "unique key in use (1)" in html
    assert ">Retry workflow: 1 failed job</button>" in html


def test_jobs_of_hidden_queues_are_hidden(monkeypatch, storage, pages, retrier):
    monkeypatch.setattr(rights, "sees", hides_books)
    for name in ("workflow", "workflows", "job"):
        html = page(retrier, name)
        assert "merge" not in html, name
        assert "/books/" not in html, name


def test_failed_job_behind_hidden_job_is_shown(monkeypatch, storage, retrier):
    first = Queue("books").node(1, name="fetch")
    chain(first, Queue("emails").node(2, name="merge", id="job-1")).enqueue()
    work(storage, "fail")
    monkeypatch.setattr(rights, "sees", hides_books)

    assert "1 failed job is blocked until its dependencies complete" in page(retrier)
    visit(retrier, BY_NAME["workflow_retry"])

    assert storage.reads.states("emails", ["job-1"]) == [State.BLOCKED]
    assert storage.reads.states("books", [first.id]) == [State.FAILED]


def test_finished_job_names_jobs_before_and_after_it(storage, viewer):
    emails = Queue("emails")
    one, two, three = (emails.node(number, name="fetch", id=f"job-{number}") for number in range(3))
    chain(one, two, three).enqueue()
    for _ in range(3):
        work(storage)

    html = page(viewer, "job")

    assert ">Workflow of 3 jobs</a>" in html
    before, after = html.index("<h3>Waits for</h3>"), html.index("<h3>Dependents</h3>")
    assert before < html.index(">job-0</span>") < after < html.index(">job-2</span>")


def test_failed_jobs_of_large_workflow_are_named(storage, monkeypatch, viewer):
    monkeypatch.setattr(flowcharts.draw, "__defaults__", (10,))
    emails = Queue("emails")
    parts = [emails.node(number, name="fetch", id=f"job-{number}") for number in range(12)]
    chord(parts, then=emails.node(0, name="merge")).enqueue()
    failed = work(storage, "fail", slots=2)

    html = page(viewer, each="1")

    assert "fetch × 10" in html
    assert "Jobs of the same step and state are grouped" in html
    listed = html[html.index("<h2>Failed jobs</h2>") :]
    assert all(job_id in listed for job_id in failed)


def test_names_are_escaped():
    node = workflows.FlowNode("q", "1", "<b>&\"'" + "x" * 30, State.FAILED)
    graph = workflows.FlowGraph(0, [node], [])
    drawn = flowcharts.svg(graph, flowcharts.draw(graph), lambda _: '/"><script>')
    [link] = ElementTree.fromstring(str(drawn)).iter("a")
    assert link.attrib["href"] == '/"><script>'
    texts = [text.text for text in link.iter("text")]
    assert texts[0].startswith("<b>&\"'x")
    assert len(texts[0]) == flowcharts.MAX_CHARACTERS
    assert texts[1] == "✕ failed"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shop.fetch", "shop.fetch"),
        ("demo_project.flights.jobs.draw_delay_chart", "draw_delay_chart"),
        ("shop.jobs.send_the_digest_of_an_airline", "send_the_digest_of_an…"),
    ],
)
def test_long_name_is_shortened_to_its_last_part(name, said):
    graph = workflows.FlowGraph(0, [workflows.FlowNode("q", "1", name, State.WAITING)], [])
    drawn = flowcharts.svg(graph, flowcharts.draw(graph), lambda _: "/")
    [link] = ElementTree.fromstring(str(drawn)).iter("a")
    assert link.find("text").text == said
    assert link.find("title").text == f"{name}, waiting, q 1"


def test_workflow_is_listed_in_the_state_of_the_whole(storage, pages, viewer):
    work(storage)
    work(storage, "fail")

    assert "data-djq-row" not in page(viewer, "workflows", state="completed")
    assert page(viewer, "workflows", state="failed").count("data-djq-row") == 1
    assert "data-djq-row" not in page(viewer, "workflows")


def test_all_workflows_are_found_among_many_other_jobs_with_few_queries(storage):
    if not storage.capabilities.mirrored_states:
        pytest.skip("the engine keeps no rows to search")
    emails = Queue("emails")
    for number in range(8):
        chain(emails.node(number, name="fetch"), emails.node(number, name="merge")).enqueue()
    while work(storage, "fail", slots=8):
        pass
    emails.enqueue_many(range(workflows.MAX_SEARCHED + 10), name="fetch")
    while work(storage, "fail", slots=50):
        pass
    client = logged_in(one_with(rights.VIEW))
    page(client, "workflows", state="failed")

    with recorded() as captured:
        html = page(client, "workflows", state="failed")

    assert html.count("data-djq-row") == 8
    assert len(captured) <= 35


@pytest.mark.parametrize("state", ["live", "completed", "failed"])
def test_every_workflow_is_on_one_page_of_the_list(storage, viewer, monkeypatch, state):
    if not storage.capabilities.mirrored_states:
        pytest.skip("the engine keeps no rows to search")
    monkeypatch.setattr(workflows, "MAX_LISTED", 2)
    monkeypatch.setattr(workflows, "MAX_CANDIDATES", 7)
    emails = Queue("emails")
    for number, size in enumerate((5, 1, 86, 2, 3)):
        parts = [emails.node(number, name="fetch") for _ in range(size - 1)]
        last = emails.node(number, name="merge", id=f"last-{number}")
        (chord(parts, then=last) if parts else chain(last)).enqueue()
    while state != "live" and work(storage, "fail" if state == "failed" else "complete", slots=50):
        pass

    sizes, url = [], address(BY_NAME["workflows"], state=state)
    while url:
        read_cache.clear()
        html = viewer.get(url).content.decode()
        sizes.append(re.findall(r"<progress .* max=\"(\d+)\"", html))
        older = re.search(r'href="([^"]+)" rel="next"', html)
        url = older and unescape(older[1])

    assert sorted(int(size) for one in sizes for size in one) == [2, 3, 5, 86]
    assert len(sizes) >= 2


@pytest.mark.parametrize("count", [5, 40])
def test_list_takes_few_queries_for_any_size_of_workflow(storage, count):
    emails = Queue("emails")
    parts = [emails.node(number, name="fetch") for number in range(count)]
    chord(parts, then=emails.node(0, name="merge")).enqueue()
    client = logged_in(one_with(rights.VIEW))

    def takes_few_queries() -> bool:
        with recorded() as captured:
            page(client, "workflows")
        return len(captured) <= 30

    # A storage that answers slowly, on a busy machine, is asked again.
    eventually(takes_few_queries)
