"""What a process remembers about queues does not grow with the number of names that it has seen."""

from typing import Any

import pytest

from djqueue.core.policies import QueuePolicy
from djqueue.storage.redis import RedisStorage, keyspace
from djqueue.testing.factories import batch, completing, request

MOST = 5


def test_names_of_queues_that_come_and_go_are_forgotten(
    redis_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyspace, "REMEMBERED", MOST)
    storage = RedisStorage(**redis_options, default_policy=QueuePolicy(limiter="shared"))
    try:
        for number in range(4 * MOST):
            queue = f"tenant-{number}"
            storage.enqueue([batch(2, queue=queue, priority=number % 2)])
            jobs = storage.finish([], request(1, queues=[queue])).claims.jobs
            storage.finish(list(map(completing, jobs)), request(5, queues=[queue]))
            storage.sweep()
            storage.queues.obliterate(queue, force=True)

        claiming, sweeping = storage._claiming, storage._sweeping
        sizes = {
            "known": len(storage._keyspace.known),
            "agreed": len(storage._keyspace.agreed),
            "short": len(claiming._short),
            "drained": len(claiming._drained),
            "fast_pauses": len(claiming._fast_pauses),
            "plain": len(claiming._plain),
            "cursors": len(sweeping._cursors),
            "ranks": len(sweeping._removing._ranks),
            "in_line": len(storage._limits.in_line),
            "subscribed": len(storage.events._subscribed),
        }
        assert {name for name, size in sizes.items() if size > MOST} == set()
    finally:
        storage.close()
