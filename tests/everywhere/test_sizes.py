"""Size limits of jobs: payload and options count together on every storage."""

import re
from itertools import count
from typing import Any

import pytest

from djqueue import Queue, flow, job
from djqueue.core.errors import OptionError, PayloadTooLargeError
from djqueue.core.options import MAX_DEPENDENCIES, MAX_TAGS
from djqueue.storage.base import Storage

ORDERS = "orders"


def tags(number: int, length: int = 200) -> list[str]:
    return [f"{index:0{length}}" for index in range(number)]


def limit(settings: Any, size: int) -> None:
    settings.DJQUEUE = {**settings.DJQUEUE, "MAX_PAYLOAD": size}


def test_job_with_more_than_a_thousand_tags_is_rejected(storage: Storage) -> None:
    expected = "tags: a job may have at most 1,000 tags, got "

    with pytest.raises(OptionError, match=expected + "1,000,000"):
        Queue(ORDERS).enqueue(tags=["tag"] * 1_000_000)
    with pytest.raises(OptionError, match=expected + "more"):
        Queue(ORDERS).enqueue(tags=(f"tag {number}" for number in count()))

    assert storage.queues.names() == []
    answer = Queue(ORDERS).enqueue(tags=tags(MAX_TAGS))
    [record] = storage.reads.jobs(ORDERS, [answer.id])
    assert record is not None
    assert len(record.options.tags) == MAX_TAGS


def test_job_with_more_than_ten_thousand_dependencies_is_rejected(storage: Storage) -> None:
    expected = "depends_on: a job may depend on at most 10,000 jobs"

    with pytest.raises(OptionError, match=expected):
        Queue(ORDERS).enqueue(depends_on=[(ORDERS, str(number)) for number in range(MAX_DEPENDENCIES + 1)])
    with pytest.raises(OptionError, match=expected):
        Queue(ORDERS).enqueue(depends_on=((ORDERS, str(number)) for number in count()))

    assert storage.queues.names() == []


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_tags_and_payload_count_toward_one_size_limit(storage: Storage, settings: Any, many: bool) -> None:
    limit(settings, 10_000)
    queue = Queue(ORDERS)

    def enqueue(payload: str, number: int) -> Any:
        if many:
            return queue.enqueue_many(["", payload], tags=tags(number))
        return queue.enqueue(payload, tags=tags(number))

    expected = (
        r"job 'orders': \d{5} bytes \(payload 3003, tags 8092\), but "
        r'DJQUEUE\["MAX_PAYLOAD"\] allows 10000 for the payload and the options together'
    )
    with pytest.raises(PayloadTooLargeError, match=expected):
        enqueue("x" * 3_000, 40)
    assert storage.queues.names() == []

    enqueue("x" * 1_000, 40)
    enqueue("x" * 9_900, 0)


def test_dependencies_count_toward_the_size_limit(storage: Storage, settings: Any) -> None:
    limit(settings, 10_000)
    queue = Queue(ORDERS)
    first = queue.enqueue_many(range(300))

    with pytest.raises(PayloadTooLargeError, match=r"\(payload 1, depends_on 1\d{4}\)"):
        queue.enqueue(depends_on=first)
    last = queue.node("last").after(*(queue.node(number) for number in range(300)))
    with pytest.raises(PayloadTooLargeError, match="depends_on"):
        flow(last).enqueue()

    assert queue.counts()["waiting"] == 300
    assert queue.enqueue(depends_on=first[:150]).status == "queued"


def test_other_options_count_toward_the_size_limit_exactly(storage: Storage, settings: Any) -> None:
    queue, texts = Queue(ORDERS), {"unique_key": "k" * 200, "concurrency_key": "g" * 200}
    limit(settings, 300)
    with pytest.raises(PayloadTooLargeError) as caught:
        queue.enqueue(**texts)
    found = re.search(r"(\d+) bytes \(payload 1, other options (\d+)\)", str(caught.value))
    assert found is not None
    size = int(found[1])
    assert size == 1 + int(found[2])

    limit(settings, size - 1)
    with pytest.raises(PayloadTooLargeError):
        queue.enqueue(**texts)
    limit(settings, size)
    assert queue.enqueue(**texts).status == "queued"


def nothing() -> None:
    """Do nothing."""


def test_options_of_a_job_function_count_toward_the_size_limit(storage: Storage, settings: Any) -> None:
    limit(settings, 5_000)

    with pytest.raises(PayloadTooLargeError, match="tags 8092"):
        job(tags=tags(40))(nothing).enqueue()


def test_updated_payload_counts_with_the_options_of_the_job(storage: Storage, settings: Any) -> None:
    limit(settings, 10_000)
    queue = Queue(ORDERS)
    answer = queue.enqueue("small", tags=tags(40))

    with pytest.raises(PayloadTooLargeError, match="payload 3003, tags 8092"):
        queue.update(answer.id, payload="x" * 3_000)

    assert queue.update(answer.id, payload="x" * 1_000)
