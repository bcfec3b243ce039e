"""Sending what running jobs emit, in batches: `Flushing` for reports of all kinds, `Emitter` for items.

The items of a generator are sent in order, with a limit on how many wait.
"""

import asyncio
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from threading import Condition, Lock
from typing import Any

from djqueue.client.steps import apart
from djqueue.codecs import get_encoder
from djqueue.conf import Settings
from djqueue.core.errors import ItemError, SerializationError
from djqueue.core.job import Emission

from .context import WorkerContext
from .owntasks import own_task
from .runs import Run

INTERVAL = 0.005
"""Minimum of seconds between two batches."""
AHEAD, AHEAD_BYTES = 1_000, 1024 * 1024
"""Items of one run, and their bytes, that may wait here; at either limit, the generator is not resumed."""
BATCH, BATCH_BYTES = 1_000, 4 * 1024 * 1024
"""Approximate maximum of items, and of their bytes, in one call of the storage."""
STOPPING = 1.0
"""Seconds that the cancellation of a task may take to arrive."""
RETRY = 1.0
"""Seconds until a batch is sent again when the storage is unavailable."""
LOCKED = 0.1
"""Seconds until what handlers report of a locked job is sent again."""
STOPPED = "stopped before its next item was sent"


class Flushing(ABC):
    """Sends what handlers report in batches: at once, and then after at least `interval` seconds."""

    interval: float
    operation: str
    """Name of the storage's operation, for messages."""

    def __init__(self, context: WorkerContext) -> None:
        self._storage = context.storage
        self._loop = context.loop
        self._events = context.events
        self._lose = context.control.lose
        self._sending = asyncio.Lock()
        self.closed = False
        self._scheduled = False
        self._waits_for_lock = False
        self._not_before = 0.0
        self._flush: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether something may not have reached the storage yet."""

    @abstractmethod
    async def flush(self) -> set[Run]:
        """Send all that waits; return the runs whose jobs are locked.

        Raises what the storage raises, and keeps what it did not accept.
        """

    async def close(self) -> None:
        """Cancel the flush in progress, if there is one; begin no other."""
        self.closed = self._scheduled = True
        if self._flush is not None:
            self._flush.cancel()
            await asyncio.gather(self._flush, return_exceptions=True)

    def _schedule(self) -> None:
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._arm)
        except RuntimeError:
            # An abandoned handler still runs after the end of its worker.
            self._events.ignored("a report")

    def _arm(self) -> None:
        delay = max(0.0, self._not_before - self._loop.time())
        self._loop.call_later(delay, self._begin)

    def _begin(self) -> None:
        if self.closed:
            return  # Nothing would await a task that begins while its loop is being closed.
        self._scheduled = False
        self._not_before = self._loop.time() + self.interval
        self._flush = own_task(self._loop, self._flush_scheduled())

    async def _flush_scheduled(self) -> None:
        try:
            locked = await self.flush()
        except Exception as error:
            self._events.storage_failed(self.operation, error)
            self._not_before = self._loop.time() + RETRY
            self._schedule()
        else:
            self._events.storage_worked(self.operation)
            if locked and not self._waits_for_lock:
                self._waits_for_lock = True
                self._loop.call_later(LOCKED, self._try_again)

    def _try_again(self) -> None:
        self._waits_for_lock = False
        self._schedule()


class Emitter(Flushing):
    """The items of a worker's runs that the storage does not have yet."""

    interval = INTERVAL
    operation = "emit"

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.settings = context.settings
        self.lock = Lock()
        self._pending: dict[RunItems, None] = {}
        """Runs with items to send, in the order of their turns."""
        self._encoders: dict[str, Callable[[Any], bytes]] = {}

    @property
    def waiting(self) -> bool:
        """Whether items may not have reached the storage yet."""
        return bool(self._pending) or self._sending.locked()

    def unsent(self) -> set[Run]:
        """Return the runs with unsent items: their outcomes must not be reported before."""
        with self.lock:
            return {items.run for items in self._pending}

    def open(self, run: Run) -> "RunItems":
        """Begin the stream of a run. From any thread."""
        content_type = run.claimed.options.content_type
        encode = self._encoders.get(content_type)
        if encode is None:
            encode = get_encoder(content_type, self.settings.max_payload, "item")
            self._encoders[content_type] = encode
        run.items = items = RunItems(self, run, encode)
        return items

    def add(self, items: "RunItems") -> None:
        """Send the items of a run soon. The caller holds the lock."""
        self._pending[items] = None
        self._schedule()

    async def flush(self) -> set[Run]:
        """Send the items that wait now; later ones, and those of locked jobs, are left to the next flush."""
        locked: set[RunItems] = set()
        async with self._sending:
            with self.lock:
                unsent = {items: items.count for items in self._pending}
            while unsent:
                with self.lock:
                    batch = _next_batch(unsent)
                emissions = [emission for _, emission in batch]
                accepted = await self._storage.acall(self._storage.emit, emissions) if batch else []
                self._take_answers(batch, accepted)
                locked |= {items for (items, _), taken in zip(batch, accepted, strict=True) if taken is None}
                unsent = {
                    items: count
                    for items, count in unsent.items()
                    if items.sent < count and items not in locked
                }
        return {items.run for items in locked}

    async def close(self) -> None:
        """Stop sending, and release the generators that wait for room."""
        await super().close()
        with self.lock:
            pending, self._pending = list(self._pending), {}
        for items in pending:
            items.wake()

    def _take_answers(
        self, batch: list[tuple["RunItems", Emission]], accepted: Sequence[bool | None]
    ) -> None:
        refused = []
        with self.lock:
            for (items, emission), taken in zip(batch, accepted, strict=True):
                # A run with more items goes to the end, so that it does not delay the others.
                self._pending.pop(items, None)
                if taken:
                    items.accept(len(emission.items))
                elif taken is False:
                    items.refuse()
                    refused.append(items.run)
                if items.waiting:
                    self._pending[items] = None
        for run in refused:
            self._lose(run)


