"""The page of a queue with groups, a shared limiter, an objective and annotations."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.job import ClaimRequest
from djqueue.core.policies import KeyLimit
from djqueue.operations.annotations import annotate
from tests.dashboard.browser.test_access import scrolls_sideways, violations
from tests.dashboard.visiting import PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

BY_NAME = {page.name: page for page in PAGES}
HAS_COLOR = """
([figure, name]) => {
  const canvas = document.querySelector(`#${figure} canvas`);
  if (!canvas) return false;
  const probe = document.createElement("canvas").getContext("2d");
  const token = document.getElementById("djq").appendChild(document.createElement("span"));
  token.style.color = `var(${name})`;
  probe.fillStyle = getComputedStyle(token).color;
  token.remove();
  probe.fillRect(0, 0, 1, 1);
  const wanted = [...probe.getImageData(0, 0, 1, 1).data].join();
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let at = 0; at < pixels.length; at += 4) {
    if (pixels.slice(at, at + 4).join() === wanted) return true;
  }
  return false;
}
"""


@pytest.fixture
def queue(settings: Any, memory: None) -> Queue:
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "LIMITERS": {"mail": {"RATE": "100/h", "CONCURRENCY": 2}},
        "QUEUES": {"emails": {"LIMITER": "mail", "OBJECTIVE": 30}, "reports": {"LIMITER": "mail"}},
    }
    queue = Queue("emails")
    for number, name in enumerate(("acme", "globex", "a company with a rather long name indeed, Ltd.")):
        queue.enqueue_many(range(3 + number), concurrency_key=name)
    queue.set_key_limit("globex", concurrency=3, rate="10/m")
    get_storage().claim(ClaimRequest("w1", 9, frozenset({"emails"}), ("emails",)))
    annotate("default", "v1.2")
    return queue


SLOW = ("willReadFrequently",)
"""Chromium's advice to whoever reads a canvas, which only this test does."""


def wait_for_color(window: Page, figure: str, name: str) -> None:
    window.wait_for_function(HAS_COLOR, arg=[figure, name])


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("dark", 1280),
        pytest.param("light", 1280, marks=pytest.mark.thorough),
        pytest.param("light", 390, marks=pytest.mark.thorough),
    ],
)
def test_queue_page_is_accessible_and_charts_are_drawn(scheme, width, open_page, queue):
    where = address(BY_NAME["queue"], concurrency_key="globex")
    window = open_page(where, scheme=scheme, width=width, expected=SLOW)
    wait_for_color(window, "djq-throughput", "--djq-mark")
    wait_for_color(window, "djq-times", "--djq-mark")
    wait_for_color(window, "djq-times", "--djq-bad")
    assert violations(window) == []
    assert not scrolls_sideways(window)


@pytest.mark.parametrize("scripts", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_concurrency_key_is_found_limited_and_paused(open_page, queue, scripts):
    window = open_page(address(BY_NAME["queue"]), scripts=scripts)
    window.get_by_label("Concurrency key", exact=True).fill("acme")
    window.get_by_role("button", name="Find key").click()
    card = window.locator("#djq-key-limits")
    expect(card).to_contain_text("Limits of concurrency key acme")
    card.get_by_label("Concurrency").fill("4")
    card.get_by_role("button", name="Save limits").click()
    expect(window.locator(".messagelist")).to_contain_text("Changed the limits of concurrency key acme.")

    window.get_by_role("button", name="Pause acme", exact=True).click()
    expect(window.get_by_role("button", name="Resume acme", exact=True)).to_be_visible()
    assert queue.key_limits()["acme"] == KeyLimit(4, paused=True)
