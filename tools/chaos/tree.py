"""Find the processes below a process, with their roles, as Linux lists them in /proc."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SUPERVISOR, MIRROR, BACKUP, WORKER = "supervisor", "mirror", "backup", "worker"
SCHEDULER = "scheduler"
LEADER = "leader"
"""The role of the process that sweeps the database, besides its own."""
KEEPER, TEMPLATE, JOB, PROGRAM = "keeper", "template", "job", "program"
SINGLE = "single process"
ROLES = (SUPERVISOR, SINGLE, MIRROR, BACKUP, WORKER, KEEPER, TEMPLATE, JOB)
"""The roles of processes that may be killed. A program is what a job has started."""


class Status(NamedTuple):
    """Fields of /proc/PID/stat."""

    name: str
    state: str
    parent: int
    started: int
    """Clock ticks since the boot. With the process id, this identifies a process."""

    @property
    def has_ended(self) -> bool:
        """Whether it is a zombie."""
        return self.state in "ZX"


class Member(NamedTuple):
    """A process below another one."""

    pid: int
    started: int
    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.pid} ({self.name})"


def parse_status(text: str) -> Status:
    """Parse the content of /proc/PID/stat. The name may contain spaces and parentheses."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Status(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def status(pid: int) -> Status | None:
    """Return the status of a process; None if it does not exist."""
    try:
        return parse_status(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, IndexError):
        return None


def lives(member: Member) -> bool:
    """Return whether a process is running."""
    found = status(member.pid)
    return found is not None and not found.has_ended and found.started == member.started


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        return found  # A thread, or the process, ended in the meantime.
    return found


def role_of(name: str, parent_role: str | None, parent_name: str, root: str = SUPERVISOR) -> str:
    """Return the role of a process.

    Args:
        name: Its name, as `ps -o comm` shows it.
        parent_role: The role of its parent; None if it is the first process.
        parent_name: The name of its parent.
        root: The role of the first process.
    """
    if parent_role is None:
        return root
    if parent_role == SUPERVISOR:
        return next((role for role in (MIRROR, BACKUP, SCHEDULER) if name == f"dq:{role}"), WORKER)
    if parent_role in (WORKER, SINGLE):
        # The lease keeper is a fork of the worker, and the template another program.
        return KEEPER if name == parent_name else TEMPLATE
    return JOB if parent_role == TEMPLATE else PROGRAM


def members(pid: int, root: str = SUPERVISOR) -> list[Member]:
    """Return a process and its descendants, parents first."""
    return list(_walk([(pid, None)], root))


def _walk(left: list[tuple[int, Member | None]], root: str) -> Iterator[Member]:
    while left:
        pid, parent = left.pop()
        found = status(pid)
        if found is None or found.has_ended:
            continue
        above = (None, "") if parent is None else (parent.role, parent.name)
        member = Member(pid, found.started, role_of(found.name, *above, root), found.name)
        yield member
        left += [(child, member) for child in children(pid)]


def by_role(found: Iterable[Member]) -> dict[str, list[Member]]:
    """Return those processes that may be killed, by role."""
    roles: dict[str, list[Member]] = {}
    for member in found:
        if member.role in ROLES:
            roles.setdefault(member.role, []).append(member)
    return roles


def lineage(pid: int, root: int) -> list[int]:
    """Return a process and its ancestors, up to `root`."""
    found = [pid]
    while found[-1] not in (root, 0, 1) and (above := status(found[-1])) is not None:
        found.append(above.parent)
    return found
