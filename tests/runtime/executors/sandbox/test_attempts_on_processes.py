"""Attempts to start programs, reach other processes, gain rights, and use parts of the kernel."""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import pty
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djqueue.core.permissions import NOTHING, Permissions
from djqueue.runtime.executors.sandbox.syscalls import prctl, syscall, this_machine
from tests.runtime.executors.sandbox.attempts import USER, WITHOUT, Attempt, each, needs_sandbox
from tests.runtime.executors.sandbox.harness import LIBC, inside, libc, raw, run

pytestmark = needs_sandbox
TRUE = "/bin/true"
NOT_IMPLEMENTED = frozenset({errno.ENOSYS})
ALL = Permissions(read=True, write=True, net=True, run=True, listen=True)


def nothing(_: None) -> Permissions:
    return NOTHING


def everything(_: None) -> Permissions:
    return ALL


def programs(_: None) -> Permissions:
    return Permissions(run=True)


def only_true(_: None) -> Permissions:
    return Permissions(run=[TRUE])


# Programs.


def forked(fork: Callable[[], int]) -> None:
    """Fork in one of several ways, and wait for the child."""
    pid = fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def executed(execute: Callable[[], object]) -> int:
    """Replace a forked child by a program; raise what kept it from starting."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            execute()
        except OSError as error:
            os.write(writer, bytes([error.errno or 255]))
        os._exit(0)
    os.close(writer)
    code = os.read(reader, 1)
    os.waitpid(pid, 0)
    if code:
        raise OSError(code[0], "not started")
    return 0


def strings(*texts: str) -> int:
    """Return the address of a null-terminated array of C strings, kept until the process ends."""
    array = (ctypes.c_char_p * (len(texts) + 1))(*(text.encode() for text in texts), None)
    KEPT.append(array)
    return ctypes.addressof(array)


KEPT: list[Any] = []


def raw_execve(path: str) -> int:
    return raw("execve", path.encode() + b"\0", strings(path), strings())


def raw_execveat(path: str) -> int:
    at_empty_path = 0x1000
    return raw("execveat", os.open(path, os.O_RDONLY), b"\0", strings(path), strings(), at_empty_path)


def execute_memory() -> int:
    """Start a program that lies in memory, where no list can name it."""
    with open(TRUE, "rb") as file:
        content = file.read()
    descriptor = raw("memfd_create", b"x\0", 0)
    os.write(descriptor, content)
    return executed(lambda: os.execve(descriptor, ["x"], {}))


def vfork() -> int:
    # With CLONE_VFORK but its own memory: a real vfork would return twice on one stack.
    return raw("clone", 0x4000 | signal.SIGCHLD, 0, 0, 0, 0)


def clone3() -> int:
    arguments = b"".join(one.to_bytes(8, "little") for one in (0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0))
    return raw("clone3", arguments, len(arguments))


PROGRAMS = [
    Attempt("fork", lambda _: forked(os.fork), nothing, programs),
    Attempt("fork with libc", lambda _: forked(lambda: libc("fork")), nothing, programs),
    Attempt(
        "fork with clone",
        lambda _: forked(lambda: raw("clone", signal.SIGCHLD, 0, 0, 0, 0)),
        nothing,
        programs,
    ),
    Attempt("fork with clone and CLONE_VFORK", lambda _: forked(vfork), nothing, programs),
    Attempt("fork with clone3", lambda _: forked(clone3), nothing, WITHOUT, errors=NOT_IMPLEMENTED),
    Attempt("start a program", lambda _: subprocess.run([TRUE], check=True), nothing, only_true),
    Attempt(
        "start a program with posix_spawn",
        lambda _: os.waitpid(os.posix_spawn(TRUE, [TRUE], {}), 0),
        nothing,
        only_true,
    ),
    Attempt(
        "become a program that is not listed",
        lambda _: executed(lambda: os.execv("/bin/sh", ["sh", "-c", ":"])),
        only_true,
        programs,
    ),
    Attempt(
        "execve a program that is not listed",
        lambda _: executed(lambda: raw_execve("/bin/sleep")),
        only_true,
        programs,
    ),
    Attempt(
        "execveat",
        lambda _: executed(lambda: raw_execveat(TRUE)),
        lambda _: Permissions(read=True, run=[TRUE]),
        everything,
    ),
    Attempt(
        "start a program in memory",
        lambda _: execute_memory(),
        lambda _: Permissions(read=True, run=[TRUE]),
        everything,
    ),
    Attempt(
        "start the shell", lambda _: subprocess.run("exit 0", shell=True, check=True), only_true, programs
    ),
]


@each(PROGRAMS)
def test_starting_programs_requires_a_permission(attempt: Attempt[None], user: str) -> None:
    attempt.is_refused(None, user)


@each(PROGRAMS)
def test_starting_programs_works_with_the_permission(attempt: Attempt[None], user: str) -> None:
    attempt.works(None, user)


@USER
def test_exec_without_a_fork_is_denied(user: str) -> None:
    for execute in (lambda: os.execv(TRUE, [TRUE]), lambda: raw_execve(TRUE)):
        assert inside(execute, NOTHING, user=user).errno == errno.EPERM


@USER
def test_started_program_runs_in_the_same_sandbox(user: str) -> None:
    def read_passwords() -> str:
        return subprocess.run(["/bin/cat", "/etc/passwd"], capture_output=True, text=True).stderr

    for run_permission in (["/bin/cat"], True):
        granted = Permissions(run=run_permission)
        assert "Permission denied" in inside(read_passwords, granted, user=user).value
    granted = Permissions(run=["/bin/cat"], read=["/etc/passwd"])
    assert inside(read_passwords, granted, user=user).value == ""


@USER
def test_started_program_gains_no_capabilities(user: str) -> None:
    def effective() -> str:
        command = ["/bin/grep", "CapEff", "/proc/self/status"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    granted = Permissions(run=True, read=True)
    assert inside(effective, granted, user=user).value.split() == ["CapEff:", "0" * 16]


# Other processes.


def parent_memory() -> bytes:
    with open(f"/proc/{os.getppid()}/mem", "rb") as file:
        file.seek(id(None))
        return file.read(8)


def read_parent() -> int:
    buffer = ctypes.create_string_buffer(8)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
    remote = (ctypes.c_uint64 * 2)(id(None), 8)
    return raw("process_vm_readv", os.getppid(), ctypes.addressof(local), 1, ctypes.addressof(remote), 1, 0)


def own_parent(descriptor: int) -> None:
    """Ask the kernel to send SIGIO to the parent."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getppid())


