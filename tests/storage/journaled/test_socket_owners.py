"""The scheduler's socket on a machine with other users: its folder, the other end, and how many connect."""

import asyncio
import contextlib
import logging
import os
import pwd
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djqueue import models
from djqueue.core.errors import ConfigurationError, StorageError, StorageUnavailableError
from djqueue.core.throttle import ThrottledLog
from djqueue.storage.journaled import JournaledStorage, accepting, connecting, folder, framing, server
from djqueue.storage.journaled.folder import private_folder
from djqueue.storage.wire import LENGTH, unpack
from djqueue.testing.factories import QUEUE, enqueue, worker
from tests.support import PATIENCE, eventually

from .conftest import MakeStorage

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
NOBODY = pwd.getpwnam("nobody")
AS_NOBODY = f"""
import json, os, socket, struct, sys
os.setgroups([]); os.setgid({NOBODY.pw_gid}); os.setuid({NOBODY.pw_uid})
"""


def as_nobody(code: str, *arguments: object, **options: Any) -> str:
    """Run Python code as the user nobody; return its output."""
    command = [sys.executable, "-I", "-c", AS_NOBODY + code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=True, cwd="/", **options
    ).stdout


@pytest.fixture
def shared() -> Iterator[Path]:
    """A sticky folder in which every user creates files, as /tmp is."""
    with tempfile.TemporaryDirectory(prefix="djqueue-") as made:
        outer = Path(made)
        outer.chmod(0o711)
        inner = outer / "tmp"
        inner.mkdir()
        inner.chmod(0o1777)
        yield inner


def start(make_storage: MakeStorage, path: Path, **options: Any) -> JournaledStorage:
    storage = make_storage(address=f"unix://{path}", **options)
    storage.role.standby = "never"
    storage.connect()
    return storage


def claim_that_a_scheduler_listens(path: Path) -> None:
    """Write the row that tells clients where the scheduler is."""
    from djqueue.core.clock import SYSTEM_CLOCK
    from djqueue.storage.journaled.lease import SchedulerLease

    assert SchedulerLease("default", SYSTEM_CLOCK, f"unix://{path}").acquire()


# The folder.


def test_folder_is_created_for_this_user_alone(make_storage: MakeStorage, shared: Path) -> None:
    start(make_storage, shared / "new" / "inner" / "s.sock")

    found = (shared / "new" / "inner").lstat()
    assert (found.st_mode & 0o777, found.st_uid) == (0o700, os.geteuid())
    assert (shared / "new").lstat().st_mode & 0o022 == 0


@needs_root
def test_symbolic_link_that_another_user_planted_is_rejected_by_scheduler(
    make_storage: MakeStorage, shared: Path
) -> None:
    as_nobody(
        "os.mkdir(sys.argv[1], 0o777); os.symlink(sys.argv[1], sys.argv[2])",
        shared / "trap",
        shared / "runtime",
    )

    with pytest.raises(ConfigurationError, match=r"runtime is a symbolic link \(of the user nobody"):
        start(make_storage, shared / "runtime" / "s.sock")

    assert list((shared / "trap").iterdir()) == []
    start(make_storage, shared / "mine" / "s.sock")  # the scheduler's place was given back


@needs_root
def test_no_payload_reaches_listener_of_another_user_behind_symbolic_link(
    make_storage: MakeStorage, shared: Path
) -> None:
    path = shared / "runtime" / "s.sock"
    listener = as_background_listener(shared / "trap", shared / "runtime")
    try:
        claim_that_a_scheduler_listens(path)
        client = make_storage()

        with pytest.raises(StorageUnavailableError, match="runtime is a symbolic link"):
            client.queues.pause(QUEUE)
        enqueue(client, payload=b"secret")  # by the tables
    finally:
        said, _ = listener.communicate("end\n", timeout=PATIENCE)
    assert said.split() == ["listening", "0"]


