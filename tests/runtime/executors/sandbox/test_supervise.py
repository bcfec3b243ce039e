"""Connections to listed hosts are made by the supervisor, and only to what it has checked."""

import array
import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from djqueue.core.permissions import Permissions
from djqueue.runtime.executors.sandbox import SandboxError
from djqueue.runtime.executors.sandbox.apply import Sandbox
from djqueue.runtime.executors.sandbox.broker import (
    DeniedAccess,
    receive_listener,
    send_listener,
)
from djqueue.runtime.executors.sandbox.seccomp import Filter
from djqueue.runtime.executors.sandbox.syscalls import set_dumpable, this_machine
from tests.runtime.executors.sandbox.attempts import USER, needs_sandbox
from tests.runtime.executors.sandbox.harness import (
    LIBC,
    USERS,
    Action,
    Result,
    SupervisedChannel,
    become,
    libc,
    run,
    shared_directory,
)
from tests.support import eventually

pytestmark = needs_sandbox
TAKING = pytest.mark.parametrize("takes_sockets", [True, False], ids=["taken", "replaced"])


class Server:
    """A server on this machine that says hello and counts its clients."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.clients = 0
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.clients += 1
                with client:
                    client.sendall(b"hello")


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server(socket.create_server(("127.0.0.1", 0)))
    yield one
    one.close()


@pytest.fixture
def other() -> Iterator[Server]:
    one = Server(socket.create_server(("127.0.0.1", 0)))
    yield one
    one.close()


def connected(
    action: Action,
    *net: str,
    user: str = "user",
    denied: list[DeniedAccess] | None = None,
    before: Callable[[SupervisedChannel], None] = lambda _: None,
    **options: Any,
) -> Result:
    """Run an action in a sandbox with a list of hosts; `before` is called when the broker has started."""
    permissions = Permissions(net=list(net))
    report = None if denied is None else denied.append
    ready, go = os.pipe(), os.pipe()
    with SupervisedChannel(permissions, on_denied=report, **options) as channel:

        def prepare() -> None:
            sandbox = Sandbox(permissions, {})
            sandbox.stage_one(channel.theirs)
            sandbox.stage_two()
            os.write(ready[1], b"x")
            os.read(go[0], 1)

        def release() -> None:
            os.read(ready[0], 1)
            channel.started.wait()
            before(channel)
            os.write(go[1], b"x")

        releasing = threading.Thread(target=release)
        releasing.start()
        try:
            return run(action, user=user, prepare=prepare)
        finally:
            # If the sandbox could not be set up, nothing was written.
            os.write(ready[1], b"x")
            releasing.join()
            for end in (*ready, *go):
                os.close(end)


def hello(port: int, host: str = "127.0.0.1") -> bytes:
    with socket.create_connection((host, port)) as client:
        return client.recv(5)


def address(port: int) -> bytes:
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, b"\x7f\0\0\x01")


# What is listed.


@USER
@TAKING
def test_only_a_listed_port_can_be_connected(
    server: Server, other: Server, user: str, takes_sockets: bool
) -> None:
    net = f"127.0.0.1:{server.port}"

    result = connected(lambda: hello(server.port), net, user=user, takes_sockets=takes_sockets)
    assert result.value == b"hello"
    result = connected(lambda: hello(other.port), net, user=user, takes_sockets=takes_sockets)
    assert result.errno == errno.EACCES
    assert (server.clients, other.clients) == (1, 0)


@TAKING
def test_non_blocking_socket_stays_non_blocking(server: Server, takes_sockets: bool) -> None:
    def connect() -> tuple[int, bool, bytes]:
        with socket.socket() as client:
            client.setblocking(False)
            code = client.connect_ex(("127.0.0.1", server.port))
            poll = select.poll()
            poll.register(client.fileno(), select.POLLOUT)
            poll.poll()
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            stays = not os.get_blocking(client.fileno())
            client.setblocking(True)
            return code, stays, client.recv(5)

    result = connected(connect, f"127.0.0.1:{server.port}", takes_sockets=takes_sockets)
    assert result.value[0] in (0, errno.EINPROGRESS)
    assert result.value[1:] == (True, b"hello")


def test_event_loop_can_open_supervised_connections(server: Server) -> None:
    async def connect() -> list[bytes]:
        async def one() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                return await reader.read(5)
            finally:
                writer.close()

        return await asyncio.gather(*(one() for _ in range(20)))

    result = connected(lambda: asyncio.run(connect()), "127.0.0.1")
    assert result.value == [b"hello"] * 20


def test_threads_connect_concurrently(server: Server) -> None:
    def connect() -> list[bytes]:
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(hello(server.port))) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert connected(connect, "127.0.0.1").value == [b"hello"] * 40


def test_options_of_a_taken_socket_are_kept(server: Server) -> None:
    def connect() -> tuple[int, bool]:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            client.connect(("127.0.0.1", server.port))
            return client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), os.get_inheritable(
                client.fileno()
            )

    assert connected(connect, "127.0.0.1").value == (1, False)


def test_replaced_socket_keeps_its_number_and_inheritance(server: Server) -> None:
    def connect(inheritable: bool) -> tuple[bool, bytes]:
        with socket.socket() as client:
            client.set_inheritable(inheritable)
            client.connect(("127.0.0.1", server.port))
            return os.get_inheritable(client.fileno()), client.recv(5)

    for one in (True, False):
        result = connected(lambda one=one: connect(one), "127.0.0.1", takes_sockets=False)  # type: ignore[misc]
        assert result.value == (one, b"hello")


@USER
@TAKING
def test_listed_unix_socket_can_be_connected(user: str, takes_sockets: bool) -> None:
    with shared_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "x"))
        (directory / "x").chmod(0o777)
        listener.listen()
        one = Server(listener)

        def connect(name: str) -> bytes:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(directory / name))
                return client.recv(5)

        try:
            net = f"unix:{directory}/x"
            assert (
                connected(lambda: connect("x"), net, user=user, takes_sockets=takes_sockets).value == b"hello"
            )
            assert connected(lambda: connect("y"), net, user=user).errno == errno.EACCES
            assert connected(lambda: connect("../x"), net, user=user).errno == errno.EACCES
        finally:
            one.close()


def test_link_in_place_of_a_unix_socket_is_not_followed() -> None:
    with shared_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "secret"))
        listener.listen()

        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(directory / "x"))

        (directory / "x").symlink_to("secret")
        assert connected(connect, f"unix:{directory}/x").errno == errno.ECONNREFUSED
        (directory / "x").unlink()
        (directory / "x").write_text("no socket")
        assert connected(connect, f"unix:{directory}/x").errno == errno.ECONNREFUSED
        (directory / "x").unlink()
        assert connected(connect, f"unix:{directory}/x").errno == errno.ENOENT


def test_directory_replaced_by_a_link_is_not_followed() -> None:
    with shared_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        (directory / "secret").mkdir()
        (directory / "out").mkdir()
        listener.bind(str(directory / "secret" / "x"))
        listener.listen()

        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(directory / "out" / "x"))

        def replace(_: SupervisedChannel) -> None:
            (directory / "out").rmdir()
            (directory / "out").symlink_to("secret")

        assert connected(connect, f"unix:{directory}/out/x", before=replace).errno == errno.ELOOP


# An address that changes.


@TAKING
@pytest.mark.parametrize("allowed_first", [True, False])
def test_address_changed_by_another_thread_after_the_copy_has_no_effect(
    server: Server, other: Server, allowed_first: bool, takes_sockets: bool
) -> None:
    """The name server holds the check up until the thread has changed the address."""
    to_child, to_broker = os.pipe(), os.pipe()
    first, second = (server, other) if allowed_first else (other, server)

    def resolve(name: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        os.write(to_child[1], b"x")
        os.read(to_broker[0], 1)
        found = {"a.example": "127.0.0.1", "b.example": "192.0.2.1"}[name]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

    def connect() -> int:
        buffer = ctypes.create_string_buffer(address(first.port), 16)

        def change() -> None:
            os.read(to_child[0], 1)
            ctypes.memmove(buffer, address(second.port), 16)
            os.write(to_broker[1], b"x")

        thread = threading.Thread(target=change)
        thread.start()
        with socket.socket() as client:
            result = LIBC.connect(client.fileno(), buffer, 16)
            code = ctypes.get_errno() if result else 0
            thread.join()
            assert buffer.raw == address(second.port)
        return code

    # The first name leads to this machine, the second does not.
    net = (f"a.example:{server.port}", f"b.example:{other.port}")
    result = connected(connect, *net, resolve=resolve, takes_sockets=takes_sockets)
    assert result.value == (0 if allowed_first else errno.EACCES)
    eventually(lambda: server.clients == int(allowed_first))
    assert other.clients == 0
    for end in (*to_child, *to_broker):
        os.close(end)


def test_address_changed_continuously_reaches_only_listed_servers(server: Server, other: Server) -> None:
    def connect() -> int:
        buffer = ctypes.create_string_buffer(address(server.port), 16)
        ends = threading.Event()

        def flicker() -> None:
            while not ends.is_set():
                ctypes.memmove(buffer, address(other.port), 16)
                ctypes.memmove(buffer, address(server.port), 16)

        thread = threading.Thread(target=flicker)
        thread.start()
        succeeded = 0
        for _ in range(200):
            with socket.socket() as client:
                succeeded += LIBC.connect(client.fileno(), buffer, 16) == 0
        ends.set()
        thread.join()
        return succeeded

    assert connected(connect, f"127.0.0.1:{server.port}").value > 0
    assert other.clients == 0


# Names.


def test_address_of_a_listed_name_can_be_connected(server: Server, other: Server) -> None:
    denied: list[DeniedAccess] = []
    net = f"localhost:{server.port}"

    assert connected(lambda: hello(server.port), net, denied=denied).value == b"hello"
    assert connected(lambda: hello(other.port), net, denied=denied).errno == errno.EACCES
    assert [one.target for one in denied] == [f"127.0.0.1:{other.port}"]


def test_broker_resolves_listed_names_for_the_process(server: Server) -> None:
    denied: list[DeniedAccess] = []
    found: list[object] = []

    def resolve(channel: SupervisedChannel) -> None:
        assert channel.broker is not None
        found.append(channel.broker.resolve("localhost", server.port))
        with pytest.raises(PermissionError):
            channel.broker.resolve("secret.example", 443)
        with pytest.raises(PermissionError):
            channel.broker.resolve("other.example", None)

    result = connected(lambda: hello(server.port), "localhost", denied=denied, before=resolve)
    assert result.value == b"hello"
    assert (socket.AF_INET, "127.0.0.1") in found[0]  # type: ignore[operator]
    assert denied == [
        DeniedAccess(pid=0, target="secret.example:443"),
        DeniedAccess(pid=0, target="other.example"),
    ]


# Denials and errors.


def test_denial_names_the_process_and_the_target(other: Server) -> None:
    denied: list[DeniedAccess] = []

    def connect() -> int:
        with contextlib.suppress(PermissionError):
            hello(other.port)
        return os.getpid()

    result = connected(connect, "127.0.0.2", denied=denied)
    assert denied == [DeniedAccess(pid=result.value, target=f"127.0.0.1:{other.port}")]


def test_denial_in_a_thread_names_the_process(other: Server) -> None:
    denied: list[DeniedAccess] = []

    def connect() -> int:
        def try_it() -> None:
            with contextlib.suppress(PermissionError):
                hello(other.port)

        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
        return os.getpid()

    result = connected(connect, "127.0.0.2", denied=denied)
    assert [one.pid for one in denied] == [result.value]


def test_denial_is_always_printable() -> None:
    denied: list[DeniedAccess] = []

    def connect() -> None:
        for name in (b"/a\nb\xff", b"\0a\0b"):
            with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(PermissionError):
                client.connect(name)

    def resolve(channel: SupervisedChannel) -> None:
        assert channel.broker is not None
        with pytest.raises(PermissionError):
            channel.broker.resolve("x\0" * 500, 1)

    assert connected(connect, "unix:/run/x", denied=denied, before=resolve).is_ok
    assert [one.target for one in denied] == ["x?" * 150, "unix:/a?b?", "unix:@a?b"]


def test_self_test_is_not_reported_as_a_denial(server: Server) -> None:
    denied: list[DeniedAccess] = []

    assert connected(lambda: hello(server.port), "127.0.0.1", denied=denied).is_ok
    assert denied == []


def connect_twice(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.connect(("127.0.0.1", port))


@TAKING
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (lambda port: hello(1), {errno.ECONNREFUSED}),
        (lambda port: libc("connect", 999, address(port), 16), {errno.EBADF}),
        (lambda port: libc("connect", -1, address(port), 16), {errno.EBADF}),
        (lambda port: libc("connect", os.pipe()[0], address(port), 16), {errno.ENOTSOCK}),
        (lambda port: libc("connect", socket.socket().detach(), None, 16), {errno.EFAULT}),
        (lambda port: libc("connect", socket.socket().detach(), ctypes.c_void_p(2**63), 16), {errno.EFAULT}),
        (lambda port: libc("connect", socket.socket().detach(), address(port), -1), {errno.EINVAL}),
        (lambda port: libc("connect", socket.socket().detach(), address(port), 129), {errno.EINVAL}),
        (lambda port: libc("connect", socket.socket().detach(), address(port), 8), {errno.EAFNOSUPPORT}),
        (lambda port: libc("connect", socket.socket().detach(), bytes(16), 0), {errno.EAFNOSUPPORT}),
    ],
)
def test_connection_errors_equal_those_of_the_kernel(
    server: Server, action: Callable[[int], object], expected: set[int], takes_sockets: bool
) -> None:
    result = connected(lambda: action(server.port), "127.0.0.1", takes_sockets=takes_sockets)

    if not takes_sockets and errno.ENOTSOCK in expected:
        # The pipe is replaced by a socket, which harms only its owner.
        return
    assert result.errno in expected, result


def test_connected_socket_cannot_be_connected_again(server: Server) -> None:
    assert connected(lambda: connect_twice(server.port), "127.0.0.1").errno == errno.EISCONN


def test_connections_fail_without_a_broker(server: Server) -> None:
    def stop(channel: SupervisedChannel) -> None:
        assert channel.broker is not None
        channel.broker.close()

    assert connected(lambda: hello(server.port), "127.0.0.1", before=stop).errno == errno.ENOSYS
    assert server.clients == 0


@pytest.mark.skipif(len(USERS) < 2, reason="needs root, to have two users")
def test_broker_that_cannot_read_addresses_is_detected() -> None:
    permissions = Permissions(net=["127.0.0.1"])

    def supervise() -> Result:
        with SupervisedChannel(permissions) as channel:
            return run(lambda: Sandbox(permissions, {}).stage_one(channel.theirs))

    def hide() -> None:
        set_dumpable(dumpable=False)

    # A process that can't be dumped keeps its memory from its supervisor, unless that is root.
    result = run(supervise, user="nobody", prepare=hide)
    assert result.is_ok, result
    assert result.value.error == "SandboxUnavailableError"
    assert "can't read the memory" in result.value.text


def test_broker_that_cannot_take_sockets_replaces_them(server: Server) -> None:
    """Container runtimes refuse `pidfd_getfd` without CAP_SYS_PTRACE."""
    permissions = Permissions(net=["127.0.0.1"])

    def supervise() -> Result:
        with SupervisedChannel(permissions) as channel:
            return run(
                lambda: hello(server.port), prepare=lambda: Sandbox(permissions, {}).stage_one(channel.theirs)
            )

    def refuse() -> None:
        rules = Filter(this_machine())
        rules.refuse("pidfd_getfd")
        rules.install()

    assert run(supervise, prepare=refuse).value == Result(value=b"hello")


def test_supervised_process_cannot_be_supervised_again(server: Server) -> None:
    ours, theirs = socket.socketpair()
    permissions = Permissions(net=["127.0.0.1"])

    def nest() -> None:
        Sandbox(permissions, {}).stage_one(theirs)

    with SupervisedChannel(permissions) as channel, ours, theirs:
        result = run(nest, prepare=lambda: Sandbox(permissions, {}).stage_one(channel.theirs))
    assert result.error == "SandboxError"


# Connections that take long.


@contextlib.contextmanager
def full_server() -> Iterator[int]:
    """A server that answers no further client, so that connecting to it waits."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        yield int(full.getsockname()[1])


