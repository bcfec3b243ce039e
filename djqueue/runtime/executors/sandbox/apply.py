"""Applying a sandbox: the layers that this system has, two stages of limits, and a self-test after each.

The first stage runs in the template process before settings and handlers are imported: it applies the whole
permission set, except that the process may fork and may read the project's modules. The second stage runs in
each forked child: no reading of the project, no fork. Stages only ever add limits.

The self-test tries actions that must fail, because some kernels and container runtimes accept the calls that
set up a sandbox, and enforce nothing.
"""

import ctypes
import errno
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from djqueue.core.executors import KERNEL_PERMISSIONS
from djqueue.core.permissions import Permissions

from . import (
    PermissionPathError,
    SandboxError,
    SandboxSelfTestFailedError,
    SandboxUnavailableError,
    landlock,
)
from .broker import send_listener
from .landlock import NetRight, Right, Ruleset, Scope
from .paths import (
    DEVICES,
    PROGRAMS,
    RESOLVER,
    code_files,
    existing,
    interpreter_of,
    interpreter_paths,
    loader_of,
    may_be_secret,
    real_path,
    without_secrets,
    writable_directories,
)
from .seccomp import ALLOW, NOTIFY, filter_for, has_action
from .syscalls import (
    drop_capabilities,
    set_no_new_privileges,
    syscall,
    this_machine,
    threads,
)

SUPERVISION = (5, 9)
"""Version of Linux that can hand a supervised process the socket of an allowed connection."""
Attempt = Callable[[], object]
"""An action of the self-test."""
REFUSED = frozenset({errno.EPERM, errno.EACCES})
"""Errors of a refused action."""
READ = Right.READ_FILE | Right.READ_DIR
WRITE = (
    READ
    | Right.WRITE_FILE
    | Right.REMOVE_DIR
    | Right.REMOVE_FILE
    | Right.MAKE_DIR
    | Right.MAKE_REG
    | Right.REFER
    | Right.TRUNCATE
)
"""Rights of an entry of `write`. Links, sockets and pipes need write=True: other programs, such as a web
server that serves the directory, would follow them."""
WRITE_ALL = WRITE | Right.MAKE_SYM | Right.MAKE_FIFO | Right.MAKE_SOCK | Right.IOCTL_DEV
START = Right.EXECUTE | Right.READ_FILE


@dataclass(frozen=True, slots=True)
class MissingLayer:
    """A mechanism that permissions need and this system does not have."""

    permissions: tuple[str, ...]
    """Names of the permissions that can't be guaranteed."""
    ineffective: tuple[str, ...]
    """Names of those among them that have no effect at all."""
    layer: str
    """Name of the mechanism."""
    state: str
    """Actual state of the system."""
    remedy: str
    """Change that makes it available."""

    def __str__(self) -> str:
        names = ", ".join(self.permissions)
        return f"{names}: needs {self.layer}, but {self.state}; {self.remedy}"


def missing_layers(permissions: Permissions) -> tuple[MissingLayer, ...]:
    """Return what this system lacks to enforce permissions; empty if it can enforce them."""
    restricted = tuple(name for name in KERNEL_PERMISSIONS if getattr(permissions, name) is not True)
    if not restricted:
        return ()
    try:
        this_machine()
    except SandboxUnavailableError as error:
        remedy = "run these jobs on such a system"
        return (MissingLayer(restricted, restricted, "a supported system", str(error), remedy),)
    kernel = f"Linux {os.uname().release}"
    if not has_action(ALLOW):
        remedy = "use a kernel or a container runtime that allows seccomp"
        state = f"{kernel} refuses them"
        return (MissingLayer(restricted, restricted, "seccomp filters", state, remedy),)
    missing = []
    if (version := landlock.abi()) == 0:
        # Without it, a job can read and write the memory of its worker, if both have the same user.
        names: list[str] = [name for name in ("read", "write") if name in restricted]
        names += [name for name in ("run", "listen") if isinstance(getattr(permissions, name), tuple)]
        state = f"{kernel} does not have it, or it is switched off"
        remedy = "use Linux 5.13 or newer, and add landlock to the kernel's lsm= option"
        missing.append(MissingLayer(restricted, tuple(names), "Landlock", state, remedy))
    elif version < landlock.NET_SINCE and isinstance(permissions.listen, tuple):
        remedy = "use Linux 6.7 or newer, or set listen to True or False"
        state = f"{kernel} has ABI {version}"
        layer = f"Landlock ABI {landlock.NET_SINCE}"
        missing.append(MissingLayer(("listen",), ("listen",), layer, state, remedy))
    if isinstance(permissions.net, tuple) and not (has_action(NOTIFY) and _release() >= SUPERVISION):
        remedy = "use Linux 5.9 or newer, or set net to True or False"
        state = f"{kernel} does not have them"
        missing.append(MissingLayer(("net",), ("net",), "seccomp notifications", state, remedy))
    return tuple(missing)


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


