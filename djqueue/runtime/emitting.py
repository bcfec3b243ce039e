"""What generators yield, on its way to the storage: in order, in groups, never more than a little ahead."""

import asyncio
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable
from itertools import islice
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

from djqueue.codecs import get_encoder
from djqueue.conf import Settings
from djqueue.core.errors import ItemError, SerializationError
from djqueue.core.job import Emission

from .flushing import Flushing

if TYPE_CHECKING:
    from .runs import Run
    from .workercontext import WorkerContext

INTERVAL = 0.005
"""Seconds between two groups, at least."""
AHEAD, AHEAD_BYTES = 1_000, 1024 * 1024
"""Items of one run, and their bytes, that wait here: while there are so many, it is asked for no more."""
GROUP, GROUP_BYTES = 1_000, 4 * 1024 * 1024
"""Items of one call of the storage, about, and their bytes."""

STOPPING = 1.0
"""Seconds that the cancellation of a task may take to arrive."""
STOPPED = "stopped before its next item was sent"


class Emitter(Flushing):
    """The items of a worker's runs that the storage does not have yet."""

    interval = INTERVAL
    verb = "emit"

    def __init__(
        self, worker_context: "WorkerContext", settings: Settings, on_refused: Callable[["Run"], None]
    ) -> None:
        super().__init__(worker_context)
        self.settings = settings
        self.lock = Lock()
        self.closed = False
        self._on_refused = on_refused
        self._pending: dict[RunItems, None] = {}
        """Those that have items to send, in the order in which they are served."""
        self._encoders: dict[str, Callable[[Any], bytes]] = {}

    @property
    def waiting(self) -> bool:
        """See `Flushing`."""
        return bool(self._pending) or self._sending.locked()

    def unsent(self) -> "set[Run]":
        """Return the runs whose items wait: their ends must not be reported before."""
        with self.lock:
            return {items.run for items in self._pending}

    def open(self, run: "Run") -> "RunItems":
        """Begin a run's stream. From any thread."""
        content_type = run.claimed.options.content_type
        encode = self._encoders.get(content_type)
        if encode is None:
            encode = get_encoder(content_type, self.settings.max_payload, "item")
            self._encoders[content_type] = encode
        run.items = RunItems(self, run, encode)
        return run.items

    def came(self, items: "RunItems") -> None:
        """There is something to send. The caller has the lock."""
        self._pending[items] = None
        self._schedule()

    async def flush(self) -> None:
        """See `Flushing`. What comes meanwhile is left to the next flush."""
        async with self._sending:
            with self.lock:
                left = {items: items.count for items in self._pending}
            while left:
                with self.lock:
                    group = _group(left)
                emissions = [emission for _, emission in group]
                accepted = await self.storage.acall(self.storage.emit, emissions) if group else []
                self._take_answers(group, accepted)
                left = {items: count for items, count in left.items() if items.sent < count}

    async def close(self) -> None:
        """Nobody is to wait for room any more, which will not come."""
        self.closed = True
        await super().close()
        with self.lock:
            pending, self._pending = list(self._pending), {}
        for items in pending:
            items.wake()

    def _take_answers(self, group: "list[tuple[RunItems, Emission]]", accepted: list[bool]) -> None:
        refused = []
        with self.lock:
            for (items, emission), taken in zip(group, accepted, strict=True):
                # Turn by turn: one that sends much holds up nobody.
                self._pending.pop(items, None)
                if taken:
                    items.told(len(emission.items))
                else:
                    items.refuse()
                    refused.append(items.run)
                if items.waiting:
                    self._pending[items] = None
        for run in refused:
            self._on_refused(run)