def as_background_listener(trap: Path, link: Path) -> "subprocess.Popen[str]":
    """Start a process of nobody that listens in a folder of its own; it prints how many have connected."""
    code = """
os.mkdir(sys.argv[1], 0o777); os.symlink(sys.argv[1], sys.argv[2])
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1] + "/s.sock"); listener.listen()
os.chmod(sys.argv[1] + "/s.sock", 0o777)
print("listening", flush=True)
sys.stdin.readline()
listener.setblocking(False)
count = 0
try:
    while True:
        listener.accept()
        count += 1
except BlockingIOError:
    print(count)
"""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", AS_NOBODY + code, str(trap), str(link)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    eventually((trap / "s.sock").exists)
    eventually(lambda: (trap / "s.sock").stat().st_mode & 0o777 == 0o777)
    return process


@needs_root
def test_link_of_another_user_in_path_to_folder_is_rejected(make_storage: MakeStorage, shared: Path) -> None:
    """The folder at its end belongs to this user: only the way there does not."""
    (shared / "mine").mkdir(mode=0o700)
    as_nobody("os.symlink(sys.argv[1], sys.argv[2])", shared, shared / "way")

    with pytest.raises(
        ConfigurationError, match=r"reached through .*/way, a symbolic link of the user nobody"
    ):
        start(make_storage, shared / "way" / "mine" / "s.sock")


@needs_root
def test_folder_inside_folder_of_another_user_is_rejected(make_storage: MakeStorage, shared: Path) -> None:
    as_nobody("os.mkdir(sys.argv[1], 0o755)", shared / "theirs")
    (shared / "theirs" / "mine").mkdir(mode=0o700)

    with pytest.raises(ConfigurationError, match="theirs, which belongs to the user nobody"):
        start(make_storage, shared / "theirs" / "mine" / "s.sock")


@needs_root
def test_folder_of_another_user_names_both_users_and_remedy(make_storage: MakeStorage, shared: Path) -> None:
    """As when a service user runs the scheduler and root runs a command, or the reverse."""
    as_nobody("os.mkdir(sys.argv[1], 0o700)", shared / "theirs")
    expected = r"belongs to the user nobody \(\d+\), and this process runs as the user root \(0\); run the"

    with pytest.raises(ConfigurationError, match=expected):
        start(make_storage, shared / "theirs" / "s.sock")
    claim_that_a_scheduler_listens(shared / "theirs" / "s.sock")
    with pytest.raises(StorageUnavailableError, match=expected):
        make_storage().queues.pause(QUEUE)


def test_client_logs_once_why_it_does_not_use_socket(
    make_storage: MakeStorage, shared: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "unsafe", ThrottledLog(connecting.logger, 60.0))
    scheduler = start(make_storage, shared / "mine" / "s.sock")
    (shared / "mine").chmod(0o755)
    client = make_storage()

    for _ in range(3):
        with pytest.raises(StorageUnavailableError, match="has the mode 0755 and must have 0700"):
            client.queues.pause(QUEUE)

    said = [line for line in caplog.messages if line.startswith("Not using the scheduler's socket")]
    assert len(said) == 1
    (shared / "mine").chmod(0o700)
    client.queues.pause(QUEUE)
    assert scheduler.queues.is_paused(QUEUE)


def test_link_of_this_user_is_rejected_as_folder_but_may_be_on_way(
    make_storage: MakeStorage, shared: Path
) -> None:
    (shared / "real" / "inner").mkdir(mode=0o700, parents=True)
    (shared / "real").chmod(0o700)
    (shared / "link").symlink_to("real")

    with pytest.raises(ConfigurationError, match="link is a symbolic link"):
        start(make_storage, shared / "link" / "s.sock")
    start(make_storage, shared / "link" / "inner" / "s.sock")
    make_storage().queues.pause(QUEUE)
    assert (shared / "real" / "inner" / "s.sock").is_socket()


def test_loop_of_links_is_rejected(shared: Path) -> None:
    (shared / "a").symlink_to("b")
    (shared / "b").symlink_to("a")

    with pytest.raises(ConfigurationError, match="symbolic link"), private_folder(shared / "a" / "inner"):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o757], ids=oct)
