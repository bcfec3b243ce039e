"""Wait for room in a full queue: by its events, and by polling in case an event is lost."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from threading import Event as ThreadEvent
from typing import ParamSpec, Protocol, TypeVar

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import QueueFullError
from djqueue.core.flow import Substitutes
from djqueue.core.job import Batch, EnqueueResult, Event
from djqueue.core.policies import QueuePolicy

from .facets import EventHandler, Events

LOOK_EVERY = 1.0
"""Seconds between attempts, in case an event was lost with a connection."""
MAKING_ROOM = frozenset({"cancelled", "failed", "removed", "started"})

P = ParamSpec("P")
T = TypeVar("T")
Policy = Callable[[str], QueuePolicy]


class Waitable(Protocol):
    """The part of a storage that `aenqueue` uses."""

    @property
    def events(self) -> Events:
        """The events of queues."""

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a sync method from a coroutine."""


def enqueue(
    events: Events,
    policy: Policy,
    batches: Sequence[Batch],
    once: Callable[[Sequence[Batch]], list[EnqueueResult]],
) -> list[EnqueueResult]:
    """Enqueue batches. If any of them may have to wait, enqueue one at a time, each as soon as there is room.

    Args:
        events: The events of the storage, which wake the caller. policy: Returns a queue's policy.
        batches: The jobs.
        once: Enqueues batches, or raises QueueFullError.
    """
    if not may_wait(policy, batches):
        return once(batches)
    results: list[EnqueueResult] = []
    substitutes = Substitutes()
    for given in batches:
        batch = substitutes.in_(given)
        try:
            answers = once([batch])
        except QueueFullError:
            patience = _patience(policy, batch)
            if not patience:
                raise
            answers = _wait(events, batch, patience, once)
        substitutes.note(batch, answers)
        results += answers
    return results


async def aenqueue(
    storage: Waitable,
    policy: Policy,
    batches: Sequence[Batch],
    once: Callable[[Sequence[Batch]], Awaitable[list[EnqueueResult]]],
) -> list[EnqueueResult]:
    """Async version of `enqueue`."""
    if not may_wait(policy, batches):
        return await once(batches)
    results: list[EnqueueResult] = []
    substitutes = Substitutes()
    for given in batches:
        batch = substitutes.in_(given)
        try:
            answers = await once([batch])
        except QueueFullError:
            patience = _patience(policy, batch)
            if not patience:
                raise
            answers = await _await(storage, batch, patience, once)
        substitutes.note(batch, answers)
        results += answers
    return results


def _wait(
    events: Events,
    batch: Batch,
    patience: int,
    once: Callable[[Sequence[Batch]], list[EnqueueResult]],
) -> list[EnqueueResult]:
    deadline = SYSTEM_CLOCK.monotonic() + patience
    changed = ThreadEvent()
    unsubscribe = events.subscribe(batch.queue, _on_room(changed.set))
    try:
        while True:
            changed.clear()
            try:
                return once([batch])
            except QueueFullError:
                left = _left(deadline)
                if not left:
                    raise
            changed.wait(min(LOOK_EVERY, left))
    finally:
        unsubscribe()


async def _await(
    storage: Waitable,
    batch: Batch,
    patience: int,
    once: Callable[[Sequence[Batch]], Awaitable[list[EnqueueResult]]],
) -> list[EnqueueResult]:
    deadline = SYSTEM_CLOCK.monotonic() + patience
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    unsubscribe = await storage.acall(storage.events.subscribe, batch.queue, _on_room(wake))
    try:
        while True:
            changed.clear()
            try:
                return await once([batch])
            except QueueFullError:
                left = _left(deadline)
                if not left:
                    raise
            try:
                await asyncio.wait_for(changed.wait(), min(LOOK_EVERY, left))
            except TimeoutError:
                continue
    finally:
        unsubscribe()


def may_wait(policy: Policy, batches: Sequence[Batch]) -> bool:
    """Return whether an enqueue of these batches waits if their queues are full."""
    return any(policy(batch.queue).when_full == "block" for batch in batches)


def _patience(policy: Policy, batch: Batch) -> int:
    found = policy(batch.queue)
    # A batch that is larger than the queue's maximum size would wait forever.
    fits = found.max_size is not None and len(batch.payloads) <= found.max_size
    return found.block_timeout if found.when_full == "block" and fits else 0


def _on_room(wake: Callable[[], None]) -> EventHandler:
    def handler(event: Event) -> None:
        if event.event in MAKING_ROOM:
            wake()

    return handler


def _left(deadline: int) -> float:
    return max(0, deadline - SYSTEM_CLOCK.monotonic()) / 1_000
