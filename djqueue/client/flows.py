"""Flows: graphs of jobs, checked before anything is stored and enqueued in one step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from djqueue.codecs import MSGPACK, PLAIN
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError
from djqueue.core.flow import levels
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import EnqueueOptions, JobKey, check_text
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage

from . import envelope
from .sending import JOBS_PER_CALL, asend_together, send_together
from .steps import apart
from .storages import get_storage
from .transactions import When, of_storage

FOLLOWERS = 20
"""Dependents that a job of a flow stores: the rest of the flow can be found from any of them."""
MORE_BATCHES = 100
"""Batches that `FOLLOWERS` may add to each level of a flow; jobs of larger levels do without them."""

_ids = IdSource()


class Node:
    """A job of a flow before it is enqueued, made by `JobType.node` and `Queue.node`."""

    def __init__(
        self,
        options: EnqueueOptions,
        name: str,
        value: Any,
        job_id: str | None,
        storage: Storage | None = None,
    ) -> None:
        assert options.queue is not None
        self.options = options
        self.name = name
        """The job's name, which selects its handler."""
        self.queue = options.queue
        self.id = check_text("id", job_id) if job_id is not None else _ids.new(SYSTEM_CLOCK.now())
        """The job's id, known before the enqueue: a node is the same job each time."""
        self.label: str | None = None
        """Its name in the flow."""
        self.value = value
        self.own_storage = storage
        """The storage of its queue; None for the configured one."""
        self.is_fresh = job_id is None
        """True until the node is enqueued, if its id was generated and so is unique."""
        self.waits_for: list[Node | str | EnqueueResult | JobKey] = []
        """The arguments of `after`; for a flow, its last nodes."""

    @property
    def storage(self) -> Storage:
        """The storage of the job."""
        return get_storage() if self.own_storage is None else self.own_storage

    def __repr__(self) -> str:
        return f"<node {self}>"

    def __str__(self) -> str:
        return self.label if self.label is not None else f"{self.name} {self.id}"

    def after(self, *others: "Other") -> "Node":
        """Start the job when the others have completed, and return the node itself.

        Args:
            others: Nodes, names of nodes, or flows (their last nodes); for existing jobs, results of
                `enqueue` or (queue, id).
        """
        for other in others:
            if not isinstance(other, Node | Flow | str | EnqueueResult) and not _is_key(other):
                raise OptionError(
                    f"after: expected a node, a flow, a name or a job, got {other!r}{_hint('after', other)}"
                )
        for other in others:
            self.waits_for += other.last if isinstance(other, Flow) else [other]
        return self


class Flow:
    """A graph of jobs, made by `flow`, `chain`, `group` and `chord`."""

    def __init__(self, parts: "Iterable[Part]", made_by: str = "flow") -> None:
        self._nodes: dict[Node, None] = {}
        for part in parts:
            _check_part(made_by, part)
            self._nodes.update(dict.fromkeys(part.nodes if isinstance(part, Flow) else [part]))

    def __repr__(self) -> str:
        return f"<flow of {len(self.nodes)} jobs>"

    @property
    def nodes(self) -> list[Node]:
        """All nodes, including those that only `after` names."""
        reached: dict[Node, None] = {}
        stack = list(reversed(self._nodes))
        while stack:
            node = stack.pop()
            if node not in reached:
                reached[node] = None
                stack += [other for other in reversed(node.waits_for) if isinstance(other, Node)]
        return list(reached)

    @property
    def first(self) -> list[Node]:
        """The nodes without dependencies in the flow."""
        return [
            node for node in self.nodes if not any(isinstance(other, Node | str) for other in node.waits_for)
        ]

    @property
    def last(self) -> list[Node]:
        """The nodes without dependents in the flow."""
        nodes = self.nodes
        needed = {other for node in nodes for other in node.waits_for if isinstance(other, Node | str)}
        return [node for node in nodes if node not in needed and node.label not in needed]

    def enqueue(self) -> "FlowResult":
        """Enqueue all jobs in one step. A second call enqueues the same jobs, to complete the first.

        Raises:
            OptionError: An option is wrong, a name is unknown, or jobs wait for each other.
            SerializationError, StorageError: Nothing, or on Redis only a part, was enqueued.
        """
        plan = _Plan(self.nodes)
        return plan.result(send_together(plan.storage, plan.batches, plan.on_commit))

    async def aenqueue(self) -> "FlowResult":
        """Async version of `enqueue`."""
        nodes = self.nodes
        foreign = {node.options.job.content_type for node in nodes} - PLAIN
        plan = await apart(min(foreign, default=MSGPACK), _Plan, nodes)
        return plan.result(await asend_together(plan.storage, plan.batches, plan.on_commit))


