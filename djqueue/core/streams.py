"""Items of generators: sent by running jobs, kept with them, read by whoever waits."""

from collections.abc import Iterable, Sequence

from .base import EngineBase
from .job import Emission, EngineJob, Event, ItemMark, ItemPage, ItemStream
from .options import JobOptions
from .shard import PendingChanges
from .states import State

PAGE_BYTES = 1024 * 1024
"""At so many bytes an answer ends."""
PAGE_ITEMS = 1_000
"""Items of one answer."""


class Streams(EngineBase):
    """The two verbs of a stream."""

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """Keep items of running jobs, each if its token still holds and none before it is missing."""
        changes = PendingChanges()
        now = self.clock.now()
        accepted = []
        for emission in emissions:
            queue = self.existing(emission.queue)
            place = self.place(emission.id)
            with place.lock:
                job = place.active.get(emission.token)
                if queue is None or job is None or job.id != emission.id or job.queue != emission.queue:
                    accepted.append(False)
                    continue
                stream = job.stream
                if stream is None:
                    stream = job.stream = ItemStream(emission.token, [])
                new = emission.items[max(0, stream.count - emission.start) :]
                accepted.append(emission.start <= stream.count)
                if not accepted[-1] or not new or stream.items is None:
                    continue
                stream.items += new
                stream.count += len(new)
                if self._journal is not None:
                    self._journal.emitted(job, new)
                if queue.observed:
                    fields = (queue.name, job.id, job.name, "item", job.state, now, stream.count)
                    changes.events.append(Event(*fields))
        self.settle(changes)
        return accepted

    def items(self, queue_name: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """What has come behind each mark; None for a job that is not known, or whose items are elsewhere."""
        shard = self.shard(queue_name)
        now = self.clock.now()
        pages: list[ItemPage | None] = []
        with shard.lock:
            queue = shard.find(queue_name)
            for mark in marks:
                job = queue.jobs.get(mark.id)
                if job is None:
                    pages.append(None)
                    continue
                with self.place(job.id).lock:
                    pages.append(_page(job, mark, now))
        return pages


def cut(items: Iterable[bytes]) -> tuple[bytes, ...]:
    """The first of some items, as many as one answer holds."""
    found: list[bytes] = []
    size = 0
    for item in items:
        found.append(item)
        size += len(item)
        if size >= PAGE_BYTES or len(found) == PAGE_ITEMS:
            break
    return tuple(found)


def are_readable(state: State, options: JobOptions, finished_at: int, now: int) -> bool:
    """Whether the time of a job's items is not over: that of its result, should it have one."""
    if state is not State.COMPLETED or options.result_ttl is None:
        return True
    return finished_at + options.result_ttl > now


def _page(job: EngineJob, mark: ItemMark, now: int) -> ItemPage | None:
    content_type, stream = job.options.content_type, job.stream
    if stream is None:
        return ItemPage(job.state, content_type, job.token, 0, (), 0)
    if stream.items is None:
        return None
    start = mark.start if mark.run == stream.run else 0
    readable = are_readable(job.state, job.options, job.finished_at, now)
    # A copy of what is wanted, and not of all that is behind it.
    ahead = (stream.items[at] for at in range(start, len(stream.items))) if readable else ()
    return ItemPage(job.state, content_type, stream.run, start, cut(ahead), stream.count)
