"""Snapshots of one storage restored in another."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from djqueue import Queue
from djqueue.core.states import State
from djqueue.models import CronJob
from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.redis import RedisStorage
from djqueue.storage.snapshots import JOB, SCHEDULE, Part
from djqueue.testing import contract
from djqueue.testing.contract.snapshots import OTHER, contents, fill, order, read_all
from djqueue.testing.factories import (
    NAME,
    QUEUE,
    UPSTREAM,
    claim,
    completing,
    enqueue,
    finish,
    items_of,
    job,
)
from tests.support import PATIENCE

STORAGES = ("memory", "database", "redis")
TWO_STORAGES = [
    *zip(STORAGES, STORAGES[1:] + STORAGES[:1], strict=True),
    *(
        pytest.param(target, source, marks=pytest.mark.thorough)
        for source, target in zip(STORAGES, STORAGES[1:] + STORAGES[:1], strict=True)
    ),
]
"""Sources and targets: each storage is both once; the other direction is thorough."""


@pytest.fixture
def make(request: pytest.FixtureRequest, tables: None) -> Iterator[Any]:
    """Makes a storage, empty and ready."""
    with ExitStack() as stack:

        def make(kind: str) -> Storage:
            made: Storage
            if kind == "memory":
                made = MemoryStorage(policies=contract.POLICIES)
            elif kind == "database":
                made = DatabaseStorage(policies=contract.POLICIES)
            else:
                server = request.getfixturevalue("redis_server")
                server.clean()
                made = RedisStorage(policies=contract.POLICIES, url=server.url, timeout=PATIENCE)
            return stack.enter_context(closing(made))

        yield make


def shown(storage: Storage) -> dict[tuple[str, str], Any]:
    """Return the records of all jobs as every reader sees them."""
    found = {}
    for queue in storage.queues.names():
        for record in storage.reads.page(queue, None, 1_000):
            found[queue, record.id] = record
    return found


def run_all(storage: Storage) -> int:
    """Run jobs until none is left that can be claimed."""
    storage.queues.set_key_limit(QUEUE, "g", rate=None)
    count = 0
    while True:
        storage.sweep()
        claims = claim(storage, 100, names=[NAME])
        if not claims and count:
            return count
        finish(storage, *map(completing, claims))
        count += len(claims)


@pytest.mark.parametrize(("source", "target"), TWO_STORAGES)
def test_snapshot_restores_the_same_jobs_in_another_storage(make: Any, source: str, target: str) -> None:
    there = make(source)
    there.connect()
    fill(there)
    enqueue(there, id="upstream", queue=UPSTREAM)
    enqueue(there, id="chained", queue="far", depends_on=((UPSTREAM, "upstream"),))
    parts = read_all(there)
    before = shown(there)
    there.close()
    here = make(target)

    here.snapshots.write(_data(parts))

    here.connect()
    after = read_all(here)
    assert _comparable(contents(_data(after))) == _comparable(contents(_data(parts)))
    assert order(after) == order(parts)
    assert shown(here) == before
    assert items_of(here, "streamed", OTHER) == [b"one", b"two"]
    assert here.queues.is_paused("paused")
    live = [key for key, record in before.items() if record.state in (State.WAITING, State.BLOCKED)]
    run_all(here)
    assert {job(here, job_id, queue).state for queue, job_id in live} == {State.COMPLETED}


def _data(parts: list[Part]) -> list[Part]:
    """Return the parts that each storage holds itself."""
    return [part for part in parts if part.kind != SCHEDULE]


def _comparable(found: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Leave out what only some storages keep: group modes before the first use, and the lengths of delays."""
    comparable = {}
    for key, record in found.items():
        if key[0] == "queue":
            comparable[key] = {**record, "key_mode": ""}
        elif key[0] == JOB:
            options = {name: value for name, value in record["options"].items() if name != "delay"}
            comparable[key] = {**record, "options": options}
        else:
            comparable[key] = record
    return comparable


def test_snapshot_of_the_configured_storage_contains_schedules(storage: Storage) -> None:
    enqueue(storage, id="job", queue=QUEUE)
    CronJob.objects.create(
        name="nightly",
        job_name="report",
        schedule="0 3 * * *",
        args=[1, {"a": None}],
        jitter=timedelta(seconds=90),
        end_at=datetime(2100, 1, 1, tzinfo=UTC),
        enabled=False,
    )
    CronJob.objects.filter(name="nightly").update(executions=7)
    before = CronJob.objects.values().get()
    parts = read_all(storage)
    CronJob.objects.create(name="hourly", job_name="other", every=timedelta(hours=1))

    storage.snapshots.write(parts, replace=True)

    after = CronJob.objects.values().get()
    assert {**after, "id": 0} == {**before, "id": 0}
    assert Queue(QUEUE).get_job("job").state is State.WAITING
    CronJob.objects.all().delete()
    storage.jobs.remove(QUEUE, ["job"])
    assert storage.snapshots.is_empty()
    CronJob.objects.create(name="hourly", job_name="other", every=timedelta(hours=1))
    assert not storage.snapshots.is_empty()


def test_failed_restore_keeps_the_schedules(storage: Storage) -> None:
    CronJob.objects.create(name="hourly", job_name="other", every=timedelta(hours=1))

    def broken() -> Iterator[Part]:
        yield Part(JOB, QUEUE, [])
        raise OSError("the file ends early")

    with pytest.raises(OSError, match="ends early"):
        storage.snapshots.write(broken(), replace=True)

    assert CronJob.objects.get().name == "hourly"
