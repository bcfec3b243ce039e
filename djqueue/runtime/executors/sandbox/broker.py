"""Supervised connections: a process outside the sandbox makes the connections that a list of hosts allows.

The kernel stops each `connect` of a sandboxed process and notifies the supervisor. The supervisor copies the
address once, compares the copy with the list, takes the process's socket and connects it to the copy. It
never lets the kernel continue the original call, because another thread could change the address meanwhile.
"""

import array
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from djqueue.core.logs import Log
from djqueue.core.permissions import Permissions
from djqueue.core.threads import start_daemon
from djqueue.runtime.executors.threadpool import ThreadPool

from . import SandboxError
from .addresses import AddressBook, Resolver, Target, parse_address
from .seccomp import notification_sizes
from .syscalls import libc, syscall, this_machine

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
"""Errors of a system that does not let the supervisor take a socket."""
RECEIVE, SEND, IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
"""Requests of a listener: SECCOMP_IOCTL_NOTIF_RECV, _SEND and _ID_VALID."""
NOTIFICATION = struct.Struct("=QIIiIQ6Q")
"""Id, thread, flags, number of the call, architecture, instruction pointer and arguments."""
ANSWER = struct.Struct("=QqiI")
"""Id, result, negative error and flags."""
LONGEST_ADDRESS = 128
"""Maximum bytes of a socket address."""
MAX_CONNECTING = 32
"""Maximum number of connections that one broker makes at once; further ones wait."""
WATCH = 1_000
"""Milliseconds between looks at which processes have ended, while connections are being made."""
FAULTS_OF_PROCESS = frozenset({errno.EBADF, errno.ENOENT, errno.ESRCH})
"""Errors of a process that gave a wrong descriptor, or has ended."""
LONGEST_TARGET = 300
"""Maximum number of characters of a target in a report."""
MARK = b"L"
"""Content of the message that carries a listener."""


logger = Log("djqueue.sandbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeniedAccess:
    """A connection or a name that the permissions did not allow."""

    pid: int
    """Process that asked; 0 if a name was asked for."""
    target: str
    """Host and port, path of the socket, or name; printable, because the job chose it."""


Report = Callable[[DeniedAccess], None]


def send_listener(channel: socket.socket, listener: int) -> None:
    """Send a listener over a connected UNIX socket."""
    channel.sendmsg([MARK], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])


