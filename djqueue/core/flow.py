"""The order in which a graph of jobs is enqueued."""

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
    """Return the nodes in levels, each node in a later level than all that it needs.

    Nodes of one level need none of each other, and keep the order in which they were given. Raises
    OptionError, which names the nodes of a cycle, if there is one.
    """
    left = {node: set(needs(node)) for node in nodes}
    needed_by: dict[Node, list[Node]] = {node: [] for node in left}
    for node, wanted in left.items():
        for other in wanted:
            needed_by[other].append(node)
    positions = {node: index for index, node in enumerate(left)}
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
        level = sorted(freed, key=positions.__getitem__)
    if left:
        cycle = " -> ".join(map(describe, _cycle(left, positions)))
        raise OptionError(f"depends_on: these jobs depend on each other in a cycle: {cycle}")
    return found


def _cycle(left: dict[Node, set[Node]], positions: dict[Node, int]) -> list[Node]:
    """Return a cycle among nodes each of which needs another one."""
    path: dict[Node, int] = {}
    node = next(iter(left))
    while node not in path:
        path[node] = len(path)
        node = min(left[node], key=positions.__getitem__)
    return [*list(path)[path[node] :], node]


# The batches of one call of a storage.


def outside(batches: Sequence[Batch]) -> list[JobKey]:
    """Return the dependencies of a call's jobs outside the call.

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
    """Return the indexes of a call's batches in waves: the dependencies of a batch are in an earlier wave."""
    if len(batches) == 1 or not any(batch.options.depends_on for batch in batches):
        return [list(range(len(batches)))]
    wave_of: dict[JobKey, int] = {}
    found: list[list[int]] = []
    for index, batch in enumerate(batches):
        wave = max((wave_of[key] + 1 for key in batch.options.depends_on if key in wave_of), default=0)
        # Of an id that occurs twice, the first one counts.
        for job_id in batch.ids or ():
            wave_of.setdefault((batch.queue, job_id), wave)
        if wave == len(found):
            found.append([])
        found[wave].append(index)
    return found


class Substitutes:
    """Dependencies on jobs whose unique keys were taken, replaced by the owners of the keys."""

    def __init__(self) -> None:
        self._keys: dict[JobKey, JobKey] = {}

    def note(self, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
        """Record the results of a batch."""
        if batch.options.unique_key is not None:
            for job_id, answer in zip(batch.ids or (), answers, strict=False):
                if answer.id != job_id:
                    self._keys[batch.queue, job_id] = (batch.queue, answer.id)

    def in_(self, batch: Batch) -> Batch:
        """Return a later batch with its dependencies replaced."""
        wanted = batch.options.depends_on
        if not wanted or self._keys.keys().isdisjoint(wanted):
            return batch
        others = tuple(dict.fromkeys(self._keys.get(key, key) for key in wanted))
        return batch._replace(options=replace(batch.options, depends_on=others))