class ItemEncoder:
    """Encodes the items of one attempt, and enforces the limits of their number and size."""

    def __init__(self, settings: Settings, encode: Callable[[Any], bytes]) -> None:
        self._settings = settings
        self._encode = encode
        self._count = 0
        self._size = 0

    def encoded(self, value: Any) -> bytes:
        """Return the bytes of the next item. Raises ItemError."""
        try:
            data = self._encode(value)
        except SerializationError as error:
            raise ItemError(f"item {self._count} cannot be sent: {error}") from error
        self.add(len(data))
        return data

    def add(self, size: int) -> None:
        """Count an item of so many bytes. Raises ItemError above a limit."""
        settings = self._settings
        if self._count >= settings.max_items:
            raise ItemError(
                f'the job yielded more than {settings.max_items:,} items, the limit in DJQUEUE["MAX_ITEMS"]'
            )
        if self._size + size > settings.max_items_size:
            raise ItemError(
                f"{self._count + 1:,} items have {self._size + size:,} bytes, but "
                f'DJQUEUE["MAX_ITEMS_SIZE"] allows {settings.max_items_size:,}'
            )
        self._count += 1
        self._size += size


class RunItems:
    """The items of one run. The emitter's lock guards what its generator and the loop both use."""

    def __init__(self, emitter: Emitter, run: Run, encode: Callable[[Any], bytes]) -> None:
        self.run = run
        self.count = 0
        """Number of items yielded so far."""
        self.sent = 0
        """Number of items that the storage has."""
        self.waiting: deque[bytes] = deque()
        """Items that the storage does not have yet."""
        self._emitter = emitter
        self._encoder = ItemEncoder(emitter.settings, encode)
        self._bytes_waiting = 0
        self._is_refused = False
        self._room = Condition(emitter.lock)
        self._room_on_loop: asyncio.Future[None] | None = None

    def put(self, value: Any) -> None:
        """Send an item; block the thread while too many items wait. Raises ItemError."""
        data = self._encoder.encoded(value)
        with self._room:
            self._room.wait_for(lambda: not self._is_full() or self._is_over())
            self._add(data)

    async def aput(self, value: Any) -> None:
        """Async version of `put`."""
        data = await apart(self.run.claimed.options.content_type, self._encoder.encoded, value)
        while True:
            with self._emitter.lock:
                is_over = self._is_over()
                if not is_over and not self._is_full():
                    self._add(data)
                    return
                self._room_on_loop = room = asyncio.get_running_loop().create_future()
            if is_over:
                # The task is being cancelled, which must happen here, and not while the generator closes.
                await asyncio.sleep(STOPPING)
                raise CancelledError(STOPPED)
            await room

    def take(self, data: bytes) -> None:
        """Send an item that another process has encoded; drop it if the run is over. Raises ItemError.

        Called on the loop. Check `is_full` before the next one.
        """
        self._encoder.add(len(data))
        with self._emitter.lock:
            if not self._is_over():
                self._add(data)

    async def room(self) -> None:
        """Wait until there is room for another item, or the run is over. Called on the loop."""
        while True:
            with self._emitter.lock:
                if self._is_over() or not self._is_full():
                    return
                self._room_on_loop = room = asyncio.get_running_loop().create_future()
            await room

    @property
    def is_full(self) -> bool:
        """Whether the next item has to wait."""
        return self._is_full() and not self._is_over()

    def wake(self) -> None:
        """Let a thread that waits for room check whether its run is over."""
        with self._room:
            self._room.notify_all()

    def emission(self) -> Emission:
        """Return the items to send next. The caller holds the lock, as for `accept` and `refuse`."""
        size, count = 0, 0
        for data in islice(self.waiting, BATCH):
            if count and size + len(data) > AHEAD_BYTES:
                break
            size += len(data)
            count += 1
        claimed = self.run.claimed
        items = tuple(islice(self.waiting, count))
        return Emission(claimed.queue, claimed.id, claimed.token, self.sent, items)

    def accept(self, count: int) -> None:
        """Drop the first items, which the storage has accepted."""
        for _ in range(count):
            self._bytes_waiting -= len(self.waiting.popleft())
        self.sent += count
        self._make_room()

    def refuse(self) -> None:
        """Drop all items: the storage accepts none, because the run's lease is lost."""
        self._is_refused = True
        self.sent = self.count
        self.waiting.clear()
        self._bytes_waiting = 0
        self._make_room()

    def _make_room(self) -> None:
        self._room.notify_all()
        if self._room_on_loop is not None and not self._room_on_loop.done():
            # The caller runs on the loop of this future.
            self._room_on_loop.set_result(None)

    def _add(self, data: bytes) -> None:
        if self._is_over():
            raise CancelledError(STOPPED)
        self.waiting.append(data)
        self._bytes_waiting += len(data)
        self.count += 1
        self._emitter.add(self)

    def _is_full(self) -> bool:
        return len(self.waiting) >= AHEAD or self._bytes_waiting >= AHEAD_BYTES

    def _is_over(self) -> bool:
        return bool(self.run.stop) or self._is_refused or self._emitter.closed


def _next_batch(candidates: dict[RunItems, int]) -> list[tuple[RunItems, Emission]]:
    """Return what the next call of the storage sends: some items of each run, as many as fit."""
    batch: list[tuple[RunItems, Emission]] = []
    count = size = 0
    for items in candidates:
        if count >= BATCH or size >= BATCH_BYTES:
            break
        if not items.waiting:
            continue
        emission = items.emission()
        batch.append((items, emission))
        count += len(emission.items)
        size += sum(map(len, emission.items))
    return batch
