"""The documented access list suffices for producers, workers, the dashboard and the whole contract."""

import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.urls import reverse

from djqueue.client import Queue
from djqueue.client.storages import close_storage, get_storage
from djqueue.core.job import JobRecord
from djqueue.dashboard.urls import PAGES
from djqueue.models import Job
from djqueue.runtime import Worker
from djqueue.testing import contract
from tests import servers
from tests.support import PATIENCE

from .cases import OnRedis
from .conftest import BUSY

DOCS = Path(__file__).parents[3] / "docs" / "redis.md"
PASSWORD = "open-sesame"


def rules() -> list[str]:
    """Return the rules of the user in the docs."""
    [found] = re.findall(r"^user djqueue (on .*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    return [rule.replace("PASSWORD", PASSWORD) for rule in found.split()]


@pytest.fixture(scope="module")
def guarded() -> Iterator[servers.RedisServer]:
    with servers.RedisServer() as server:
        server.run("ACL", "SETUSER", "djqueue", *rules())
        yield server


@pytest.fixture
def denied(guarded: servers.RedisServer) -> Iterator[list[Any]]:
    """What the server has refused by the end of a test."""
    guarded.run("FLUSHALL")
    guarded.run("ACL", "LOG", "RESET")
    yield (entries := [])
    entries += guarded.run("ACL", "LOG")
    refused = {(entry["reason"], entry["object"]) for entry in map(as_dict, entries)}
    # redis-py tells the server its version, and does not mind if it may not. The checks do without CONFIG.
    assert refused <= {("command", "client|setinfo"), ("command", "client"), ("command", "config|get")}


def test_documented_access_list_does_not_reveal_the_passwords_of_the_server(
    guarded: servers.RedisServer,
) -> None:
    client = redis.Redis.from_url(url(guarded))
    for name in ("requirepass", "masterauth", "*"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.config_get(name)
    client.close()


def as_dict(entry: Any) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True))


def url(server: servers.RedisServer) -> str:
    return f"redis://djqueue:{PASSWORD}@127.0.0.1:{server.port}/0"


class TestContract(OnRedis, contract.StorageContract):
    """The whole contract, as the user of the docs."""

    examples = 40  # `make mutants` shows that they suffice; test_conformance.py runs more of them

    @pytest.fixture
    def options(self, guarded: servers.RedisServer, denied: list[Any]) -> dict[str, Any]:
        return {"URL": url(guarded), **BUSY}


@pytest.mark.django_db(transaction=True)
def test_documented_access_list_suffices_for_producer_worker_and_dashboard(
    guarded: servers.RedisServer, denied: list[Any], settings: Any, admin_client: Any
) -> None:
    settings.DJQUEUE = {
        "STORAGE": {
            "BACKEND": "djqueue.storage.redis.RedisStorage",
            "OPTIONS": {"URL": url(guarded), **BUSY},
        },
        "QUEUES": {"orders": {"RATE": "1000/s", "LIMITER": "shared"}, "others": {"RETENTION": {}}},
        "LIMITERS": {"shared": {"CONCURRENCY": 5}},
    }
    try:
        storage = get_storage()
        orders, others = Queue("orders"), Queue("others")
        first = orders.enqueue(1, tags=["a"], unique_key="k", subject="shop.order:1")
        orders.enqueue(2, depends_on=first)
        others.enqueue_many(range(20), concurrency_key="g")
        orders.enqueue(3, delay=3_600)
        others.pause()
        others.resume()
        worker = Worker(
            storage, handlers={"orders": lambda job: job.log("done"), "others": fail}, until_empty=True
        )
        with worker:
            worker.join(timeout=PATIENCE)
        assert orders.counts()["completed"] == 2
        assert others.counts()["failed"] + others.counts()["delayed"] == 20
        for page in PAGES:
            if page.method == "GET" and "<" not in page.route and page.name != "stream":
                address = reverse(f"admin:djqueue_dashboard_{page.name}")
                assert admin_client.get(address).status_code == 200, address
        assert storage.reads.diagnostics().lines
        call_command("runworkers", until_empty=True, stdout=StringIO())  # with the mirror
        assert Job.objects.filter(queue="orders", state="completed").count() == 2
        others.retry_dead()
    finally:
        close_storage()


def fail(job: JobRecord) -> None:
    raise ValueError(job)
