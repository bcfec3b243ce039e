"""The pages of workers and their commands."""

import re

import pytest

from djqueue.client import get_storage
from djqueue.core.workers import DUMP_TTL, ProcessInfo, RunningJob
from djqueue.dashboard import rights
from djqueue.dashboard.reading import read_cache
from djqueue.models import AuditEvent
from djqueue.testing.factories import enqueue, worker
from tests.dashboard.visiting import PAGES, address, logged_in, one_with, visit
from tests.statements import recorded

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}
COMMANDS = ("quiet", "resume", "stop", "dump")


def hides_secret(request, queue):
    return queue != "secret"


@pytest.fixture
def storage():
    return get_storage()


@pytest.fixture
def keeper():
    return logged_in(one_with(rights.VIEW, rights.WORKERS))


@pytest.fixture
def viewer():
    return logged_in(one_with(rights.VIEW))


@pytest.fixture
def hidden(memory, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"QUEUE_FILTER": hides_secret}}


def page(client, name="workers"):
    read_cache.clear()
    return client.get(address(BY_NAME[name])).content.decode()


def press(client, command, **data):
    read_cache.clear()
    return client.post(address(BY_NAME[f"worker_{command}"]), data)


def words(html):
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_page_shows_what_worker_reports(storage, viewer):
    now = storage.engine.clock.now()
    storage.workers.register(
        worker(
            "w1",
            host="web-1",
            pid=12345,
            queues=("emails", "images"),
            concurrency=10,
            active=4,
            started_at=now - 60_000,
            kind="runworkers",
            heartbeat=5_000,
            rss=123 * 1024 * 1024,
            version="0.5",
            project="2026.11",
            jobs=(RunningJob("emails", "job-1", "shop.send", now - 4_000),),
            supervisor=12300,
            processes=(
                ProcessInfo(801, "shop.render", "isolated", 7, 45_000_000, "images", "job-5"),
                ProcessInfo(802, "shop.convert", "subprocess", 1, 0),
            ),
        )
    )
    text = words(page(viewer))
    for part in (
        "1 worker, 1 host, 4 of 10 slots",
        "web-1:12345",
        "123",
        "emails, images",
        "2026.11",
        "running",
    ):
        assert part in text, part
    html = page(viewer, "worker")
    text = words(html)
    details = "separate process", "every 5 s", "Supervisor process 12300"
    processes = "801 shop.render isolated job-5 7 42.9 MB", "802 shop.convert subprocess - 1 -"
    for part in (*details, *processes, "shop.send", "3 more jobs", "4/10"):
        assert part in text, part
    assert f'href="{address(BY_NAME["job"])}"' in html


@pytest.mark.parametrize(
    ("silent", "level"), [(4_900, "ok"), (7_000, "warn"), (14_900, "warn"), (17_000, "bad")]
)
def test_silent_worker_is_marked_by_its_own_heartbeat_interval(storage, viewer, silent, level, monkeypatch):
    storage.workers.register(worker("w1", heartbeat=5_000))
    clock = storage.engine.clock
    later = clock.now() + silent
    monkeypatch.setattr(type(clock), "now", lambda _: later)
    html = page(viewer)
    assert re.search(rf'<span class="djq-level-{level}">[✖! ]*<time', html)
    assert ("✖ silent" in words(html)) is (level == "bad")


def test_leader_and_hosts_are_shown(storage, viewer, monkeypatch):
    found = [worker("w1", host="a", pid=7), worker("w2", host="b", leads=True), worker("w3", host="b")]
    monkeypatch.setattr(storage.workers, "all", lambda: found)

    text = words(page(viewer))
    assert "3 workers, 2 hosts, 0 of 3 slots in use" in text
    assert "w1 a:7 " in text
    assert text.count("★ Leader") == 1


def test_mixed_versions_are_flagged(storage, viewer):
    storage.workers.register(worker("old", version="0.5", project="a", started_at=1))
    storage.workers.register(worker("new", version="0.5", project="b", started_at=2))
    html = page(viewer)
    assert "Workers run different versions: b (djqueue 0.5) × 1, a (djqueue 0.5) × 1" in words(html)
    assert html.count("older than the newest worker's version") == 1
    storage.workers.unregister("old")
    html = page(viewer)
    assert "different versions" not in html
    assert "older than the newest worker" not in html


@pytest.mark.parametrize("command", COMMANDS)
def test_command_reaches_worker_and_is_logged(storage, keeper, command):
    storage.workers.register(worker("w1"))
    response = press(keeper, command, confirm="1")
    assert (response.status_code, response["Location"]) == (302, address(BY_NAME["worker"]))
    assert storage.workers.register(worker("w1")) == (command,)
    event = AuditEvent.objects.get()
    assert (event.action, event.refused, event.detail) == (f"worker_{command}", False, {"worker": "w1"})
    assert "worker w1" in words(page(keeper))


def test_stop_requires_confirmation(storage, keeper):
    storage.workers.register(worker("w1", active=2, concurrency=2))
    response = press(keeper, "stop", djq_back=address(BY_NAME["workers"]))
    html = response.content.decode()
    assert response.status_code == 200
    assert "The worker has 2 active jobs." in words(html)
    assert f'name="djq_back" value="{address(BY_NAME["workers"])}"' in html
    assert storage.workers.register(worker("w1")) == ()
    assert not AuditEvent.objects.exists()

    response = press(keeper, "stop", confirm="1", djq_back=address(BY_NAME["workers"]))
    assert response["Location"] == address(BY_NAME["workers"])
    assert storage.workers.register(worker("w1")) == ("stop",)


