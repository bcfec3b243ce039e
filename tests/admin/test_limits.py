"""The lists of what was said to groups and limiters, and of marks: to look at, and a way to the dashboard."""

import pytest
from django.urls import reverse

from djqueue.models import Annotation, GroupState, LimiterState
from tests.admin.factories import NOON, change_url, list_url, logged_in, make_superuser

pytestmark = pytest.mark.django_db


def page(url: str) -> str:
    response = logged_in(make_superuser()).get(url)
    assert response.status_code == 200
    return str(response.content.decode())


def queue_url(name: str) -> str:
    return reverse("admin:djqueue_dashboard_queue", args=[name])


def test_a_group_is_shown_with_its_limits_and_leads_to_its_queue() -> None:
    row = GroupState.objects.create(
        queue="a/b", group="<acme>", concurrency=7, rate_capacity=5, rate_per=60_000
    )
    GroupState.objects.create(queue="a/b", group="", mode="keyed", rate_capacity=2, rate_per=90_000)

    html = page(list_url("groupstate"))
    assert f'<a href="{queue_url("a/b")}">a/b</a>' in html
    assert "&lt;acme&gt;" in html
    assert ">5/m<" in html
    assert "all groups" in html
    assert "2 in 90 s" in html
    assert f'href="{queue_url("a/b")}?group=%3Cacme%3E"' in page(change_url(row))


def test_a_limiter_leads_to_the_queues_that_share_it(settings: object) -> None:
    settings.DJQUEUE = {  # type: ignore[attr-defined]
        "LIMITERS": {"stripe": {}},
        "QUEUES": {"charges": {"LIMITER": "stripe"}, "refunds": {"LIMITER": "stripe"}, "other": {}},
    }
    row = LimiterState.objects.create(name="stripe", concurrency=3)

    html = page(change_url(row))
    links = [f'<a href="{queue_url(name)}">{name}</a>' for name in ("charges", "refunds")]
    assert ", ".join(links) in html
    assert queue_url("other") not in html


@pytest.mark.parametrize("model", [GroupState, LimiterState, Annotation])
def test_rows_are_not_changed_here(model: type) -> None:
    given = {
        GroupState: {"queue": "q", "group": "g"},
        LimiterState: {"name": "l"},
        Annotation: {"at": NOON, "label": "v1"},
    }[model]
    row = model.objects.create(**given)  # type: ignore[attr-defined]
    client = logged_in(make_superuser())
    assert 'name="_save"' not in page(change_url(row))
    assert client.post(change_url(row), {"label": "x"}).status_code == 403
    assert client.get(reverse(f"admin:djqueue_{model.__name__.lower()}_add")).status_code == 403