def test_parent_in_which_others_can_replace_folder_is_rejected(
    make_storage: MakeStorage, shared: Path, mode: int
) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(mode)

    with pytest.raises(ConfigurationError, match=rf"open, where other users can replace it \(mode 0{mode:o}"):
        start(make_storage, shared / "open" / "mine" / "s.sock")


def test_file_in_place_of_folder_is_rejected(make_storage: MakeStorage, shared: Path) -> None:
    (shared / "file").touch()

    with pytest.raises(ConfigurationError, match="file is not a directory"):
        start(make_storage, shared / "file" / "s.sock")


def test_file_in_place_of_socket_is_kept(make_storage: MakeStorage, shared: Path) -> None:
    (shared / "mine").mkdir(mode=0o700)
    (shared / "mine" / "data").write_text("precious")

    with pytest.raises(StorageError, match="data exists and is not a socket"):
        start(make_storage, shared / "mine" / "data")

    assert (shared / "mine" / "data").read_text() == "precious"


def test_folder_that_is_replaced_between_check_and_use_is_noticed(shared: Path) -> None:
    (shared / "mine").mkdir(mode=0o700)

    def replace() -> None:
        with private_folder(shared / "mine"):
            (shared / "mine").rename(shared / "old")
            (shared / "mine").mkdir(mode=0o700)

    with pytest.raises(ConfigurationError, match="mine was replaced"):
        replace()


# The process at the other end.


@needs_root
def test_client_sends_nothing_to_listener_of_another_user(make_storage: MakeStorage, shared: Path) -> None:
    """The folder and the socket are this user's, and yet another user's process listens."""
    (shared / "mine").mkdir(mode=0o700)
    path = shared / "mine" / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        # The kernel notes who calls listen().
        as_nobody(
            "socket.socket(fileno=int(sys.argv[1])).listen()", listener.fileno(), pass_fds=[listener.fileno()]
        )
        claim_that_a_scheduler_listens(path)

        with pytest.raises(StorageUnavailableError, match=r"runs as the user nobody .*nothing was sent; run"):
            make_storage().queues.pause(QUEUE)

        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(1_000) == b""


@needs_root
def test_scheduler_refuses_client_of_another_user(make_storage: MakeStorage, shared: Path) -> None:
    path = shared / "mine" / "s.sock"
    scheduler = start(make_storage, path)
    path.parent.chmod(0o711)
    path.chmod(0o666)

    said = as_nobody(
        """
connection = socket.socket(socket.AF_UNIX); connection.connect(sys.argv[1])
connection.sendall(bytes.fromhex(sys.argv[2]))
data = b""
while chunk := connection.recv(1000):
    data += chunk
    connection.close() if len(data) >= 4 + struct.unpack(">I", data[:4])[0] else None
    break
print(data.hex())
""",
        path,
        server_request("queues.pause", QUEUE).hex(),
    )

    [number, word, reason] = unpack(bytes.fromhex(said)[LENGTH.size :])
    assert (number, word) == (0, "refused")
    assert "this process runs as the user nobody" in reason
    assert not scheduler.queues.is_paused(QUEUE)


def server_request(operation: str, *args: Any) -> bytes:
    from djqueue.storage.wire import pack

    return pack([1, operation, list(args), {}])


