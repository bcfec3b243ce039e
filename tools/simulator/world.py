"""One simulated machine: its processes, its faults, and the record of what happened."""

import hashlib
from collections.abc import Callable
from contextvars import copy_context
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from .database import FaultyDatabase
from .loop import PROCESS, Crashed, Process, SimulatedClock, SimulatedLoop

if TYPE_CHECKING:
    from .monitor import Monitor
    from .network import SimulatedServer
    from .nodes import Node

LONGEST_DRAIN = 1_200.0
"""Simulated seconds within which everything has to be done once the faults have stopped."""
KILL, STOP, BREAK = "kill", "stop", "break"
FREEZE, LONG_FREEZE = "freeze", "long-freeze"
STEPS = {
    "clock-step": (-5_000, -200, 200, 5_000),
    "clock-forward": (60_000, 3_600_000),
    "clock-back": (-3_600_000,),
}
"""Milliseconds by which the clock is set, by the fault's name."""
FAULTS = {KILL: 8, STOP: 4, BREAK: 4, FREEZE: 4, LONG_FREEZE: 3, **dict.fromkeys(STEPS, 1)}
"""How often each fault comes, in proportion."""


class World:
    """See the module.

    faults: what may happen, by name; see `FAULTS` and `--without`.
    """

    _current: ClassVar["World | None"] = None

    def __init__(
        self, seed: int, *, trace: Callable[[str], None] | None = None, without: frozenset[str]
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.loop = SimulatedLoop(self.random)
        self.loop.failed = self.fail
        self.clock = SimulatedClock(self.loop)
        self.database = FaultyDatabase(self._fate, self._is_busy, self._crash)
        self.servers: dict[str, SimulatedServer] = {}
        self.nodes: list[Node] = []
        self.processes: dict[str, Process] = {}
        self.monitor: Monitor
        self.chaos = True
        self.violation: str | None = None
        self.steps = 0
        self.faults = 0
        self._without = without
        self._faults = {fault: weight for fault, weight in FAULTS.items() if fault not in without}
        self._trace = trace
        self._hash = hashlib.sha256()
        self._root = copy_context()
        World._current = self

    @classmethod
    def current(cls) -> "World":
        """The world that is being simulated."""
        assert cls._current is not None
        return cls._current

    # The record.

    @property
    def digest(self) -> str:
        """A hash of everything that has happened so far."""
        return self._hash.hexdigest()[:16]

    def note(self, event: str, *about: object) -> None:
        """Record an event."""
        process = PROCESS.get()
        line = f"{self.steps} {self.loop.time():.4f} {process or '-'} {event} {' '.join(map(str, about))}"
        self._hash.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def fail(self, message: str) -> None:
        """Record that an invariant does not hold; the first one counts."""
        self.note("VIOLATION", message)
        if self.violation is None:
            self.violation = message

    def allows(self, fault: str) -> bool:
        """Whether something was not left out."""
        return fault not in self._without

    # Processes.

    def new_process(self, name: str) -> Process:
        """Start a process."""
        process = Process(name, 1_000 + len(self.processes))
        self.processes[name] = process
        return process

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does."""
        if not process.alive:
            return
        self.note("killed", process)
        process.alive = process.frozen = False
        process.deferred.clear()
        for address, server in list(self.servers.items()):
            if server.process is process:
                server.is_open = False
                server.hang_up()
                del self.servers[address]
        self.monitor.process_died(process)

    def later(self, seconds: float, action: Callable[..., Any], *args: Any) -> None:
        """Call something that belongs to no process."""
        self.loop.call_later(seconds, action, *args, context=self._root)

    # Faults.

    def latency(self) -> float:
        """Seconds that a message takes."""
        return self.random.choice((0.0, 0.0002, 0.001, 0.01, 0.1)) if self.chaos else 0.0002

    def message(self) -> str:
        """What becomes of a message: `sent`, `lost`, `repeated` or `late`."""
        if not self.chaos or "messages" in self._without or self.random.random() > 0.02:
            return "sent"
        self.faults += 1
        fate = self.random.choice(("lost", "repeated", "late"))
        self.note("message", fate)
        return fate

    def _fate(self) -> str:
        process = PROCESS.get()
        if not self.chaos or "database" in self._without or self.random.random() > 0.01:
            return "done"
        self.faults += 1
        fates = ["refused", "unanswered"]
        if KILL not in self._without and process is not None and process.name != "producer":
            fates += ["crash_before", "crash_after"]
        fate = self.random.choice(fates)
        self.note("commit", fate)
        return fate

    def _is_busy(self) -> bool:
        if not self.chaos or "database" in self._without or self.random.random() > 0.001:
            return False
        self.faults += 1
        self.note("statement refused")
        return True

    def _crash(self) -> None:
        process = PROCESS.get()
        assert process is not None
        self.kill(process)
        raise Crashed

    def _inject(self) -> None:
        if not self._faults or self.random.random() > 0.004:
            return
        [fault] = self.random.choices(list(self._faults), list(self._faults.values()))
        nodes = [node for node in self.nodes if node.process is not None and node.process.is_running]
        if not nodes:
            return
        self.faults += 1
        node = self.random.choice(nodes)
        process = node.process
        assert process is not None
        if fault == KILL:
            self.kill(process)
        elif fault == STOP:
            process.call(node.stop)
        elif fault in (FREEZE, LONG_FREEZE):
            self.note("frozen", process)
            process.frozen = True
            seconds = (0.5, 3.0) if fault == FREEZE else (12.0, 40.0)
            self.later(self.random.choice(seconds), self._thaw, process)
        elif fault in STEPS:
            milliseconds = self.random.choice(STEPS[fault])
            self.note("clock set", milliseconds)
            self.clock.offset += milliseconds
        else:
            for server in list(self.servers.values()):
                self.note("connections broken", server.process)
                server.hang_up()

    def _thaw(self, process: Process) -> None:
        if process.alive and process.frozen:
            self.note("thawed", process)
            self.loop.thaw(process)

    # The run.

    def run(self, steps: int) -> str | None:
        """Take so many steps with faults, then let everything drain. Returns the violation, if any."""
        while self.steps < steps and self.violation is None:
            self._inject()
            if not self._step():
                self.fail("nothing is left to be done")
        self._calm()
        limit = self.loop.time() + LONGEST_DRAIN
        while self.violation is None and not self.monitor.is_drained():
            if self.loop.time() > limit or not self._step():
                self.fail(f"not drained within {LONGEST_DRAIN:g} s: {self.monitor.undone()}")
        if self.violation is None:
            self.monitor.check_end()
        return self.violation

    def _step(self) -> bool:
        self.steps += 1
        if not self.loop.step():
            return False
        self.monitor.check()
        return True

    def _calm(self) -> None:
        self.chaos = False
        self.note("faults stop")
        for process in self.processes.values():
            self._thaw(process)