class FlowResult:
    """The results of a flow by node or name, iterable in enqueue order."""

    def __init__(self, results: dict[Node, EnqueueResult]) -> None:
        self._results = results
        self._named: dict[str, EnqueueResult] = {
            node.label: result for node, result in results.items() if node.label is not None
        }

    def __repr__(self) -> str:
        return f"<result of a flow of {len(self)} jobs>"

    def __getitem__(self, node: Node | str) -> EnqueueResult:
        if isinstance(node, str):
            if node not in self._named:
                raise KeyError(f"no job of the workflow is named {node!r}{nearest(node, self._named)}")
            return self._named[node]
        if node not in self._results:
            raise KeyError(f"{node!r} is not a node of the workflow")
        return self._results[node]

    def __iter__(self) -> Iterator[EnqueueResult]:
        return iter(self._results.values())

    def __len__(self) -> int:
        return len(self._results)

    @property
    def ids(self) -> list[str]:
        """The ids of all jobs."""
        return [result.id for result in self]


_Kind: TypeAlias = tuple[EnqueueOptions, str, tuple[JobKey, ...], tuple[JobKey, ...]]
Part: TypeAlias = Node | Flow
Other: TypeAlias = Node | Flow | str | EnqueueResult | JobKey


def flow(*parts: Part, **named: Node) -> Flow:
    """Return a flow of jobs with any dependencies.

    Args:
        parts: Nodes and flows; nodes that these depend on are included.
        named: Nodes with names for `after` and for the result.
    """
    for label, node in named.items():
        if not isinstance(node, Node):
            raise OptionError(f"flow: {label}: expected a node, got {node!r}")
        if node.label not in (None, label):
            raise OptionError(
                f"flow: the node is already named {node.label!r}, and cannot also be named {label!r}"
            )
        node.label = label
    return Flow([*parts, *named.values()])


def chain(*parts: Part) -> Flow:
    """Return a flow whose parts run one after the other."""
    for part in parts:
        _check_part("chain", part)
    before: list[Node] = []
    for part in parts:
        # Compute both before `after` changes them.
        first, last = ([part], [part]) if isinstance(part, Node) else (part.first, part.last)
        for node in first:
            node.after(*before)
        before = last
    return Flow(parts)


def group(*parts: Part) -> Flow:
    """Return a flow whose parts run in parallel."""
    return Flow(parts, "group")


def chord(parts: Iterable[Part], *, then: Part) -> Flow:
    """Return a flow whose parts run in parallel, and `then` when all of them have completed."""
    if not isinstance(parts, Iterable) or isinstance(parts, (str, bytes)):
        raise OptionError(f"chord: expected a list of nodes, got {parts!r}")
    return chain(group(*parts), then)


class _Plan:
    """The batches of a flow, in the order of their dependencies."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        if not nodes:
            raise OptionError("flow: expected at least one job")
        _check_distinct(nodes)
        needs = _needs(nodes)
        followers = _followers(needs)
        self.storage = _storage_of(nodes)
        self.on_commit = _on_commit_of(nodes)
        self.batches: list[Batch] = []
        self._order: list[Node] = []
        for level in levels(nodes, lambda node: needs[node], str):
            alike = _alike(level, needs, followers)
            if len(alike) > len({kind[:3] for kind in alike}) + MORE_BATCHES:
                alike = _alike(level, needs, {})
            for (options, name, depends_on, dependents), grouped in alike.items():
                if depends_on != options.job.depends_on or dependents:
                    job = replace(options.job, depends_on=depends_on, dependents=dependents)
                    options = replace(options, job=job)
                for start in range(0, len(grouped), JOBS_PER_CALL):
                    self._add(options, name, grouped[start : start + JOBS_PER_CALL])
        for node in nodes:
            node.is_fresh = False

    def result(self, answers: Sequence[EnqueueResult]) -> FlowResult:
        """Return the storage's answers by node."""
        own = next((node.own_storage for node in self._order if node.own_storage is not None), None)
        return FlowResult(dict(zip(self._order, of_storage(answers, own), strict=True)))

    def _add(self, options: EnqueueOptions, name: str, nodes: list[Node]) -> None:
        values, ids = [node.value for node in nodes], [node.id for node in nodes]
        batch = envelope.batch(options, name, values, ids)
        self.batches.append(batch._replace(fresh=all(node.is_fresh for node in nodes)))
        self._order += nodes