def seize() -> int:
    ptrace_seize = 0x4206
    return raw("ptrace", ptrace_seize, os.getppid(), 0, 0)


def queue_signal() -> int:
    information = (ctypes.c_int * 32)(0, 0, -1)
    return raw("rt_sigqueueinfo", os.getppid(), 0, ctypes.addressof(information))


ROOT = ("root", "user")
"""An ordinary user may not reach a process of root outside the sandbox either."""
OTHERS = [
    Attempt("signal the parent", lambda _: os.kill(os.getppid(), 0), everything, WITHOUT, works_for=ROOT),
    Attempt(
        "signal the parent with libc",
        lambda _: libc("kill", os.getppid(), 0),
        everything,
        WITHOUT,
        works_for=ROOT,
    ),
    Attempt(
        "signal the parent's thread",
        lambda _: raw("tgkill", os.getppid(), os.getppid(), 0),
        everything,
        WITHOUT,
        works_for=ROOT,
    ),
    Attempt(
        "signal a thread by its number",
        lambda _: raw("tkill", os.getppid(), 0),
        everything,
        WITHOUT,
        works_for=ROOT,
    ),
    Attempt("queue a signal", lambda _: queue_signal(), everything, WITHOUT, works_for=ROOT),
    # With run=True, the kernel answers 0 to this although it signals no process.
    Attempt("signal everybody", lambda _: os.kill(-1, 0), nothing, WITHOUT, works_for=ROOT),
    Attempt("a handle of the parent", lambda _: os.pidfd_open(os.getppid()), everything, WITHOUT),
    Attempt("let the kernel signal the parent", lambda _: own_parent(os.pipe()[0]), everything, WITHOUT),
    Attempt("read the parent's memory", lambda _: parent_memory(), everything, WITHOUT, works_for=ROOT),
    Attempt(
        "read the parent's memory with a raw call",
        lambda _: read_parent(),
        everything,
        WITHOUT,
        works_for=ROOT,
    ),
    Attempt(
        "read the parent's variables",
        lambda _: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
        everything,
        WITHOUT,
        works_for=ROOT,
    ),
    Attempt("trace the parent", lambda _: seize(), everything, WITHOUT, works_for=ROOT),
    Attempt("trace with libc", lambda _: libc("ptrace", 0, 0, 0, 0), everything, WITHOUT),
    Attempt(
        "limit the parent",
        lambda _: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)),
        everything,
        WITHOUT,
        works_for=ROOT,
    ),
    Attempt(
        "slow the parent down",
        lambda _: os.setpriority(
            os.PRIO_PROCESS, os.getppid(), os.getpriority(os.PRIO_PROCESS, os.getppid())
        ),
        everything,
        WITHOUT,
        works_for=ROOT,
    ),
    Attempt(
        "move the parent to a processor",
        lambda _: os.sched_setaffinity(os.getppid(), os.sched_getaffinity(os.getppid())),
        everything,
        WITHOUT,
        works_for=ROOT,
    ),
    Attempt("share memory", lambda _: raw("shmget", 0, 4096, 0o1600), everything, WITHOUT),
    Attempt("a message queue", lambda _: raw("msgctl", raw("msgget", 0, 0o1600), 0, 0), everything, WITHOUT),
    Attempt(
        "a POSIX message queue",
        lambda _: _open_queue(f"djq{os.getpid()}".encode() + b"\0"),
        everything,
        WITHOUT,
    ),
]