def receive_listener(channel: socket.socket) -> int:
    """Receive the listener that `send_listener` sent. Raises SandboxError if something else arrives."""
    data, ancillary, _flags, _address = channel.recvmsg(
        len(MARK), socket.CMSG_SPACE(4 * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    received = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
    if data != MARK or len(received) != 1:
        for descriptor in received:
            os.close(descriptor)
        raise SandboxError("a process did not send the listener of its connections")
    return received[0]


class ConnectBroker:
    """Answers the `connect` calls of the processes of one sandbox, from a thread of its own.

    Args:
        listener: File descriptor from `receive_listener`; the broker closes it.
        permissions: Permissions whose `net` lists what is allowed, with database servers added.
        on_denied: Called on a thread of the broker for every denial; must not raise, and must bound what it
            keeps, because a job may try as often as it likes.
        resolve: Resolves names, like `socket.getaddrinfo`.
        takes_sockets: False: replace sockets in place of taking them, as where the system forbids taking.
    """

    def __init__(
        self,
        listener: int,
        permissions: Permissions,
        *,
        on_denied: Report | None = None,
        resolve: Resolver = socket.getaddrinfo,
        takes_sockets: bool = True,
    ) -> None:
        if notification_sizes() != (NOTIFICATION.size, ANSWER.size):
            raise SandboxError("the kernel's notifications have an unknown size")
        self._listener = listener
        self._on_denied = on_denied
        self._takes_sockets = takes_sockets
        self._book = AddressBook(permissions, resolve)
        self._pool = ThreadPool(MAX_CONNECTING, "djqueue-connect")
        self._lock = threading.Lock()
        self._connecting: dict[int, int] = {}
        """Sockets of attempts that may take long, by pidfd of their process."""
        self._unanswered = 0
        """Number of calls that threads of the pool work on."""
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closed = threading.Event()
        self._thread = start_daemon("djqueue-connects", self._serve)

    def resolve(self, name: str, port: int | None) -> list[tuple[int, str]]:
        """Return the addresses of a listed name as (family, address) pairs, and allow connections to them.

        Args:
            name: Host name or address that the sandboxed process asked for.
            port: Port, or None if the process did not name one.

        Raises PermissionError for a name that is not listed, and OSError if it can't be resolved.
        """
        try:
            return self._book.resolve(name, port)
        except PermissionError:
            self._report(0, name if port is None else f"{name}:{port}")
            raise

    def close(self) -> None:
        """Stop answering: further `connect` calls fail with ENOSYS."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock, suppress(OSError):
            os.write(self._wake_writer, b"x")
        self._pool.close()
        # The thread may wait in the kernel for a call that was interrupted; it is a daemon then.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1)

    def _serve(self) -> None:
        _block_signals()
        try:
            while not self._closed.is_set():
                ready = self._poll()
                state = ready.pop(self._listener, 0)
                if self._closed.is_set() or state & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    # The last process of the sandbox has ended.
                    return
                for process in ready:
                    self._interrupt(process)
                if state & select.POLLIN:
                    self._receive()
        except OSError:
            if not self._closed.is_set():
                logger.exception("Stopped supervising connections; further ones fail.")
        finally:
            self._release()

    def _poll(self) -> dict[int, int]:
        poll = select.poll()
        with self._lock:
            descriptors = (self._listener, self._wake_reader, *self._connecting)
            timeout = WATCH if self._unanswered else None
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        return dict(poll.poll(timeout))

    def _receive(self) -> None:
        buffer = bytearray(NOTIFICATION.size)
        try:
            fcntl.ioctl(self._listener, RECEIVE, buffer)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                # The call was interrupted before it was received.
                return
            raise
        notification = NOTIFICATION.unpack(buffer)
        if self._is_refused_at_once(notification):
            return
        with self._lock:
            self._unanswered += 1
        self._pool.submit(self._answer_received, notification)

    def _is_refused_at_once(self, notification: tuple[int, ...]) -> bool:
        """Answer a call for an address that no list contains, such as that of the self-test.

        The self-test of a new process must not wait behind connections that take long.
        """
        id, thread, _flags, _number, _architecture, _ip, _socket, pointer, size, *_ = notification
        length = ctypes.c_int(size).value
        if not 0 <= length <= LONGEST_ADDRESS:
            return False
        try:
            raw = _copy_memory(thread, pointer, length)
        except OSError:
            return False
        if not self._is_valid(id) or parse_address(raw) is not None:
            return False
        self._answer(id, errno.EAFNOSUPPORT)
        return True

    def _answer_received(self, notification: tuple[int, ...]) -> None:
        _block_signals()
        id, thread, _flags, _number, _architecture, _pointer, *arguments = notification
        try:
            code = self._handle(id, thread, arguments)
        except OSError as error:
            if error.errno not in FAULTS_OF_PROCESS:
                logger.warning("Could not supervise a connection of process %d: %s", thread, error)
            code = errno.EBADF if error.errno == errno.EBADF else errno.EACCES
        except Exception:
            logger.exception("Could not supervise a connection of process %d; it was refused.", thread)
            code = errno.EACCES
        if code is not None:
            self._answer(id, code)
        with self._lock:
            self._unanswered -= 1

    def _handle(self, id: int, thread: int, arguments: list[int]) -> int | None:
        """Connect, and return the errno of the call's answer: 0 for success, None if none is awaited."""
        descriptor = ctypes.c_int(arguments[0]).value
        length = ctypes.c_int(arguments[2]).value
        if not 0 <= length <= LONGEST_ADDRESS:
            return errno.EINVAL
        try:
            raw = _copy_memory(thread, arguments[1], length)
        except OSError as error:
            return errno.EFAULT if error.errno == errno.EIO else self._unreadable(thread, error)
        # Checked after the memory was opened: the thread may have ended, and its number may be reused.
        if not self._is_valid(id):
            return None
        target = parse_address(raw)
        if target is None:
            # No family that can be listed. The self-test expects this answer, which only a supervisor that
            # reads addresses can give.
            return errno.EAFNOSUPPORT
        pid = process_of(thread)
        checked = self._book.checked(target)
        if checked is None:
            self._report(pid, str(target))
            return errno.EACCES
        process = os.pidfd_open(pid)
        try:
            if not self._is_valid(id):
                return None
            taken = take_socket(process, descriptor) if self._takes_sockets else None
            if taken is None:
                return replace_socket(self._listener, id, checked, thread=thread, descriptor=descriptor)
            return self._connect(taken, checked, process)
        finally:
            os.close(process)

    def _connect(self, taken: int, target: Target, process: int) -> int:
        """Connect a process's socket, which may take minutes unless the process ends."""
        try:
            if not stat.S_ISSOCK(os.fstat(taken).st_mode):
                return errno.ENOTSOCK
            if os.get_blocking(taken):
                with self._lock:
                    self._connecting[process] = taken
            return connect_socket(taken, target)
        finally:
            with self._lock:
                self._connecting.pop(process, None)
                os.close(taken)

    def _interrupt(self, process: int) -> None:
        """End the attempt to connect the socket of a process."""
        with self._lock:
            taken = self._connecting.pop(process, None)
            if taken is not None:
                libc().shutdown(ctypes.c_int(taken), ctypes.c_int(socket.SHUT_RDWR))

    def _unreadable(self, thread: int, error: OSError) -> int:
        if not self._closed.is_set() and os.path.exists(f"/proc/{thread}"):
            logger.error(
                "Could not read the memory of sandboxed process %d, so its connection was refused: %s.",
                thread,
                error.strerror,
            )
        return errno.EACCES

    def _is_valid(self, id: int) -> bool:
        try:
            fcntl.ioctl(self._listener, IS_VALID, struct.pack("=Q", id))
        except (OSError, ValueError):
            # The call was interrupted, or the broker was closed.
            return False
        return True

    def _answer(self, id: int, code: int) -> None:
        # Without flags: the kernel never continues the original call.
        answer = bytearray(ANSWER.pack(id, 0, -code, 0))
        with suppress(OSError, ValueError):
            fcntl.ioctl(self._listener, SEND, answer)

    def _report(self, pid: int, target: str) -> None:
        if self._on_denied is not None:
            self._on_denied(DeniedAccess(pid=pid, target=_printable(target)))

    def _release(self) -> None:
        self._closed.set()
        self._pool.close()
        with self._lock:
            connecting = list(self._connecting)
        for process in connecting:
            self._interrupt(process)
        with self._lock:
            for descriptor in (self._listener, self._wake_reader, self._wake_writer):
                os.close(descriptor)
            # Threads that still answer must not write to what gets these numbers next.
            self._listener = self._wake_reader = self._wake_writer = -1


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


def _printable(text: str) -> str:
    """Return a text that a job chose in a form that logs and databases accept."""
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_TARGET])


def _copy_memory(thread: int, address: int, length: int) -> bytes:
    if length == 0:
        return b""
    memory = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        copy = os.pread(memory, length, address)
    except OverflowError:
        raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
    finally:
        os.close(memory)
    if len(copy) != length:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return copy


def _block_signals() -> None:
    """Leave the process's signals to its main thread, so that they interrupt no call here."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
