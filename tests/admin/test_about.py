"""The panel with jobs about an object, on the object's page in the admin."""

import re

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.urls import reverse

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.errors import StorageUnavailableError
from djqueue.dashboard.reading import read_cache
from tests.admin.factories import logged_in, make_superuser, make_user
from tests.statements import recorded

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.admin.about_urls")]

OWN = """{% extends "admin/change_form.html" %}
{% block after_related_objects %}<p>the team's own</p>{% endblock %}
{% block submit_buttons_bottom %}<button>Dissolve</button>{% endblock %}"""


@pytest.fixture(autouse=True)
def _templates(settings):
    [one] = settings.TEMPLATES
    loaders = [
        ("django.template.loaders.locmem.Loader", {"team.html": OWN}),
        "django.template.loaders.app_directories.Loader",
    ]
    settings.TEMPLATES = [
        {**one, "APP_DIRS": False, "OPTIONS": {**one["OPTIONS"], "loaders": loaders}},
    ]


@pytest.fixture
def memory(settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}


@pytest.fixture
def ada():
    return User.objects.create(username="ada")


def keeper(*rights):
    """Create a staff user who may change users and groups, with these permissions of djqueue."""
    user = make_user(*rights)
    user.user_permissions.add(*Permission.objects.filter(content_type__app_label="auth"))
    return user


def page(client, obj, site="office", **query):
    name = f"{site}:{obj._meta.app_label}_{obj._meta.model_name}_change"
    response = client.get(reverse(name, args=[obj.pk], query=query or None))
    assert response.status_code == 200
    return response.content.decode()


def panel(html):
    found = re.search(r'<section class="module djq-about".*?</section>', html, re.DOTALL)
    return found and found[0]


def test_the_newest_jobs_about_the_object_are_listed(memory, ada):
    mail = Queue("emails")
    ids = [mail.enqueue(n, name=f"greet-{n}", subject=ada).id for n in range(5)]
    mail.enqueue(9, name="another", subject="auth.user:999")

    html = panel(page(logged_in(keeper("view_dashboard")), ada))

    assert re.findall(r"greet-\d|another", html) == ["greet-4", "greet-3", "greet-2"]
    assert reverse("office:djqueue_dashboard_job", args=["emails", ids[4]]) in html
    everything = reverse("office:djqueue_dashboard_jobs", query={"subject": f"auth.user:{ada.pk}"})
    assert everything in html
    assert "waiting" in html


def test_an_object_without_jobs_has_an_empty_panel(memory, ada):
    assert "No jobs for this object." in panel(page(logged_in(make_superuser()), ada))


def test_users_without_permission_to_view_the_dashboard_see_no_panel(memory, ada):
    Queue("emails").enqueue(1, name="greet", subject=ada)

    html = page(logged_in(keeper()), ada)

    assert panel(html) is None
    assert "greet" not in html


def hidden(request, queue):
    return queue != "secret"


def test_jobs_of_hidden_queues_are_not_listed(settings, ada):
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"},
        "DASHBOARD": {"QUEUE_FILTER": "tests.admin.test_about.hidden"},
    }
    for number in range(2):
        Queue("emails").enqueue(1, name=f"greet-{number}", subject=ada)
    for number in range(20):
        Queue("secret").enqueue(number, name="spy", subject=ada)

    html = panel(page(logged_in(keeper("view_dashboard")), ada))

    assert re.findall(r"greet-\d|spy", html) == ["greet-1", "greet-0"]


def test_a_site_without_a_dashboard_shows_the_panel_without_links(memory, ada):
    Queue("emails").enqueue(1, name="greet", subject=ada)

    html = panel(page(logged_in(make_superuser()), ada, "annex"))

    assert "greet" in html
    assert "href" not in html


def test_a_custom_template_keeps_its_content(memory):
    team = Group.objects.create(name="rockets")
    Queue("emails").enqueue(1, name="greet", subject="team rockets")
    client = logged_in(make_superuser())

    html = page(client, team)

    assert "greet" in panel(html)
    assert html.count("the team's own") == html.count("<button>Dissolve</button>") == 1
    without = html.replace(panel(html), "")
    bare = page(client, team, "plain")
    for mark in ("<form", "<input", "<fieldset", "<button"):
        assert without.count(mark) == bare.count(mark)


def test_an_object_without_a_subject_has_no_panel(memory):
    team = Group.objects.create(name="nobody")

    assert panel(page(logged_in(make_superuser()), team)) is None


@pytest.mark.parametrize("query", [{"_popup": "1"}])
def test_a_popup_has_no_panel(memory, ada, query):
    assert panel(page(logged_in(make_superuser()), ada, **query)) is None


def test_an_add_form_has_no_panel(memory):
    html = logged_in(make_superuser()).get(reverse("office:auth_user_add")).content.decode()

    assert panel(html) is None


def test_a_form_with_errors_has_the_panel(memory, ada):
    address = reverse("office:auth_user_change", args=[ada.pk])

    html = logged_in(make_superuser()).post(address, {"username": ""}).content.decode()

    assert "No jobs for this object." in panel(html)


def test_the_form_works_while_the_storage_is_unreachable(memory, ada, monkeypatch):
    def away(*args, **kwargs):
        raise StorageUnavailableError("nobody answers")

    monkeypatch.setattr(get_storage().reads, "jobs_about", away)

    html = page(logged_in(make_superuser()), ada)

    assert "The storage is unreachable: nobody answers" in panel(html)
    assert 'name="_save"' in html


def test_the_panel_takes_one_query_with_the_database_storage(ada):
    client = logged_in(make_superuser())
    page(client, ada)
    page(client, ada, "plain")

    with recorded() as bare:
        page(client, ada, "plain")
    read_cache.clear()  # A slow read is reused for a while.
    with recorded() as with_jobs:
        html = page(client, ada)

    assert not [sql for sql in bare if "djqueue_" in sql]
    asked = [sql for sql in with_jobs if "djqueue_" in sql]
    assert len(asked) == 1, (get_storage().describe(), panel(html))
    [more] = asked
    assert "COUNT(" not in more
    assert " LIMIT " in more


def test_the_panel_has_no_inline_styles_or_scripts(memory, ada):
    Queue("emails").enqueue(1, name="<b>greet</b>", subject=ada)

    html = panel(page(logged_in(make_superuser()), ada))

    assert "&lt;b&gt;greet" in html
    assert not re.search(r"<script|<style|style=|onclick|<b>", html)
