"""Tasks sent to an existing Celery broker with kombu alone."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kombu
import pytest
from celery import Celery
from kombu import pools

from djqueue.contrib.celery import publish
from djqueue.core.errors import ArgumentsError, OptionError
from tests.contrib.celery.workers import celery_worker
from tests.servers import RedisServer
from tests.support import PATIENCE

# kombu 5.5 calls redis-py 6.4 in a way that redis-py announced to remove.
pytestmark = pytest.mark.filterwarnings("ignore:Call to 'get_connection' function:DeprecationWarning")


@pytest.fixture
def broker(redis_server: RedisServer) -> Iterator[str]:
    redis_server.run("flushall")
    pools.reset()  # Other tests of this process may have left pools of theirs.
    yield redis_server.url
    pools.reset()


def received(broker: str, queue: str = "celery") -> kombu.Message:
    """Return the only message of a queue."""
    with kombu.Connection(broker) as connection, connection.SimpleQueue(queue) as simple:
        message = simple.get(timeout=PATIENCE)
        message.ack()
        return message


def test_celery_worker_runs_a_published_task(broker: str, tmp_path: Path) -> None:
    app = Celery("results", broker=broker, backend=broker, set_as_current=False)
    with celery_worker({"CELERY_TEST_URL": broker}, tmp_path / "log"):
        task_id = publish(
            "describe",
            (1, "two"),
            {"three": 3},
            broker=broker,
            priority=4,
            time_limit=60,
            soft_time_limit=50,
            countdown=0.1,
            headers={"tenant": "acme"},
        )
        described = app.AsyncResult(task_id).get(timeout=PATIENCE)
        late = publish("add", (1, 2), broker=broker, expires=datetime(2020, 1, 1, tzinfo=UTC))
        revoked = app.AsyncResult(late).get(timeout=PATIENCE, propagate=False)
        state = app.AsyncResult(late).state
    app.close()

    origin = described.pop("origin")
    assert described == {
        "args": [1, "two"],
        "kwargs": {"three": 3},
        "id": task_id,
        "timelimit": [60, 50],
        "priority": 4,
        "routing_key": "celery",
        "header": "acme",
    }
    assert "@" in origin
    assert (state, type(revoked).__name__) == ("REVOKED", "TaskRevokedError")


def test_message_has_the_layout_of_protocol_2(broker: str) -> None:
    task_id = publish(
        "shop.send",
        ("é",),
        broker=broker,
        queue="mail",
        eta=datetime(2030, 1, 2, tzinfo=UTC),
        reply_to="replies",
    )
    message = received(broker, "mail")

    headers: dict[str, Any] = dict(message.headers)
    origin = headers.pop("origin")
    assert headers == {
        "lang": "py",
        "task": "shop.send",
        "id": task_id,
        "shadow": None,
        "eta": "2030-01-02T00:00:00+00:00",
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": task_id,
        "parent_id": None,
        "argsrepr": "('é',)",
        "kwargsrepr": "{}",
        "ignore_result": False,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
    }
    assert "@" in origin
    assert (message.properties["correlation_id"], message.properties["reply_to"]) == (task_id, "replies")
    assert message.payload == [["é"], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]


def test_published_task_is_routed_by_exchange_and_routing_key(broker: str) -> None:
    exchange = kombu.Exchange("jobs", "topic")
    with kombu.Connection(broker) as connection:
        kombu.Queue("reports", exchange, "reports.#")(connection.default_channel).declare()

    publish("report", broker=broker, exchange=exchange, routing_key="reports.daily", id="fixed")

    assert received(broker, "reports").headers["id"] == "fixed"


def test_connections_are_pooled(broker: str) -> None:
    for number in range(5):
        publish("add", (number, 1), broker=broker)

    (pool,) = pools.connections.values()
    assert len(pool._dirty) + sum(isinstance(held, kombu.Connection) for held in pool._resource.queue) == 1


def test_unavailable_broker_raises_after_the_retries() -> None:
    with pytest.raises(kombu.exceptions.OperationalError):
        publish("add", broker="redis://127.0.0.1:1/0", retry_policy={"max_retries": 1, "interval_start": 0})
    pools.reset()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"priority": 10}, "priority: must be from 0 to 9; got 10"),
        ({"eta": datetime(2030, 1, 1)}, "is naive; use a datetime with a time zone"),
        ({"expires": "soon"}, "expires: expected seconds, a timedelta or an aware datetime, got 'soon'"),
        ({"time_limit": -1}, "time_limit: expected seconds greater than 0, got -1"),
        ({"eta": datetime(2030, 1, 1, tzinfo=UTC), "countdown": 1}, "eta and countdown can't be combined"),
    ],
)
def test_invalid_options_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        publish("add", broker="memory://", **given)


def test_unknown_options_are_rejected() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'delay'"):
        publish("add", broker="memory://", delay=1)  # type: ignore[call-arg]


def test_arguments_must_be_a_list_and_a_dict() -> None:
    with pytest.raises(ArgumentsError, match="args: expected a list or tuple, got str"):
        publish("add", "ab", broker="memory://")


def test_publish_needs_neither_celery_nor_django_settings() -> None:
    code = (
        "import sys; sys.modules['celery'] = None; "
        "from djqueue.contrib.celery import publish; "
        "print(publish('add', (1, 2), broker='memory://', id='an-id'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "an-id"
