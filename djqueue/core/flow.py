"""Graphs of jobs: in which order they are enqueued, and what of them must be there before."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from .errors import OptionError
from .job import Batch, EnqueueResult
from .options import JobKey

Node = TypeVar("Node", bound=Hashable)


def levels(
    nodes: Iterable[Node], needs: Callable[[Node], Iterable[Node]], describe: Callable[[Node], str]
) -> list[list[Node]]:
    """Nodes, each behind all that it needs; those of one list need none of each other, and are in the order
    in which they were given.

    Raises OptionError, which names the nodes of a circle, if there is one.
    """
    left = {node: set(needs(node)) for node in nodes}
    needed_by: dict[Node, list[Node]] = {node: [] for node in left}
    for node, wanted in left.items():
        for other in wanted:
            needed_by[other].append(node)
    places = {node: place for place, node in enumerate(left)}
    found: list[list[Node]] = []
    level = [node for node, wanted in left.items() if not wanted]
    while level:
        found.append(level)
        freed: dict[Node, None] = {}
        for node in level:
            for other in needed_by[node]:
                left[other].discard(node)
                if not left[other]:
                    freed[other] = None
            del left[node]
        level = sorted(freed, key=places.__getitem__)
    if left:
        circle = " -> ".join(map(describe, _circle(left, places)))
        raise OptionError(f"depends_on: these jobs depend on each other in a cycle: {circle}")
    return found


def _circle(left: dict[Node, set[Node]], places: dict[Node, int]) -> list[Node]:
    """One of the circles among nodes each of which needs another one of them."""
    path: dict[Node, int] = {}
    node = next(iter(left))
    while node not in path:
        path[node] = len(path)
        node = min(left[node], key=places.__getitem__)
    return [*list(path)[path[node] :], node]


# What one call of a storage enqueues.


def outside(batches: Sequence[Batch]) -> list[JobKey]:
    """Return what jobs of a call depend on, apart from jobs of earlier batches of the same call.

    Raises OptionError for a job that would wait for itself.
    """
    if not any(batch.options.depends_on for batch in batches):
        return []
    inside: set[JobKey] = set()
    found: dict[JobKey, None] = {}
    for batch in batches:
        mine = {(batch.queue, job_id) for job_id in batch.ids or ()}
        for key in batch.options.depends_on:
            if key in mine:
                raise OptionError(f"depends_on: job {key[1]!r} cannot depend on itself")
            if key not in inside:
                found[key] = None
        inside |= mine
    return list(found)


def waves(batches: Sequence[Batch]) -> list[list[int]]:
    """Return the places of a call's batches: what a batch depends on is in an earlier list."""
    if len(batches) == 1 or not any(batch.options.depends_on for batch in batches):
        return [list(range(len(batches)))]
    wave_of: dict[JobKey, int] = {}
    found: list[list[int]] = []
    for place, batch in enumerate(batches):
        wave = max((wave_of[key] + 1 for key in batch.options.depends_on if key in wave_of), default=0)
        # An id that comes twice is there with the first of the two.
        for job_id in batch.ids or ():
            wave_of.setdefault((batch.queue, job_id), wave)
        if wave == len(found):
            found.append([])
        found[wave].append(place)
    return found


class Substitutes:
    """Jobs of a call whose unique keys were taken: what depends on them depends on the keys' owners."""

    def __init__(self) -> None:
        self._keys: dict[JobKey, JobKey] = {}

    def note(self, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
        """What became of a batch."""
        if batch.options.unique_key is not None:
            for job_id, answer in zip(batch.ids or (), answers, strict=False):
                if answer.id != job_id:
                    self._keys[batch.queue, job_id] = (batch.queue, answer.id)

    def in_(self, batch: Batch) -> Batch:
        """Return a later batch as it is to be enqueued."""
        wanted = batch.options.depends_on
        if not wanted or self._keys.keys().isdisjoint(wanted):
            return batch
        others = tuple(dict.fromkeys(self._keys.get(key, key) for key in wanted))
        return batch._replace(options=replace(batch.options, depends_on=others))
