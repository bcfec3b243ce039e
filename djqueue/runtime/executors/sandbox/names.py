"""Name resolution inside a sandbox: the supervisor asks the name servers, and only for listed names."""

import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

Ask = Callable[[str, int | None], list[tuple[int, str]]]
"""(name, port) -> (family, address) pairs: `ConnectBroker.resolve`, called in the supervisor's process.
Raises PermissionError for a name that is not listed, and OSError for one that can't be resolved."""
NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


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
        if name is None or _is_address(name):
            # Neither needs a name server.
            return original(name, number, family, type, proto, flags & ~socket.AI_ADDRCONFIG)
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found: list[Any] = []
        for one, address in ask(name, number):
            if family in (socket.AF_UNSPEC, one):
                # Only TCP sockets exist here.
                kind = type or socket.SOCK_STREAM
                found += original(address, number, one, kind, proto, NUMERIC)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found

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


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
