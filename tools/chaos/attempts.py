"""Read what the handlers noted, and tell which attempts no signal explains."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass
class Attempt:
    """One run of a handler; times are nanoseconds of the monotonic clock, which all processes share."""

    number: str
    pids: tuple[int, ...]
    """The process that ran it, then its ancestors up to the supervisor."""
    begun: int
    seen: int
    """The time of the last note."""
    ended: int | None = None

    @property
    def pid(self) -> int:
        """The process that ran it."""
        return self.pids[0]


@dataclass(frozen=True)
class Death:
    """A process that was killed or stopped at some moment between two times."""

    pid: int
    before: int
    """Nanoseconds of the monotonic clock before the signal was sent."""
    gone: int
    """And when the process and its children had ended. A busy machine may run them for a while in between."""


def read(path: Path) -> dict[str, list[Attempt]]:
    """Return the attempts by the number of their job, in the order in which they began."""
    found: defaultdict[str, list[Attempt]] = defaultdict(list)
    for line in path.read_text().splitlines():
        event, number, lineage, text = line.split()
        pids, at = tuple(map(int, lineage.split(","))), int(text)
        if event == "begin":
            found[number].append(Attempt(number, pids, at, at))
            continue
        last = next(one for one in reversed(found[number]) if one.pids == pids and one.ended is None)
        last.seen = at
        if event == "end":
            last.ended = at
    for attempts in found.values():
        attempts.sort(key=lambda one: one.begun)
    return dict(found)


def overlapping(attempts: Iterable[Attempt], deaths: Iterable[Death]) -> list[str]:
    """Say which attempts began while an earlier one ran, as its notes or the life of its process tell."""
    by_process = _by_process(deaths)
    wrong = []
    earlier: list[Attempt] = []
    for attempt in attempts:
        for before in earlier:
            is_dead = _has_died(by_process, before, attempt)
            if before.seen > attempt.begun or (before.ended is None and not is_dead):
                wrong.append(f"{attempt.number} began in {attempt.pid} while {before.pid} ran it")
        earlier.append(attempt)
    return wrong


def unexplained(attempts: Iterable[Attempt], killed: Iterable[Death]) -> list[str]:
    """Say which attempts followed another one of their job although nothing that knew of that had died.

    killed: processes that ran handlers, and those above them.
    """
    deaths = _by_process(killed)
    return [
        f"{after.number} ran in {before.pid} and again in {after.pid} without a kill"
        for before, after in pairwise(attempts)
        if not _has_died(deaths, before, after)
    ]


def repeated(attempts: Iterable[Attempt]) -> list[str]:
    """Say which attempts followed one that ran to its end: a stop interrupts jobs, and repeats no others."""
    return [
        f"{after.number} ran to its end in {before.pid} and again in {after.pid}"
        for before, after in pairwise(attempts)
        if before.ended is not None
    ]


def interrupted_early(attempts: Iterable[Attempt], stops: Iterable[Death], timeout: float) -> list[str]:
    """Say which attempts did not end, although they were not stopped, or not given their time.

    timeout: Seconds that running jobs have after the signal.
    """
    by_process = _by_process(stops)
    return [
        f"{attempt.number} was interrupted in {attempt.pid} before its time"
        for attempt in attempts
        if attempt.ended is None
        and not any(
            stop.before + timeout * 1e9 <= attempt.seen + SLACK and attempt.begun <= stop.gone
            for pid in attempt.pids
            for stop in by_process(pid)
        )
    ]


SLACK = 500_000_000
"""Nanoseconds that may pass between two notes of a long job."""


def _by_process(deaths: Iterable[Death]) -> Callable[[int], list[Death]]:
    found: defaultdict[int, list[Death]] = defaultdict(list)
    for death in deaths:
        found[death.pid].append(death)
    return lambda pid: found.get(pid, [])


def _has_died(deaths: Callable[[int], list[Death]], before: Attempt, after: Attempt) -> bool:
    """Return whether the process of an attempt, or one above it, has died before the next attempt began."""
    return any(_is_between(death, before, after) for pid in before.pids for death in deaths(pid))


def _is_between(death: Death, before: Attempt, after: Attempt) -> bool:
    return before.begun <= death.gone and death.before <= after.begun
