"""Connecting the socket of another process to an address that was checked."""

import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
from contextlib import suppress

from .addresses import Target
from .syscalls import libc, syscall
from .tables import this_machine

ADD_DESCRIPTOR = 0x40182103
"""SECCOMP_IOCTL_NOTIF_ADDFD."""
ADDED = struct.Struct("=QIIII")
"""Id, flags, our descriptor, the process's descriptor and its flags."""
AT_NUMBER = 1 << 0
"""SECCOMP_ADDFD_FLAG_SETFD: replaces the descriptor of that number."""
NO_SYMBOLIC_LINKS = 0x04
"""RESOLVE_NO_SYMLINKS."""
AT_WORKING_DIRECTORY = -100
"""AT_FDCWD."""
UNAVAILABLE = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})


def process_of(thread: int) -> int:
    """Return the process that a thread belongs to. Raises OSError if it has ended."""
    with open(f"/proc/{thread}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))


def take_socket(process: int, descriptor: int) -> int | None:
    """Return a duplicate of a process's file descriptor, or None if the system does not allow that.

    Raises OSError with EBADF if the process has no such descriptor.
    """
    try:
        return syscall(this_machine().numbers["pidfd_getfd"], process, descriptor, 0)
    except OSError as error:
        if error.errno in UNAVAILABLE:
            # Container runtimes refuse it to processes without CAP_SYS_PTRACE.
            return None
        raise


def replace_socket(listener: int, id: int, target: Target, *, thread: int, descriptor: int) -> int:
    """Connect a new socket, put it over a process's, and return the errno of the attempt, 0 for success.

    Options that were set on the old socket are lost, except whether it blocks.

    Args:
        listener: Listener of the notification.
        id: Notification.
        target: Address that was checked.
        thread: Thread that called `connect`.
        descriptor: Its file descriptor of the socket.
    """
    flags = _flags_of(thread, descriptor)
    if flags is None:
        return errno.EBADF
    with socket.socket(target.family, socket.SOCK_STREAM) as made:
        os.set_blocking(made.fileno(), not flags & os.O_NONBLOCK)
        code = connect_socket(made.fileno(), target)
        if code not in (0, errno.EINPROGRESS):
            return code
        on_exec = os.O_CLOEXEC if flags & os.O_CLOEXEC else 0
        request = ADDED.pack(id, AT_NUMBER, made.fileno(), descriptor, on_exec)
        fcntl.ioctl(listener, ADD_DESCRIPTOR, request)
        return code


def connect_socket(descriptor: int, target: Target) -> int:
    """Connect a socket, and return the errno of the attempt, 0 for success."""
    if target.path:
        return _connect_path(descriptor, target)
    return _connect_raw(descriptor, target.raw)


def _flags_of(thread: int, descriptor: int) -> int | None:
    with suppress(OSError, ValueError), open(f"/proc/{thread}/fdinfo/{descriptor}", encoding="ascii") as file:
        for line in file:
            if line.startswith("flags:"):
                return int(line.split()[1], 8)
    return None


def _connect_path(descriptor: int, target: Target) -> int:
    """Connect to a UNIX socket by its file: a link that was put in its place must not be followed."""
    how = struct.pack("=QQQ", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, NO_SYMBOLIC_LINKS)
    options = ctypes.create_string_buffer(how, len(how))
    name = ctypes.create_string_buffer(os.fsencode(target.directory))
    try:
        directory = syscall(
            this_machine().numbers["openat2"],
            AT_WORKING_DIRECTORY,
            ctypes.addressof(name),
            ctypes.addressof(options),
            len(how),
        )
    except OSError as error:
        return error.errno or errno.EACCES
    try:
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(os.path.basename(target.path), flags, dir_fd=directory)
    except OSError as error:
        return error.errno or errno.EACCES
    finally:
        os.close(directory)
    try:
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            return errno.ECONNREFUSED
        return _connect_raw(
            descriptor, struct.pack("=H", socket.AF_UNIX) + f"/proc/self/fd/{file}\0".encode()
        )
    finally:
        os.close(file)


def _connect_raw(descriptor: int, address: bytes) -> int:
    buffer = ctypes.create_string_buffer(address, len(address))
    result = libc().connect(ctypes.c_int(descriptor), buffer, ctypes.c_uint32(len(address)))
    return 0 if result == 0 else ctypes.get_errno()
