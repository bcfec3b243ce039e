"""Running an action in a sandboxed child process, as root or as an ordinary user, and getting its outcome."""

import contextlib
import ctypes
import encodings.idna  # noqa: F401  (imports fail where the interpreter's files can't be read)
import os
import pickle
import resource
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djqueue.core.permissions import Permissions
from djqueue.runtime.executors.sandbox.apply import Sandbox
from djqueue.runtime.executors.sandbox.broker import ConnectBroker, receive_listener
from djqueue.runtime.executors.sandbox.syscalls import set_dumpable, syscall, this_machine

NOBODY = 65_534
USERS = ("root", "nobody") if os.geteuid() == 0 else ("user",)
"""Users that attempts are made as."""
LIBC = ctypes.CDLL(None, use_errno=True)
LIMIT = 30
"""Seconds after which a child is killed: a hang is a failure."""

Action = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """Outcome of an action: its value, its error, or the signal that ended the process."""

    value: Any = None
    error: str = ""
    """Type of the exception, or empty."""
    errno: int | None = None
    text: str = ""
    signal: int = 0

    @property
    def is_ok(self) -> bool:
        return not self.error and not self.signal


def run(action: Action, *, user: str = "user", prepare: Action = lambda: None) -> Result:
    """Call `prepare` and `action` in a forked child, as a user; an error of `prepare` is one of the test."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # The tests' process may have threads; the child calls nothing that their locks could stop.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _serve(action, prepare, user, writer)
    os.close(writer)
    with open(reader, "rb") as file:
        data = file.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return Result(signal=os.WTERMSIG(status))
    result: Result = pickle.loads(data)
    if result.error == "setup":
        raise AssertionError(f"the sandbox could not be set up: {result.text}")
    return result


def inside(
    action: Action,
    permissions: Permissions,
    *,
    user: str = "user",
    values: dict[str, str] | None = None,
    project_paths: tuple[str, ...] = (),
    code_paths: tuple[str, ...] = (),
    unenforced: tuple[str, ...] = (),
    stages: int = 2,
) -> Result:
    """Run an action in a sandbox with these permissions; a list of hosts gets a broker."""
    with supervised(permissions) as channel:

        def prepare() -> None:
            sandbox = Sandbox(
                permissions, values or {}, code_paths, project_paths=project_paths, unenforced=unenforced
            )
            sandbox.stage_one(channel)
            if stages == 2:
                sandbox.stage_two()

        return run(action, user=user, prepare=prepare)


@contextlib.contextmanager
def supervised(permissions: Permissions, **options: Any) -> Iterator[socket.socket | None]:
    """Give the child's end of a channel, and answer the connections of the process that sends a listener."""
    if not isinstance(permissions.net, tuple):
        yield None
        return
    with SupervisedChannel(permissions, **options) as channel:
        yield channel.theirs


class SupervisedChannel:
    """A channel whose broker starts when the listener arrives."""

    def __init__(self, permissions: Permissions, **options: Any) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.broker: ConnectBroker | None = None
        self.started = threading.Event()
        self._options = options
        self._permissions = permissions
        self._thread = threading.Thread(target=self._receive)

    def __enter__(self) -> "SupervisedChannel":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.theirs.close()
        self._thread.join()
        if self.broker is not None:
            self.broker.close()
        self.ours.close()

    def _receive(self) -> None:
        with contextlib.suppress(Exception):
            self.broker = ConnectBroker(receive_listener(self.ours), self._permissions, **self._options)
        self.started.set()


@contextlib.contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory that every user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(
        prefix="djqueue-sandbox-", dir="/tmp", ignore_cleanup_errors=True
    ) as path:
        os.chmod(path, 0o777)
        yield Path(path)


def become(user: str) -> None:
    """Give up root for an ordinary user, as a process that was started as that user."""
    if user == "nobody":
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # Changing the user makes a process unreadable to its supervisor, as starting a program does not.
        set_dumpable(dumpable=True)


def raw(name: str, *arguments: int | bytes) -> int:
    """Make a system call by its number; bytes are passed as the address of a copy."""
    buffers = [ctypes.create_string_buffer(one) if isinstance(one, bytes) else one for one in arguments]
    return syscall(
        this_machine().numbers[name],
        *(one if isinstance(one, int) else ctypes.addressof(one) for one in buffers),
    )


def libc(name: str, *arguments: Any) -> int:
    """Call a function of the C library that returns -1 and sets errno for an error."""
    function = getattr(LIBC, name)
    ctypes.set_errno(0)
    result = int(function(*arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _serve(action: Action, prepare: Action, user: str, writer: int) -> None:
    try:
        signal.alarm(LIMIT)
        # Some actions end their process.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            become(user)
            prepare()
        except BaseException as error:
            result = Result(error="setup", text=f"{type(error).__name__}: {error}")
        else:
            result = _outcome(action)
        with open(writer, "wb") as file:
            file.write(pickle.dumps(result))
        os._exit(0)
    finally:
        os._exit(1)


def _outcome(action: Action) -> Result:
    try:
        return Result(value=action())
    except BaseException as error:
        return Result(error=type(error).__name__, errno=getattr(error, "errno", None), text=str(error))
