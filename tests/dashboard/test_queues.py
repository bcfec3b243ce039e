"""The list of queues."""

from collections import Counter

import pytest

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.dashboard import boards
from djqueue.dashboard.boards import DRAINING, EMPTY, NEVER, Forecast
from djqueue.dashboard.views.queues import ORDERS
from djqueue.models import AuditEvent
from tests.dashboard.acting import claim, fail
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


def shown(client, **query):
    response = client.get(address(BY_NAME["queues"], **query))
    assert response.status_code == 200
    return response


def names(client, **query):
    return [line.name for line in shown(client, **query).context["lines"]]


def test_any_number_of_queues_takes_one_read(client, memory, monkeypatch):
    for number in range(30):
        Queue(f"queue-{number}").enqueue(1)
    storage, asked = get_storage(), Counter()
    operations = [
        *((storage.reads, name) for name in ("overview", "series", "counts", "page", "cursor_page")),
        (storage.workers, "all"),
        (storage.queues, "is_paused"),
    ]
    for facet, name in operations:
        real = getattr(facet, name)
        monkeypatch.setattr(
            facet,
            name,
            lambda *args, _real=real, _name=name, **more: asked.update([_name]) or _real(*args, **more),
        )
    assert len(names(client)) == 30
    # The past minutes are read once, apart from the current one; the workers also for the page's version.
    assert asked == {"overview": 1, "series": 2, "all": 2}


def test_queues_are_found_by_part_of_their_name(client, anywhere):
    for name in ("emails", "images", "mail"):
        Queue(name).enqueue(1)
    assert names(client, q="MAIL") == ["emails", "mail"]
    assert "No matching queues." in shown(client, q="nothing").content.decode()


def test_queues_are_sorted_by_the_server(client, memory):
    Queue("a").enqueue(1)
    Queue("b").enqueue_many(range(3))
    Queue("c").enqueue_many(range(2), ids=["c1", "c2"])
    fail("c1", queue="c")
    claim("b")
    assert names(client) == ["a", "b", "c"]
    assert names(client, sort="waiting") == ["b", "a", "c"]
    assert names(client, sort="active")[0] == "b"
    assert names(client, sort="dead")[0] == "c"
    assert names(client, sort="nonsense") == ["a", "b", "c"]
    for order in ORDERS:
        html = shown(client, sort=order).content.decode()
        assert sorted(names(client, sort=order)) == ["a", "b", "c"]
        assert html.count("aria-sort") == (order not in ("in", "out"))


def test_queues_that_never_drain_come_first(client, memory, monkeypatch):
    for name in ("empty", "never", "soon"):
        Queue(name).enqueue(1)
    board = boards.read_board()
    empty, never, soon = board.lines
    lines = (
        empty._replace(row=empty.row._replace(counts={}), forecast=Forecast(EMPTY)),
        never._replace(workers=1, forecast=Forecast(NEVER)),
        soon._replace(workers=1, forecast=Forecast(DRAINING, 12_000)),
    )
    monkeypatch.setattr(boards, "read_board", lambda: board._replace(lines=lines))
    assert names(client, sort="drain") == ["never", "soon", "empty"]
    html = shown(client).content.decode()
    assert "never: the backlog is growing" in html
    assert "about 12 s" in html


def test_limits_are_shown_as_gauges(client, memory):
    queue = Queue("emails")
    queue.set_limits(rate="10/m", concurrency=4)
    queue.enqueue(1)
    claim("emails")
    html = shown(client).content.decode()
    assert "slots 1/4" in html
    assert "9 of 10 starts available" in html
    assert 'max="4" value="1"' in html


def test_sparkline_data_is_also_in_a_table(client, memory, monkeypatch):
    Queue("emails").enqueue(1)
    board = boards.read_board()
    [line] = board.lines
    minutes = [bucket._replace(completed=1) for bucket in line.buckets]
    monkeypatch.setattr(
        boards, "read_board", lambda: board._replace(lines=(line._replace(buckets=tuple(minutes)),))
    )
    twin = shown(client).context["twin"]
    assert twin.rows == [("emails", [5] * 12)]
    assert len(twin.starts) == 12


def test_queue_is_paused_and_resumed(client, anywhere):
    Queue("emails").enqueue(1)
    assert "no workers" in shown(client).content.decode()
    client.post(address(BY_NAME["pause"]))
    assert get_storage().queues.is_paused("emails")
    html = shown(client).content.decode()
    assert "❚❚ paused" in html
    assert f'formaction="{address(BY_NAME["resume"])}"' in html
    client.post(address(BY_NAME["resume"]))
    assert not get_storage().queues.is_paused("emails")
    kept = AuditEvent.objects.order_by("pk").values_list("action", "queue")
    assert list(kept) == [("pause", "emails"), ("resume", "emails")]


def test_hidden_queue_is_not_listed(client, memory, settings):
    seen = {"QUEUE_FILTER": lambda _request, name: name != "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("emails").enqueue(1)
    Queue("images").enqueue(1)
    assert names(client) == ["images"]


def test_queue_of_settings_can_be_paused_before_its_first_job(memory, settings):
    hides = {"QUEUE_FILTER": lambda _request, name: name != "hidden"}
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": ["nightly", "hidden"], "DASHBOARD": hides}
    client = logged_in(one_with(*ALL_RIGHTS))

    html = client.get(address(BY_NAME["queues"])).content.decode()
    url = address(BY_NAME["queue"]).replace("emails", "nightly")
    assert f'<a href="{url}">nightly</a>' in html
    assert address(BY_NAME["queue"]).replace("emails", "hidden") not in html

    assert client.post(f"{url}pause/").status_code == 302
    assert get_storage().queues.is_paused("nightly")
