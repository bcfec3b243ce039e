"""Every order of what may happen to a dependency and of the enqueue of its dependents."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.options import ON_DEPENDENCY_FAILURE, JobKey
from djqueue.core.states import PENDING, State
from djqueue.storage.base import Storage

from ..factories import batch
from .case import MODEL_FREE, MODEL_GROUPED, MODEL_PLAIN
from .machine import ModelContract, StorageMachine

HOME, TO = MODEL_FREE, MODEL_PLAIN
"""The queue of the dependency, and the one that it may be moved to."""
TTL = 400
"""Milliseconds after which a dependency that has not started expires."""
BRIEF = 100
"""Milliseconds for which the record of an ended dependency is kept, and by which dependents are delayed."""


class OrderedDependency:
    """A dependency on a storage and in its model, and the steps that may happen to it."""

    def __init__(self, machine: StorageMachine) -> None:
        self.machine = machine
        self.queue = HOME

    @property
    def key(self) -> JobKey:
        return self.queue, "first"

    def enqueue(self) -> None:
        """It is enqueued."""
        options = {"ttl": TTL, "retention": BRIEF, "result_ttl": None, "max_stalls": 0}
        self.machine.enqueue(self.queue, "send", options, ids=["first"])

    def _at(self) -> int:
        keys = [job.key for job in self.machine.reference.jobs]
        return keys.index(self.key) if self.key in keys else len(keys) + 1

    def _run(self, kind: str) -> None:
        """Start it, and end its attempt."""
        self.start()
        active = [(*self.key, job.token) for job in self.machine.reference.active(self.queue)]
        self.machine.end(active, kind, 0, "explicit_fail", False)

    def start(self) -> None:
        """Its attempt starts."""
        self.machine.claim(self.queue, "w1", 1, ["send"], True)

    def completes(self) -> None:
        """Its attempt completes."""
        self._run("complete")

    def fails(self) -> None:
        """Its attempt fails for good."""
        self._run("fail")

    def is_retried(self) -> None:
        """It fails, and another attempt follows."""
        self._run("retry")

    def gives_up(self) -> None:
        """Its attempt ends as cancelled."""
        self._run("cancel")

    def stalls(self) -> None:
        """Its attempt loses its worker for the last time."""
        self.start()
        self.machine.let_time_pass_and_sweep(self.machine.reference.policy(self.queue).lease + 1)

    def is_cancelled(self) -> None:
        """A caller cancels it."""
        self.machine.cancel(self._at())

    def is_removed(self) -> None:
        """A caller removes it."""
        self.machine.remove(self._at())

    def is_obliterated(self) -> None:
        """Its queue is obliterated."""
        self.machine.obliterate(self.queue, True)

    def is_cleaned(self) -> None:
        """Its queue is cleaned."""
        self.machine.let_time_pass(1)
        self.machine.clean(self.queue, frozenset(State), None)

    def is_moved(self) -> None:
        """It is moved to the other queue, or back."""
        to = HOME if self.queue == TO else TO
        self.machine.relocate(self.queue, "first", to)
        self.queue = to

    def is_brought_back(self) -> None:
        """Its dead letter is retried."""
        self.machine.retry(self._at())

    def expires(self) -> None:
        """Its ttl passes, or its record expires."""
        self.machine.let_time_pass_and_sweep(TTL + 1)


D = OrderedDependency
Step = Callable[[OrderedDependency], None]

LIVES: Sequence[Sequence[Step]] = (
    (D.completes, D.is_removed),
    (D.completes, D.expires),
    (D.completes, D.is_cleaned),
    (D.completes, D.is_obliterated),
    (D.is_retried, D.completes),
    (D.is_retried, D.is_removed),
    (D.start, D.is_cancelled, D.gives_up, D.is_removed),
    (D.gives_up, D.enqueue, D.completes),
    (D.stalls, D.is_brought_back, D.stalls),
    (D.fails, D.is_brought_back, D.completes),
    (D.fails, D.is_brought_back, D.fails, D.is_removed),
    (D.fails, D.is_brought_back, D.is_cancelled, D.is_removed),
    (D.fails, D.is_removed, D.enqueue, D.completes),
    (D.fails, D.is_cleaned),
    (D.fails, D.is_obliterated),
    (D.fails, D.enqueue, D.completes),
    (D.fails, D.is_moved, D.is_brought_back, D.completes),
    (D.fails, D.is_moved, D.is_removed),
    (D.is_cancelled, D.is_removed, D.enqueue, D.completes),
    (D.is_cancelled, D.enqueue, D.completes),
    (D.is_cancelled, D.expires),
    (D.is_removed, D.enqueue, D.is_removed),
    (D.is_cleaned, D.enqueue, D.fails),
    (D.is_obliterated, D.enqueue, D.completes),
    (D.start, D.is_obliterated),
    (D.is_moved, D.completes, D.is_removed),
    (D.is_moved, D.is_moved, D.completes),
    (D.is_moved, D.is_moved, D.is_removed),
    (D.is_moved, D.is_cancelled),
    (D.is_moved, D.is_cleaned),
    (D.is_moved, D.is_obliterated),
    (D.is_moved, D.expires, D.is_brought_back, D.fails),
    (D.expires, D.is_brought_back, D.completes),
    (D.expires, D.is_removed),
)
"""Lives of a dependency: steps that happen one after the other, with new dependents before and after each."""


class Kind(NamedTuple):
    """A dependent."""

    queue: str
    options: Mapping[str, Any]
    delay: int | None = None
    moves_to: str | None = None
    """The queue that it is moved to at once."""


KINDS = (
    Kind(HOME, {}),
    Kind(HOME, {"priority": 1}, delay=BRIEF),
    Kind(MODEL_GROUPED, {"concurrency_key": "g"}),
    Kind(HOME, {}, moves_to=MODEL_GROUPED),
)


class DependencyOrdersContract(ModelContract):
    """Dependents that are enqueued before and after each step of a dependency's life."""

    def transaction(self) -> AbstractContextManager[object] | None:
        """Return a transaction that all operations of the storage join; None if it joins none."""
        return None

    @pytest.mark.parametrize("life", LIVES, ids=lambda life: "-".join(step.__name__ for step in life))
    def test_dependents_follow_the_life_of_their_dependency(
        self, storage: Storage, life: Sequence[Step]
    ) -> None:
        if not self.examples:
            pytest.skip("its time cannot be moved")
        self.live(storage, life, nullcontext())
        if (transaction := self.transaction()) is not None:
            self.live(storage, life, transaction)

    def live(self, storage: Storage, life: Sequence[Step], during: AbstractContextManager[object]) -> None:
        """Let a dependency live, and enqueue dependents before and after each step."""
        machine = self.machine(storage)()
        dependency = OrderedDependency(machine)
        with during:
            dependency.enqueue()
            for number, step in enumerate(life):
                self.depend(machine, dependency.key, number)
                machine.compare(all_jobs=False)
                step(dependency)
                machine.compare(all_jobs=False)
            self.depend(machine, dependency.key, len(life))
            if dependency.queue == HOME:
                self.retry_all(machine)
            machine.compare()
        machine.let_time_pass_and_sweep(TTL)
        machine.teardown()

    def depend(self, machine: StorageMachine, key: JobKey, number: int) -> None:
        """Enqueue dependents with each policy, of half of the kinds in turn, and one that depends on them."""
        for policy, (at, kind) in product(ON_DEPENDENCY_FAILURE, enumerate(KINDS)):
            if (ON_DEPENDENCY_FAILURE.index(policy) + at + number) % 2:
                continue
            name = f"{policy} {at} {number}"
            options = {**kind.options, "depends_on": (key,), "on_dependency_failure": policy}
            if machine.reference.job(*key) is None:
                with pytest.raises(OptionError, match="'first'"):
                    machine.storage.enqueue([batch(queue=kind.queue, name="draw", ids=[name], **options)])
                continue
            machine.enqueue(kind.queue, "draw", options, ids=[name], delay=kind.delay)
            dependent = machine.reference.job(kind.queue, name)
            if kind.moves_to is not None and dependent is not None and dependent.state in PENDING:
                machine.relocate(kind.queue, name, kind.moves_to)
        needed = (HOME, f"fail {number % 2} {number}")
        if machine.reference.job(*needed) is not None:
            machine.enqueue(HOME, "draw", {"depends_on": (needed,)}, ids=[f"last {number}"])

    def retry_all(self, machine: StorageMachine) -> None:
        """Retry the dependents that have failed, as far as their dependency is still there."""
        for queue in (HOME, MODEL_GROUPED):
            failed = [job.id for job in machine.reference.of(queue) if job.state is State.FAILED]
            answers = machine.storage.jobs.retry(queue, failed)
            assert answers == [machine.reference.retry(queue, job_id) for job_id in failed]
