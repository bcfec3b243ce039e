"""Saved views of jobs: who has which, and what they tell of hidden queues."""

import pytest

from djqueue import Queue
from djqueue.dashboard import rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.views import savedviews
from djqueue.dashboard.views.jobs import FilterForm
from djqueue.models import AuditEvent
from tests.dashboard.visiting import PAGES, logged_in, one_with
from tests.dashboard.visiting import address as address_of

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}


def address(page, **query):
    return address_of(BY_NAME[page], **query)


def user(*more):
    return logged_in(one_with(rights.VIEW, rights.SAVE_VIEW, *more))


@pytest.fixture
def ann():
    return user(rights.SHARE_VIEW)


@pytest.fixture
def bob():
    return user()


def save(client, view, page="view_save", /, **query):
    return client.post(address(page), {"view": view, **query})


def views(client):
    """Return the views on the page by name, with their URLs."""
    read_cache.clear()
    return {one.view.name: one.url for one in client.get(address("jobs")).context["views"]}


def delete(client, name):
    pk = AuditEvent.objects.filter(detail__view=name, detail__has_key="query").latest("pk").pk
    return client.post(address("view_delete").replace("/1/", f"/{pk}/"))


def test_filter_is_saved_opened_and_deleted(bob):
    saved = save(bob, "Late mails", state="waiting", queue="emails", name="", page_size="7")
    assert saved["Location"] == address("jobs", state="waiting", queue="emails")
    assert views(bob) == {"Late mails": address("jobs", state="waiting", queue="emails")}
    html = bob.get(address("jobs", queue="emails", state="waiting")).content.decode()
    assert '<input type="hidden" name="queue" value="emails">' in html
    assert delete(bob, "Late mails").status_code == 302
    assert views(bob) == {}
    assert delete(bob, "Late mails").status_code == 302


def test_view_keeps_every_filter_of_the_list():
    assert set(savedviews.FIELDS) == {"state", *FilterForm.base_fields}


def test_view_replaces_the_one_of_the_user_with_the_same_name(ann, bob):
    save(bob, "Mine", state="failed")
    save(ann, "Mine", state="active")
    save(bob, "Mine", state="waiting")
    assert views(bob) == {"Mine": address("jobs", state="waiting")}
    assert views(ann) == {"Mine": address("jobs", state="active")}


@pytest.mark.parametrize("name", ["", "  ", "x" * 61])
def test_view_needs_a_short_name(bob, name):
    save(bob, name, state="failed")
    assert views(bob) == {}


def test_shared_view_is_seen_by_others_who_cannot_change_it(ann, bob):
    save(ann, "Ours", "view_share", state="failed")
    assert views(bob) == {"Ours": address("jobs", state="failed")}
    assert "shared by" in bob.get(address("jobs")).content.decode()
    assert address("view_delete") not in bob.get(address("jobs")).content.decode()
    assert delete(bob, "Ours").status_code == 403
    assert save(bob, "Theirs", "view_share").status_code == 403
    refused = AuditEvent.objects.filter(refused=True).values_list("action", flat=True)
    assert [*refused] == ["view_delete", "view_share"]
    assert views(bob).keys() == {"Ours"}
    assert delete(user(rights.SHARE_VIEW), "Ours").status_code == 302
    assert views(bob) == {}


def test_view_tells_nothing_of_hidden_queues(ann, bob, settings):
    for queue in ("emails", "payroll"):
        Queue(queue).enqueue(1)
    for queue in ("emails", "payroll", ""):
        save(ann, f"Ours {queue}".strip(), "view_share", queue=queue, name="pay")
    save(bob, "My payroll", queue="payroll")
    save(bob, "My jobs", state="failed")
    assert views(bob).keys() == {"Ours", "Ours emails", "Ours payroll", "My payroll", "My jobs"}
    seen = {"QUEUE_FILTER": lambda _request, name: name == "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("payroll").enqueue(1)
    assert views(bob).keys() == {"Ours emails", "My jobs"}
    for page in ("history", "palette"):
        html = bob.get(address(page, q="pay")).content.decode()
        assert "payroll" not in html
    for page in ("history", "palette"):
        html = bob.get(address(page, q="ours")).content.decode().partition('id="djq-live"')[2]
        assert html.count("Ours") == 1
    assert save(bob, "Guess", queue="payroll").status_code == 403
    assert views(bob).keys() == {"Ours emails", "My jobs"}


def test_palette_finds_views(bob):
    save(bob, "Late mails", state="waiting")
    read_cache.clear()
    html = bob.get(address("palette", q="late")).content.decode()
    assert f'href="{address("jobs", state="waiting")}"' in html