def test_supervised_connection_respects_the_timeout_of_the_socket(server: Server) -> None:
    def connect(port: int) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 50_000))
            client.connect(("127.0.0.1", port))

    with full_server() as port:
        assert connected(lambda: connect(port), "127.0.0.1").errno in (errno.EINPROGRESS, errno.EAGAIN)


def test_waiting_connection_does_not_delay_others(server: Server) -> None:
    def connect(full: int) -> bytes:
        threading.Thread(target=lambda: hello(full), daemon=True).start()
        return hello(server.port)

    with full_server() as port:
        assert connected(lambda: connect(port), "127.0.0.1").value == b"hello"


def test_connection_of_a_killed_process_is_abandoned() -> None:
    permissions = Permissions(net=["127.0.0.1"])
    with full_server() as port, SupervisedChannel(permissions) as channel:
        pid = start(lambda: Sandbox(permissions, {}).stage_one(channel.theirs), lambda: hello(port))
        channel.started.wait()
        broker = channel.broker
        assert broker is not None
        eventually(lambda: broker._connecting)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        eventually(lambda: not broker._connecting)


def test_broker_ends_with_its_last_process() -> None:
    permissions = Permissions(net=["127.0.0.1"])
    with SupervisedChannel(permissions) as channel:
        pid = start(lambda: Sandbox(permissions, {}).stage_one(channel.theirs), lambda: None)
        os.waitpid(pid, 0)
        channel.started.wait()
        assert channel.broker is not None
        thread = channel.broker._thread
        eventually(lambda: not thread.is_alive())


