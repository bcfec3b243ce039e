"""The page of a workflow: light and dark, wide and narrow, by keyboard, and for screen readers."""

import pytest
from playwright.sync_api import expect

from djqueue import Queue, chain, chord, group
from djqueue.client import get_storage
from djqueue.testing.factories import claim, completing, failing, finish
from tests.dashboard.browser.test_access import scrolls_sideways, violations
from tests.dashboard.visiting import PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

BY_NAME = {page.name: page for page in PAGES}
NAMES = ["fetch", "clean", "merge", "publish", "tell everybody who has asked for it"]


@pytest.fixture
def flow():
    """Jobs in most states: the first has completed, another has failed, one runs."""
    emails, books = Queue("emails"), Queue("books")
    first = emails.node(0, name="fetch", id="job-1")
    middle = [
        chain(emails.node(n, name="fetch", id=f"f{n}"), emails.node(n, name="clean", id=f"c{n}"))
        for n in range(4)
    ]
    end = [books.node(n, name=NAMES[3 + n], id=f"end-{n}") for n in range(2)]
    chain(first, chord(middle, then=books.node(9, name="merge", id="merge")), group(*end)).enqueue()
    storage = get_storage()
    for one in claim(storage, 1, names=NAMES):
        finish(storage, completing(one))
    ended = claim(storage, 3, names=NAMES)
    finish(storage, completing(ended[0]), failing(ended[1]))
    return [one.id for one in ended]


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 390),
        pytest.param("light", 1280, marks=pytest.mark.thorough),
        pytest.param("dark", 1280, marks=pytest.mark.thorough),
        pytest.param("dark", 390, marks=pytest.mark.thorough),
    ],
)
def test_workflow_page_is_accessible_and_only_the_graph_scrolls_sideways(scheme, width, open_page, flow):
    window = open_page(address(BY_NAME["workflow"]), scheme=scheme, width=width)
    window.wait_for_function("window.htmx !== undefined")
    window.locator(".djq-twin summary").click()
    assert violations(window) == []
    assert not scrolls_sideways(window)
    graph = window.locator(".djq-graph")
    assert graph.evaluate("graph => graph.scrollWidth > graph.clientWidth"), "five steps are wider than that"
    expect(window.get_by_role("group", name="Workflow of 12 jobs")).to_be_visible()
    expect(window.locator(".djq-twin tbody tr")).to_have_count(12)


def test_job_of_the_graph_opens_by_keyboard(open_page, flow):
    window = open_page(address(BY_NAME["workflow"]))
    window.get_by_role("link", name="merge, failed, books merge").focus()
    window.keyboard.press("Enter")
    expect(window.locator("h2.djq-mono")).to_contain_text("merge")
    expect(window.get_by_role("heading", name="Workflow")).to_be_visible()


def test_workflow_is_retried_without_scripts(open_page, flow):
    window = open_page(address(BY_NAME["workflow"]), scripts=False)
    window.get_by_role("button", name="Retry workflow: 5 failed jobs").click()
    expect(window.locator(".messagelist")).to_contain_text("1 job will be retried")
    expect(window.get_by_role("link", name=f"fetch, waiting, emails {flow[1]}")).to_be_visible()
