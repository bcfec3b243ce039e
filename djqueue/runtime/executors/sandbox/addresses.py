"""Addresses and host names: those that a sandbox may connect to, and how a process inside resolves names.

The supervisor outside compares addresses with the list, and asks the name servers, only for listed names.
"""

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from djqueue.core.netrules import IPAddress, NetRule, normal_name, unmapped
from djqueue.core.permissions import Permissions

Resolver = Callable[..., list[tuple[Any, ...]]]
"""`socket.getaddrinfo`, or a function like it."""
NAMES_VALID = 60.0
"""Seconds for which the addresses of a name are used before it is resolved again."""
ADDRESSES_VALID = 3_600.0
"""Seconds for which an address is allowed after a name was resolved to it: name servers of large sites
answer with other addresses every time, and clients keep using the ones that they have."""
MAX_ADDRESSES = 10_000
"""Maximum number of resolved addresses that are remembered; the oldest are forgotten."""
SIZE_INET, SIZE_INET6 = 16, 24
"""Minimum size in bytes of an address of each family."""
Ask = Callable[[str, int | None], list[tuple[int, str]]]
"""(name, port) -> (family, address) pairs: `ConnectBroker.resolve`, called in the supervisor's process.
Raises PermissionError for a name that is not listed, and OSError for one that can't be resolved."""
NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An address, copied from the memory of the process that connects."""

    family: int
    address: IPAddress | None = None
    port: int = 0
    path: str = ""
    """Path of a UNIX socket."""
    directory: str = ""
    """Directory of the UNIX socket without symbolic links."""
    raw: bytes = b""
    """The copy as the kernel reads it."""

    def __str__(self) -> str:
        if self.address is None:
            return f"unix:{self.path}"
        return f"[{self.address}]:{self.port}" if self.address.version == 6 else f"{self.address}:{self.port}"


def parse_address(raw: bytes) -> Target | None:
    """Return the target of a socket address, or None if it has no family that can be listed."""
    if len(raw) < 2:
        return None
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET and len(raw) >= SIZE_INET:
        port, packed = struct.unpack_from("!H4s", raw, 2)
        return Target(family=family, address=IPv4Address(packed), port=port, raw=raw[:SIZE_INET])
    if family == socket.AF_INET6 and len(raw) >= SIZE_INET6:
        port, _flow, packed = struct.unpack_from("!HI16s", raw, 2)
        return Target(
            family=family, address=IPv6Address(packed), port=port, raw=raw[: SIZE_INET6 + 4].ljust(28, b"\0")
        )
    if family == socket.AF_UNIX and len(raw) > 2:
        # An abstract name begins with a null byte, and is shown with @ as usual. No list contains it.
        name = raw[2:].split(b"\0", 1)[0] or b"@" + raw[3:]
        return Target(family=family, path=os.fsdecode(name), raw=raw)
    return None


class AddressBook:
    """Entries of the `net` permission, and the addresses that their names resolved to. Thread-safe.

    Args:
        permissions: Permissions whose `net` is a list.
        resolve: Resolves names, like `socket.getaddrinfo`.
        now: Current time in seconds, for tests.
    """

    def __init__(
        self, permissions: Permissions, resolve: Resolver, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._permissions = permissions
        self._rules = permissions.net_rules
        # Links are followed now: what a job puts in the place of a directory later must not count.
        self._directories = {
            rule.path: os.path.realpath(os.path.dirname(rule.path)) for rule in self._rules if rule.path
        }
        self._resolve = resolve
        self._now = now
        self._lock = threading.Lock()
        self._addresses: dict[tuple[IPAddress, int | None], float] = {}
        """End of validity by address and port; the port None is every port."""
        self._resolved: dict[str, float] = {}
        """Time at which a host name was resolved last."""

    def resolve(self, name: str, port: int | None) -> list[tuple[int, str]]:
        """Return the addresses of a listed name as (family, address) pairs, and allow them.

        Raises PermissionError for a name that is not listed, and OSError if it can't be resolved.
        """
        literal = _literal(name)
        if literal is not None:
            # Connecting is checked on its own; an address needs no name server.
            return [(socket.AF_INET6 if literal.version == 6 else socket.AF_INET, name)]
        rules = [rule for rule in self._rules if rule.matches_name(name) and _has_port(rule, port)]
        if self._permissions.net is not True and not rules:
            raise PermissionError(f"the permission net does not list {name!r}")
        return self._look_up(name, rules)

    def checked(self, target: Target) -> Target | None:
        """Return an allowed target, ready to be connected to, or None. May wait for a name server."""
        if target.address is None:
            directory = self._directories.get(target.path)
            return None if directory is None else replace(target, directory=directory)
        if self._permissions.allows_net(target.address, target.port):
            return target
        address = unmapped(target.address)
        is_known = self._knows(address, target.port) or (
            self._look_up_listed(target.port) and self._knows(address, target.port)
        )
        return target if is_known else None

    def _knows(self, address: IPAddress, port: int) -> bool:
        now = self._now()
        with self._lock:
            return any(self._addresses.get((address, rule_port), 0.0) > now for rule_port in (port, None))

    def _look_up_listed(self, port: int) -> bool:
        """Resolve the listed host names for a port if their addresses are old; return whether any was."""
        now = self._now()
        was_due = False
        for rule in self._rules:
            with self._lock:
                is_due = self._resolved.get(rule.host, now - NAMES_VALID) <= now - NAMES_VALID
            if rule.host and _has_port(rule, port) and is_due:
                was_due = True
                try:
                    self._look_up(
                        rule.host, [other for other in self._rules if other.matches_name(rule.host)]
                    )
                except OSError:
                    # Without a name server, the name allows what it allowed before.
                    continue
        return was_due

    def _look_up(self, name: str, rules: list[NetRule]) -> list[tuple[int, str]]:
        plain = normal_name(name)
        with self._lock:
            self._resolved[plain] = self._now()
        entries = self._resolve(plain, None, type=socket.SOCK_STREAM)
        addresses = [(int(entry[0]), str(entry[4][0])) for entry in entries]
        until = self._now() + ADDRESSES_VALID
        with self._lock:
            for _family, text in addresses:
                address = _literal(text)
                for rule in rules if address is not None else ():
                    assert address is not None
                    # Inserted anew, so that the oldest come first.
                    self._addresses.pop((address, rule.port), None)
                    self._addresses[address, rule.port] = until
            while len(self._addresses) > MAX_ADDRESSES:
                del self._addresses[next(iter(self._addresses))]
            while len(self._resolved) > MAX_ADDRESSES:
                del self._resolved[next(iter(self._resolved))]
        return addresses


def use_supervisor(ask: Ask) -> None:
    """Replace `socket.getaddrinfo` and the functions like it by ones that ask the supervisor.

    Libraries that resolve names in C, such as libpq, don't use these; give them addresses.
    """
    original = socket.getaddrinfo

    def getaddrinfo(
        host: bytes | str | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,  # noqa: A002 (callers pass it by this name)
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        number = _port_of(port)
        name = _name_of(host)
        if name is None or _literal(name) is not None:
            # Neither needs a name server.
            return original(name, number, family, type, proto, flags & ~socket.AI_ADDRCONFIG)
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        entries: list[Any] = []
        for address_family, address in ask(name, number):
            if family in (socket.AF_UNSPEC, address_family):
                # Only TCP sockets exist here.
                kind = type or socket.SOCK_STREAM
                entries += original(address, number, address_family, kind, proto, NUMERIC)
        if not entries:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return entries

    def gethostbyname(hostname: str) -> str:
        return str(getaddrinfo(hostname, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])

    def gethostbyname_ex(hostname: str) -> tuple[str, list[str], list[str]]:
        entries = getaddrinfo(hostname, None, socket.AF_INET, socket.SOCK_STREAM)
        return hostname, [], [str(entry[4][0]) for entry in entries]

    socket.getaddrinfo = getaddrinfo
    socket.gethostbyname = gethostbyname
    socket.gethostbyname_ex = gethostbyname_ex


def _name_of(host: bytes | str | None) -> str | None:
    """Return the ASCII form of a host name, or None for this machine."""
    if not host:
        return None
    try:
        return host.decode("ascii") if isinstance(host, bytes) else host.encode("idna").decode("ascii")
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None


def _port_of(port: bytes | str | int | None) -> int | None:
    if isinstance(port, bytes):
        port = port.decode("ascii", "replace")
    if not isinstance(port, str):
        return port
    if port.isdecimal():
        return int(port)
    try:
        return socket.getservbyname(port, "tcp")
    except OSError:
        raise socket.gaierror(socket.EAI_SERVICE, "Servname not supported for ai_socktype") from None


def _literal(text: str) -> IPAddress | None:
    try:
        return unmapped(ip_address(text))
    except ValueError:
        return None


def _has_port(rule: NetRule, port: int | None) -> bool:
    return rule.port is None or port is None or rule.port == port
