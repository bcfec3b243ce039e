"""List, count, retry and move the dead letters of a queue by their contents, a page at a time."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple

from djqueue.core.errorgroups import MAX_FINGERPRINTS, fingerprint_of
from djqueue.core.errors import OptionError
from djqueue.core.job import DEAD_LETTER_REASONS, DeadLetterRecord
from djqueue.core.options import MAX_INTEGER, check_text
from djqueue.core.states import State
from djqueue.core.suggest import nearest
from djqueue.core.units import milliseconds
from djqueue.storage.base import Storage

from .sending import chunks

MAX_PAGE = 500
"""Dead letters per call."""
Progress = Callable[["RetriedDead"], object]


class RetriedDead(NamedTuple):
    """The outcomes of a retry of dead letters, as counts."""

    retried: int = 0
    unique_key_taken: int = 0
    """Not retried: a live job has their unique key."""
    not_failed: int = 0
    """Already retried or enqueued again."""
    not_found: int = 0
    rejected: int = 0
    """Not retried: they could never run, and need another payload first."""
    blocked_again: int = 0
    """Retried, and blocked until their unmet dependencies complete."""
    dependency_gone: int = 0
    """Not retried: an unmet dependency was cancelled or removed."""


class MovedDead(NamedTuple):
    """The outcomes of a move of dead letters to another queue, as counts."""

    moved: int = 0
    duplicate: int = 0
    """Not moved: the other queue has a job with this id."""
    not_found: int = 0
    """No longer there, or already moved."""
    refused: int = 0
    """Already retried or enqueued again, or refused by the other queue."""


class ErrorCount(NamedTuple):
    """The number of dead letters with one fingerprint, and the newest error."""

    total: int
    error_type: str
    error_message: str


class DeadLetterCounts(NamedTuple):
    """Counts of a queue's dead letters. Each mapping is sorted by count, largest first."""

    total: int
    reasons: dict[str, int]
    names: dict[str, int]
    """By job name."""
    error_types: dict[str, int]
    fingerprints: dict[str, ErrorCount]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """A filter of dead letters; None matches any. Built by `read_filter`."""

    reason: str | None = None
    name: str | None = None
    error_type: str | None = None
    fingerprint: str | None = None
    """One fingerprint, or several separated by commas."""
    older_than: int | None = None
    """Milliseconds since the job failed, as for `newer_than`."""
    newer_than: int | None = None

    def matches(self, letter: DeadLetterRecord, at: int) -> bool:
        """Return whether a dead letter matches at a time."""
        age = at - letter.entered_at
        return (
            (self.reason is None or letter.reason == self.reason)
            and (self.name is None or letter.name == self.name)
            and (self.error_type is None or is_of_type(letter.error_type, self.error_type))
            and (self.older_than is None or age >= self.older_than)
            and (self.newer_than is None or age < self.newer_than)
            and (self.fingerprint is None or fingerprint(letter) in self.fingerprint.split(","))
        )


FILTERS = tuple(field.name for field in fields(DeadLetterFilter))
"""The filters of dead letters."""


def read_filter(
    *,
    reason: str | None = None,
    name: str | None = None,
    error_type: str | None = None,
    fingerprint: str | None = None,
    older_than: float | timedelta | None = None,
    newer_than: float | timedelta | None = None,
) -> DeadLetterFilter:
    """Check the options of a filter, and return it. Raises OptionError."""
    if reason is not None and reason not in DEAD_LETTER_REASONS:
        hint = nearest(str(reason), DEAD_LETTER_REASONS) or "."
        raise OptionError(
            f"reason: unknown reason {reason!r}{hint} Choose from {', '.join(sorted(DEAD_LETTER_REASONS))}."
        )
    return DeadLetterFilter(
        reason=reason,
        name=_text("name", name),
        error_type=_text("error_type", error_type),
        fingerprint=_fingerprints(fingerprint),
        older_than=_age("older_than", older_than),
        newer_than=_age("newer_than", newer_than),
    )


def _text(name: str, value: str | None) -> str | None:
    return None if value is None else check_text(name, value)


def _fingerprints(value: str | None) -> str | None:
    if not isinstance(value, str):
        return _text("fingerprint", value)
    parts = value.split(",")
    if len(parts) > MAX_FINGERPRINTS:
        raise OptionError(f"fingerprint: must have at most {MAX_FINGERPRINTS} parts; got {len(parts)}")
    return ",".join(check_text("fingerprint", part) for part in parts)


