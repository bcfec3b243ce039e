"""Layers: the mechanisms of the system that enforce permissions, and how to get a missing one."""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from djqueue.core.executors import KERNEL_PERMISSIONS
from djqueue.core.permissions import Permissions

from . import landlock
from .errors import SandboxUnavailableError
from .seccomp import ALLOW, NOTIFY, has_action
from .tables import this_machine

SUPERVISION = (5, 9)
"""Version of Linux that can hand a supervised process the socket of an allowed connection."""
PORTS = landlock.NET_SINCE


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingLayer:
    """A mechanism that permissions need and this system does not have."""

    permissions: tuple[str, ...]
    """Names of the permissions that can't be guaranteed."""
    ineffective: tuple[str, ...]
    """Names of those among them that have no effect at all."""
    layer: str
    """Name of the mechanism."""
    found: str
    """Actual state of the system."""
    remedy: str
    """Change that makes it available."""

    def __str__(self) -> str:
        names = ", ".join(self.permissions)
        return f"{names}: needs {self.layer}, but {self.found}; {self.remedy}"


def missing_layers(permissions: Permissions) -> tuple[MissingLayer, ...]:
    """Return what this system lacks to enforce permissions; empty if it can enforce them."""
    restricted = tuple(name for name in KERNEL_PERMISSIONS if getattr(permissions, name) is not True)
    if not restricted:
        return ()
    try:
        this_machine()
    except SandboxUnavailableError as error:
        remedy = "run these jobs on such a system"
        return (_missing(restricted, restricted, "a supported system", str(error), remedy),)
    kernel = f"Linux {os.uname().release}"
    if not has_action(ALLOW):
        remedy = "use a kernel or a container runtime that allows seccomp"
        return (_missing(restricted, restricted, "seccomp filters", f"{kernel} refuses them", remedy),)
    found = []
    if (version := landlock.abi()) == 0:
        # Without it, a job can read and write the memory of its worker, if both have the same user.
        names: list[str] = [name for name in ("read", "write") if name in restricted]
        names += [name for name in ("run", "listen") if isinstance(getattr(permissions, name), tuple)]
        state = f"{kernel} does not have it, or it is switched off"
        remedy = "use Linux 5.13 or newer, and add landlock to the kernel's lsm= option"
        found.append(_missing(restricted, tuple(names), "Landlock", state, remedy))
    elif version < PORTS and isinstance(permissions.listen, tuple):
        remedy = "use Linux 6.7 or newer, or set listen to True or False"
        state = f"{kernel} has ABI {version}"
        found.append(_missing(("listen",), ("listen",), f"Landlock ABI {PORTS}", state, remedy))
    if isinstance(permissions.net, tuple) and not (has_action(NOTIFY) and _release() >= SUPERVISION):
        remedy = "use Linux 5.9 or newer, or set net to True or False"
        state = f"{kernel} does not have them"
        found.append(_missing(("net",), ("net",), "seccomp notifications", state, remedy))
    return tuple(found)


def enforceable(permissions: Permissions, unenforced: Iterable[str]) -> Permissions:
    """Return permissions without the limits that have no effect here, if a job type accepts that.

    Args:
        permissions: Permissions as declared.
        unenforced: Names of the permissions that may stay without guarantee where a layer is missing.

    Raises SandboxUnavailableError, with a remedy, for a permission that is not among them.
    """
    accepted = frozenset(unenforced)
    missing = missing_layers(permissions)
    refused = [layer for layer in missing if not accepted.issuperset(layer.permissions)]
    if refused:
        raise SandboxUnavailableError(
            "this system can't enforce the permissions: " + "; ".join(str(layer) for layer in refused)
        )
    return replace(permissions, **{name: True for layer in missing for name in layer.ineffective})


def needs_landlock(permissions: Permissions) -> bool:
    """Return whether only Landlock can enforce a part of the permissions."""
    return (
        permissions.read is not True
        or permissions.write is not True
        or isinstance(permissions.run, tuple)
        or isinstance(permissions.listen, tuple)
    )


def _missing(
    permissions: tuple[str, ...], ineffective: tuple[str, ...], layer: str, found: str, remedy: str
) -> MissingLayer:
    return MissingLayer(
        permissions=permissions, ineffective=ineffective, layer=layer, found=found, remedy=remedy
    )


def _release() -> tuple[int, ...]:
    numbers = os.uname().release.split("-")[0].split(".")[:2] if sys.platform == "linux" else []
    return tuple(int(number) for number in numbers if number.isdecimal())
