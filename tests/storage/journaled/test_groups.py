"""Groups in the database: what was said to them outlives a restart, and so does a queue's mode."""

import pytest
from django.db import transaction

from djqueue import models
from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.groups import GroupLimit
from djqueue.core.limiter import Rate
from djqueue.core.queue import QueuePolicy
from djqueue.testing.factories import QUEUE, claim, enqueue, enqueue_many
from tests.support import eventually

pytestmark = pytest.mark.dialect


@pytest.fixture
def make(make_storage):
    def make(mode="optional"):
        return make_storage(policies={QUEUE: QueuePolicy(group_mode=mode)})

    return make


def test_group_settings_survive_restart(make):
    first = make()
    first.connect()
    first.queues.set_group_limit(QUEUE, "g", concurrency=2)
    first.queues.set_group_limit(QUEUE, "rated", rate=Rate(1, 3_600_000), weight=2)
    first.queues.set_group_limit(QUEUE, None, concurrency=3, rate=Rate(2, 3_600_000))
    first.queues.pause_group(QUEUE, "paused")
    first.queues.set_group_limit(QUEUE, "gone", concurrency=7)
    first.queues.set_group_limit(QUEUE, "gone", concurrency=None)
    first.close()
    second = make()
    second.connect()

    said = {
        "g": GroupLimit(2),
        "rated": GroupLimit(rate=Rate(1, 3_600_000), weight=2),
        None: GroupLimit(3, rate=Rate(2, 3_600_000)),
        "paused": GroupLimit(paused=True),
    }
    assert second.queues.group_limits(QUEUE) == said
    for group in ("g", "other", "paused", "rated"):
        enqueue_many(second, 5, group=group)
    served = sorted(str(one.options.group) for one in claim(second, 20))
    assert served == ["g", "g", "other", "other", "rated"]
    second.queues.obliterate(QUEUE, force=True)
    assert not models.GroupState.objects.exists()


def test_client_changes_group_settings(make):
    client, scheduler = make(), make()
    client.queues.set_group_limit(QUEUE, "g", concurrency=2)
    assert client.queues.group_limits(QUEUE) == {"g": GroupLimit(2)}
    scheduler.connect()
    enqueue_many(scheduler, 5, group="g")
    assert len(claim(scheduler, 10)) == 2

    client.queues.pause_group(QUEUE, "g")
    client.queues.set_group_limit(QUEUE, "g", concurrency=4)
    assert claim(scheduler, 10) == []
    client.queues.resume_group(QUEUE, "g")
    assert len(claim(scheduler, 10)) == 2


def test_job_without_group_is_rejected_in_required_group_mode(make):
    for storage in (make("keyed"), scheduler := make("keyed")):
        if storage is scheduler:
            storage.connect()
        with pytest.raises(OptionError, match="keyed"):
            enqueue(storage)
        with pytest.raises(OptionError, match="keyed"):
            enqueue(storage, durable=False)
    assert not models.Job.objects.exists()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("keyed", "optional"),
        ("keyed", "global"),
        ("global", "keyed"),
        ("optional", "keyed"),
        ("optional", "global"),
    ],
)
@pytest.mark.parametrize("is_scheduler", [True, False])
def test_process_configured_for_another_mode_is_rejected(make, first, second, is_scheduler):
    one = make(first)
    if is_scheduler:
        one.connect()
    enqueue(one, group="g", durable=True)
    one.close()
    message = f"'{QUEUE}'.*'{first}'.*'{second}'"

    with pytest.raises(ConfigurationError, match=message):
        enqueue(make(second), group="g")
    with pytest.raises(ConfigurationError, match=message):
        make(second).connect()
    same = make(first)
    same.connect()
    assert len(claim(same, 10)) == 1


def test_obliterated_queue_may_have_another_mode(make):
    first = make("keyed")
    first.connect()
    enqueue(first, group="g")
    first.queues.obliterate(QUEUE)
    first.close()

    second = make("global")
    second.connect()
    enqueue(second, durable=True)
    with pytest.raises(ConfigurationError):
        enqueue(make("keyed"), group="g")


@pytest.mark.parametrize("is_scheduler", [True, False])
def test_existing_queue_without_group_mode_takes_mode_of_next_use(make, is_scheduler):
    first = make()
    first.queues.set_group_limit(QUEUE, "g", concurrency=2)
    enqueue(first, group="g")
    models.GroupState.objects.filter(group="").delete()

    second = make("keyed")
    if is_scheduler:
        second.connect()
    enqueue(second, group="g", durable=True)
    second.close()
    assert models.GroupState.objects.get(group="").mode == "keyed"
    with pytest.raises(ConfigurationError):
        enqueue(make(), group="g")


def test_scheduler_logs_producer_with_different_group_mode(make, caplog):
    scheduler, producer = make("keyed"), make("optional")
    scheduler.connect()
    enqueue(producer)
    eventually(lambda: caplog.messages)

    assert "'optional'" in caplog.text
    assert "'keyed'" in caplog.text
    assert len(claim(scheduler, 10)) == 1


def test_mode_is_not_recorded_by_transaction_that_is_rolled_back(make):
    with transaction.atomic():
        enqueue(make("optional"), group="g")
        transaction.set_rollback(True)
    enqueue(make("keyed"), group="g")

    assert models.GroupState.objects.get().mode == "keyed"