def _open_queue(name: bytes) -> None:
    os.close(raw("mq_open", name, 0o101, 0o600, 0))
    # Queues outlive their process, and a user may have only some.
    raw("mq_unlink", name)


@each(OTHERS)
def test_no_permission_allows_access_to_other_processes(attempt: Attempt[None], user: str) -> None:
    attempt.is_refused(None, user)


@each(OTHERS)
def test_other_processes_are_accessible_outside_the_sandbox(attempt: Attempt[None], user: str) -> None:
    attempt.works(None, user)


# Rights and limits.


def become_root() -> None:
    libc("setuid", 0)


def set_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc("capget", ctypes.byref(header), ctypes.byref(data))
    libc("capset", ctypes.byref(header), ctypes.byref(data))


def raise_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def raw_limit() -> int:
    limits = (ctypes.c_uint64 * 2)()
    raw("prlimit64", 0, resource.RLIMIT_NOFILE, 0, ctypes.addressof(limits))
    return raw("prlimit64", 0, resource.RLIMIT_NOFILE, ctypes.addressof(limits), 0)


PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_KEEPCAPS = 1, 4, 22, 8
RIGHTS = [
    Attempt("become root", lambda _: become_root(), everything, WITHOUT, works_for=("root",)),
    Attempt("change the group", lambda _: os.setgid(os.getgid()), everything, WITHOUT),
    Attempt("set capabilities", lambda _: set_capabilities(), everything, WITHOUT),
    Attempt(
        "raise a limit", lambda _: raise_limit(), everything, WITHOUT, errors=frozenset({errno.EPERM, None})
    ),
    Attempt("raise a limit with a raw call", lambda _: raw_limit(), everything, WITHOUT),
    Attempt("outlive the worker", lambda _: prctl(PR_SET_PDEATHSIG, 0), everything, WITHOUT),
    Attempt("become readable to others", lambda _: prctl(PR_SET_DUMPABLE, 1), everything, WITHOUT),
    Attempt("keep capabilities", lambda _: libc("prctl", PR_SET_KEEPCAPS, 0, 0, 0, 0), everything, WITHOUT),
    Attempt(
        "install another filter",
        lambda _: raw("seccomp", 2, 0, (0x7FFF0000).to_bytes(4, "little")),
        everything,
        WITHOUT,
    ),
    Attempt("change the personality", lambda _: raw("personality", 0x0400000), everything, WITHOUT),
]