class Sandbox:
    """The sandbox of one permission set.

    Args:
        permissions: Permissions of the job type.
        values: Absolute path by name of each template in the permissions' paths.
        code_paths: Code that jobs import late, such as installed apps; readable in both stages, except files
            that may hold secrets.
        project_paths: Directories of the project, with its settings. Their modules are readable in the first
            stage, and nothing else.
        import_paths: Other files and directories that are readable in the first stage.
        unenforced: Permissions that may stay without guarantee if this system can't enforce them.

    Raises SandboxUnavailableError if the system lacks a layer, and OptionError if a template has no value.
    """

    def __init__(
        self,
        permissions: Permissions,
        values: Mapping[str, str],
        code_paths: Iterable[str] = (),
        *,
        project_paths: Iterable[str] = (),
        import_paths: Iterable[str] = (),
        unenforced: Iterable[str] = (),
    ) -> None:
        self.permissions = enforceable(permissions, unenforced)
        """Permissions that have an effect here."""
        missing = {name for layer in missing_layers(permissions) for name in layer.permissions}
        self.unenforced = tuple(name for name in KERNEL_PERMISSIONS if name in missing)
        """Names of the permissions that this system can't guarantee."""
        self._values = values
        self._code_paths = tuple(code_paths)
        self._project_paths = tuple(project_paths)
        self._import_paths = tuple(import_paths)
        self._code: tuple[str, ...] = ()
        """Parts of the code paths without secrets, as the first stage has found them."""
        self._resolved = self.permissions.resolved(values)
        self._has_filters = has_action(ALLOW)
        self._in_force: tuple[Permissions, bool] | None = None
        """Permissions of this process once a stage has been applied, and whether it may fork."""

    @property
    def starts_programs(self) -> bool:
        """Whether the processes may start others, and a parent can wait for these and end as they do."""
        if not self._has_filters:
            return True
        return self.permissions.run is not False and landlock.abi() >= landlock.SCOPES_SINCE

    def stage_one(self, channel: socket.socket | None = None) -> None:
        """Restrict the template process, which must have one thread, for good; then test it.

        Args:
            channel: Connected UNIX socket to the worker, which receives the listener of supervised
                connections. Required if `net` is a list; the worker must start a `ConnectBroker` with it at
                once, because the self-test connects.

        Raises SandboxError, PermissionPathError or SandboxSelfTestFailedError; the process must then exit.
        """
        if not self._has_filters:
            return
        is_supervised = isinstance(self._resolved.net, tuple)
        if is_supervised and channel is None:
            raise SandboxError("a list of hosts needs a channel to the process that supervises connections")
        try:
            if threads() != 1:
                raise SandboxError("a sandbox must be applied before the process starts threads")
            set_no_new_privileges()
            drop_capabilities()
        except OSError as error:
            raise SandboxError(f"privileges could not be dropped: {error}") from error
        # Reading the list of threads must still work when the second stage is applied.
        self._code = tuple(_readable_parts(self._code_paths))
        self._restrict(self._resolved, is_importing=True)
        rules = filter_for(self._resolved, this_machine(), may_fork=True, abi=landlock.abi(), pid=os.getpid())
        listener = rules.install(listener=is_supervised)
        if channel is not None and is_supervised:
            try:
                send_listener(channel, listener)
            except OSError as error:
                raise SandboxError(f"the listener could not be sent: {error}") from error
            finally:
                os.close(listener)
        self._in_force = self._resolved, True
        self.self_test()

    def stage_two(self, values: Mapping[str, str] | None = None) -> None:
        """Restrict a child of the template process further, before it reads its first job; then test it.

        Set limits with `setrlimit`, and what `prctl` sets, before this: it forbids both.

        Args:
            values: Values of the templates for this child, such as a temporary directory of its own. Their
                paths must lie in those of the first stage.

        Raises SandboxError, PermissionPathError or SandboxSelfTestFailedError; the process must then exit.
        """
        if not self._has_filters:
            return
        resolved = self._resolved if values is None else self.permissions.resolved({**self._values, **values})
        self._restrict(resolved, is_importing=False)
        rules = filter_for(
            resolved,
            this_machine(),
            may_fork=False,
            abi=landlock.abi(),
            pid=os.getpid(),
            is_supervised=isinstance(resolved.net, tuple),
        )
        rules.install()
        self._in_force = resolved, False
        self.self_test()

    def self_test(self) -> None:
        """Try one refused action for each limit of this process. Both stages end with this.

        Raises SandboxSelfTestFailedError if one of them succeeds, and SandboxError before the first stage.
        """
        if self._in_force is None:
            raise SandboxError("the sandbox has not been applied to this process")
        permissions, may_fork = self._in_force
        self_test(permissions, may_fork=may_fork)

    def _restrict(self, permissions: Permissions, *, is_importing: bool) -> None:
        version = landlock.abi()
        if version == 0 and not _needs_landlock(permissions):
            return
        known = landlock.rights_of(version)
        ruleset = Ruleset(
            known, net=_handled_ports(permissions, version), scopes=_scopes(permissions, version)
        )
        try:
            _allow_everywhere(ruleset, permissions, known)
            for path in existing((*interpreter_paths(), *self._code)):
                ruleset.allow_path(path, READ & known)
            if is_importing:
                self._allow_imports(ruleset)
            for path in existing(DEVICES):
                ruleset.allow_path(path, (Right.READ_FILE | Right.WRITE_FILE | Right.TRUNCATE) & known)
            if permissions.net is True:
                for path in existing(RESOLVER):
                    ruleset.allow_path(path, READ)
            self._allow_paths(ruleset, permissions, known)
            _allow_programs(ruleset, permissions)
            if isinstance(permissions.listen, tuple):
                for port in permissions.listen:
                    ruleset.allow_port(port, NetRight.BIND_TCP)
            ruleset.restrict_self()
        finally:
            ruleset.close()

    def _allow_imports(self, ruleset: Ruleset) -> None:
        # The second stage counts the threads.
        ruleset.allow_path("/proc", Right.READ_DIR)
        for directory in existing(self._project_paths):
            ruleset.allow_path(directory, Right.READ_DIR)
            for path in code_files(directory):
                with suppress(PermissionPathError):  # It is gone, or a broken link.
                    ruleset.allow_path(path, Right.READ_FILE)
        for path in self._import_paths:
            for part in _readable_parts([path]):
                ruleset.allow_path(part, READ)

    def _allow_paths(self, ruleset: Ruleset, permissions: Permissions, known: Right) -> None:
        if isinstance(permissions.read, tuple):
            for path in permissions.read:
                real = real_path("read", path, protected=self._project_paths)
                ruleset.allow_path(real, READ & known)
        if isinstance(permissions.write, tuple):
            protected = (*self._project_paths, *self._code_paths, *interpreter_paths())
            for path in permissions.write:
                real = real_path("write", path, protected=protected)
                ruleset.allow_path(real, WRITE & known)


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


