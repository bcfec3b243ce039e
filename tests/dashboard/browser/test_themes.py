"""Themes of the admin: those with an htmx of their own, and popular ones as they are installed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from djqueue import Queue
from djqueue.dashboard.reading import read_cache
from tests.dashboard.browser.test_access import scrolls_sideways, violations
from tests.dashboard.browser.test_live import BY_NAME, look, look_until_unchanged
from tests.dashboard.visiting import address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

HERE = Path(__file__).parent
VENDORED = {
    "2.0.11": HERE.parent / "vendor" / "htmx-2.0.11",
    "4.0.1": HERE.parents[2] / "static" / "djqueue" / "vendor" / "htmx-4.0.1",
}


@pytest.fixture(params=VENDORED)
def theme(request: Any, settings: Any) -> str:
    version: str = request.param
    settings.STATICFILES_DIRS = [("theme", VENDORED[version])]
    [templates] = settings.TEMPLATES
    options = {
        **templates["OPTIONS"],
        "context_processors": [*templates["OPTIONS"]["context_processors"], f"{__name__}.v{version[0]}"],
    }
    settings.TEMPLATES = [{**templates, "DIRS": [HERE / "theme"], "OPTIONS": options}]
    return version


def v2(request: Any) -> dict[str, str]:
    return {"theme_htmx": "theme/htmx-2.0.11.min.js"}


def v4(request: Any) -> dict[str, str]:
    return {"theme_htmx": "theme/htmx-4.0.1.min.js"}


def opened(open_page: Any, page: str, **query: str) -> Page:
    window: Page = open_page(address(BY_NAME[page], **query))
    window.wait_for_function("window.htmx !== undefined")
    window.locator("[data-djq-every]").select_option("0")
    window.locator("h1").click()
    return window


def test_page_uses_htmx_of_theme_and_refreshes_with_one_request(open_page, theme):
    queue = Queue("emails")
    queue.enqueue(1, delay=3_600)  # with no age, which would grow
    page = opened(open_page, "queues")
    assert page.evaluate("htmx.version").startswith(theme)
    assert page.locator("script[src*=htmx]").count() == 1

    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    looks = look_until_unchanged(page)
    assert page.evaluate("djqChanges") == 0
    queue.pause()
    read_cache.clear()
    assert look(page).status == 200
    expect(page.locator("tr[data-djq-row]")).to_contain_text("paused")
    looks += 1
    assert len(asked) == looks

    with page.expect_response(lambda answer: "jsi18n" in answer.url):
        page.evaluate("htmx.trigger(document.getElementById('theirs'), 'theirpoll')")
    assert len(asked) == looks + 1


def test_long_list_on_a_phone_refreshes_while_all_rows_are_shown(open_page, theme):
    queue = Queue("emails")
    queue.enqueue_many(range(12))
    page = opened(open_page, "jobs", state="waiting")
    page.set_viewport_size({"width": 390, "height": 900})
    page.get_by_label("Show all 12 rows").check()
    queue.enqueue(1)
    read_cache.clear()
    with page.expect_response(lambda answer: "hx-request" in answer.request.headers):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.get_by_label("Show all 13 rows")).to_be_checked()
    expect(page.locator("tr[data-djq-row]:visible")).to_have_count(13)


def test_expired_session_shows_banner_whatever_the_theme_swaps(open_page, theme):
    page = open_page(address(BY_NAME["queues"]), expected=("401", "Response Status Error"))
    page.wait_for_function("window.htmx !== undefined")
    page.evaluate("htmx.config.noSwap = [204, 304]")
    page.locator("[data-djq-every]").select_option("0")
    page.locator("h1").click()
    page.context.clear_cookies()
    assert look(page).status == 401
    expect(page.locator("#djq-banner")).to_contain_text("session has expired")
    expect(page.locator("#djq-live table, #djq-live p").first).to_be_visible()


LOOKS = """() => {
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  const number = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const cell = style(innerWidth < 768 ? "#djq .djq-cards tbody tr" : "#djq .djq-table tbody td");
  const [red, green, blue] = number(style("#djq .djq-danger").color);
  return {
    borders: cell.borderBottomWidth !== "0px" && cell.borderBottomColor !== style("body").backgroundColor,
    sparklines: [...document.querySelectorAll("#djq .djq-spark polyline")].every(
      (one) => getComputedStyle(one).stroke !== "none" && getComputedStyle(one).strokeWidth !== "0px"
    ),
    danger: red > green + 60 && red > blue + 60,
    sticky: style("#djq thead th").position === "sticky",
  };
}"""
THEMED = ("", "jobs/?state=failed", "queues/emails/", "errors/", "workflows/emails/flow-1/", "schedules/")


@pytest.fixture(scope="module", params=["unfold", "jazzmin"])
def themed(request: Any, tmp_path_factory: Any) -> Iterator[dict[str, str]]:
    """Address and session of a project under a theme, in a process of its own: themes replace the site."""
    pytest.importorskip(request.param)
    name = tmp_path_factory.mktemp("themed") / "db.sqlite3"
    env = {**os.environ, "DJQUEUE_TEST_THEME": request.param, "DJQUEUE_TEST_NAME": str(name)}
    command = [sys.executable, "-m", "tests.dashboard.themed"]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


@pytest.mark.thorough
@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 1440), ("light", 390)])
def test_pages_look_right_and_are_accessible_under_theme(browser: Browser, themed, scheme, width):
    context = browser.new_context(
        base_url=themed["url"], viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    context.add_cookies([{"name": "sessionid", "value": themed["session"], "url": themed["url"]}])
    page, found = context.new_page(), {}
    for path in THEMED:
        page.goto(f"/admin/djqueue/dashboard/{path}")
        page.wait_for_function("window.htmx !== undefined")
        found[path] = (violations(page), scrolls_sideways(page))
    page.goto("/admin/djqueue/dashboard/errors/")
    looks = page.evaluate(LOOKS)
    context.close()
    assert found == dict.fromkeys(THEMED, ([], False))
    assert looks == {"borders": True, "sparklines": True, "danger": True, "sticky": True}
