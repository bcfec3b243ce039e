"""Open pages refresh themselves, and request nothing while they are hidden."""

from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.metrics import MINUTE
from djqueue.core.states import State
from djqueue.dashboard.reading import read_cache
from djqueue.testing.factories import a_failed_job, claim, completing, failing, finish
from tests.dashboard.acting import note_error
from tests.dashboard.test_streams import Served, served
from tests.dashboard.visiting import PAGES, address
from tests.support import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

BY_NAME = {page.name: page for page in PAGES}
COUNT = """
window.djqChanges = 0;
const live = document.getElementById("djq-live"); // itself is marked while it asks; times tick
const counts = (change) => change.target !== live && !change.target.closest?.("time");
new MutationObserver((all) => { djqChanges += all.filter(counts).length; }).observe(
  live,
  {subtree: true, childList: true, attributes: true, characterData: true},
);
"""


KEEP_PLOTS = """
window.djqPlots = [];
let library;
const keep = (Plot, values) => {
  const plot = new Plot(...values);
  djqPlots.push(plot);
  return plot;
};
Object.defineProperty(window, "uPlot", {
  get: () => library,
  set: (value) => { library = new Proxy(value, {construct: keep}); },
});
"""
WRONG_PLOTS = """
djqPlots.filter((plot) => plot.root.isConnected).flatMap((plot) => {
  const rows = [...plot.root.closest("figure").querySelectorAll("table.djq-table tbody tr")];
  const cell = (row, column) => row.children[column].dataset.v;
  const head = plot.root.closest("figure").querySelectorAll("table.djq-table thead th");
  const number = (row, column) => cell(row, column) === "" ? null : Number(cell(row, column));
  const expected = plot.series.map((_series, column) => rows.map(
    (row) => number(row, column) + ("djqStack" in head[column].dataset ? number(row, column - 1) : null)
      || (cell(row, column) === "" ? null : 0)));
  return JSON.stringify(expected) === JSON.stringify(plot.data) ? [] : [[expected, plot.data]];
})
"""
FACTS = """
Object.fromEntries([...document.querySelectorAll(".djq-facts li")].map(
  (one) => [one.querySelector("span").textContent, one.querySelector("strong").textContent]))
"""
TABS = """
Object.fromEntries([...document.querySelectorAll(".djq-states li")].map(
  (one) => [one.textContent.trim().split(/\\s+/)[0], one.querySelector("strong")?.textContent]))
"""
ROW = """
Object.fromEntries([...document.querySelectorAll("tr[data-djq-row] [data-label]")].map(
  (cell) => [cell.dataset.label, cell.textContent.trim()]))
"""
CHART = """
[...document.querySelectorAll("#djq-throughput table.djq-table tbody tr")].map(
  (row) => [...row.children].map((cell) => Number(cell.dataset.v)))
"""
SETTLED = "!document.querySelector('.htmx-request, .htmx-swapping, .htmx-settling, .htmx-added')"


def test_every_column_of_queues_fits_beside_the_sidebar(open_page: Any) -> None:
    Queue("emails").enqueue(1, name="send")
    Queue("emails").set_limits(rate="500/s", concurrency=20)
    page = open_page(address(BY_NAME["queues"]))

    for name in ("Wait p95", "Workers"):
        expect(page.get_by_role("columnheader", name=name)).to_be_visible()
    live = page.locator("#djq-live")
    live.locator("time").first.evaluate("(time) => { time.textContent = '59 min. ago'; }")
    assert live.evaluate("(live) => live.scrollWidth - live.clientWidth") <= 0


def test_long_list_on_a_phone_has_ten_short_cards_until_all_are_asked_for(open_page: Any) -> None:
    Queue("emails").enqueue_many([{"order": number, "text": "x" * 200} for number in range(60)], name="send")
    page = ready(open_page(address(BY_NAME["jobs"], state="waiting"), width=390))
    rows = page.locator("tr[data-djq-row]:visible")
    expect(rows).to_have_count(10)
    assert page.evaluate("document.documentElement.scrollHeight") <= 2_500
    assert rows.evaluate_all("(rows) => Math.max(...rows.map((row) => row.clientHeight))") <= 80

    page.get_by_label("Show all 50 rows").check()
    expect(rows).to_have_count(50)
    page.locator("h1").click()
    look(page)
    expect(rows).to_have_count(50)


