"""Landlock refuses what no rule allows, and never leaves out what was asked for."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from djqueue.runtime.executors.sandbox import PermissionPathError, SandboxUnavailableError, landlock
from djqueue.runtime.executors.sandbox.landlock import NetRight, Right, Ruleset, Scope, abi, rights_of
from tests.runtime.executors.sandbox.attempts import USER
from tests.runtime.executors.sandbox.harness import run, shared_directory

pytestmark = pytest.mark.skipif(abi() == 0, reason="the kernel has no Landlock, or it is switched off")
READ = Right.READ_FILE | Right.READ_DIR


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_directory() as path:
        (path / "in").mkdir()
        (path / "in" / "data").write_text("data")
        (path / "secret").write_text("secret")
        yield path


# What the kernel knows.


def test_each_landlock_abi_includes_the_rights_of_earlier_ones() -> None:
    assert rights_of(0) == Right(0)
    assert rights_of(1) == Right(2**13 - 1)
    assert rights_of(2) == rights_of(1) | Right.REFER
    assert rights_of(3) == rights_of(4) == rights_of(2) | Right.TRUNCATE
    assert rights_of(7) == rights_of(3) | Right.IOCTL_DEV
    assert rights_of(9) == rights_of(7) | Right.RESOLVE_UNIX


@pytest.mark.parametrize(
    ("version", "handled", "net", "scopes", "missing"),
    [
        (0, READ, NetRight(0), Scope(0), "no Landlock"),
        (1, READ | Right.REFER, NetRight(0), Scope(0), "ABI 1 does not know <Right.REFER"),
        (2, Right.TRUNCATE, NetRight(0), Scope(0), "ABI 2 does not know <Right.TRUNCATE"),
        (4, Right.IOCTL_DEV, NetRight(0), Scope(0), "ABI 4 does not know <Right.IOCTL_DEV"),
        (3, READ, NetRight.BIND_TCP, Scope(0), "ABI 3 does not know <NetRight.BIND_TCP: 1>; ABI 4 does"),
        (5, READ, NetRight.BIND_TCP, Scope.SIGNAL, "ABI 5 does not know <Scope.SIGNAL: 2>; ABI 6 does"),
        (7, Right.RESOLVE_UNIX, NetRight(0), Scope(0), "ABI 7 does not know <Right.RESOLVE_UNIX"),
    ],
)
def test_right_unknown_to_the_kernel_is_an_error(
    version: int, handled: Right, net: NetRight, scopes: Scope, missing: str
) -> None:
    with pytest.raises(SandboxUnavailableError, match=missing):
        Ruleset(handled, net=net, scopes=scopes, version=version)


def test_ruleset_rejected_by_the_kernel_is_an_error() -> None:
    with pytest.raises(SandboxUnavailableError, match="Landlock refused landlock_create_ruleset"):
        Ruleset(Right(0), version=1)


def test_right_not_handled_by_a_ruleset_cannot_be_granted() -> None:
    ruleset = Ruleset(Right.READ_FILE)
    try:
        with pytest.raises(SandboxUnavailableError, match=r"does not handle <Right.READ_DIR"):
            ruleset.allow_path("/usr", READ)
        with pytest.raises(SandboxUnavailableError, match=r"does not handle <NetRight.BIND_TCP"):
            ruleset.allow_port(80, NetRight.BIND_TCP)
    finally:
        ruleset.close()


def test_missing_path_is_an_error() -> None:
    ruleset = Ruleset(READ)
    try:
        with pytest.raises(PermissionPathError, match="/nowhere/at/all can't be granted: No such file"):
            ruleset.allow_path("/nowhere/at/all", READ)
    finally:
        ruleset.close()


def test_kernel_without_landlock_has_abi_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EOPNOTSUPP, "switched off")

    monkeypatch.setattr(landlock, "syscall", refuse)
    assert landlock.abi.__wrapped__() == 0


# What it refuses.


@USER
def test_only_allowed_paths_can_be_read(folder: Path, user: str) -> None:
    def restrict() -> None:
        ruleset = Ruleset(READ)
        ruleset.allow_path(str(folder / "in"), READ)
        ruleset.restrict_self()

    def read(name: str) -> str:
        return run(lambda: (folder / name).read_text(), user=user, prepare=restrict)

    assert read("in/data").value == "data"
    assert read("secret").errno == errno.EACCES
    assert run(lambda: (folder / "secret").read_text(), user=user).value == "secret"


@USER
def test_file_can_be_allowed_with_the_rights_of_a_directory(folder: Path, user: str) -> None:
    def restrict() -> None:
        ruleset = Ruleset(READ)
        ruleset.allow_path(str(folder / "in" / "data"), READ)
        ruleset.restrict_self()

    assert run((folder / "in" / "data").read_text, user=user, prepare=restrict).value == "data"
    assert run(lambda: os.listdir(folder / "in"), user=user, prepare=restrict).errno == errno.EACCES


@USER
def test_second_ruleset_can_only_narrow_the_first(folder: Path, user: str) -> None:
    def restrict(path: Path) -> None:
        ruleset = Ruleset(READ)
        ruleset.allow_path(str(path), READ)
        ruleset.restrict_self()

    def narrow_first() -> None:
        restrict(Path("/proc"))
        restrict(folder / "in")

    def wide_first() -> None:
        restrict(folder)
        ruleset = Ruleset(READ)
        ruleset.allow_path(str(folder / "in"), READ)
        # The list of threads can no longer be read, so this process can't show that it has one.
        ruleset._call("landlock_restrict_self", ruleset._descriptor, 0)

    assert run((folder / "in" / "data").read_text, user=user, prepare=narrow_first).errno == errno.EACCES
    assert run((folder / "in" / "data").read_text, user=user, prepare=wide_first).value == "data"
    assert run((folder / "secret").read_text, user=user, prepare=wide_first).errno == errno.EACCES


@USER
def test_process_with_threads_is_rejected(user: str) -> None:
    def restrict() -> None:
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        try:
            Ruleset(READ).restrict_self()
        finally:
            release.set()
            thread.join()

    result = run(restrict, user=user)
    assert result.error == "SandboxError"
    assert "before threads are started, but this process has 2" in result.text


@pytest.mark.skipif(abi() < landlock.NET_SINCE, reason="this Landlock does not know TCP ports")
@USER
def test_only_allowed_ports_can_be_bound_and_connected_to(user: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [one.getsockname()[1] for one in (allowed, other)]

        def restrict() -> None:
            ruleset = Ruleset(Right.EXECUTE, net=NetRight.BIND_TCP | NetRight.CONNECT_TCP)
            ruleset.allow_port(ports[0], NetRight.CONNECT_TCP)
            ruleset.restrict_self()

        def connect(port: int) -> None:
            socket.create_connection(("127.0.0.1", port)).close()

        assert run(lambda: connect(ports[0]), user=user, prepare=restrict).is_ok
        assert run(lambda: connect(ports[1]), user=user, prepare=restrict).errno == errno.EACCES
        assert run(lambda: connect(ports[1]), user=user).is_ok
        bind = lambda: socket.create_server(("127.0.0.1", 0)).close()  # noqa: E731
        assert run(bind, user=user, prepare=restrict).errno == errno.EACCES
        assert run(bind, user=user).is_ok


@pytest.mark.skipif(abi() < landlock.SCOPES_SINCE, reason="this Landlock does not know scopes")
@USER
def test_signals_and_abstract_sockets_do_not_leave_the_sandbox(user: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0djqueue-test-{os.getpid()}-{user}")
        server.listen()
        address = server.getsockname()

        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address)

        def restrict() -> None:
            Ruleset(Right.EXECUTE, scopes=Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET).restrict_self()

        assert run(connect, user=user, prepare=restrict).errno == errno.EPERM
        assert run(connect, user=user).is_ok
        assert run(lambda: os.kill(os.getpid(), 0), user=user, prepare=restrict).is_ok
        if user != "nobody":
            # An ordinary user may not signal root anyway.
            assert run(lambda: os.kill(os.getppid(), 0), user=user).is_ok
        assert run(lambda: os.kill(os.getppid(), 0), user=user, prepare=restrict).errno == errno.EPERM
