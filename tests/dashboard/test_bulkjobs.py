"""Bulk actions on all matching jobs."""

import pytest

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.states import State
from djqueue.dashboard import rights
from djqueue.models import AuditEvent, BulkKind, BulkOperation, BulkState
from djqueue.operations import bulk
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


def jobs(**query):
    return address(BY_NAME["jobs"], **query)


def test_list_offers_actions_by_state_and_permission(client):
    Queue("emails").enqueue(1, delay=60)
    html = client.get(jobs(state="delayed", queue="emails")).content.decode()
    for words in ("Run all matching now", "Cancel all matching", "Delete all matching"):
        assert words in html
    assert "all matching" not in client.get(jobs(state="active")).content.decode()
    viewer = logged_in(one_with(rights.VIEW, rights.CANCEL))
    html = viewer.get(jobs(state="delayed")).content.decode()
    assert "Cancel all matching" in html
    assert "Delete all matching" not in html


@pytest.mark.parametrize(
    ("page", "kind", "becomes"),
    [
        ("all_cancel", BulkKind.CANCEL, State.CANCELLED),
        ("all_promote", BulkKind.PROMOTE, State.WAITING),
        ("all_delete", BulkKind.DELETE, None),
    ],
)
def test_action_on_all_matching_jobs_is_previewed_and_then_started(client, page, kind, becomes):
    queue = Queue("emails")
    ids = [queue.enqueue(1, delay=60, id=f"job-{number}").id for number in range(3)]
    Queue("images").enqueue(1, delay=60, id="other")
    filters = {"queue": "emails", "state": "delayed"}
    html = client.get(address(BY_NAME[page], **filters)).content.decode()
    assert "<strong>3</strong>" in html
    assert not BulkOperation.objects.exists()

    response = client.post(address(BY_NAME[f"{page}_begin"]), {**filters, "expected": "3", "rate": "500"})
    row = BulkOperation.objects.get()
    assert response["Location"].endswith(f"/history/operations/{row.pk}/")
    assert (row.kind, row.rate, row.expected, row.filter["queues"]) == (kind, 500, 3, ["emails"])
    event = AuditEvent.objects.get()
    assert (event.action, event.count, event.detail["state"]) == (f"{page}_begin", 3, "delayed")

    BulkOperation.objects.update(start_at=row.created_at)
    assert bulk.Bulk(get_storage(), "default").work() == 3
    assert get_storage().reads.states("emails", ids) == [becomes] * 3
    assert get_storage().reads.states("images", ["other"]) == [State.DELAYED]


def test_action_is_refused_for_state_that_does_not_allow_it(client):
    Queue("emails").enqueue(1)
    html = client.get(address(BY_NAME["all_promote"], state="waiting")).content.decode()
    assert "doesn&#x27;t allow this action" in html
    client.post(address(BY_NAME["all_promote_begin"]), {"state": "waiting"})
    assert not BulkOperation.objects.exists()


def test_hidden_queues_are_excluded(client, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name == "images"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("emails").enqueue(1)
    Queue("images").enqueue(1)
    client.post(address(BY_NAME["all_cancel_begin"]), {"state": "waiting"})
    assert BulkOperation.objects.get().filter["queues"] == ["images"]
    client.post(address(BY_NAME["all_cancel_begin"]), {"state": "waiting", "queue": "emails"})
    assert BulkOperation.objects.count() == 1


def test_bulk_operation_can_be_ended_only_with_permission_to_start_it():
    Queue("emails").enqueue(1)
    row = bulk.begin("default", BulkKind.DELETE, bulk.Selection(("emails",), state="waiting"))
    BulkOperation.objects.update(id=1)
    other = logged_in(one_with(rights.VIEW, rights.DEAD_LETTERS, rights.CANCEL))
    for name in ("abort", "abort_cancel"):
        other.post(address(BY_NAME[name]))
    assert "Undo" not in other.get(address(BY_NAME["operation"])).content.decode()
    assert BulkOperation.objects.get().state == row.state == BulkState.PLANNED

    keeper = logged_in(one_with(rights.VIEW, rights.DELETE))
    assert "Undo" in keeper.get(address(BY_NAME["operation"])).content.decode()
    keeper.post(address(BY_NAME["abort_delete"]))
    assert BulkOperation.objects.get().state == BulkState.ABORTED
