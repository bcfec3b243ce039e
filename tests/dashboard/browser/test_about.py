"""The panel of an object's jobs on its admin page: light and dark, wide and narrow."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from playwright.sync_api import expect

from djqueue import Queue
from tests.dashboard.browser.test_access import axe

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.slow,
    pytest.mark.urls("tests.admin.about_urls"),
]


def violations(window: Any, part: str) -> list[Any]:
    """Return what axe finds in a part of an open page."""
    window.evaluate(axe())
    found = window.evaluate("(part) => axe.run({include: [[part]]}, {resultTypes: ['violations']})", part)
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]]


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 390),
        pytest.param("dark", 1280, marks=pytest.mark.thorough),
        pytest.param("light", 1280, marks=pytest.mark.thorough),
        pytest.param("dark", 390, marks=pytest.mark.thorough),
    ],
)
def test_panel_links_to_job_and_job_links_back(scheme, width, open_page):
    ada = User.objects.create(username="ada")
    queue = Queue("emails")
    for name in ("greet", "remind", f"shop.jobs.{'a_long_name_' * 8}"):
        queue.enqueue(1, name=name, subject=ada)
    queue.enqueue(1, name="cancelled", subject=ada, id="gone")
    queue.cancel("gone")
    address = reverse("office:auth_user_change", args=[ada.pk])

    window = open_page(address, scheme=scheme, width=width)

    panel = window.locator(".djq-about")
    expect(panel.get_by_role("heading")).to_have_text("Jobs")
    assert violations(window, ".djq-about") == []
    box, inside = panel.bounding_box(), panel.evaluate("(it) => it.scrollWidth <= it.clientWidth")
    assert inside
    assert box is not None
    assert box["x"] + box["width"] <= width

    panel.get_by_role("link", name="All jobs for this object").click()
    expect(window.locator("#djq-live tbody tr")).to_have_count(4)
    assert violations(window, "#djq") == []
    window.get_by_role("link", name="remind").click()
    expect(window.get_by_text("Timeline")).to_be_visible()
    assert violations(window, "#djq") == []
    window.get_by_role("link", name=f"auth.user:{ada.pk}").click()
    window.wait_for_url(f"**{address}")
