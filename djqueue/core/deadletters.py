"""The dead letters of one queue."""

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from .backoff import Backoff
from .enginejob import EngineJob
from .job import REJECTED, DeadLetterRecord, JobFailure
from .options import DAY
from .sizes import size_of

COMPACT_FROM = 64
NO_ERROR = JobFailure("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterPolicy:
    """How dead letters of a queue are kept."""

    max_entries: int = 10_000
    """The oldest go first when there are more."""
    max_bytes: int | None = None
    """Of their jobs' payloads and errors together; None: as many as there are."""
    ttl: int = 7 * DAY
    """Milliseconds for which one is kept."""
    auto_retries: int = 0
    """How often a dead letter is retried by itself."""
    auto_retry_delay: int | Backoff = 3_600_000
    """Milliseconds from its death to that retry, or a rule for them by the number of the retry."""

    def retry_at(self, reason: str, retries: int, now: int, random: Random) -> int:
        """When one that has been retried so often by itself is retried again; 0: never."""
        if retries >= self.auto_retries or reason == REJECTED:
            return 0
        delay = self.auto_retry_delay
        return now + (delay.delay(retries + 1, random) if isinstance(delay, Backoff) else delay)


class DeadLetters:
    """Dead letters by job id, in order of arrival."""

    __slots__ = ("_letters", "_numbers", "_order", "_random", "_retries", "_sizes", "bytes", "policy")

    def __init__(self, policy: DeadLetterPolicy, random: Random) -> None:
        self.policy = policy
        self._random = random
        self._letters: OrderedDict[str, DeadLetterRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}
        """Bytes of the job of each."""
        self.bytes = 0
        """Of all of them."""
        self._numbers = count(1)
        self._order: list[tuple[int, DeadLetterRecord]] = []
        """Every letter by a number that rises; also some that are gone."""
        self._retries: dict[str, int] = {}
        """How often jobs that live again have been retried by themselves."""

    def add(self, job: EngineJob, now: int) -> tuple[DeadLetterRecord, list[DeadLetterRecord]]:
        """The dead letter of a job that has just failed, and the oldest ones that gave way to it."""
        policy = self.policy
        letter = letter_of(job, now, self._retries.pop(job.id, 0), policy, self._random)
        self.restore(letter, job)
        return letter, self._surplus()

    def receive(
        self, letter: DeadLetterRecord, job: EngineJob, now: int
    ) -> tuple[DeadLetterRecord, list[DeadLetterRecord]]:
        """One from another queue, to be retried by itself as this queue has it; and those that gave way."""
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
        """Put back one that was kept elsewhere, as it was."""
        self._letters.pop(letter.id, None)
        self._letters[letter.id] = letter
        self._weigh(letter.id, size_of(job))
        self._order.append((next(self._numbers), letter))
        if len(self._order) > COMPACT_FROM + 2 * len(self._letters):
            self._order = [entry for entry in self._order if self._is_there(entry[1])]

    def remove(self, job_id: str, *, by_itself: bool = False) -> DeadLetterRecord | None:
        """Take one out; `by_itself` says that its job is being retried by the sweep."""
        letter = self._letters.pop(job_id, None)
        if letter is not None:
            self._weigh(job_id, 0)
            if by_itself:
                self._retries[job_id] = letter.retries + 1
        return letter

    def _weigh(self, job_id: str, size: int) -> None:
        self.bytes += size - self._sizes.pop(job_id, 0)
        if size:
            self._sizes[job_id] = size

    def retries_of(self, job_id: str) -> int:
        """Return how often a job that lives again has been retried by itself."""
        return self._retries.get(job_id, 0)

    def note_retries(self, job_id: str, retries: int) -> None:
        """How often one that comes from another queue has been retried by itself."""
        if retries:
            self._retries[job_id] = retries

    def forget(self, job_id: str) -> None:
        """The job is gone for good: so is the count of its retries."""
        self._retries.pop(job_id, None)

    def is_due(self, job_id: str, now: int) -> bool:
        """Return whether this one's time for a retry by itself has come."""
        letter = self._letters.get(job_id)
        return letter is not None and 0 < letter.next_retry_at <= now

    def due(self, now: int) -> list[DeadLetterRecord]:
        """Those whose time for a retry by itself has come."""
        return [letter for letter in self._letters.values() if 0 < letter.next_retry_at <= now]

    def follow_step(self, step: int) -> list[DeadLetterRecord]:
        """Keep the lengths of delays before retries: the wall clock was set by so many milliseconds.

        Returns the letters that are retried at another time than before.
        """
        moved = {
            letter.id: letter._replace(next_retry_at=letter.next_retry_at + step)
            for letter in self._letters.values()
            if letter.next_retry_at
        }
        self._order = [
            (number, moved.get(letter.id, letter)) for number, letter in self._order if self._is_there(letter)
        ]
        self._letters.update(moved)
        return list(moved.values())

    def expired(self, now: int) -> list[DeadLetterRecord]:
        """Those whose time is over, oldest first."""
        return [letter for letter in self._letters.values() if letter.expires_at <= now]

    def surplus(self, limit: int) -> list[DeadLetterRecord]:
        """Up to `limit` of the oldest, as many as are above the bytes that are kept."""
        most = self.policy.max_bytes
        letters: list[DeadLetterRecord] = []
        if most is not None and self.bytes > most:
            excess = self.bytes - most
            for letter in islice(self._letters.values(), limit):
                if excess <= 0:
                    break
                excess -= self._sizes.get(letter.id, 0)
                letters.append(letter)
        return letters

    def get(self, job_id: str) -> DeadLetterRecord | None:
        """One by its job's id."""
        return self._letters.get(job_id)

    def letters(self) -> list[DeadLetterRecord]:
        """All, oldest first."""
        return list(self._letters.values())

    def page(self, after: int, limit: int) -> tuple[list[DeadLetterRecord], int | None]:
        """Up to `limit` letters with numbers above one, oldest first; the last one's if there are more."""
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


def letter_of(
    job: EngineJob, now: int, retries: int, policy: DeadLetterPolicy, random: Random
) -> DeadLetterRecord:
    """The dead letter of a failed job that has been retried so often by itself."""
    error = job.error or NO_ERROR
    return DeadLetterRecord(
        job.queue,
        job.id,
        job.reason,
        now,
        now + policy.ttl,
        retries,
        policy.retry_at(job.reason, retries, now, random),
        job.name,
        error.type,
        error.message,
        tuple(sorted(job.unmet)) if job.unmet else (),
    )


def _number(entry: tuple[int, DeadLetterRecord]) -> int:
    return entry[0]
