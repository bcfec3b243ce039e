"""The simulated producer: what it enqueues, and what it does to jobs."""

import asyncio
from typing import Any

from djqueue.codecs import MSGPACK, encode
from djqueue.core.backoff import Backoff
from djqueue.core.errors import DjqueueError
from djqueue.core.job import Batch
from djqueue.core.options import JobKey, JobOptions
from djqueue.storage.journaled.storage import JournaledStorage

from .nodes import POLICIES, new_storage
from .world import World

MOST = 30
"""Jobs that are under way at once."""


class Producer:
    """A process that is never killed, so that what it was told is known."""

    def __init__(self) -> None:
        world = self._world = World.current()
        self._random = world.random
        self._process = world.new_process("producer")
        self._storage: JournaledStorage = self._process.call(new_storage, self._process)
        self._known: list[JobKey] = []
        self._count = 0
        self._paused: set[str] = set()
        world.loop.spawn(self._process, self._work())

    async def _work(self) -> None:
        while self._world.chaos:
            await asyncio.sleep(self._random.choice((0.01, 0.1, 0.5, 2.0)))
            action = self._act if self._random.random() < 0.25 else self._enqueue
            await self._try(action)
        while self._paused:
            await asyncio.sleep(1.0)
            await self._try(self._resume_all)

    async def _try(self, action: Any) -> None:
        try:
            await asyncio.to_thread(action)
        except DjqueueError as error:
            self._world.note("refused", type(error).__name__)

    def _enqueue(self) -> None:
        monitor, random = self._world.monitor, self._random
        if monitor.pending() >= MOST:
            return
        queue = random.choice(list(POLICIES))
        self._count += 1
        ids = [f"{self._count}-{at}" for at in range(random.choice((1, 1, 3)))]
        options = self._options(queue)
        payload = encode([random.choice((0, 0, 0.05, 1, 4, 11)), random.choice((0, 0, 0, 1, 2))], MSGPACK)
        delay = random.choice((None, None, None, 500, 5_000))
        batch = Batch(queue, "work", options, [payload] * len(ids), ids, delay)
        monitor.offered(batch)
        answers = self._storage.enqueue([batch])
        for answer in answers:
            self._world.note("enqueued", queue, answer.id, answer.status)
            if answer.status == "queued":
                self._known.append((queue, answer.id))
                monitor.acknowledged((queue, answer.id), options)

    def _options(self, queue: str) -> JobOptions:
        random = self._random
        words: dict[str, Any] = {
            "max_stalls": random.choice((3, 1_000)),
            "max_attempts": random.choice((1, 3)),
            "backoff": Backoff(kind="fixed", base=random.choice((0, 1_000)), jitter=0.0),
            "result_ttl": None,
            "priority": random.choice((0, 0, 1)),
            "lifo": random.random() < 0.1,
            "durable": random.choice((None, None, True, False)),
        }
        if queue == "grouped":
            words["group"] = random.choice(("a", "b", "c"))
        if queue.startswith("shared"):
            words["weight"] = random.choice((1, 1, 2))
        if queue == "plain" and random.random() < 0.3:
            words["unique_key"] = random.choice(("k", "l"))
            words["on_duplicate"] = random.choice(("keep", "replace", "keep_last_if_active"))
        if self._known and random.random() < 0.25:
            known = self._known[-8:]
            words["depends_on"] = tuple(dict.fromkeys(random.choices(known, k=random.choice((1, 2)))))
            words["on_dependency_failure"] = random.choice(("fail", "cancel", "ignore"))
        return JobOptions(**words)

    def _act(self) -> None:
        random, storage = self._random, self._storage
        if not self._known:
            return
        queue, job_id = random.choice(self._known[-20:])
        act = random.choice(("cancel", "promote", "update", "retry", "pause", "resume", "read"))
        if not self._world.allows("keyed") and self._world.monitor.is_keyed((queue, job_id)):
            act = "read"
        self._world.note("act", act, queue, job_id)
        if act == "cancel":
            storage.jobs.cancel(queue, [job_id])
        elif act == "promote":
            storage.jobs.promote(queue, [job_id])
        elif act == "update":
            storage.jobs.update(queue, [job_id], priority=random.choice((0, 1, 2)))
        elif act == "retry":
            self._world.monitor.retried((queue, job_id))
            storage.jobs.retry(queue, [job_id])
        elif act == "pause":
            self._paused.add(queue)
            storage.queues.pause(queue)
        elif act == "resume":
            self._resume_all()
        else:
            storage.reads.states(queue, [job_id])

    def _resume_all(self) -> None:
        for queue in sorted(self._paused):
            self._storage.queues.resume(queue)
            self._paused.discard(queue)
