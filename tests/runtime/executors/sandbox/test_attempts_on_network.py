"""Attempts to reach the network without a permission, and what a permission opens."""

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from djqueue.core.permissions import NOTHING, Permissions
from djqueue.runtime.executors.sandbox import landlock
from tests.runtime.executors.sandbox.attempts import USER, WITHOUT, Attempt, each, needs_sandbox
from tests.runtime.executors.sandbox.harness import (
    inside,
    libc,
    raw,
    shared_directory,
)

pytestmark = needs_sandbox
FAST_OPEN = 0x20000000


@dataclass(frozen=True)
class Servers:
    """Servers on this machine that a sandboxed process may or may not reach."""

    port: int
    port6: int
    path: str
    datagram_path: str
    abstract: str


def answer(server: socket.socket) -> None:
    """Say hello to every client until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            client, _ = server.accept()
            with client:
                client.sendall(b"hello")


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(shared_directory())
        inet = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        inet6 = stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        names = [str(directory / "stream"), f"\0djqueue-test-{os.getpid()}"]
        unix = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in names]
        for server, name in zip(unix, names, strict=True):
            server.bind(name)
            server.listen()
        datagram = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagram.bind(str(directory / "datagram"))
        for path in directory.iterdir():
            path.chmod(0o777)
        threads = [threading.Thread(target=answer, args=(one,)) for one in (inet, inet6, *unix)]
        for thread in threads:
            thread.start()
        yield Servers(
            inet.getsockname()[1], inet6.getsockname()[1], names[0], str(directory / "datagram"), names[1]
        )
        for server in (inet, inet6, *unix):
            server.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def nothing(_: Servers) -> Permissions:
    return NOTHING


def everything(_: Servers) -> Permissions:
    return Permissions(net=True, listen=True, read=True, write=True)


def elsewhere(_: Servers) -> Permissions:
    return Permissions(net=["127.0.0.2", "127.0.0.1:1", "unix:/nowhere"], read=True, write=True)


def server_only(_: Servers) -> Permissions:
    return Permissions(listen=True)


def listed(servers: Servers) -> Permissions:
    return Permissions(net=[f"127.0.0.1:{servers.port}", f"[::1]:{servers.port6}", f"unix:{servers.path}"])


def hello(address: object, family: int = socket.AF_INET) -> bytes:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.connect(address)  # type: ignore[arg-type]
        received = client.recv(5)
    assert received == b"hello"
    return received


def inet_address(port: int) -> bytes:
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, b"\x7f\0\0\x01")


def connect_with_libc(port: int) -> int:
    descriptor = libc("socket", socket.AF_INET, socket.SOCK_STREAM, 0)
    return libc("connect", descriptor, inet_address(port), 16)


def connect_raw(port: int) -> int:
    descriptor = raw("socket", socket.AF_INET, socket.SOCK_STREAM, 6)
    return raw("connect", descriptor, inet_address(port), 16)


def fast_open(port: int) -> int:
    with socket.socket() as client:
        return client.sendto(b"x", FAST_OPEN, ("127.0.0.1", port))


def fast_open_message(port: int) -> int:
    with socket.socket() as client:
        return client.sendmsg([b"x"], [], FAST_OPEN, ("127.0.0.1", port))


def send_datagram(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", path)


def send_datagram_from_pair(path: str) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        one.sendto(b"x", path)


def udp(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", ("127.0.0.1", port))


def bind_only() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))


def listen_without_bind() -> None:
    with socket.socket() as server:
        server.listen()


def make_socket(family: int, kind: int, protocol: int = 0) -> None:
    with socket.socket(family, kind, protocol):
        pass


def use_fast_open_option(port: int) -> bytes:
    with socket.socket() as client:
        client.setsockopt(socket.IPPROTO_TCP, 30, 1)
        client.connect(("127.0.0.1", port))
        client.send(b"x")
        return client.recv(5)


ATTEMPTS = [
    Attempt("connect", lambda s: hello(("127.0.0.1", s.port)), nothing, everything),
    Attempt("connect where nothing is listed", lambda s: hello(("127.0.0.1", s.port)), elsewhere, listed),
    Attempt("connect as a server", lambda s: hello(("127.0.0.1", s.port)), server_only, everything),
    Attempt("connect with libc", lambda s: connect_with_libc(s.port), elsewhere, listed),
    Attempt("connect with a raw call", lambda s: connect_raw(s.port), elsewhere, listed),
    Attempt("connect by IPv6", lambda s: hello(("::1", s.port6), socket.AF_INET6), elsewhere, listed),
    Attempt(
        "connect by IPv4 in IPv6",
        lambda s: hello(("::ffff:127.0.0.1", s.port), socket.AF_INET6),
        elsewhere,
        listed,
    ),
    Attempt("connect to a zero address", lambda s: hello(("0.0.0.0", s.port)), listed, everything),
    Attempt("connect to a UNIX socket", lambda s: hello(s.path, socket.AF_UNIX), nothing, everything),
    Attempt("connect to a UNIX socket elsewhere", lambda s: hello(s.path, socket.AF_UNIX), elsewhere, listed),
    Attempt("connect to an abstract socket", lambda s: hello(s.abstract, socket.AF_UNIX), listed, everything),
    Attempt("connect while sending", lambda s: fast_open(s.port), elsewhere, everything),
    Attempt("connect while sending a message", lambda s: fast_open_message(s.port), listed, everything),
    Attempt("connect at the first write", lambda s: use_fast_open_option(s.port), elsewhere, listed),
    Attempt("a UDP packet", lambda s: udp(s.port), listed, everything),
    Attempt("a datagram to a UNIX socket", lambda s: send_datagram(s.datagram_path), listed, everything),
    Attempt("a datagram from a pair", lambda s: send_datagram_from_pair(s.datagram_path), listed, WITHOUT),
    Attempt("bind", lambda _: bind_only(), listed, everything),
    Attempt("listen without bind", lambda _: listen_without_bind(), listed, everything),
    Attempt("listen", lambda _: socket.create_server(("127.0.0.1", 0)).close(), listed, server_only),
]


@each(ATTEMPTS)
def test_network_access_requires_a_permission(attempt: Attempt[Servers], servers: Servers, user: str) -> None:
    attempt.is_refused(servers, user)


@each(ATTEMPTS)
def test_network_access_works_with_the_permission(
    attempt: Attempt[Servers], servers: Servers, user: str
) -> None:
    attempt.works(servers, user)


KINDS = {
    "netlink": (socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "packets": (socket.AF_PACKET, socket.SOCK_RAW, 0),
    "raw IP": (socket.AF_INET, socket.SOCK_RAW, 1),
    "ping": (socket.AF_INET, socket.SOCK_DGRAM, 1),
    "SCTP": (socket.AF_INET, socket.SOCK_STREAM, 132),
    "multipath TCP": (socket.AF_INET, socket.SOCK_STREAM, 262),
    "virtual machines": (40, socket.SOCK_STREAM, 0),
    "cryptography": (38, socket.SOCK_SEQPACKET, 0),
}


@USER
@pytest.mark.parametrize("kind", KINDS)
def test_no_permission_allows_unusual_socket_types(kind: str, user: str) -> None:
    result = inside(lambda: make_socket(*KINDS[kind]), Permissions(net=True, listen=True), user=user)

    assert result.errno == errno.EPERM


@USER
def test_socket_pair_requires_no_permission(user: str) -> None:
    def talk() -> bytes:
        one, other = socket.socketpair()
        with one, other:
            one.sendall(b"hello")
            return other.recv(5)

    assert inside(talk, NOTHING, user=user).value == b"hello"


@pytest.mark.skipif(landlock.abi() < landlock.NET_SINCE, reason="this Landlock does not know TCP ports")
@USER
def test_only_listed_ports_can_be_bound(user: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free.getsockname()[1], other.getsockname()[1]]

    def listen(port: int) -> int:
        with socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])

    granted = Permissions(listen=[ports[0]])
    assert inside(lambda: listen(ports[0]), granted, user=user).value == ports[0]
    assert inside(lambda: listen(ports[1]), granted, user=user).errno == errno.EACCES
    assert inside(lambda: listen(0), granted, user=user).errno == errno.EACCES
    assert inside(lambda: listen(0), Permissions(listen=[0]), user=user).is_ok
    assert inside(lambda: listen(ports[1]), Permissions(listen=True), user=user).is_ok


@USER
def test_inherited_socket_cannot_be_connected_elsewhere(servers: Servers, user: str) -> None:
    with socket.socket() as client:
        client.connect(("127.0.0.1", servers.port))

        def move() -> None:
            # An address without a family would dissolve the connection.
            libc("connect", client.fileno(), bytes(16), 16)

        assert inside(move, NOTHING, user=user).errno == errno.EPERM
        assert inside(move, listed(servers), user=user).errno == errno.EAFNOSUPPORT
        assert inside(lambda: client.recv(5), NOTHING, user=user).value == b"hello"


def test_host_names_can_be_resolved_if_every_host_is_allowed() -> None:
    granted = Permissions(net=True)

    found = inside(lambda: socket.getaddrinfo("localhost", 80, socket.AF_INET), granted)
    assert found.value[0][4] == ("127.0.0.1", 80)
