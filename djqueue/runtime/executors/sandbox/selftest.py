"""The self-test of a sandbox: actions that must fail, tried in the process itself.

Some kernels and container runtimes accept the calls that set up a sandbox, and enforce nothing.
"""

import ctypes
import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterator

from djqueue.core.permissions import Permissions

from .errors import SandboxSelfTestFailedError, SandboxUnavailableError
from .syscalls import syscall
from .tables import this_machine

Attempt = Callable[[], object]
REFUSED = frozenset({errno.EPERM, errno.EACCES})


def self_test(permissions: Permissions, *, may_fork: bool) -> None:
    """Try one refused action for each limit that is in force.

    Args:
        permissions: Permissions that the process has.
        may_fork: True in the template process, which may fork.

    Raises SandboxSelfTestFailedError if the kernel does not refuse one as it should, and
    SandboxUnavailableError if the supervisor of connections can't do its work.
    """
    allowed = [
        name
        for name, attempt, expected in _attempts(permissions, may_fork=may_fork)
        if not _is_refused(attempt, expected)
    ]
    if allowed:
        raise SandboxSelfTestFailedError(
            f"the sandbox has no effect: the kernel did not refuse {', '.join(allowed)}"
        )


def _attempts(permissions: Permissions, *, may_fork: bool) -> Iterator[tuple[str, Attempt, frozenset[int]]]:
    # Each of these fails with another error if the filter is not there.
    yield "a change of the owner of no file", lambda: os.fchown(-1, -1, -1), frozenset({errno.EPERM})
    yield "clone3", _clone3, frozenset({errno.ENOSYS})
    if permissions.read is not True and permissions.write is not True:
        yield "reading the root directory", _open_root, frozenset({errno.EACCES})
    if permissions.write is not True:
        yield "writing to the root directory", _make_directory, REFUSED | {errno.EROFS}
    if isinstance(permissions.net, tuple):
        yield "connecting", _connect_supervised, frozenset({errno.EAFNOSUPPORT})
    elif permissions.net is False:
        yield "connecting", _connect, REFUSED
    if permissions.net is not True:
        yield "a UDP socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(), REFUSED
    if permissions.run is False:
        yield "starting a program", _execute, REFUSED
        if not may_fork:
            yield "fork", _fork, REFUSED
    if os.getppid() > 0:
        yield "a signal to the parent process", lambda: os.kill(os.getppid(), 0), REFUSED


def _is_refused(attempt: Attempt, expected: frozenset[int]) -> bool:
    try:
        attempt()
    except OSError as error:
        return error.errno in expected
    return False


def _open_root() -> None:
    os.close(os.open("/", os.O_RDONLY | os.O_DIRECTORY))


def _make_directory() -> None:
    path = f"/djqueue-self-test-{secrets.token_hex(8)}"
    os.mkdir(path, 0o700)
    os.rmdir(path)


def _connect() -> None:
    """Connect to an address without a family: no list contains it, and the kernel answers EINVAL."""
    address = ctypes.create_string_buffer(16)
    # A pair of connected sockets is allowed whatever the permissions are.
    one, other = socket.socketpair()
    with one, other:
        number = this_machine().numbers["connect"]
        syscall(number, one.fileno(), ctypes.addressof(address), len(address))


def _connect_supervised() -> None:
    """Like `_connect`; only a supervisor that can read the address answers EAFNOSUPPORT."""
    try:
        _connect()
    except OSError as error:
        if error.errno in REFUSED:
            raise SandboxUnavailableError(
                "the supervisor of connections can't read the memory of this process; run the worker as the "
                "same user, and allow it to trace its children"
            ) from error
        raise


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _execute() -> None:
    os.execv("/djqueue-self-test", ["djqueue-self-test"])  # noqa: S606


def _clone3() -> None:
    syscall(this_machine().numbers["clone3"], 0, 0)
