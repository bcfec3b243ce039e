"""The dead letters of one queue."""

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count, islice
from random import Random

from ..enginejob import EngineJob, letter_of, size_of
from ..job import DeadLetterRecord
from ..policies import DeadLetterPolicy

COMPACT_FROM = 64

Heap = list[tuple[int, int, DeadLetterRecord]]
"""(time, number, dead letter)."""


class DeadLetters:
    """Dead letters by job id, in order of arrival."""

    __slots__ = (
        "_expiries",
        "_letters",
        "_numbers",
        "_order",
        "_random",
        "_retries",
        "_retry_times",
        "_sizes",
        "bytes",
        "policy",
    )

    def __init__(self, policy: DeadLetterPolicy, random: Random) -> None:
        self.policy = policy
        self._random = random
        self._letters: OrderedDict[str, DeadLetterRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}
        """Bytes of each dead letter's job."""
        self.bytes = 0
        """Bytes of all jobs."""
        self._numbers = count(1)
        self._order: list[tuple[int, DeadLetterRecord]] = []
        """Dead letters by ascending number; may contain removed ones, as the next two."""
        self._expiries: Heap = []
        self._retry_times: Heap = []
        """The times of automatic retries."""
        self._retries: dict[str, int] = {}
        """Number of automatic retries of jobs that are live again."""

    def add(self, job: EngineJob, now: int) -> tuple[DeadLetterRecord, list[DeadLetterRecord]]:
        """Add the dead letter of a failed job; return it, and the oldest ones that exceed the limit."""
        policy = self.policy
        letter = letter_of(job, now, self._retries.pop(job.id, 0), policy, self._random)
        self.restore(letter, job)
        return letter, self._surplus()

    def receive(
        self, letter: DeadLetterRecord, job: EngineJob, now: int
    ) -> tuple[DeadLetterRecord, list[DeadLetterRecord]]:
        """Add a dead letter of another queue with this queue's retries; return it, and those that exceed the
        limit.
        """
        letter = letter._replace(
            next_retry_at=self.policy.retry_at(letter.reason, letter.retries, now, self._random)
        )
        self.restore(letter, job)
        return letter, self._surplus()

    def _surplus(self) -> list[DeadLetterRecord]:
        evicted = []
        while len(self._letters) > self.policy.max_entries:
            oldest = self._letters.popitem(last=False)[1]
            self._weigh(oldest.id, 0)
            evicted.append(oldest)
        return evicted

    def restore(self, letter: DeadLetterRecord, job: EngineJob) -> None:
        """Add a stored dead letter as it was."""
        self._letters.pop(letter.id, None)
        self._letters[letter.id] = letter
        self._weigh(letter.id, size_of(job))
        number = next(self._numbers)
        self._order.append((number, letter))
        heapq.heappush(self._expiries, (letter.expires_at, number, letter))
        if letter.next_retry_at:
            heapq.heappush(self._retry_times, (letter.next_retry_at, number, letter))
        self._compact()

    def remove(self, job_id: str, *, by_itself: bool = False) -> DeadLetterRecord | None:
        """Remove a dead letter; `by_itself`: for an automatic retry."""
        letter = self._letters.pop(job_id, None)
        if letter is not None:
            self._weigh(job_id, 0)
            if by_itself:
                self._retries[job_id] = letter.retries + 1
            self._compact()
        return letter

    def _compact(self) -> None:
        if len(self._order) > COMPACT_FROM + 2 * len(self._letters):
            self._order = [entry for entry in self._order if self._is_there(entry[1])]
            for heap in (self._expiries, self._retry_times):
                heap[:] = [entry for entry in heap if self._is_there(entry[2])]
                heapq.heapify(heap)

    def _weigh(self, job_id: str, size: int) -> None:
        self.bytes += size - self._sizes.pop(job_id, 0)
        if size:
            self._sizes[job_id] = size

    def retries_of(self, job_id: str) -> int:
        """Return the number of automatic retries of a job that is live again."""
        return self._retries.get(job_id, 0)

    def note_retries(self, job_id: str, retries: int) -> None:
        """Set the number of automatic retries of a job from another queue."""
        if retries:
            self._retries[job_id] = retries

    def forget(self, job_id: str) -> None:
        """Drop the number of retries of a removed job."""
        self._retries.pop(job_id, None)

    def is_due(self, job_id: str, now: int) -> bool:
        """Return whether the time of an automatic retry has come."""
        letter = self._letters.get(job_id)
        return letter is not None and 0 < letter.next_retry_at <= now

    def due(self, now: int) -> Iterator[DeadLetterRecord]:
        """Yield the dead letters whose automatic retry is due, in the order of these times."""
        return self._until(self._retry_times, now)

    def expired(self, now: int, limit: int) -> list[DeadLetterRecord]:
        """Return up to `limit` expired dead letters, in the order of these times."""
        return list(islice(self._until(self._expiries, now), limit))

    def _until(self, heap: Heap, now: int) -> Iterator[DeadLetterRecord]:
        while heap and not self._is_there(heap[0][2]):
            heapq.heappop(heap)
        # Entries of the heap, which stay in it, with their indices: the root, and the children of those seen.
        ahead = [(heap[0], 0)] if heap else []
        while ahead and ahead[0][0][0] <= now:
            (_, _, letter), index = heapq.heappop(ahead)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(ahead, (heap[child], child))
            if self._is_there(letter):
                yield letter

    def surplus(self, limit: int) -> list[DeadLetterRecord]:
        """Return up to `limit` of the oldest dead letters that exceed the maximum size."""
        limit_bytes = self.policy.max_bytes
        letters: list[DeadLetterRecord] = []
        if limit_bytes is not None and self.bytes > limit_bytes:
            excess = self.bytes - limit_bytes
            for letter in islice(self._letters.values(), limit):
                if excess <= 0:
                    break
                excess -= self._sizes.get(letter.id, 0)
                letters.append(letter)
        return letters

    def get(self, job_id: str) -> DeadLetterRecord | None:
        """Return the dead letter of a job; None if it has none."""
        return self._letters.get(job_id)

    def letters(self) -> list[DeadLetterRecord]:
        """Return all dead letters, oldest first."""
        return list(self._letters.values())

    def page(self, after: int, limit: int) -> tuple[list[DeadLetterRecord], int | None]:
        """Return up to `limit` dead letters above a number, and the last number if there are more."""
        letters: list[DeadLetterRecord] = []
        last = after
        for at in range(bisect_right(self._order, after, key=_number), len(self._order)):
            number, letter = self._order[at]
            if not self._is_there(letter):
                continue
            if len(letters) == limit:
                return letters, last
            letters.append(letter)
            last = number
        return letters, None

    def _is_there(self, letter: DeadLetterRecord) -> bool:
        return self._letters.get(letter.id) is letter

    def __len__(self) -> int:
        return len(self._letters)


def _number(entry: tuple[int, DeadLetterRecord]) -> int:
    return entry[0]
