"""Subjects of jobs on the pages of the dashboard."""

import re

import pytest
from django.contrib.auth.models import Permission, User
from django.urls import reverse

from djqueue import Queue
from djqueue.dashboard import rights, subjects
from tests.dashboard.visiting import PAGES, address, logged_in, make_superuser, one_with

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

JOB, JOBS = [next(page for page in PAGES if page.name == name) for name in ("job", "jobs")]


@pytest.fixture
def ada():
    return User.objects.create(username="ada")


def html(client, page, **query):
    response = client.get(address(page, **query))
    assert response.status_code == 200
    return response.content.decode()


def reader_of_users():
    user = one_with(rights.VIEW)
    user.user_permissions.add(Permission.objects.get(codename="view_user"))
    return user


def test_job_links_to_its_subject_for_users_who_may_view_it(ada):
    Queue("emails").enqueue(1, id="job-1", subject=ada)
    name, link = f"auth.user:{ada.pk}", f'href="{reverse("admin:auth_user_change", args=[ada.pk])}"'

    assert link in html(logged_in(reader_of_users()), JOB)
    for user in (one_with(rights.VIEW), make_superuser()):
        shown = html(logged_in(user), JOB)
        assert name in shown
        assert (link in shown) is user.is_superuser


@pytest.mark.parametrize(
    "subject",
    [
        "auth.user:999",
        "auth.user:x",
        "auth.nothing:1",
        "nowhere.user:1",
        "sessions.session:1",
        "a text",
        "a:b",
    ],
)
def test_subject_without_page_is_shown_as_text(subject):
    Queue("emails").enqueue(1, id="job-1", subject=subject)

    shown = html(logged_in(make_superuser()), JOB)

    assert re.search(rf'<span class="djq-mono">{re.escape(subject)}</span>', shown)


def test_job_without_subject_shows_none():
    Queue("emails").enqueue(1, id="job-1")

    assert "All jobs for this object" not in html(logged_in(make_superuser()), JOB)


def test_list_filters_jobs_by_subject(ada):
    about = [Queue("emails").enqueue(n, subject=ada).id for n in range(60)]
    other = Queue("emails").enqueue(1, subject="auth.user:999").id
    client = logged_in(make_superuser())

    first = html(client, JOBS, subject=f"auth.user:{ada.pk}")

    listed = [one for one in about if reverse("admin:djqueue_dashboard_job", args=["emails", one]) in first]
    assert set(listed) == set(about[10:])
    assert other not in first
    older = re.search(r'href="([^"]*)" rel="next"', first)[1].replace("&amp;", "&")
    second = client.get(older).content.decode()
    assert all(reverse("admin:djqueue_dashboard_job", args=["emails", one]) in second for one in about[:10])
    assert 'rel="next"' not in second
    assert reverse("admin:auth_user_change", args=[ada.pk]) in second


def test_subject_is_taken_literally_and_escaped():
    Queue("emails").enqueue(1, id="job-1", subject=" <b>&1 ")

    shown = html(logged_in(make_superuser()), JOBS, subject=" <b>&1 ")

    assert reverse("admin:djqueue_dashboard_job", args=["emails", "job-1"]) in shown
    assert "<b>&1" not in shown


@pytest.mark.parametrize("query", [{"subject": "a\0b"}, {"subject": "x" * 256}, {"subject": "x", "at": "y"}])
def test_invalid_subject_in_url_is_rejected_with_400(query):
    assert logged_in(make_superuser()).get(address(JOBS, **query)).status_code == 400


def test_jobs_of_hidden_queues_are_hidden(settings, rf):
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"},
        "DASHBOARD": {"QUEUE_FILTER": lambda request, queue: queue != "secret"},
    }
    seen = [Queue("emails").enqueue(n, subject="x").id for n in range(3)]
    for number in range(30):
        Queue("secret").enqueue(number, subject="x")
    seen += [Queue("emails").enqueue(n, subject="x").id for n in range(3)]

    found, cursor = [], None
    while True:
        page = subjects.jobs_of(rf.get("/"), "x", 2, cursor)
        assert len(page.jobs) <= 2
        found += [one.id for one in page.jobs]
        cursor = page.next
        if cursor is None:
            break

    assert found == seen[::-1]


def test_next_page_does_not_name_jobs_of_hidden_queues(settings, rf):
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"},
        "DASHBOARD": {"QUEUE_FILTER": lambda request, queue: queue != "payroll"},
    }
    seen = [Queue("emails").enqueue(n, subject="x").id for n in range(2)]
    for number in range(60):
        Queue("payroll").enqueue(number, id=f"raise-{number}", subject="x")

    page = subjects.jobs_of(rf.get("/"), "x", 2)

    assert page.next is None
    assert [one.id for one in page.jobs] == seen[::-1]