def _needs(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the nodes that each node depends on. Raises OptionError for an unknown name."""
    labels = {node.label: node for node in nodes if node.label is not None}
    needs = {}
    for node in nodes:
        needed: dict[Node, None] = {}
        for other in node.waits_for:
            if isinstance(other, Node):
                needed[other] = None
            elif isinstance(other, str):
                if other not in labels:
                    raise OptionError(
                        f"after: no job of the workflow is named {other!r}{nearest(other, labels)}"
                    )
                needed[labels[other]] = None
        needs[node] = list(needed)
    return needs


def _alike(
    level: Sequence[Node],
    needs: Mapping[Node, Iterable[Node]],
    followers: Mapping[Node, tuple[JobKey, ...]],
) -> dict[_Kind, list[Node]]:
    """Group the nodes of a level by their options; each group can be one batch."""
    groups: dict[_Kind, list[Node]] = {}
    for node in level:
        kind = (node.options, node.name, _dependencies(node, needs[node]), followers.get(node, ()))
        groups.setdefault(kind, []).append(node)
    return groups


def _followers(needs: Mapping[Node, Iterable[Node]]) -> dict[Node, tuple[JobKey, ...]]:
    """Return the first dependents of each node."""
    followers: dict[Node, tuple[JobKey, ...]] = {}
    for node, needed in needs.items():
        for other in needed:
            known = followers.get(other, ())
            if len(known) < FOLLOWERS:
                followers[other] = (*known, (node.queue, node.id))
    return followers


def _dependencies(node: Node, needs: Iterable[Node]) -> tuple[JobKey, ...]:
    keys = dict.fromkeys(node.options.job.depends_on)
    for other in node.waits_for:
        if isinstance(other, EnqueueResult):
            keys[other.queue, other.id] = None
        elif isinstance(other, tuple):
            keys[other] = None
    keys.update({(needed.queue, needed.id): None for needed in needs})
    return tuple(keys)


def _check_distinct(nodes: Sequence[Node]) -> None:
    keys: set[JobKey] = set()
    labels: set[str] = set()
    for node in nodes:
        if (node.queue, node.id) in keys:
            raise OptionError(
                f"flow: two nodes have the id {node.id!r} in queue {node.queue!r}; ids must be unique"
            )
        if node.label in labels:
            raise OptionError(f"flow: two nodes are named {node.label!r}; names must be unique")
        keys.add((node.queue, node.id))
        if node.label is not None:
            labels.add(node.label)


def _storage_of(nodes: Sequence[Node]) -> Storage:
    storage = nodes[0].storage
    for node in nodes:
        if node.storage is not storage:
            raise OptionError(
                f"flow: {nodes[0]} and {node} use different storages; all jobs of a workflow must use the "
                "same one"
            )
    return storage


def _on_commit_of(nodes: Sequence[Node]) -> When:
    """Return what the flow waits for: its jobs are enqueued in one step, so one job defers them all."""
    values = {node.options.enqueue_on_commit for node in nodes} - {False}
    if len(values) > 1:
        listed = ", ".join(sorted(map(repr, values)))
        raise OptionError(f"enqueue_on_commit: all jobs of a workflow must use the same value; got {listed}")
    return values.pop() if values else False


def _check_part(where: str, part: object) -> None:
    if isinstance(part, Node | Flow):
        return
    raise OptionError(f"{where}: {part!r} is neither a node nor a flow{_hint(where, part)}")


def _hint(where: str, part: object) -> str:
    """Return a hint on what to pass instead of a wrong part."""
    if isinstance(part, EnqueueResult):
        return ", a result of enqueue(): use .node(...) instead of .enqueue(...)"
    if hasattr(type(part), "node"):
        return ": use its .node(...)"
    if isinstance(part, Iterable) and not isinstance(part, (str, bytes)):
        return f": unpack it: {where}(*nodes)"
    return ""


def _is_key(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and all(isinstance(part, str) for part in entry)
