"""A call to a PostgreSQL that cannot be used tries to connect once."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from django.db import connection, connections

from djqueue import Queue
from djqueue.core.errors import StorageUnavailableError
from djqueue.storage.journaled import JournaledStorage
from djqueue.testing.factories import QUEUE, enqueue


class Refusing:
    """Accepts connections, counts them and ends them at once."""

    def __init__(self) -> None:
        self.attempts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.attempts += 1
                client.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Refusing]:
    refusing = Refusing()
    yield refusing
    refusing.close()


@pytest.fixture
def storage(server: Refusing, django_db_blocker: Any) -> Iterator[JournaledStorage]:
    connections.databases["away"] = connections.configure_settings(
        {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": "shop",
                "HOST": "127.0.0.1",
                "PORT": server.port,
                "OPTIONS": {"connect_timeout": 60, "sslmode": "disable", "gssencmode": "disable"},
            }
        }
    )["default"]
    with django_db_blocker.unblock():
        storage = JournaledStorage(database="away")
        yield storage
        storage.close()
    del connections.databases["away"]
    del connections["away"]


@pytest.mark.parametrize("call", ["cancel", "pause"])
def test_change_tries_to_connect_to_database_once(storage, server, call):
    queue = Queue("emails", storage=storage)
    with pytest.raises(StorageUnavailableError):
        queue.cancel("job-1") if call == "cancel" else queue.pause()
    assert server.attempts == 1


@pytest.mark.dialect
@pytest.mark.skipif("connection.vendor != 'postgresql'")
def test_change_reconnects_after_database_server_restart(make_storage):
    producer = make_storage()
    job_id = enqueue(producer)
    backend = connection.connection.info.backend_pid
    with closing(connection.copy()) as other, other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [backend])

    [cancelled] = producer.jobs.cancel(QUEUE, [job_id])

    assert cancelled.status == "cancelled"
