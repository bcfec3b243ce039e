"""Send signals to random processes of a service, and check who ends within which time."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import TypeVar

from . import tree
from .attempts import Death
from .processes import PATIENCE, Service
from .project import leader
from .tree import Member

SHUTDOWN_TIMEOUT = 2.0
"""Seconds that running jobs have after SIGTERM, less than the longest jobs take."""
STOP_LIMIT = SHUTDOWN_TIMEOUT + 15.0
"""Seconds in which a stopped service has to end: what the docs recommend for TimeoutStopSec."""
OUTLIVES = 10.0
"""Seconds that a process may live after the one that started it."""

T = TypeVar("T")


class Signals:
    """Sends signals to services, and records who died when, and what is wrong."""

    def __init__(self, folder: Path, random: Random) -> None:
        self._folder = folder
        self._random = random
        self._events = folder / "signals.txt"
        self.sent: Counter[str] = Counter()
        self.killed: list[Death] = []
        """Killed processes, and their parents."""
        self.stopped: list[Death] = []
        """Supervisors that were stopped or reloaded."""
        self.took: list[float] = []
        """Seconds that services took to stop."""
        self.early = 0
        """Services that ended by SIGTERM before they had started a process."""
        self.wrong: list[str] = []

    # SIGKILL.

    def kill(self, service: Service) -> None:
        """Kill the process of a service and start it again; nothing below it may live on."""
        self._kill_first(service)
        service.start()

    def kill_any(self, service: Service) -> None:
        """Kill a process with a random role, and start the service again if that was its first."""
        roles = tree.by_role(service.members())
        if not roles:
            self._kill_first(service)
            service.start()
            return
        leading = leader(self._folder)
        if found := [one for members in roles.values() for one in members if one.pid == leading]:
            roles[tree.LEADER] = found
        role = self._random.choice(list(roles))
        victim = self._random.choice(roles[role])
        if victim.pid == service.pid:
            self.kill(service)
            return
        below = tree.members(victim.pid, victim.role)
        before = self._note(signal.SIGKILL, role, victim.pid)
        if not _send(victim, signal.SIGKILL):
            return
        if not _until(lambda: not tree.lives(victim), PATIENCE):
            self.wrong.append(f"{victim} did not end after SIGKILL")
        self._check_gone(below, f"the killed {victim}")
        self._note_deaths([victim, *below], before)

    def end(self, service: Service) -> None:
        """Kill a service and leave it."""
        self._kill_first(service)

    def _kill_first(self, service: Service) -> None:
        below = service.members()
        before = self._note(signal.SIGKILL, service.root, service.pid)
        os.kill(service.pid, signal.SIGKILL)
        code = service.zygote.wait(service.pid)
        if code != -signal.SIGKILL:
            self.wrong.append(f"{service.name} (process {service.pid}) ended by itself with code {code}")
        self._check_gone(below, f"the killed {service.name} {service.pid}", service)
        self._note_deaths(below, before)
        self.killed.append(Death(service.pid, before, time.monotonic_ns()))

    def _note_deaths(self, ended: Iterable[Member], before: int) -> None:
        # An attempt that begins in the last moments of a child no longer finds its ancestors.
        now = time.monotonic_ns()
        self.killed += [Death(pid, before, now) for pid in {one.pid for one in ended}]

    # SIGTERM and SIGHUP.

    def stop(self, service: Service) -> None:
        """Stop a service and start it again. It has to end in time, with code 0 and all that it started."""
        self.stop_for_good(service)
        service.start()

    def stop_for_good(self, service: Service) -> None:
        """Stop a service."""
        below = service.members()
        before = self._note(signal.SIGTERM, service.root, service.pid)
        os.kill(service.pid, signal.SIGTERM)
        code = service.zygote.wait(service.pid, STOP_LIMIT)
        seconds = (time.monotonic_ns() - before) / 1e9
        name = f"{service.name} (process {service.pid})"
        if code is None:
            left = ", ".join(map(str, service.members()))
            self.wrong.append(f"{name} did not stop within {STOP_LIMIT:g} s: {left}")
            os.kill(service.pid, signal.SIGKILL)
            service.zygote.wait(service.pid)
        elif code == -signal.SIGTERM and len(below) == 1:
            # It had not replaced the interpreter's reaction to the signal yet.
            self.early += 1
        elif code:
            self.wrong.append(f"{name} stopped with code {code}")
        else:
            self.took.append(seconds)
        self._check_gone(below, f"the stopped {name}", service)
        self.stopped.append(Death(service.pid, before, time.monotonic_ns()))

    def reload(self, service: Service) -> None:
        """Send SIGHUP to a supervisor that has started; it replaces its processes and lives on."""
        below = service.members()[1:]
        if not below:
            return  # Until the program has started, SIGHUP ends it, as it ends any program.
        before = self._note(signal.SIGHUP, service.root, service.pid)
        os.kill(service.pid, signal.SIGHUP)
        if self._random.random() < 0.3:
            # The next signal comes while it reloads.
            time.sleep(self._random.random() * SHUTDOWN_TIMEOUT)
            self.stopped.append(Death(service.pid, before, before + int(STOP_LIMIT * 1e9)))
            self.stop(service)
            return
        if not _until(lambda: not any(map(tree.lives, below)), STOP_LIMIT):
            left = ", ".join(str(one) for one in below if tree.lives(one))
            self.wrong.append(f"{service.name} did not reload within {STOP_LIMIT:g} s: {left}")
        self.stopped.append(Death(service.pid, before, time.monotonic_ns()))

    def disturb(self, service: Service) -> None:
        """Send SIGTERM to a random process below the first one, which has to ignore it."""
        # Until it has a name of its own, a program that is starting ends, as any program does.
        roles = tree.by_role(one for one in service.members()[1:] if one.name.startswith("dq:"))
        if not roles:
            return
        victim = self._random.choice(roles[self._random.choice(list(roles))])
        self._note(signal.SIGTERM, victim.role, victim.pid)
        _send(victim, signal.SIGTERM)

    # What is left.

    def _check_gone(self, below: list[Member], whose: str, service: Service | None = None) -> None:
        """Check that processes have ended within a second; with a service, also those that are orphaned."""

        def left() -> list[Member]:
            found = [one for one in below if tree.lives(one)]
            return found if service is None else [*found, *service.zygote.orphans()]

        if not _until(lambda: not left(), OUTLIVES):
            found = {one.pid: one for one in left()}.values()
            self.wrong += [f"{one} outlives {whose} by more than {OUTLIVES:g} s" for one in found]
            for one in found:
                _send(one, signal.SIGKILL)

    def _note(self, number: signal.Signals, role: str, pid: int) -> int:
        now = time.monotonic_ns()
        self.sent[f"{number.name} {role}"] += 1
        with self._events.open("a") as events:
            events.write(f"{time.strftime('%H:%M:%S')} {now} {number.name} {role} {pid}\n")
        return now


def _send(member: Member, number: signal.Signals) -> bool:
    try:
        if tree.lives(member):
            os.kill(member.pid, number)
            return True
    except ProcessLookupError:
        pass
    return False


def _until(is_true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