def _readable_parts(paths: Iterable[str]) -> Iterator[str]:
    for path in existing(paths):
        if os.path.isdir(path):
            yield from without_secrets(path)
        elif not may_be_secret(path):
            yield path


def _release() -> tuple[int, ...]:
    numbers = os.uname().release.split("-")[0].split(".")[:2] if sys.platform == "linux" else []
    return tuple(int(number) for number in numbers if number.isdecimal())


def _needs_landlock(permissions: Permissions) -> bool:
    """Return whether only Landlock can enforce a part of the permissions."""
    return (
        permissions.read is not True
        or permissions.write is not True
        or isinstance(permissions.run, tuple)
        or isinstance(permissions.listen, tuple)
    )


def _allow_everywhere(ruleset: Ruleset, permissions: Permissions, known: Right) -> None:
    rights = Right(0)
    if permissions.read is True:
        rights |= READ
    if permissions.write is True:
        for path in writable_directories():
            ruleset.allow_path(path, WRITE_ALL & known)
    if permissions.run is True:
        # Without READ_FILE, which starting needs too: every program that the process may read.
        rights |= Right.EXECUTE
    if permissions.net is True:
        rights |= Right.RESOLVE_UNIX
    if rights & known:
        ruleset.allow_path("/", rights & known)


def _allow_programs(ruleset: Ruleset, permissions: Permissions) -> None:
    if permissions.run is True:
        for path in existing(PROGRAMS):
            ruleset.allow_path(path, READ)
    if not isinstance(permissions.run, tuple):
        return
    listed = {real_path("run", path, protected=()) for path in permissions.run}
    for program in sorted(listed):
        if os.path.isdir(program):
            raise PermissionPathError(f"run: {program} is a directory; list its programs")
        interpreter = interpreter_of(program)
        if interpreter is not None and os.path.realpath(interpreter) not in listed:
            raise PermissionPathError(f"run: {program} is a script; add its interpreter {interpreter}")
        ruleset.allow_path(program, START)
        # The kernel opens the loader of a dynamic program as a program, too.
        loader = loader_of(program)
        if loader is not None:
            ruleset.allow_path(loader, START)


def _handled_ports(permissions: Permissions, version: int) -> NetRight:
    rights = NetRight(0)
    if version >= landlock.NET_SINCE:
        if permissions.listen is not True:
            rights |= NetRight.BIND_TCP
        if permissions.net is not True:
            # Connections to listed hosts are made by the supervisor, so this process needs no right.
            rights |= NetRight.CONNECT_TCP
    return rights


def _scopes(permissions: Permissions, version: int) -> Scope:
    if version < landlock.SCOPES_SINCE:
        return Scope(0)
    return Scope.SIGNAL if permissions.net is True else Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET


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
    left, right = socket.socketpair()
    with left, right:
        number = this_machine().numbers["connect"]
        syscall(number, left.fileno(), ctypes.addressof(address), len(address))


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