def look(page: Page) -> Any:
    """Refresh the page, as its timer would, and return the response."""
    with page.expect_response(lambda answer: "hx-request" in answer.request.headers) as found:
        page.keyboard.press("r")
    page.wait_for_function(SETTLED)
    return found.value


def look_until_unchanged(page: Page) -> int:
    """Refresh the page until the server responds that nothing has changed, as nothing does in most minutes.

    Return how often. The page counts the changes of the last refresh.
    """
    read_cache.clear()
    look(page)
    for times in range(2, 10):
        page.evaluate(COUNT)
        read_cache.clear()
        if look(page).status == 304:
            return times
    raise AssertionError("every refresh changed the page")


def ready(page: Page) -> Page:
    page.wait_for_function("window.htmx !== undefined")
    page.locator("[data-djq-every]").select_option("0")
    page.locator("h1").click()
    return page


def test_refresh_shows_changes_and_leaves_unchanged_page_alone(open_page):
    queue = Queue("emails")
    queue.enqueue(1, delay=3_600)  # with no age, which would grow
    page = ready(open_page(address(BY_NAME["queues"])))
    row = page.locator("tr[data-djq-row]")
    expect(row).to_contain_text("emails")

    look_until_unchanged(page)
    assert page.evaluate("djqChanges") == 0

    queue.pause()
    read_cache.clear()
    assert look(page).status == 200
    expect(row).to_contain_text("paused")


def assert_page_shows_what_storage_answers(page: Page, name: str) -> None:
    """Compare the numbers of a page, and the points of its charts, with the storage's own answers."""
    reads = get_storage().reads
    [queue] = reads.overview(["emails"]).queues
    counts = {str(state.value): str(queue.counts.get(state, 0)) for state in State}
    totals = {"Waiting": counts["waiting"], "Active": counts["active"], "Delayed": counts["delayed"]}
    if name == "status":
        facts = page.evaluate(FACTS)
        assert facts.items() >= {**totals, "Dead letters": counts["failed"]}.items()
        assert facts["Failed in the last hour"] == str(queue.totals.failed)
    elif name in ("queue", "jobs"):
        assert page.evaluate(TABS).items() >= counts.items()
    elif name == "queues":
        assert page.evaluate(ROW).items() >= {**totals, "Dead letters": counts["failed"]}.items()
    elif name == "job_types":
        shown = page.evaluate(ROW)
        for label in ("enqueued", "completed", "failed", "retried"):
            assert shown[label.capitalize()] == str(getattr(queue.totals, label)), label
    elif name == "errors":
        expect(page.locator("#djq-live")).to_contain_text(f"{counts['failed']} matching dead letter")
        assert page.evaluate(ROW)["Failed jobs"] == counts["failed"]
    if page.locator("#djq-throughput").count():
        points = page.evaluate(CHART)
        start, end = int(points[0][0]) * 1_000, int(points[-1][0]) * 1_000 + MINUTE
        buckets = reads.series(["emails"], start, end, MINUTE)
        assert points == [
            [one.start // 1_000, one.enqueued, one.completed, one.failed, one.retried] for one in buckets
        ]
    assert page.evaluate(WRONG_PLOTS) == []


def test_pages_and_their_charts_show_what_storage_answers_after_three_refreshes(open_page):
    queue, storage = Queue("emails"), get_storage()
    queue.enqueue(0, id="delayed", delay=3_600)
    page = open_page("about:blank")
    page.add_init_script(KEEP_PLOTS)
    for number, name in enumerate(("status", "queues", "queue", "jobs", "job_types", "errors")):
        for refresh in range(4):
            queue.enqueue_many(range(3), ids=[f"{at}-{number}-{refresh}" for at in range(3)])
            claimed = claim(storage, 2, names=["emails"])
            finish(storage, completing(claimed[0]), failing(claimed[1], "timeout"))
            note_error("emails")
            storage.sweep()
            read_cache.clear()
            if refresh:
                assert look(page).status == 200
            else:
                page.goto(address(BY_NAME[name]))
                ready(page)
            assert_page_shows_what_storage_answers(page, name)


def test_hidden_page_sends_no_requests(open_page):
    page = ready(open_page(address(BY_NAME["queues"])))
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.djqHidden})")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("window.djqHidden = true")
    page.keyboard.press("r")
    page.evaluate("htmx.trigger(document.getElementById('djq-live'), 'djqpoll')")
    page.evaluate("window.djqHidden = false")
    assert look(page).status in (200, 304)
    assert len(asked) == 1


