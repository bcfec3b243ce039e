"""Read what the handlers noted, and tell which attempts no kill explains."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass
class Attempt:
    """One run of a handler; times are nanoseconds of the monotonic clock, which all processes share."""

    number: str
    pid: int
    begun: int
    ended: int | None = None


@dataclass(frozen=True)
class Death:
    """A process that was killed at some moment between two times."""

    pid: int
    before: int
    """Nanoseconds of the monotonic clock before the signal was sent."""
    gone: int
    """And when the process had been waited for. A busy machine may run it for a while in between."""


def read(path: Path) -> dict[str, list[Attempt]]:
    """Return the attempts by the number of their job, in the order in which they began."""
    found: defaultdict[str, list[Attempt]] = defaultdict(list)
    for line in path.read_text().splitlines():
        event, number, pid, at = line.split()
        if event == "begin":
            found[number].append(Attempt(number, int(pid), int(at)))
        else:
            last = next(one for one in reversed(found[number]) if one.pid == int(pid) and one.ended is None)
            last.ended = int(at)
    for attempts in found.values():
        attempts.sort(key=lambda one: one.begun)
    return dict(found)


def overlapping(attempts: Iterable[Attempt], killed: Iterable[Death]) -> list[str]:
    """Say which attempts began while an earlier one ran in a process that had not been killed."""
    deaths = _by_process(killed)
    wrong = []
    earlier: list[Attempt] = []
    for attempt in attempts:
        for before in earlier:
            if _has_died(deaths[before.pid], before, attempt):
                continue
            if before.ended is None or before.ended > attempt.begun:
                wrong.append(f"{attempt.number} began in {attempt.pid} while {before.pid} ran it")
        earlier.append(attempt)
    return wrong


def unexplained(
    attempts: Iterable[Attempt], killed: Iterable[Death], schedulers: Collection[Death]
) -> list[str]:
    """Say which attempts followed another one of their job although nothing that knew of that had died.

    killed: processes that ran handlers.
    schedulers: processes that may have been the scheduler, which knows how an attempt ended.
    """
    deaths = _by_process(killed)
    return [
        f"{after.number} ran in {before.pid} and again in {after.pid} without a kill"
        for before, after in pairwise(attempts)
        if not _has_died(deaths[before.pid], before, after) and not _has_died(schedulers, before, after)
    ]


def _by_process(killed: Iterable[Death]) -> defaultdict[int, list[Death]]:
    found: defaultdict[int, list[Death]] = defaultdict(list)
    for death in killed:
        found[death.pid].append(death)
    return found


def _has_died(deaths: Iterable[Death], before: Attempt, after: Attempt) -> bool:
    return any(before.begun <= death.gone and death.before <= after.begun for death in deaths)