def start(prepare: Action, action: Action) -> int:
    """Start an action in a forked child, and return its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            become("user")
            prepare()
            action()
        finally:
            os._exit(0)
    return pid


@TAKING
def test_broker_leaves_no_descriptors_open(server: Server, takes_sockets: bool) -> None:
    def connect() -> None:
        for _ in range(20):
            hello(server.port)
            with contextlib.suppress(PermissionError):
                hello(1)
            with contextlib.suppress(OSError):
                libc("connect", 999, address(server.port), 16)

    before = len(os.listdir("/proc/self/fd"))
    assert connected(connect, f"127.0.0.1:{server.port}", takes_sockets=takes_sockets).is_ok
    assert len(os.listdir("/proc/self/fd")) == before


# The channel.


def test_listener_is_sent_over_a_socket() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    with ours, theirs:
        send_listener(theirs, reader)
        received = receive_listener(ours)
    os.write(writer, b"x")

    assert os.read(received, 1) == b"x"
    assert fcntl.fcntl(received, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    for descriptor in (reader, writer, received):
        os.close(descriptor)


@pytest.mark.parametrize("count", [0, 2])
def test_wrong_number_of_descriptors_is_rejected_and_closed(count: int) -> None:
    ours, theirs = socket.socketpair()
    before = set(os.listdir("/proc/self/fd"))
    with ours, theirs:
        numbers = array.array("i", [0] * count)
        theirs.sendmsg([b"L"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if count else [])
        with pytest.raises(SandboxError, match="did not send the listener"):
            receive_listener(ours)
        assert set(os.listdir("/proc/self/fd")) == before


def test_ended_process_sends_no_listener() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(SandboxError, match="did not send the listener"):
        receive_listener(ours)


def test_list_of_hosts_without_a_channel_is_an_error() -> None:
    result = run(lambda: Sandbox(Permissions(net=["127.0.0.1"]), {}).stage_one())

    assert result.error == "SandboxError"
    assert "needs a channel" in result.text