@pytest.mark.parametrize(
    ("state", "offered"), [("running", {"quiet", "stop"}), ("quiet", {"resume", "stop"}), ("stopping", set())]
)
def test_commands_are_offered_by_worker_state_and_permission(storage, keeper, viewer, state, offered):
    storage.workers.register(worker("w1", state=state))
    for name, more in (("workers", set()), ("worker", {"dump"})):
        html = page(keeper, name)
        found = {one for one in COMMANDS if f'formaction="{address(BY_NAME[f"worker_{one}"])}"' in html}
        assert found == offered | more
        assert "formaction" not in page(viewer, name)


def test_command_to_stopping_or_missing_worker_is_reported_and_not_logged(storage, keeper):
    storage.workers.register(worker("w1", state="stopping"))
    press(keeper, "quiet")
    assert "w1 is already stopping." in words(page(keeper))
    storage.workers.unregister("w1")
    response = press(keeper, "stop")
    assert response["Location"] == address(BY_NAME["workers"])
    assert "Worker w1 no longer exists." in words(page(keeper))
    assert not AuditEvent.objects.exists()


def test_stack_dump_requires_permission_and_expires(storage, keeper, viewer, monkeypatch):
    storage.workers.register(worker("w1"))
    storage.workers.save_dump("w1", 'File "<jobs>.py", line 3')
    assert "File &quot;&lt;jobs&gt;.py&quot;, line 3" in page(keeper, "worker")
    assert "jobs&gt;.py" not in page(viewer, "worker")
    clock = storage.engine.clock
    later = clock.now() + DUMP_TTL
    monkeypatch.setattr(type(clock), "now", lambda _: later)
    assert "jobs&gt;.py" not in page(keeper, "worker")


def test_read_only_dashboard_offers_no_commands(storage, keeper, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"READ_ONLY": True}}
    storage = get_storage()
    storage.workers.register(worker("w1"))
    storage.workers.save_dump("w1", "frames")
    for name in ("workers", "worker"):
        assert "formaction" not in page(keeper, name)
    assert "frames" not in page(keeper, "worker")


def test_missing_worker_is_not_found(storage, viewer):
    response = viewer.get(address(BY_NAME["worker"]))
    assert response.status_code == 404
    assert "Worker w1 was not found" in words(response.content.decode())


# Queues that the user is not to know of.


@pytest.mark.usefixtures("hidden")
def test_hidden_queues_and_their_jobs_are_not_named(viewer):
    storage = get_storage()
    jobs = (RunningJob("secret", "job-9", "spy", 1), RunningJob("emails", "job-1", "send", 1))
    processes = (ProcessInfo(801, "spy", "isolated", 7, 45_000_000, "secret", "job-9"),)
    about = {"jobs": jobs, "processes": processes}
    storage.workers.register(worker("w1", queues=("emails", "secret"), active=2, **about))
    for name in ("workers", "worker"):
        text = words(page(viewer, name))
        assert "emails" in text
        assert "secret" not in text
        assert "job-9" not in text
    assert "1 more job." in words(page(viewer, "worker"))


@pytest.mark.usefixtures("hidden")
def test_worker_of_hidden_queues_only_is_not_found(keeper):
    storage = get_storage()
    storage.workers.register(worker("w1", queues=("secret",)))
    assert "No workers are running" in page(keeper)
    assert keeper.get(address(BY_NAME["worker"])).status_code == 404
    press(keeper, "stop", confirm="1")
    assert storage.workers.register(worker("w1", queues=("secret",))) == ()


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("queues", [None, ("emails", "secret")])
def test_worker_that_also_serves_hidden_queues_cannot_be_controlled(keeper, queues):
    storage = get_storage()
    enqueue(storage, queue="secret")
    storage.workers.register(worker("w1", queues=queues))
    storage.workers.save_dump("w1", "frames")
    html = page(keeper, "worker")
    assert "control this worker" in html
    assert "formaction" not in html + page(keeper)
    assert "frames" not in html
    for command in COMMANDS:
        assert press(keeper, command, confirm="1").status_code == 403
    assert AuditEvent.objects.filter(refused=True, detail={"worker": "w1"}).count() == len(COMMANDS)
    assert storage.workers.register(worker("w1", queues=queues)) == ()


def test_refused_command_is_logged_with_its_worker(storage, viewer):
    storage.workers.register(worker("w1"))
    assert visit(viewer, BY_NAME["worker_stop"]).status_code == 403
    assert AuditEvent.objects.get().detail == {"worker": "w1"}


def test_quiet_worker_does_not_count_as_worker_of_queue(storage, viewer):
    enqueue(storage, queue="emails")
    storage.workers.register(worker("w1", state="quiet"))
    assert "no workers" in words(page(viewer, "queues"))
    storage.workers.register(worker("w1"))
    assert "no workers" not in words(page(viewer, "queues"))


@pytest.mark.parametrize("name", ["workers", "worker"])
def test_page_takes_few_queries(storage, keeper, name):
    for number in range(20):
        storage.workers.register(worker(f"w{number}"))
    with recorded() as statements:
        page(keeper, name)
    assert len(statements) <= 6, statements
