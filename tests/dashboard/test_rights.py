"""Every page with every method and permission: which requests are allowed and which are refused."""

import re

import pytest
from django.test import Client
from django.urls import reverse

from djqueue.dashboard import rights
from djqueue.dashboard.site import SECTIONS
from djqueue.dashboard.urls import PAGES
from djqueue.models import AuditEvent
from tests.dashboard.visiting import (
    ALL_RIGHTS,
    address,
    logged_in,
    make_superuser,
    one_with,
    one_without,
    visit,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

CHANGES = [page for page in PAGES if page.method == "POST"]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def hides_emails(request, queue):
    return queue != "emails"


def allowed(request, pages):
    """Return the names of pages to which a request is not refused."""
    return [page.name for page in pages if request(page).status_code != 403]


def test_page_requires_its_permission():
    wrong = []
    for right in ALL_RIGHTS:
        without, having = logged_in(one_without(right)), logged_in(one_with(right, rights.VIEW))
        for page in (page for page in PAGES if page.right == right):
            if visit(without, page).status_code != 403:
                wrong.append(f"{page.name} admits a user without {right}")
            if visit(having, page).status_code == 403:
                wrong.append(f"{page.name} refuses a user with {right}")
    assert wrong == []


def test_action_requires_permission_to_view_the_dashboard():
    clients = {right: logged_in(one_with(right)) for right in ALL_RIGHTS}
    assert allowed(lambda page: visit(clients[page.right], page), CHANGES) == []


def test_page_accepts_one_method():
    client = logged_in(one_with(*ALL_RIGHTS))
    wrong = []
    for page in PAGES:
        accepted = {"POST"} if page.method == "POST" else {"GET", "HEAD"}
        for method in set(METHODS) - accepted:
            if visit(client, page, method).status_code != 405:
                wrong.append(f"{method} {page.name}")
    assert wrong == []


def test_anonymous_user_is_redirected_to_login():
    for page in PAGES:
        response = visit(Client(), page)
        assert response.status_code == 302, page.name
        assert response["Location"].startswith(reverse("admin:login")), page.name


def test_partial_request_of_expired_session_gets_no_login_page():
    for page in PAGES:
        if page.method == "GET":
            response = visit(Client(), page, **{"HX-Request": "true"})
            assert response.status_code == 401, page.name
            assert b"<form" not in response.content, page.name


def test_refused_action_is_in_the_activity_log():
    client = logged_in(one_with(rights.VIEW))
    assert allowed(lambda page: visit(client, page), CHANGES) == []
    events = AuditEvent.objects.order_by("pk").values_list("action", "refused")
    assert list(events) == [(page.name, True) for page in CHANGES]


def test_post_without_csrf_token_is_refused():
    client = Client(enforce_csrf_checks=True)
    client.force_login(one_with(*ALL_RIGHTS))
    assert allowed(lambda page: visit(client, page), CHANGES) == []


def test_read_only_dashboard_refuses_every_action(settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"READ_ONLY": True}}
    client = logged_in(one_with(*ALL_RIGHTS))
    changes = [page for page in CHANGES if page.right not in rights.READING]
    assert allowed(lambda page: visit(client, page), changes) == []


@pytest.mark.parametrize(
    "chosen", [hides_emails, "tests.dashboard.test_rights.hides_emails"], ids=["function", "path"]
)
def test_pages_of_hidden_queue_are_refused(chosen, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"QUEUE_FILTER": chosen}}
    client = logged_in(one_with(*ALL_RIGHTS))
    pages = [page for page in PAGES if "<djq:queue>" in page.route]
    assert allowed(lambda page: visit(client, page), pages) == []


def test_navigation_has_pages_that_the_user_may_open():
    html = logged_in(one_with(rights.VIEW)).get(address(PAGES[0])).content.decode()
    tabs = re.findall(r'<a href="([^"]+)" data-djq-key', html)
    by_name = {page.name: page for page in PAGES}
    assert tabs == [address(by_name[name]) for name in SECTIONS if by_name[name].right == rights.VIEW]
    assert "system" in SECTIONS
    assert address(by_name["system"]) not in tabs


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dead-letters/?fingerprint=ab&queue=x%20y", "errors/?fingerprint=ab&queue=x%20y"),
        ("cron/7/edit/", "schedules/7/edit/"),
        ("flows/a_2Fb/job-1/", "workflows/a_2Fb/job-1/"),
        ("metrics/?window=day", "job-types/?window=day"),
        ("metrics/export/?format=csv", "job-types/all/export/?format=csv"),
        ("enqueue/", "job-types/"),
        ("operations/3/", "history/operations/3/"),
        ("bulk-writes/", "history/bulk-writes/"),
        ("activity/?user=ann", "history/?user=ann"),
        ("storage/", "system/"),
    ],
)
def test_former_address_of_a_page_leads_to_its_new_one(old, new):
    start = address(PAGES[0])
    response = logged_in(one_with(rights.VIEW)).get(f"{start}{old}")
    assert (response.status_code, response["Location"]) == (301, f"{start}{new}")
    assert Client().get(f"{start}{old}")["Location"].startswith(reverse("admin:login"))


def test_lists_of_tables_are_in_the_index_of_the_admin_if_a_setting_shows_them(settings):
    superuser = logged_in(make_superuser())
    link = f'href="{reverse("admin:djqueue_job_changelist")}"'
    assert link not in superuser.get(reverse("admin:index")).content.decode()
    assert superuser.get(reverse("admin:djqueue_job_changelist")).status_code == 200
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"ADMIN_LISTS": True}}
    assert link in superuser.get(reverse("admin:index")).content.decode()


def test_admin_index_links_to_dashboard_only_with_permission():
    link = f'href="{address(PAGES[0])}"'
    assert link in logged_in(one_with(rights.VIEW)).get(reverse("admin:index")).content.decode()
    assert link not in logged_in(one_without(rights.VIEW)).get(reverse("admin:index")).content.decode()
