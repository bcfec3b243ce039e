"""Applying a sandbox, in two stages: to the process that imports the handlers, and to those that run jobs.

The first stage runs in the template process before settings and handlers are imported: it applies the whole
permission set, except that the process may fork and may read the project's code. The second stage runs in
each forked child: no reading of the project, no fork. Stages only ever add limits.
"""

import os
from collections.abc import Iterable, Mapping
from socket import socket

from djqueue.core.executors import KERNEL_PERMISSIONS
from djqueue.core.permissions import Permissions

from . import landlock
from .calls import filter_for
from .errors import PermissionPathError, SandboxError
from .landlock import NetRight, Right, Ruleset, Scope
from .layers import enforceable, missing_layers, needs_landlock
from .paths import DEVICES, PROGRAMS, RESOLVER, existing, interpreter_paths, real_path, writable_directories
from .programs import interpreter_of, loader_of
from .seccomp import ALLOW, has_action
from .selftest import self_test
from .supervise import send_listener
from .syscalls import drop_capabilities, set_no_new_privileges, threads
from .tables import this_machine

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


class Sandbox:
    """The sandbox of one permission set.

    Args:
        permissions: Permissions of the job type.
        values: Absolute path by name of each template in the permissions' paths.
        code_paths: Code that jobs import late, such as installed apps; readable in both stages.
        project_paths: Directories that are readable only in the first stage: the project, with its settings.
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
        self._resolved = self.permissions.resolved(values)
        self._has_filters = has_action(ALLOW)
        self._in_force: tuple[Permissions, bool] | None = None
        """Permissions of this process once a stage has been applied, and whether it may fork."""

    def stage_one(self, channel: socket | None = None) -> None:
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
        self._restrict(self._resolved, (*self._code_paths, *self._project_paths), may_list_processes=True)
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
        self._restrict(resolved, self._code_paths, may_list_processes=False)
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

    def _restrict(
        self, permissions: Permissions, code_paths: tuple[str, ...], *, may_list_processes: bool
    ) -> None:
        version = landlock.abi()
        if version == 0 and not needs_landlock(permissions):
            return
        known = landlock.rights_of(version)
        ruleset = Ruleset(
            known, net=_handled_ports(permissions, version), scopes=_scopes(permissions, version)
        )
        try:
            _allow_everywhere(ruleset, permissions, known)
            for path in existing((*interpreter_paths(), *code_paths)):
                ruleset.allow_path(path, READ & known)
            for path in existing(DEVICES):
                ruleset.allow_path(path, (Right.READ_FILE | Right.WRITE_FILE | Right.TRUNCATE) & known)
            if may_list_processes:
                ruleset.allow_path("/proc", Right.READ_DIR)
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
