"""Landlock: the kernel's limits on files, TCP ports, signals and abstract sockets.

This module never leaves out a right that the kernel does not know: it raises. Callers that can do without
one ask for `abi()` first.
"""

import ctypes
import os
import stat
from enum import IntFlag
from functools import cache

from . import PermissionPathError, SandboxError, SandboxUnavailableError
from .syscalls import set_no_new_privileges, syscall, this_machine, threads

CREATE_VERSION = 1
"""Flag of `landlock_create_ruleset` that asks for the version of the ABI."""
PATH_BENEATH, NET_PORT = 1, 2
"""Types of rules."""


class Right(IntFlag):
    """Rights on files and directories, with the kernel's values."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15
    RESOLVE_UNIX = 1 << 16


class NetRight(IntFlag):
    """Rights on TCP ports, with the kernel's values."""

    BIND_TCP = 1 << 0
    CONNECT_TCP = 1 << 1


class Scope(IntFlag):
    """Ways out of the sandbox that can be closed as a whole, with the kernel's values."""

    ABSTRACT_UNIX_SOCKET = 1 << 0
    SIGNAL = 1 << 1


OF_FILES = Right.EXECUTE | Right.WRITE_FILE | Right.READ_FILE | Right.TRUNCATE | Right.IOCTL_DEV
"""Rights that a rule for a file, rather than a directory, may have."""
SINCE = {Right.REFER: 2, Right.TRUNCATE: 3, Right.IOCTL_DEV: 5, Right.RESOLVE_UNIX: 9}
"""ABI that introduced a right; the others came with the first."""
NET_SINCE, SCOPES_SINCE = 4, 6
NO_NET, NO_SCOPE = NetRight(0), Scope(0)


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathAttributes(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _PortAttributes(ctypes.Structure):
    _fields_ = (("allowed_access", ctypes.c_uint64), ("port", ctypes.c_uint64))


SIZES = {1: 8, 4: 16, 6: 24}
"""Size in bytes of the attributes of a ruleset, by the ABI that introduced it."""


@cache
def abi() -> int:
    """Return the version of Landlock's ABI; 0 if the kernel has no Landlock or it is switched off."""
    try:
        number = this_machine().numbers["landlock_create_ruleset"]
        return syscall(number, 0, 0, CREATE_VERSION)
    except (OSError, SandboxUnavailableError):
        return 0


def rights_of(version: int) -> Right:
    """Return the rights that an ABI knows."""
    known = Right(0)
    for right in Right:
        if SINCE.get(right, 1) <= version:
            known |= right
    return known


class Ruleset:
    """A set of rules, which `restrict_self` applies to this process for good.

    Everything that is handled and not allowed is refused with EACCES or EPERM.

    Args:
        handled: Rights on files and directories.
        net: Rights on TCP ports.
        scopes: Ways out to close.

    Raises SandboxUnavailableError if the kernel does not know one of them.
    """

    def __init__(
        self,
        handled: Right,
        *,
        net: NetRight = NO_NET,
        scopes: Scope = NO_SCOPE,
        version: int | None = None,
    ) -> None:
        self._abi = abi() if version is None else version
        self._handled = handled
        self._net = net
        _check(self._abi, handled, net, scopes)
        self._numbers = this_machine().numbers
        attributes = _RulesetAttributes(handled, net, scopes)
        size = max(size for since, size in SIZES.items() if since <= self._abi)
        self._descriptor = self._call("landlock_create_ruleset", ctypes.addressof(attributes), size, 0)

    def allow_path(self, path: str, rights: Right) -> None:
        """Grant rights on a file, or on a directory and everything below it.

        Rights that only directories have are left out for a file. The rule binds to the file itself: its
        symbolic links are followed now, and a file that is created later under the same name is another one.

        Raises PermissionPathError if the path can't be opened, and SandboxUnavailableError if the ruleset
        does not handle a right.
        """
        if unknown := rights & ~self._handled:
            raise SandboxUnavailableError(f"Landlock does not handle {unknown!r} here")
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise PermissionPathError(f"{path} can't be granted: {error.strerror}") from error
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= OF_FILES
            if rights:
                attributes = _PathAttributes(rights, descriptor)
                self._add(PATH_BENEATH, ctypes.addressof(attributes))
        finally:
            os.close(descriptor)

    def allow_port(self, port: int, rights: NetRight) -> None:
        """Grant rights on a TCP port. Raises SandboxUnavailableError if the ruleset does not handle one."""
        if unknown := rights & ~self._net:
            raise SandboxUnavailableError(f"Landlock does not handle {unknown!r} here")
        attributes = _PortAttributes(rights, port)
        self._add(NET_PORT, ctypes.addressof(attributes))

    def restrict_self(self) -> None:
        """Apply the rules to this process and its future children, and close the ruleset.

        Raises SandboxError if the process has several threads, because the others would stay unrestricted.
        """
        try:
            try:
                count = threads()
            except OSError as error:
                raise SandboxError(f"the threads of the process can't be counted: {error}") from error
            if count != 1:
                raise SandboxError(
                    f"a sandbox must be applied before threads are started, but this process has {count}"
                )
            set_no_new_privileges()
            self._call("landlock_restrict_self", self._descriptor, 0)
        finally:
            self.close()

    def close(self) -> None:
        """Close the ruleset without applying it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _add(self, kind: int, address: int) -> None:
        self._call("landlock_add_rule", self._descriptor, kind, address, 0)

    def _call(self, name: str, *arguments: int) -> int:
        try:
            return syscall(self._numbers[name], *arguments)
        except OSError as error:
            raise SandboxUnavailableError(f"Landlock refused {name}: {error.strerror}") from error


def _check(version: int, handled: Right, net: NetRight, scopes: Scope) -> None:
    if version < 1:
        raise SandboxUnavailableError("the kernel has no Landlock, or it is switched off")
    if unknown := handled & ~rights_of(version):
        raise SandboxUnavailableError(f"Landlock ABI {version} does not know {unknown!r}")
    if net and version < NET_SINCE:
        raise SandboxUnavailableError(f"Landlock ABI {version} does not know {net!r}; ABI {NET_SINCE} does")
    if scopes and version < SCOPES_SINCE:
        raise SandboxUnavailableError(
            f"Landlock ABI {version} does not know {scopes!r}; ABI {SCOPES_SINCE} does"
        )
