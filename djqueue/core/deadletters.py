"""The dead letters of one queue."""

from collections import OrderedDict
from dataclasses import dataclass

from .job import DeadLetter
from .options import DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterPolicy:
    """How dead letters of a queue are kept."""

    max_entries: int = 10_000
    """The oldest go first when there are more."""
    ttl: int = 7 * DAY
    """Milliseconds for which one is kept."""
    auto_retries: int = 0
    """How often a dead letter is retried by itself."""
    auto_retry_delay: int = 3_600_000
    """Milliseconds from its death to that retry."""


class DeadLetters:
    """Dead letters by job id, in order of arrival."""

    __slots__ = ("_letters", "_retries", "policy")

    def __init__(self, policy: DeadLetterPolicy) -> None:
        self.policy = policy
        self._letters: OrderedDict[str, DeadLetter] = OrderedDict()
        self._retries: dict[str, int] = {}
        """How often jobs that live again have been retried by themselves."""

    def add(self, queue: str, job_id: str, reason: str, now: int) -> tuple[DeadLetter, list[DeadLetter]]:
        """A new dead letter, and the oldest ones that gave way to it."""
        policy = self.policy
        retries = self._retries.pop(job_id, 0)
        again = now + policy.auto_retry_delay if retries < policy.auto_retries else 0
        letter = DeadLetter(queue, job_id, reason, now, now + policy.ttl, retries, again)
        self.restore(letter)
        evicted = []
        while len(self._letters) > policy.max_entries:
            evicted.append(self._letters.popitem(last=False)[1])
        return letter, evicted

    def restore(self, letter: DeadLetter) -> None:
        """Put back one that was kept elsewhere, as it was."""
        self._letters.pop(letter.id, None)
        self._letters[letter.id] = letter

    def remove(self, job_id: str, *, by_itself: bool = False) -> DeadLetter | None:
        """Take one out; `by_itself` says that its job is being retried by the sweep."""
        letter = self._letters.pop(job_id, None)
        if letter is not None and by_itself:
            self._retries[job_id] = letter.retries + 1
        return letter

    def forget(self, job_id: str) -> None:
        """The job is gone for good: so is the count of its retries."""
        self._retries.pop(job_id, None)

    def is_due(self, job_id: str, now: int) -> bool:
        """Whether this one's time for a retry by itself has come."""
        letter = self._letters.get(job_id)
        return letter is not None and 0 < letter.next_retry_at <= now

    def due(self, now: int) -> list[DeadLetter]:
        """Those whose time for a retry by itself has come."""
        return [letter for letter in self._letters.values() if 0 < letter.next_retry_at <= now]

    def expired(self, now: int) -> list[DeadLetter]:
        """Those whose time is over, oldest first."""
        return [letter for letter in self._letters.values() if letter.expires_at <= now]

    def get(self, job_id: str) -> DeadLetter | None:
        """One by its job's id."""
        return self._letters.get(job_id)

    def letters(self) -> list[DeadLetter]:
        """All, oldest first."""
        return list(self._letters.values())

    def __len__(self) -> int:
        return len(self._letters)