@each(RIGHTS)
def test_no_permission_allows_raising_rights_or_limits(attempt: Attempt[None], user: str) -> None:
    attempt.is_refused(None, user)


@each(RIGHTS)
def test_rights_and_limits_can_be_changed_outside_the_sandbox(attempt: Attempt[None], user: str) -> None:
    attempt.works(None, user)


@USER
def test_sandboxed_process_has_no_capabilities(user: str) -> None:
    def capabilities() -> set[int]:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        data = (ctypes.c_uint32 * 6)()
        libc("capget", ctypes.byref(header), ctypes.byref(data))
        bounding = {prctl(23, one) for one in range(41)} if os.getuid() == 0 else {0}
        return {*data, *bounding}

    assert inside(capabilities, ALL, user=user).value == {0}


# The kernel.


def mount_something() -> int:
    return raw("mount", b"none\0", b"/tmp\0", b"tmpfs\0", 0x20, 0)


NEW_USER = 0x10000000
KERNEL = [
    Attempt("a new user namespace", lambda _: raw("unshare", NEW_USER), everything, WITHOUT),
    Attempt("a new user namespace with libc", lambda _: libc("unshare", NEW_USER), everything, WITHOUT),
    Attempt(
        "a child in a new namespace",
        lambda _: forked(lambda: raw("clone", NEW_USER | signal.SIGCHLD, 0, 0, 0, 0)),
        everything,
        WITHOUT,
    ),
    Attempt(
        "join a namespace",
        lambda _: raw("setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0),
        everything,
        WITHOUT,
        works_for=("root",),
    ),
    Attempt("remount a directory", lambda _: mount_something(), everything, WITHOUT, works_for=()),
    Attempt("change the root", lambda _: os.chroot("/"), everything, WITHOUT, works_for=("root",)),
    Attempt(
        "a ring of calls",
        lambda _: os.close(raw("io_uring_setup", 1, bytes(120))),
        everything,
        WITHOUT,
        works_for=(),
    ),
    Attempt("asynchronous calls", lambda _: raw("io_setup", 1, bytes(8)), everything, WITHOUT, works_for=()),
    Attempt(
        "a program in the kernel", lambda _: raw("bpf", 0, bytes(128), 128), everything, WITHOUT, works_for=()
    ),
    Attempt("page faults", lambda _: os.close(raw("userfaultfd", 1)), everything, WITHOUT, works_for=()),
    Attempt(
        "performance counters",
        lambda _: raw("perf_event_open", bytes(128), 0, -1, -1, 0),
        everything,
        WITHOUT,
        works_for=(),
    ),
    Attempt(
        "a key of the user",
        lambda _: raw("add_key", b"user\0", b"x\0", b"y", 1, -2),
        everything,
        WITHOUT,
        works_for=(),
    ),
    Attempt("load a module", lambda _: raw("init_module", 0, 0, b"\0"), everything, WITHOUT, works_for=()),
    Attempt("another kernel", lambda _: raw("kexec_load", 0, 0, 0, 0), everything, WITHOUT, works_for=()),
    Attempt("set the clock", lambda _: raw("clock_settime", 0, 0), everything, WITHOUT, works_for=()),
    Attempt("swap", lambda _: raw("swapoff", b"/none\0"), everything, WITHOUT, works_for=()),
    Attempt("the kernel's log", lambda _: raw("syslog", 10, 0, 0), everything, WITHOUT, works_for=("root",)),
    Attempt(
        "an unknown call",
        lambda _: raw_number(500),
        everything,
        WITHOUT,
        errors=NOT_IMPLEMENTED,
        works_for=(),
    ),
    Attempt(
        "a call from a gap of the table",
        lambda _: raw_number(400),
        everything,
        WITHOUT,
        errors=NOT_IMPLEMENTED,
        works_for=(),
    ),
]


def raw_number(number: int) -> int:
    return syscall(number)


@each(KERNEL)
def test_no_permission_allows_access_to_other_kernel_features(attempt: Attempt[None], user: str) -> None:
    attempt.is_refused(None, user)


@each([one for one in KERNEL if one.works_for])
def test_other_kernel_features_are_accessible_outside_the_sandbox(attempt: Attempt[None], user: str) -> None:
    attempt.works(None, user)


@USER
def test_no_input_can_be_injected_into_an_inherited_terminal(user: str) -> None:
    make_controlling, put_character = 0x540E, 0x5412
    master, slave = pty.openpty()

    def put() -> None:
        os.setsid()
        fcntl.ioctl(slave, make_controlling, 0)
        fcntl.ioctl(slave, put_character, b"x")

    try:
        assert inside(put, ALL, user=user).errno == errno.EPERM
        if user == "root":
            assert run(put).is_ok
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86_64 has these conventions")
@USER
def test_system_calls_with_foreign_conventions_end_the_process(user: str) -> None:
    def machine_code(code: bytes) -> Callable[[], int]:
        def execute() -> int:
            memory = mmap.mmap(-1, 4_096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            memory.write(code)
            KEPT.append(memory)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())

        return execute

    def x32() -> int:
        return int(LIBC.syscall(ctypes.c_ulong(0x40000000 | 39)))

    getpid_of_i386 = machine_code(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    getpid = machine_code(b"\xb8\x27\x00\x00\x00\x0f\x05\xc3")
    assert inside(x32, ALL, user=user).signal == signal.SIGSYS
    assert inside(getpid, NOTHING, user=user).value > 0
    # Kernels without 32-bit programs answer with SIGSEGV.
    assert inside(getpid_of_i386, ALL, user=user).signal in (signal.SIGSYS, signal.SIGSEGV)


# What must keep working.


@USER
def test_sandboxed_process_can_use_threads(user: str) -> None:
    def use_threads() -> list[int]:
        found: list[int] = []
        threads = [threading.Thread(target=found.append, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(found)

    assert inside(use_threads, NOTHING, user=user).value == [0, 1, 2]


@USER
def test_sandboxed_process_can_signal_itself_and_abort(user: str) -> None:
    def interrupt() -> None:
        # Programs that a shell starts in the background ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert inside(interrupt, NOTHING, user=user).error == "KeyboardInterrupt"
    assert inside(kill, NOTHING, user=user).signal == signal.SIGKILL
    assert inside(os.abort, NOTHING, user=user).signal == signal.SIGABRT


def test_sandboxed_process_can_import_the_standard_library() -> None:
    def use() -> str:
        import csv
        import decimal
        import zoneinfo

        assert csv
        return f"{decimal.Decimal(1) / 3:.3f} {zoneinfo.ZoneInfo('Europe/Berlin')}"

    for name in ("csv", "_csv"):
        sys.modules.pop(name, None)
    assert inside(use, NOTHING).value == "0.333 Europe/Berlin"


def test_sandboxed_process_can_use_standard_devices() -> None:
    def use() -> tuple[int, int]:
        with open("/dev/null", "w") as file:
            file.write("x")
        with open("/dev/urandom", "rb") as random:
            return len(random.read(4)), len(os.urandom(4))

    assert inside(use, NOTHING).value == (4, 4)


def test_machine_of_the_tests_is_supported() -> None:
    assert this_machine().name == platform.machine()
    assert run(os.getpid).is_ok