def test_expired_session_shows_banner_and_no_login_form(open_page):
    page = ready(open_page(address(BY_NAME["queues"]), expected=("401",)))
    page.context.clear_cookies()
    assert look(page).status == 401
    expect(page.locator("#djq-banner")).to_contain_text("session has expired")
    assert page.locator("#id_password").count() == 0


def test_button_of_refreshed_content_acts_and_returns_to_the_page(open_page):
    Queue("emails").enqueue(1)
    page = ready(open_page(address(BY_NAME["queues"], q="mail")))
    page.get_by_role("button", name="Pause emails").click()
    expect(page.locator(".messagelist")).to_contain_text("Paused queue emails")
    assert page.url.endswith("?q=mail")
    expect(page.get_by_role("button", name="Resume emails")).to_be_visible()


def test_open_menu_stays_open_when_page_refreshes(open_page):
    queue = Queue("emails")
    queue.enqueue(1, id="job-1")
    page = ready(open_page(address(BY_NAME["jobs"], state="waiting")))
    page.locator("details.djq-menu summary").click()
    queue.enqueue(2, id="job-2")
    read_cache.clear()
    look(page)
    expect(page.locator("details.djq-menu")).to_have_count(2)
    expect(page.locator("details.djq-menu[open]")).to_have_count(1)
    expect(page.get_by_role("button", name="Cancel job-1", exact=True)).to_be_visible()


def test_selected_rows_stay_selected_when_page_refreshes(open_page):
    storage = get_storage()
    ticked = a_failed_job(storage)
    page = ready(open_page(address(BY_NAME["errors"])))
    box = page.locator(f"[data-djq-one][value$='{ticked}']")
    box.check()
    page.locator("h1").click()
    a_failed_job(storage)
    read_cache.clear()
    assert look(page).status == 200
    expect(page.locator("[data-djq-one]")).to_have_count(2)
    expect(page.locator("[data-djq-one]:checked")).to_have_count(1)
    expect(box).to_be_checked()


def test_back_button_returns_to_filtered_list(open_page):
    for name in ("emails", "reports"):
        Queue(name).enqueue(1)
    page = ready(open_page(address(BY_NAME["queues"])))
    page.locator("[data-djq-filter]").fill("mail")
    page.get_by_role("button", name="Show").click()
    page.locator("a[data-djq-open]").click()
    expect(page.locator("h1")).to_contain_text("emails")
    page.go_back()
    expect(page.locator("[data-djq-filter]")).to_have_value("mail")
    expect(page.locator("tr[data-djq-row]")).to_have_count(1)
    assert "q=mail" in page.url


def new_window(browser: Browser, server: Served) -> Page:
    """Open a window that waits for less than the minute after which a page refreshes without a stream."""
    site = f"http://127.0.0.1:{server.port}"
    name, _, session = server.headers["Cookie"].partition("=")
    context = browser.new_context(base_url=site)
    context.set_default_timeout(50_000)
    context.add_cookies([{"name": name, "value": session, "url": site}])
    return context.new_page()


def test_page_refreshes_on_stream_event_and_closes_stream_while_hidden(browser):
    Queue("emails").enqueue(1)
    with served(most=5) as server:
        page = new_window(browser, server)
        with page.expect_response(lambda answer: "hx-request" in answer.request.headers) as first:
            page.goto(address(BY_NAME["queues"]))
        assert first.value.status in (200, 304)
        assert page.locator("[data-djq-every]").input_value() == "60"
        assert server.followers()["streams"] == 1

        page.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.djqHidden})")
        for hidden, streams in ((True, 0), (False, 1)):
            page.evaluate(f"window.djqHidden = {str(hidden).lower()}")
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            eventually(lambda streams=streams: server.followers()["streams"] == streams)
        page.locator("[data-djq-every]").select_option("0")
        eventually(lambda: server.followers()["streams"] == 0)
        page.context.close()


def test_page_polls_when_no_stream_is_available(browser):
    Queue("emails").enqueue(1)
    with served(most=0) as server:
        page = new_window(browser, server)
        with page.expect_response(lambda answer: answer.status == 503):
            page.goto(address(BY_NAME["queues"]))
        with page.expect_response(lambda answer: "hx-request" in answer.request.headers) as polled:
            page.locator("[data-djq-every]").select_option("2")
        assert polled.value.status in (200, 304)
        page.context.close()
