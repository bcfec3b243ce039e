"""Exports of the Redis storage: on a single node, and on a cluster of three masters."""

from contextlib import closing

import pytest

from djqueue.storage.export import PAGE_BYTES, ExportFilter, ExportPart
from djqueue.storage.redis import RedisStorage
from djqueue.testing import contract
from djqueue.testing.contract.exporting import LARGE, TOGETHER, rows
from djqueue.testing.contract.snapshots import read_all
from djqueue.testing.factories import batch, claim, completing, finish

from .cases import OnCluster, OnSingle

JOBS = ExportFilter("jobs", frozenset({"id"}))


class TestSingle(OnSingle, contract.ExportContract):
    pass


@pytest.mark.thorough
class TestCluster(OnCluster, contract.ExportContract):
    pass


@pytest.fixture
def storage(redis_options):
    with closing(RedisStorage(**redis_options)) as storage:
        yield storage


def ids(storage, part, size=100):
    return [job_id for page in storage.capabilities.export.pages(JOBS, part, size) for job_id in page["id"]]


@pytest.mark.parametrize(
    ("divisor", "size", "jobs"),
    [
        *((1, 7, 1_000), (2, 1, 1_000), (4, 7, 1_000), (16, 500, 5_000), (64, 500, 5_000)),
        *(
            pytest.param(divisor, size, 5_000, marks=pytest.mark.thorough)
            for divisor in (1, 2, 4, 16, 64)
            for size in (1, 7, 500)
        ),
    ],
)
def test_export_parts_contain_every_job_once(storage, divisor, size, jobs):
    given = [answer.id for answer in storage.enqueue([batch(jobs)])]

    found = [ids(storage, ExportPart("default", rest, divisor, 0), size) for rest in range(divisor)]

    assert all(found)
    assert sorted(job_id for some in found for job_id in some) == sorted(given)


def test_first_export_part_alone_reads_a_queue_that_has_become_short(storage):
    given = [answer.id for answer in storage.enqueue([batch(300)])]

    found = [ids(storage, ExportPart("default", rest, 16, 0)) for rest in range(16)]

    assert sorted(found[0]) == sorted(given)
    assert found[1:] == [[]] * 15


def test_export_contains_remaining_jobs_once_while_the_queue_grows_and_shrinks(storage):
    stays = [answer.id for answer in storage.enqueue([batch(1_000)])]
    goes = [answer.id for answer in storage.enqueue([batch(3_000)])]
    found = []
    for rest in range(4):
        for page in storage.capabilities.export.pages(JOBS, ExportPart("default", rest, 4, 0), 100):
            found += page["id"]
            if goes:
                storage.jobs.remove("default", goes[:200])
                del goes[:200]
            else:
                storage.enqueue([batch(500)])

    assert len(set(found)) == len(found)
    assert set(stays) <= set(found)


@pytest.fixture
def replies(storage, monkeypatch):
    """Return a list that gets the bytes of each reply from now on."""
    sizes, ask = [], storage._roundtrips._exchange.ask

    def measured(words):
        reply = ask(words)
        sizes.append(size_of(reply))
        return reply

    monkeypatch.setattr(storage._roundtrips._exchange, "ask", measured)
    return sizes


def size_of(reply):
    if isinstance(reply, list):
        return sum(map(size_of, reply))
    return len(reply) if isinstance(reply, bytes) else 0


def test_no_reply_is_much_larger_than_a_page(storage, replies):
    storage.enqueue([batch(payloads=[bytes(LARGE)] * 24)])
    finish(storage, *(completing(claimed, bytes(LARGE)) for claimed in claim(storage, 12)))
    replies.clear()

    jobs, results = rows(storage, "jobs"), rows(storage, "results")
    parts = read_all(storage)
    given = [row["id"] for row in jobs]
    copied = storage.capabilities.changes.records("default", given, b"")

    assert [(record.id, len(record.payload)) for record in copied] == [(job_id, LARGE) for job_id in given]
    assert [len(row["payload"]) for row in jobs] == [LARGE] * 24
    assert [len(row["result"]) for row in results] == [LARGE] * 12
    assert sum(len(part.records) for part in parts if part.kind == "job") == 24
    assert max(replies) < TOGETHER * PAGE_BYTES


def test_call_looks_at_few_jobs_with_large_payloads_even_if_it_returns_none_of_them(storage):
    given = [answer.id for answer in storage.enqueue([batch(payloads=[bytes(LARGE)] * 12)])]
    wanted = ExportFilter("jobs", frozenset({"id", "name"}))
    [part] = storage.capabilities.export.parts(wanted, 1)

    found = [page["id"] for page in storage.capabilities.export.pages(wanted, part, 1_000)]

    assert sorted(job_id for page in found for job_id in page) == sorted(given)
    assert max(map(len, found)) <= TOGETHER


def test_one_large_payload_among_small_ones_ends_a_page(storage):
    given = [answer.id for answer in storage.enqueue([batch(3_000)])]
    given += [answer.id for answer in storage.enqueue([batch(payloads=[bytes(LARGE)] * 3)])]

    found = ids(storage, ExportPart("default", 0, 1, 0), 1_000)

    assert sorted(found) == sorted(given)
