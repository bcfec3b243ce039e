"""Read what the handlers noted, and tell which attempts no kill explains."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Attempt:
    """One run of a handler; times are nanoseconds of the monotonic clock, which all processes share."""

    number: str
    pid: int
    begun: int
    ended: int | None = None


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


def overlapping(attempts: Iterable[Attempt], killed: Iterable[tuple[int, int]]) -> list[str]:
    """Say which attempts began while an earlier one ran in a process that had not been killed."""
    deaths = defaultdict(list)
    for pid, at in killed:
        deaths[pid].append(at)
    wrong = []
    earlier: list[Attempt] = []
    for attempt in attempts:
        for before in earlier:
            if not _died(deaths[before.pid], before, attempt) and (
                before.ended is None or before.ended > attempt.begun
            ):
                wrong.append(f"{attempt.number} began in {attempt.pid} while {before.pid} ran it")
        earlier.append(attempt)
    return wrong


def unexplained(
    attempts: Iterable[Attempt], killed: Iterable[tuple[int, int]], schedulers: Iterable[int]
) -> list[str]:
    """Say which attempts followed another one of their job although nothing that knew of that had died.

    killed: each process and when, of those that ran handlers.
    schedulers: when a process was killed that may have been the scheduler, which knows how an attempt ended.
    """
    deaths = defaultdict(list)
    for pid, at in killed:
        deaths[pid].append(at)
    times = sorted(schedulers)
    wrong = []
    before: Attempt | None = None
    for attempt in attempts:
        if before is not None:
            index = bisect_left(times, before.begun)
            scheduler_died = index < len(times) and times[index] <= attempt.begun
            if not scheduler_died and not _died(deaths[before.pid], before, attempt):
                wrong.append(
                    f"{attempt.number} ran in {before.pid} and again in {attempt.pid} without a kill"
                )
        before = attempt
    return wrong


def _died(deaths: Iterable[int], before: Attempt, after: Attempt) -> bool:
    return any(before.begun <= at <= after.begun for at in deaths)
