"""Every address, every method, every right: who comes in, and who is told to stay out."""

import pytest
from django.test import Client
from django.urls import reverse

from djqueue.dashboard import rights
from djqueue.dashboard.urls import PAGES
from djqueue.models import AuditEvent
from tests.dashboard.visiting import (
    ALL_RIGHTS,
    address,
    every_change,
    every_page,
    logged_in,
    one_with,
    one_without,
    visit,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def hides_emails(request, queue):
    return queue != "emails"


@pytest.mark.parametrize("page", every_page())
def test_one_without_the_right_is_refused_and_one_with_it_is_not(page):
    assert visit(logged_in(one_without(page.right)), page).status_code == 403
    assert visit(logged_in(one_with(page.right, rights.VIEW)), page).status_code != 403


@pytest.mark.parametrize("page", every_change())
def test_a_right_alone_is_none_without_that_to_see_the_dashboard(page):
    assert visit(logged_in(one_with(page.right)), page).status_code == 403


@pytest.mark.parametrize("page", every_page())
def test_a_page_has_one_method(page):
    client = logged_in(one_with(*ALL_RIGHTS))
    allowed = {"POST"} if page.method == "POST" else {"GET", "HEAD"}
    for method in set(METHODS) - allowed:
        assert visit(client, page, method).status_code == 405, method


@pytest.mark.parametrize("page", every_page())
def test_one_who_is_not_logged_in_is_led_to_the_login(page):
    response = visit(Client(), page)
    assert response.status_code == 302
    assert response["Location"].startswith(reverse("admin:login"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.method == "GET"], ids=lambda page: page.name)
def test_an_open_page_whose_session_is_over_gets_no_login_page(page):
    response = visit(Client(), page, **{"HX-Request": "true"})
    assert response.status_code == 401
    assert b"<form" not in response.content


@pytest.mark.parametrize("page", every_change())
def test_a_forged_post_is_refused_and_kept(page):
    client = logged_in(one_with(rights.VIEW))
    assert visit(client, page).status_code == 403
    event = AuditEvent.objects.get()
    assert (event.action, event.refused) == (page.name, True)


@pytest.mark.parametrize("page", every_change())
def test_a_post_from_another_site_is_refused(page):
    client = Client(enforce_csrf_checks=True)
    client.force_login(one_with(*ALL_RIGHTS))
    assert visit(client, page).status_code == 403


@pytest.mark.parametrize("page", every_change())
def test_a_read_only_dashboard_changes_nothing_for_anybody(page, settings):
    if page.right in rights.READING:
        pytest.skip("to reveal changes nothing")
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"READ_ONLY": True}}
    assert visit(logged_in(one_with(*ALL_RIGHTS)), page).status_code == 403


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "<djq:queue>" in page.route], ids=lambda page: page.name
)
@pytest.mark.parametrize("chosen", [hides_emails, "tests.dashboard.test_rights.hides_emails"])
def test_a_queue_that_the_user_is_not_to_see_is_refused(page, chosen, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"QUEUE_FILTER": chosen}}
    assert visit(logged_in(one_with(*ALL_RIGHTS)), page).status_code == 403


def test_the_navigation_has_what_the_user_may_open():
    html = logged_in(one_with(rights.VIEW)).get(address(PAGES[0])).content.decode()
    for page in PAGES:
        if page.label:
            assert (f'data-djq-page="{page.name}"' in html) is (page.right == rights.VIEW), page.name


def test_the_admins_index_leads_to_the_dashboard_of_those_who_may_open_it():
    link = f'href="{address(PAGES[0])}"'
    assert link in logged_in(one_with(rights.VIEW)).get(reverse("admin:index")).content.decode()
    assert link not in logged_in(one_without(rights.VIEW)).get(reverse("admin:index")).content.decode()
