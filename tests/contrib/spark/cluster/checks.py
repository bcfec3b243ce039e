"""What holds after every fault."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from djqueue.codecs import MSGPACK, decode
from djqueue.core.states import State

QUEUE = "emails"


def multiset(storage: Any, queue: str = QUEUE) -> Counter[int]:
    """How many jobs there are of each number."""
    return Counter(
        decode(job.payload, MSGPACK)["kwargs"]["n"]
        for job in storage.reads.page(queue, State.WAITING, 100_000)
    )


def are_once(storage: Any, rows: Iterable[int], queue: str = QUEUE) -> None:
    """Each row is a job, and no job is there besides."""
    jobs, wanted = multiset(storage, queue), Counter(rows)
    assert jobs == wanted, f"{queue}: {(wanted - jobs).total()} lost, {(jobs - wanted).total()} too many"


def goes_by_itself(storage: Any) -> None:
    """What was put aside and is left has an end."""
    client = storage._connections.sync()
    for key in client.keys("*:stage:*"):
        assert client.pttl(key) > 0, key
