"""The marker, which tells that keys were lost."""

import pytest

from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis import health as health_module
from djqueue.testing.factories import enqueue


@pytest.fixture
def make_storage(redis_options):
    """Makes storages, as processes that know nothing of each other have them."""
    made = []

    def make():
        made.append(RedisStorage(**redis_options))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


@pytest.fixture
def processes(make_storage):
    """Two storages on one server, as two processes have them."""
    return make_storage(), make_storage()


def losses(storage):
    return [finding.text.partition(" (")[0] for finding in storage.probe()]


def test_server_that_keeps_its_keys_is_healthy(processes):
    for storage in processes * 2:
        assert losses(storage) == []


@pytest.mark.parametrize("first", [0, 1], ids=["seen first by who knew", "seen first by a new process"])
def test_flush_is_reported_to_all_processes_until_its_time_is_over(
    processes, redis_server, make_storage, monkeypatch, first
):
    knows, other = processes
    assert losses(knows) == []
    enqueue(knows)
    redis_server.run("FLUSHALL")

    if first:
        assert losses(other) == []
    assert losses(knows) == [health_module.FLUSHED]
    assert losses(other) == losses(make_storage()) == [health_module.FLUSHED]
    [finding] = knows.probe()
    assert "restore-from-mirror" in finding.hint
    monkeypatch.setattr(health_module, "RED_FOR", -1)
    assert losses(knows) == losses(other) == []


def test_evicted_keys_are_reported(processes, monkeypatch):
    numbers = iter([7, 7, 9, 9])
    monkeypatch.setattr(health_module, "evicted_keys", lambda _: next(numbers))
    one, other = processes

    assert losses(one) == losses(other) == []
    assert losses(other) == losses(one) == [health_module.EVICTED]
