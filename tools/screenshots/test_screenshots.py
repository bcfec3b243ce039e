"""Pictures of every page of the dashboard, of the demo as it runs: `make screenshots`."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urljoin, urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from djqueue.dashboard.urls import PAGES
from tests.dashboard.browser.conftest import QUIET
from tests.dashboard.browser.test_access import DOWNLOADS
from tests.demo.project import ROOT, TIMEOUT_SECONDS, DemoProject

from . import pictures

pytestmark = pytest.mark.slow

LINKS = """[...document.querySelectorAll('#djq a[href]')].map(
  (link) => new URL(link.getAttribute('href'), location.href).href
)"""
"""The addresses of a page's links, those of drawings included, whose `href` is no text."""

FLIGHTS = "60000"
PREFERRED = {
    "queue": re.compile(r"/queues/claims/"),
    "errors": re.compile(r"/errors/$"),
    "jobs": re.compile(r"/jobs/\?state=completed"),
    "job_types": re.compile(r"/job-types/$"),
}
"""Which address of a page is shown, of those that links lead to; else the first."""
DISGUISE = """([words]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    for (const [from, to] of Object.entries(words)) {
      if (text.data.includes(from)) text.data = text.data.replaceAll(from, to);
    }
    text.data = text.data.replaceAll(/\\/tmp\\/[^ ]*pictures\\d*/g, "/srv/flights/var");
  }
}"""
"""Takes where this is made, and on which machine, out of the page."""
LISTED = {"job": "errors/?queue=claims", "job-waiting": "queues/charts/"}
"""Pages of single jobs, by the list of which the first is shown: one that has failed, one that waits."""
ALIKE = {"all_delete", "all_cancel", "all_promote", "schedule_edit"}
"""Pages that look as others do."""
ABSENT = {"bulk_writes", "bulk_write", "bulk_write_cancel", "bulk_write_retry"}
"""Pages of what a demo without Spark does not have."""
ROUTES = {
    page.name: re.compile(re.sub(r"<[^>]*>", "[^/]+", page.route) + "$")
    for page in sorted(PAGES, key=lambda page: "<" in page.route)
    if page.method == "GET" and page.name not in ALIKE | ABSENT
}
"""Addresses of pages. Those without a parameter come first: so `schedules/new/` is no schedule."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the dashboard of a demo that is running, with jobs in every state."""
    project = DemoProject(tmp_path_factory.mktemp("pictures"))
    with running(project, "All jobs are done.", "-m", "demo_project.demo", "--flights", FLIGHTS) as address:
        staged = project.start("-m", "tools.screenshots.stage")
        output, _ = staged.communicate(timeout=TIMEOUT_SECONDS * 3)
        assert staged.returncode == 0, output
        yield address


@pytest.fixture(scope="module")
def spark_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the dashboard of the demo by way of Spark, when all is done."""
    pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
    project = DemoProject(tmp_path_factory.mktemp("pictures"))
    with running(project, "Server and workers stay up", "-m", "demo_project.spark", "--serve") as address:
        yield address


@contextmanager
def running(project: DemoProject, until: str, *command: str) -> Iterator[str]:
    """The address of the dashboard of a demo that has said a line."""
    with project.start(*command) as process:
        try:
            address = ""
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="")
                if found := re.search(r"http://\S+/admin/", line):
                    address = found[0]
                if line.startswith(until):
                    break
            assert address, "the demo has ended"
            yield urljoin(address, "djqueue/dashboard/")
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=QUIET)
        yield chromium
        chromium.close()


def window(browser: Browser, shape: pictures.Shape, dashboard: str) -> Page:
    """A window of this shape, logged in."""
    context = browser.new_context(
        viewport={"width": shape.width, "height": 900},
        color_scheme="dark" if shape.scheme == "dark" else "light",
        timezone_id="America/New_York",
        locale="en-US",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(dashboard)
    page.fill("#id_username", "admin")
    page.fill("#id_password", "admin")
    page.click("input[type=submit]")
    page.wait_for_selector("#djq")
    return page


def begin_a_bulk_operation(page: Page, dashboard: str) -> None:
    """Retry the dead letters, as an operator would."""
    page.goto(urljoin(dashboard, "errors/begin/?kind=retry&queue=claims"))
    page.fill("#id_rate", "20")
    page.click("#djq button.djq-main")
    page.wait_for_url("**/history/operations/*/")


def named(address: str, dashboard: str) -> str:
    """The name of the page of an address; empty if it is another one's."""
    path = urlsplit(address).path
    base = urlsplit(dashboard).path
    if not path.startswith(base):
        return ""
    found = [name for name, route in ROUTES.items() if route.match(path.removeprefix(base))]
    return found[0] if found else ""