def _age(name: str, value: float | timedelta | None) -> int | None:
    return None if value is None else milliseconds(name, value)


def check_limit(limit: Any) -> int | None:
    """Check a limit, and return it. Raises OptionError."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_INTEGER:
        raise OptionError(f"limit: must be a whole number from 0 to {MAX_INTEGER}; got {limit!r}")
    return limit


def find_dead_letters(storage: Storage, queue: str, wanted: DeadLetterFilter) -> Iterator[DeadLetterRecord]:
    """Yield the dead letters that match, oldest first, up to the first one that has failed again since."""
    seen: set[str] = set()
    after = None
    while True:
        page = storage.reads.dead_letter_page(queue, MAX_PAGE, after)
        for letter in page.dead_letters:
            if letter.id in seen:
                return
            seen.add(letter.id)
            if wanted.matches(letter, page.at):
                yield letter
        after = page.next
        if after is None:
            return


def count_dead_letters(storage: Storage, queue: str, wanted: DeadLetterFilter) -> DeadLetterCounts:
    """Count the dead letters that match."""
    reasons: Counter[str] = Counter()
    names: Counter[str] = Counter()
    types: Counter[str] = Counter()
    fingerprints: Counter[str] = Counter()
    newest: dict[str, DeadLetterRecord] = {}
    for letter in find_dead_letters(storage, queue, wanted):
        reasons[letter.reason] += 1
        names[letter.name] += 1
        types[letter.error_type] += 1
        digest = fingerprint(letter)
        fingerprints[digest] += 1
        newest[digest] = letter
    return DeadLetterCounts(
        reasons.total(),
        dict(reasons.most_common()),
        dict(names.most_common()),
        dict(types.most_common()),
        {
            digest: ErrorCount(count, newest[digest].error_type, newest[digest].error_message)
            for digest, count in fingerprints.most_common()
        },
    )


def retry_dead_letters(
    storage: Storage,
    queue: str,
    ids: Iterable[str],
    limit: int | None,
    *,
    dry_run: bool,
    progress: Progress | None,
) -> RetriedDead:
    """Retry dead letters by id, a part at a time; `progress` is called with the counts after each part."""
    answers: Counter[str] = Counter()
    counts = RetriedDead()
    for chunk in chunks(islice(ids, limit), MAX_PAGE):
        answers.update(storage.jobs.retry(queue, chunk, dry_run=dry_run))
        counts = RetriedDead(**answers)
        if progress is not None:
            progress(counts)
    return counts


def move_dead_letters(
    storage: Storage,
    queue: str,
    to: str,
    ids: Iterable[str],
    limit: int | None,
    *,
    dry_run: bool,
    progress: Callable[[MovedDead], object] | None,
) -> MovedDead:
    """Move dead letters by id, a part at a time; `progress` is called with the counts after each part."""
    counts = MovedDead()
    for chunk in chunks(islice(ids, limit), MAX_PAGE):
        answers = _would_move(storage, queue, chunk, to) if dry_run else storage.jobs.move(queue, chunk, to)
        moved = Counter(answer if answer in MovedDead._fields else "refused" for answer in answers)
        counts = MovedDead(*(before + moved[name] for name, before in counts._asdict().items()))
        if progress is not None:
            progress(counts)
    return counts


def _would_move(storage: Storage, queue: str, ids: Sequence[str], to: str) -> Iterator[str]:
    for state, other in zip(storage.reads.states(queue, ids), storage.reads.states(to, ids), strict=True):
        if state is None:
            yield "not_found"
        elif state is not State.FAILED:
            yield "refused"
        else:
            yield "moved" if other is None else "duplicate"


def fingerprint(letter: DeadLetterRecord) -> str:
    """Return a hash that is equal for dead letters of the same job name and error, even if numbers, ids,
    quoted texts or URLs in the message differ.
    """
    return fingerprint_of(letter.error_type, letter.name, letter.error_message)


def is_of_type(error_type: str, wanted: str) -> bool:
    """Return whether an error's type matches a dotted name, or its last part."""
    return error_type == wanted or error_type.rpartition(".")[2] == wanted