class RunItems:
    """The items of one run. Guarded by the emitter's lock, but for what only the generator's side touches."""

    def __init__(self, emitter: Emitter, run: "Run", encode: Callable[[Any], bytes]) -> None:
        self.run = run
        self.count = 0
        """Yielded so far."""
        self.sent = 0
        """Of which the storage has so many."""
        self.waiting: deque[bytes] = deque()
        """The others."""
        self._emitter = emitter
        self._encode = encode
        self._bytes = 0
        """Of all."""
        self._bytes_waiting = 0
        self._is_refused = False
        self._room = Condition(emitter.lock)
        self._room_on_loop: asyncio.Future[None] | None = None

    def put(self, value: Any) -> None:
        """Send an item; on a thread, which waits while too many are on their way. Raises ItemError."""
        data = self._encoded(value)
        with self._room:
            self._room.wait_for(lambda: not self._is_full() or self._is_over())
            self._add(data)

    async def aput(self, value: Any) -> None:
        """See `put`; on the loop."""
        data = self._encoded(value)
        while True:
            with self._emitter.lock:
                is_over = self._is_over()
                if not is_over and not self._is_full():
                    self._add(data)
                    return
                self._room_on_loop = room = asyncio.get_running_loop().create_future()
            if is_over:
                # Its task's cancellation is on its way, and is to come here: not when the generator closes.
                await asyncio.sleep(STOPPING)
                raise CancelledError(STOPPED)
            await room

    def wake(self) -> None:
        """Have a thread that waits look whether it still should."""
        with self._room:
            self._room.notify_all()

    def emission(self) -> Emission:
        """What is sent next. The caller has the lock, as for the rest."""
        size, many = 0, 0
        for data in islice(self.waiting, GROUP):
            if many and size + len(data) > AHEAD_BYTES:
                break
            size += len(data)
            many += 1
        claimed = self.run.claimed
        items = tuple(islice(self.waiting, many))
        return Emission(claimed.queue, claimed.id, claimed.token, self.sent, items)

    def told(self, many: int) -> None:
        """The storage has taken the next ones."""
        for _ in range(many):
            self._bytes_waiting -= len(self.waiting.popleft())
        self.sent += many
        self._make_room()

    def refuse(self) -> None:
        """The storage takes no more: the run is not this worker's."""
        self._is_refused = True
        self.sent = self.count
        self.waiting.clear()
        self._bytes_waiting = 0
        self._make_room()

    def _make_room(self) -> None:
        self._room.notify_all()
        if self._room_on_loop is not None and not self._room_on_loop.done():
            # Answers are taken on the loop that it is of.
            self._room_on_loop.set_result(None)

    def _encoded(self, value: Any) -> bytes:
        settings = self._emitter.settings
        try:
            data = self._encode(value)
        except SerializationError as error:
            raise ItemError(f"item {self.count} cannot be sent: {error}") from error
        if self.count >= settings.max_items:
            raise ItemError(
                f'the job yielded more than {settings.max_items:,} items, the limit in DJQUEUE["MAX_ITEMS"]'
            )
        self._bytes += len(data)
        if self._bytes > settings.max_items_size:
            raise ItemError(
                f"{self.count + 1:,} items have {self._bytes:,} bytes, but "
                f'DJQUEUE["MAX_ITEMS_SIZE"] allows {settings.max_items_size:,}'
            )
        return data

    def _add(self, data: bytes) -> None:
        if self._is_over():
            raise CancelledError(STOPPED)
        self.waiting.append(data)
        self._bytes_waiting += len(data)
        self.count += 1
        self._emitter.came(self)

    def _is_full(self) -> bool:
        return len(self.waiting) >= AHEAD or self._bytes_waiting >= AHEAD_BYTES

    def _is_over(self) -> bool:
        return bool(self.run.stop) or self._is_refused or self._emitter.closed


def _group(candidates: dict[RunItems, int]) -> list[tuple[RunItems, Emission]]:
    """The next call of the storage: something of each run, as much as fits."""
    group: list[tuple[RunItems, Emission]] = []
    many = size = 0
    for items in candidates:
        if many >= GROUP or size >= GROUP_BYTES:
            break
        if not items.waiting:
            continue
        emission = items.emission()
        group.append((items, emission))
        many += len(emission.items)
        size += sum(map(len, emission.items))
    return group