def addresses(page: Page, dashboard: str) -> dict[str, str]:
    """An address for each page that links lead to, from the first page on."""
    found: dict[str, str] = {"status": dashboard}
    visited: set[str] = set()
    while waiting := [url for url in found.values() if url not in visited]:
        visited.add(waiting[0])
        answer = page.context.request.get(waiting[0])
        if not answer.headers["content-type"].startswith("text/html"):
            continue
        page.goto(waiting[0])
        for url in page.evaluate(LINKS):
            name = named(url, dashboard)
            wanted = PREFERRED.get(name)
            if name and (
                name not in found or (wanted and wanted.search(url) and not wanted.search(found[name]))
            ):
                found[name] = url
    for name, where in LISTED.items():
        page.goto(urljoin(dashboard, where))
        found[name] = page.locator("#djq tbody th a[href*='/jobs/']").first.evaluate("(link) => link.href")
    return {
        name: url
        for name, url in found.items()
        if page.context.request.get(url).headers["content-type"].startswith("text/html")
    }


def take(page: Page, address: str, shape: pictures.Shape) -> bytes:
    page.goto(address)
    page.wait_for_function("window.htmx !== undefined")
    page.mouse.move(0, 0)
    page.evaluate(DISGUISE, [{str(ROOT): "/srv/flights", socket.gethostname(): "worker-1"}])
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": shape.width, "height": min(height, shape.longest)})
    page.wait_for_function(
        "[...document.querySelectorAll('.djq-plot')].every((one) => !one.clientWidth || one.firstChild)"
    )
    taken = page.screenshot()
    page.set_viewport_size({"width": shape.width, "height": 900})
    return taken


def test_every_page_has_its_pictures(demo: str, browser: Browser) -> None:
    page = window(browser, pictures.DESKTOP[0], demo)
    begin_a_bulk_operation(page, demo)
    found = addresses(page, demo)
    changed = []
    for shape in (*pictures.DESKTOP, *pictures.PHONE):
        page = window(browser, shape, demo)
        for name, address in found.items():
            if shape in pictures.shapes(name):
                path = shape.path(name)
                if pictures.save(take(page, address, shape), path):
                    changed.append(path.name)
                assert path.stat().st_size < pictures.LARGEST, path
    print(f"{len(found)} pages: {', '.join(found)}. New pictures: {', '.join(changed) or 'none'}.")
    assert set(ROUTES) - found.keys() - DOWNLOADS == set(), "no link leads there"


def test_what_spark_has_brought_has_its_pictures(spark_demo: str, browser: Browser) -> None:
    for shape in pictures.DESKTOP:
        page = window(browser, shape, spark_demo)
        page.goto(urljoin(spark_demo, "history/bulk-writes/"))
        latest = page.locator("#djq tbody a[href*='/history/bulk-writes/']").last.evaluate(
            "(link) => link.href"
        )
        for name, address in (
            ("bulk_writes", urljoin(spark_demo, "history/bulk-writes/")),
            ("bulk_write", latest),
        ):
            path = shape.path(name)
            pictures.save(take(page, address, shape), path)
            assert path.stat().st_size < pictures.LARGEST, path