# How many.


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What servers log about connections, throttled anew."""
    fresh = ThrottledLog(accepting.logger, 60.0)
    monkeypatch.setattr(accepting, "log", fresh)
    monkeypatch.setattr(server, "log", fresh)
    caplog.set_level(logging.WARNING, "djqueue")
    return caplog


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4_096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [150, pytest.param(1_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1:0"], ids=["unix", "tcp"])
def test_many_silent_connections_hold_64_descriptors_and_block_no_client(
    make_storage: MakeStorage,
    address: str | None,
    count: int,
    lines: pytest.LogCaptureFixture,
    many_descriptors: None,
) -> None:
    scheduler = make_storage(address=address, token="open sesame")
    scheduler.connect()
    assert scheduler._server is not None
    client = make_storage(token="open sesame")
    client.workers.register(worker())
    where = scheduler._server.address

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(framing.connect(where))
        eventually(lambda: len(scheduler._server._sessions) <= 65)
        other = make_storage(token="open sesame")
        other.workers.register(worker("another"))
        client.workers.register(worker())
        assert len(scheduler._server._unauthenticated) <= 64

    eventually(lambda: len(scheduler._server._sessions) == 2)
    assert len(lines.messages) == 1
    assert lines.messages[0].startswith("Closed the oldest connection, because more than 64")


def test_clients_beyond_half_of_descriptors_receive_error(
    make_storage: MakeStorage, scheduler: JournaledStorage, lines: pytest.LogCaptureFixture
) -> None:
    assert scheduler._server is not None
    scheduler._server.limits = scheduler._server.limits._replace(total=2)
    clients = [make_storage() for _ in range(4)]
    for client in clients[:2]:
        client.workers.register(worker())

    for client in clients[2:]:
        with pytest.raises(StorageUnavailableError, match=r"2 clients are connected .*LimitNOFILE"):
            client.workers.register(worker())

    assert len(lines.messages) == 1
    clients[0].close()
    eventually(lambda: len(scheduler._server._sessions) == 1)
    clients[2].workers.register(worker())


@pytest.mark.parametrize(
    ("soft", "expected"),
    [(256, (32, 128)), (1_024, (64, 512)), (8, (1, 4)), (resource.RLIM_INFINITY, (64, 32_768))],
)
def test_limits_leave_descriptors_for_databases_and_jobs(
    monkeypatch: pytest.MonkeyPatch, soft: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))

    assert accepting.Limits.of_process() == expected


def test_process_without_free_descriptors_logs_one_line_and_accepts_later(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, shared: Path
) -> None:
    monkeypatch.setattr(accepting, "RETRY", 0.01)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(shared / "s.sock"))
        listener.listen()
        client.connect(str(shared / "s.sock"))
        asyncio.run(accept_without_descriptors(listener))
    assert len(lines.messages) == 1
    assert lines.messages[0].startswith("Cannot accept connections: [Errno 24]")


async def accept_without_descriptors(listener: socket.socket) -> None:
    """Accept a connection while the process has no free descriptor, and again when it has."""
    loop = asyncio.get_running_loop()
    failed, served = asyncio.Event(), asyncio.Event()
    sock_accept, attempts = loop.sock_accept, 0

    async def counted(found: socket.socket) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 6:
            failed.set()
        return await sock_accept(found)

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refusal: str | None) -> None:
        assert refusal is None
        writer.transport.abort()
        served.set()

    loop.sock_accept = counted  # type: ignore[method-assign]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (listener.fileno() + 1, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(listener.fileno()))
        task = asyncio.create_task(accepting.accept(listener, accepted))
        async with asyncio.timeout(PATIENCE):
            await failed.wait()
        assert not served.is_set()
    async with asyncio.timeout(PATIENCE):
        await served.wait()
    task.cancel()
    await asyncio.wait([task])


def test_requests_that_fail_alike_log_one_traceback(
    make_storage: MakeStorage, scheduler: JournaledStorage, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    from djqueue.storage.journaled import session

    monkeypatch.setattr(session, "failures", ThrottledLog(session.logger, 60.0))
    client = make_storage()
    for _ in range(20):
        with pytest.raises(StorageError, match="TypeError"):
            client._client._remote.call("queues.pause")

    assert [line for line in caplog.messages if "client's request failed" in line] == [
        "A client's request failed: queues.pause"
    ]


def test_peer_user_of_socket_is_known() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        assert folder.peer_uid(left) == folder.peer_uid(right) == os.geteuid()
        assert folder.refusal_of(left) is None


def test_row_of_lease_names_socket(make_storage: MakeStorage, shared: Path) -> None:
    start(make_storage, shared / "mine" / "s.sock")

    assert models.SchedulerLease.objects.get().address == f"unix://{shared}/mine/s.sock"
