"""Check what must be true after every fault."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from djqueue.codecs import MSGPACK, decode
from djqueue.core.states import State

QUEUE = "emails"


def multiset(storage: Any, queue: str = QUEUE) -> Counter[int]:
    """Return the number of jobs for each row."""
    return Counter(
        decode(job.payload, MSGPACK)["kwargs"]["n"]
        for job in storage.reads.page(queue, State.WAITING, 100_000)
    )


def are_once(storage: Any, rows: Iterable[int], queue: str = QUEUE) -> None:
    """Assert that each row has one job, and that no other jobs exist."""
    jobs, wanted = multiset(storage, queue), Counter(rows)
    assert jobs == wanted, f"{queue}: {(wanted - jobs).total()} lost, {(jobs - wanted).total()} too many"


def goes_by_itself(storage: Any) -> None:
    """Assert that all remaining staged rows expire."""
    client = storage._connections.sync()
    for key in client.keys("*:stage:*"):
        assert client.pttl(key) > 0, key
