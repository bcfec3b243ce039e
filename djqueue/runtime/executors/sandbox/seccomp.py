"""The filter of system calls: those that permissions allow, and an assembler for the kernel's BPF machine.

Landlock decides on files and ports. The filter closes what Landlock does not know: other kinds of sockets,
other processes, namespaces, modes with the set-user-ID bit, and rarely used parts of the kernel.

Every filter kills the process on calls of a foreign architecture or of the x32 convention, whose numbers mean
other calls, and answers ENOSYS to numbers that the tables do not know. Kernel versions add calls: a new one
must be refused until it has been reviewed, and the C library falls back to an older one on ENOSYS.
"""

import ctypes
import errno
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from djqueue.core.permissions import Permissions

from . import SandboxError, SandboxUnavailableError
from .syscalls import (
    X86_64,
    Machine,
    set_no_new_privileges,
    syscall,
    this_machine,
)

SET_MODE_FILTER, GET_ACTION_AVAILABLE, GET_NOTIFICATION_SIZES = 1, 2, 3
"""Operations of the seccomp call."""
TSYNC, NEW_LISTENER = 1 << 0, 1 << 3
"""Flags of SET_MODE_FILTER."""
ALLOW, NOTIFY, KILL, ERROR = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
"""Answers of a filter; the number of the error is added to the last one."""
X32_BIT = 0x40000000
"""Bit of the numbers of calls of the x32 convention."""
INT = 2**32 - 1
"""Mask of an argument that the kernel reads as an int: what a caller puts above must not matter."""
POINTER = 2**64 - 1
LOAD, JUMP, IF_EQUAL, IF_GREATER_OR_EQUAL, IF_BITS, AND, RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
"""Codes of the instructions in use."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets of what a filter sees."""
FARTHEST = 255
"""Maximum distance of a conditional jump."""
LONGEST = 4_096
"""Maximum number of instructions of a filter."""
Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, and operand."""

SET_ID_BITS = 0o6000
"""Mode of a program that runs as its owner or its group."""
CREATES = 0o100 | 0o20000000
"""O_CREAT and O_TMPFILE: the flags of `open` with which its mode counts."""
ACCESS_MODE, TRUNCATES = 0o3, 0o1000
UNIX, INET, INET6 = 1, 2, 10
STREAM, DATAGRAM, SEQUENCED = 1, 2, 5
TCP, UDP = 6, 17
TYPE = 2**32 - 1 & ~(0o4000 | 0o2000000)
"""Type of a socket without SOCK_NONBLOCK and SOCK_CLOEXEC."""
FAST_OPEN = 0x20000000
"""MSG_FASTOPEN: connects while sending, without `connect`."""
NEW_NAMESPACES = 0x7E020000
"""Flags of `clone` that create namespaces. CLONE_NEWTIME is a part of the signal there."""
CLONE_FOREIGN = NEW_NAMESPACES | 0x8000 | 0x2000
"""New namespaces, a sibling in place of a child, and a traced child."""
CLONE_THREAD = 0x10000
REFUSED_IOCTLS = {
    "TIOCSTI": 0x5412,
    "TIOCLINUX": 0x541C,
    "FIOSETOWN": 0x8901,
    "SIOCSPGRP": 0x8902,
    "FS_IOC_SETFLAGS": 0x40086602,
    "FS_IOC_FSSETXATTR": 0x401C5820,
    "FS_IOC_ENABLE_VERITY": 0x40806685,
    "FS_IOC_SET_ENCRYPTION_POLICY": 0x800C6613,
}
"""Requests that type into a terminal, make the kernel signal another process, or change the attributes of a
file that is open for reading."""
REFUSED_FCNTLS = {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15, "F_SETLEASE": 1024}
"""Commands that make the kernel signal another process, or block others that open a file."""
SAFE_PRCTLS = {
    "GET_PDEATHSIG": 2,
    "GET_DUMPABLE": 3,
    "GET_KEEPCAPS": 7,
    "SET_NAME": 15,
    "GET_NAME": 16,
    "GET_SECCOMP": 21,
    "CAPBSET_READ": 23,
    "GET_TSC": 25,
    "GET_SECUREBITS": 27,
    "SET_TIMERSLACK": 29,
    "GET_TIMERSLACK": 30,
    "GET_CHILD_SUBREAPER": 37,
    "SET_NO_NEW_PRIVS": 38,
    "GET_NO_NEW_PRIVS": 39,
    "GET_TID_ADDRESS": 40,
    "SET_THP_DISABLE": 41,
    "GET_THP_DISABLE": 42,
    "SVE_GET_VL": 51,
    "GET_TAGGED_ADDR_CTRL": 56,
    "SET_VMA": 0x53564D41,
}
TEMPLATE_PRCTLS = {"SET_PDEATHSIG": 1, "SET_CHILD_SUBREAPER": 36}
"""Options that the template process and its children use until the second stage."""
PRIORITY_OF_PROCESS, IO_PRIORITY_OF_PROCESS = 0, 1
QUERY_PERSONALITY = 0xFFFFFFFF
REFUSED = {
    "other processes": """
        ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp get_robust_list
        pidfd_open pidfd_getfd pidfd_send_signal perf_event_open
    """,
    "namespaces and mounts": """
        unshare setns mount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen fsconfig
        fsmount fspick mount_setattr
    """,
    "owners and identities": """
        chown fchown lchown fchownat capset setuid setgid setreuid setregid setresuid setresgid setfsuid
        setfsgid setgroups
    """,
    "files without a path, and attributes that administrators set": """
        name_to_handle_at open_by_handle_at fanotify_init fanotify_mark quotactl quotactl_fd file_setattr
        memfd_secret
    """,
    "objects that all processes of a user share": """
        shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open
        mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr add_key request_key keyctl
    """,
    "ways around this filter, and parts of the kernel that had many defects": """
        io_uring_setup io_uring_enter io_uring_register io_setup io_destroy io_submit io_cancel io_getevents
        io_pgetevents bpf userfaultfd lsm_set_self_attr modify_ldt iopl ioperm uselib lookup_dcookie
    """,
    "the machine": """
        reboot kexec_load kexec_file_load init_module finit_module delete_module create_module swapon
        swapoff acct syslog vhangup sethostname setdomainname settimeofday clock_settime clock_adjtime
        adjtimex nfsservctl sysfs ustat _sysctl move_pages migrate_pages mbind set_mempolicy
        set_mempolicy_home_node
    """,
}
"""Calls that no permission allows, by subject."""
UNAVAILABLE = """
    clone3 openat2 setxattrat getxattrat listxattrat removexattrat file_getattr statmount listmount
"""
"""Calls with arguments in memory, where a filter can't see them: libraries fall back to older ones."""
CHANGES_OF_METADATA = """
    chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat fsetxattr fremovexattr
"""


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on one argument of a system call."""

    argument: int
    mask: int
    """Bits of the argument that count."""
    value: int
    negated: bool = False
    """True: the masked argument must differ from the value."""

    def __post_init__(self) -> None:
        if self.value & ~self.mask:
            raise ValueError(f"no masked argument has the value {self.value:#x}")

    def holds(self, arguments: tuple[int, ...]) -> bool:
        """Return whether the condition holds, as the kernel computes it."""
        return ((arguments[self.argument] & self.mask) == self.value) is not self.negated


Case = tuple[Check, ...]
"""Conditions that must all hold."""


def equals(argument: int, value: int, *, mask: int = INT) -> Check:
    """Return the condition that the masked argument has a value."""
    return Check(argument, mask, value & mask)


def any_bits(argument: int, bits: int) -> Check:
    """Return the condition that at least one of the bits is set."""
    return Check(argument, bits, 0, negated=True)


def is_null(argument: int) -> Check:
    """Return the condition that a pointer is null."""
    return Check(argument, POINTER, 0)


@dataclass(slots=True)
class _Rule:
    """Answers to one system call."""

    refused: list[tuple[Case, int]] = field(default_factory=list)
    allowed: list[Case] = field(default_factory=list)
    otherwise: int = ALLOW


class Filter:
    """A filter of system calls. Calls that no rule names are allowed.

    For one call, cases that are refused come first, then those that are allowed, then the rest.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._rules: dict[int, _Rule] = {}

    def refuse(self, *names: str, error: int = errno.EPERM) -> None:
        """Refuse calls whatever their arguments."""
        for number in self.machine.numbers_of(*names):
            self._rules[number] = _Rule(otherwise=ERROR | error)

    def refuse_if(self, name: str, *cases: Case, error: int = errno.EPERM) -> None:
        """Refuse a call in any of some cases."""
        for rule in self._rules_of(name):
            rule.refused += [(case, ERROR | error) for case in cases]

    def allow_only_if(self, name: str, *cases: Case, error: int = errno.EPERM) -> None:
        """Refuse a call except in some cases."""
        for rule in self._rules_of(name):
            rule.allowed += cases
            rule.otherwise = ERROR | error

    def notify(self, name: str) -> None:
        """Let the owner of the filter's listener answer a call."""
        for rule in self._rules_of(name):
            rule.otherwise = NOTIFY

    def instructions(self) -> list[Instruction]:
        """Return the assembled filter. Raises SandboxError if it is too long for the kernel."""
        code = self._prologue()
        by_answer: dict[int, list[int]] = {}
        for number, rule in sorted(self._rules.items()):
            if not rule.refused and not rule.allowed:
                by_answer.setdefault(rule.otherwise, []).append(number)
        for answer, numbers in by_answer.items():
            code += _answer_all(numbers, answer)
        for number, rule in sorted(self._rules.items()):
            if rule.refused or rule.allowed:
                code += _block(number, rule)
        code.append((RETURN, 0, 0, ALLOW))
        if len(code) > LONGEST:
            raise SandboxError(f"a filter of {len(code):,} instructions is longer than {LONGEST:,}")
        return code

    def install(self, *, listener: bool = False) -> int:
        """Apply the filter to this process and its future children, for good.

        Returns the file descriptor that receives the notifications if `listener` is set, otherwise 0.
        Raises SandboxUnavailableError if the kernel refuses.
        """
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in self.instructions())
        program = ctypes.create_string_buffer(code, len(code))
        header = struct.pack("@HP", len(code) // 8, ctypes.addressof(program))
        pointer = ctypes.create_string_buffer(header, len(header))
        set_no_new_privileges()
        # A listener and TSYNC exclude each other; Landlock has checked that there is one thread.
        flags = NEW_LISTENER if listener else TSYNC
        number = self.machine.numbers["seccomp"]
        try:
            result = syscall(number, SET_MODE_FILTER, flags, ctypes.addressof(pointer))
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise SandboxUnavailableError(
                    "the calls of this process are supervised already, so its connections can't be"
                ) from error
            raise SandboxUnavailableError(f"seccomp refused the filter: {error.strerror}") from error
        if not listener and result:
            raise SandboxError(f"thread {result} could not be given the filter")
        return result

    def _rules_of(self, name: str) -> Iterable[_Rule]:
        for number in self.machine.numbers_of(name):
            yield self._rules.setdefault(number, _Rule())

    def _prologue(self) -> list[Instruction]:
        code: list[Instruction] = [
            (LOAD, 0, 0, ARCHITECTURE),
            (IF_EQUAL, 1, 0, self.machine.audit_arch),
            (RETURN, 0, 0, KILL),
            (LOAD, 0, 0, NUMBER),
        ]
        if self.machine is X86_64:
            # -1, which a tracer uses to skip a call, is no x32 call.
            code += [
                (IF_EQUAL, 2, 0, 2**32 - 1),
                (IF_BITS, 0, 1, X32_BIT),
                (RETURN, 0, 0, KILL),
            ]
        for first, last in self.machine.gaps:
            # Below: skip. Above: skip. Between: there is no such call.
            code.append((IF_GREATER_OR_EQUAL, 0, 1 if last == 2**32 - 1 else 2, first))
            if last != 2**32 - 1:
                code.append((IF_GREATER_OR_EQUAL, 1, 0, last + 1))
            code.append((RETURN, 0, 0, ERROR | errno.ENOSYS))
        return code


@cache
def has_action(action: int) -> bool:
    """Return whether the kernel's seccomp knows an answer, such as NOTIFY."""
    value = ctypes.c_uint32(action)
    try:
        syscall(this_machine().numbers["seccomp"], GET_ACTION_AVAILABLE, 0, ctypes.addressof(value))
    except (OSError, SandboxUnavailableError):
        return False
    return True


def notification_sizes() -> tuple[int, int]:
    """Return the sizes in bytes of the kernel's notifications and of their answers."""
    sizes = (ctypes.c_uint16 * 3)()
    syscall(this_machine().numbers["seccomp"], GET_NOTIFICATION_SIZES, 0, ctypes.addressof(sizes))
    return sizes[0], sizes[1]


def filter_for(
    permissions: Permissions,
    machine: Machine,
    *,
    may_fork: bool,
    abi: int = 0,
    pid: int | None = None,
    is_supervised: bool = False,
) -> Filter:
    """Return the filter of a process.

    Args:
        permissions: Permissions of the job type.
        machine: Architecture of the process.
        may_fork: True for the template process, which forks the children that run jobs.
        abi: Version of Landlock's ABI that is in force too; for an older one, this filter refuses more.
        pid: Process that the filter is for, if it has no children; it may send signals to itself.
        is_supervised: True if an earlier filter with a listener is in force. The newest filter decides who is
            notified, so this one must leave `connect` to the other.
    """
    rules = Filter(machine)
    _processes(rules, permissions, may_fork=may_fork)
    _signals(rules, permissions, may_fork=may_fork, abi=abi, pid=pid)
    _limits(rules, may_fork=may_fork)
    _files(rules, permissions, abi=abi)
    _network(rules, permissions, is_supervised=is_supervised)
    for names in REFUSED.values():
        rules.refuse(*names.split())
    rules.refuse(*UNAVAILABLE.split(), error=errno.ENOSYS)
    return rules


def _processes(rules: Filter, permissions: Permissions, *, may_fork: bool) -> None:
    rules.refuse_if("clone", (any_bits(0, CLONE_FOREIGN),))
    if not may_fork and permissions.run is False:
        rules.allow_only_if("clone", (any_bits(0, CLONE_THREAD),))
        rules.refuse("fork", "vfork")
    if permissions.run is False:
        rules.refuse("execve")
    if permissions.run is not True:
        # Programs in memory have no path that a list could name.
        rules.refuse("execveat", "memfd_create")
    allowed = {**SAFE_PRCTLS, **(TEMPLATE_PRCTLS if may_fork else {})}
    rules.allow_only_if("prctl", *((equals(0, option),) for option in allowed.values()))
    if may_fork:
        # The second stage adds a filter, which can only refuse more. A listener would answer for ours.
        no_listener = equals(1, 0, mask=NEW_LISTENER)
        rules.allow_only_if("seccomp", (equals(0, SET_MODE_FILTER), no_listener))
    else:
        rules.refuse("seccomp")
    rules.allow_only_if("personality", (equals(0, QUERY_PERSONALITY),), (equals(0, 0),))
    for value in REFUSED_IOCTLS.values():
        rules.refuse_if("ioctl", (equals(1, value),))
    for value in REFUSED_FCNTLS.values():
        rules.refuse_if("fcntl", (equals(1, value),))


def _signals(rules: Filter, permissions: Permissions, *, may_fork: bool, abi: int, pid: int | None) -> None:
    """Keep signals inside. Landlock does from ABI 6 on, and its domain includes started programs."""
    if abi >= 6 and (may_fork or permissions.run is not False):
        return
    own = () if pid is None else ((equals(0, pid),),)
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        rules.allow_only_if(name, *own)
    if abi < 6:
        # The number of a thread says nothing about its process; the first thread has the number of its own.
        rules.allow_only_if("tkill", *own)


def _limits(rules: Filter, *, may_fork: bool) -> None:
    """Allow changes of limits and priorities only for the process itself, and of limits only in time."""
    if may_fork:
        rules.allow_only_if("prlimit64", (equals(0, 0),))
    else:
        rules.refuse("setrlimit")
        rules.allow_only_if("prlimit64", (equals(0, 0), is_null(2)))
    for name in ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr"):
        rules.allow_only_if(name, (equals(0, 0),))
    rules.allow_only_if("setpriority", (equals(0, PRIORITY_OF_PROCESS), equals(1, 0)))
    rules.allow_only_if("ioprio_set", (equals(0, IO_PRIORITY_OF_PROCESS), equals(1, 0)))


def _files(rules: Filter, permissions: Permissions, *, abi: int) -> None:
    for name, mode in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("fchmodat2", 2), ("creat", 1)):
        rules.refuse_if(name, (any_bits(mode, SET_ID_BITS),))
    for name, mode in (("mknod", 1), ("mknodat", 2)):
        rules.refuse_if(name, (any_bits(mode, SET_ID_BITS),))
    for name, flags in (("open", 1), ("openat", 2)):
        rules.refuse_if(name, (any_bits(flags, CREATES), any_bits(flags + 1, SET_ID_BITS)))
        if abi < 3 and permissions.write is not True:
            # Landlock learned to refuse truncation with ABI 3; opened for reading, a file could be emptied.
            reading = equals(flags, TRUNCATES, mask=TRUNCATES | ACCESS_MODE)
            rules.refuse_if(name, (reading,))
    if abi < 3 and permissions.write is not True:
        rules.refuse("truncate")
    if permissions.write is False:
        rules.refuse(*CHANGES_OF_METADATA.split())
    if permissions.write is not True:
        # Landlock does not know extended attributes. Programs that copy files accept this answer.
        rules.refuse("setxattr", "lsetxattr", "removexattr", "lremovexattr", error=errno.EOPNOTSUPP)
    if permissions.read is not True and permissions.write is not True:
        rules.refuse("getxattr", "lgetxattr", "listxattr", "llistxattr", error=errno.EOPNOTSUPP)
        # A watch reports the names of files in directories that can't be read.
        rules.refuse("inotify_add_watch")


def _network(rules: Filter, permissions: Permissions, *, is_supervised: bool) -> None:
    rules.allow_only_if("socket", *_sockets(permissions))
    # A datagram socket could send to any path, and no other kind of pair has an address.
    rules.allow_only_if(
        "socketpair", *((equals(0, UNIX), equals(1, kind, mask=TYPE)) for kind in (STREAM, SEQUENCED))
    )
    if permissions.net is False:
        rules.refuse("connect")
    elif permissions.net is not True and not is_supervised:
        rules.notify("connect")
    if permissions.net is not True:
        for name, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
            rules.refuse_if(name, (any_bits(flags, FAST_OPEN),))
    if permissions.listen is False:
        rules.refuse("bind", "listen")


def _sockets(permissions: Permissions) -> list[Case]:
    cases: list[Case] = []
    if permissions.net is not False or permissions.listen is not False:
        cases += [_inet(family, STREAM, protocol) for family in (INET, INET6) for protocol in (0, TCP)]
    if permissions.net is True:
        # The C library asks name servers by UDP; with a list, the supervisor resolves names.
        cases += [_inet(family, DATAGRAM, protocol) for family in (INET, INET6) for protocol in (0, UDP)]
        cases += [(equals(0, UNIX),)]
    elif any(rule.path for rule in permissions.net_rules):
        cases += [(equals(0, UNIX), equals(1, STREAM, mask=TYPE))]
    return cases


def _inet(family: int, kind: int, protocol: int) -> tuple[Check, Check, Check]:
    return (equals(0, family), equals(1, kind, mask=TYPE), equals(2, protocol))


def _answer_all(numbers: list[int], answer: int) -> list[Instruction]:
    """Return the code that gives some calls one answer, and goes on otherwise."""
    code: list[Instruction] = []
    step = FARTHEST - 1
    for start in range(0, len(numbers), step):
        part = numbers[start : start + step]
        code += [(IF_EQUAL, len(part) - at, 0, number) for at, number in enumerate(part)]
        code += [(JUMP, 0, 0, 1), (RETURN, 0, 0, answer)]
    return code


def _block(number: int, rule: _Rule) -> list[Instruction]:
    """Return the code of one call with conditions. It never goes on: the number is no longer loaded."""
    body: list[Instruction] = []
    for case, answer in rule.refused:
        body += _case(case, answer)
    for case in rule.allowed:
        body += _case(case, ALLOW)
    body.append((RETURN, 0, 0, rule.otherwise))
    return [(IF_EQUAL, 1, 0, number), (JUMP, 0, 0, len(body)), *body]


def _case(case: Case, answer: int) -> list[Instruction]:
    """Return the code that answers if all conditions hold, and goes on otherwise."""
    code: list[Instruction] = [(RETURN, 0, 0, answer)]
    for check in reversed(case):
        code = _check(check, len(code)) + code
    return code


def _check(check: Check, after: int) -> list[Instruction]:
    """Return the code of a condition: it goes on if the condition holds, and skips `after` otherwise."""
    offset = ARGUMENTS + 8 * check.argument
    # Both machines are little-endian: the low half comes first.
    halves = [
        (offset + 4 * at, check.mask >> 32 * at & INT, check.value >> 32 * at & INT)
        for at in (0, 1)
        if check.mask >> 32 * at & INT
    ]
    code: list[Instruction] = []
    for at, (where, mask, value) in enumerate(reversed(halves)):
        below = len(code)
        if check.negated:
            # One half that differs is enough; the last one decides.
            equal, different = (after + below, below) if at == 0 else (0, below)
        else:
            equal, different = 0, after + below
        part: list[Instruction] = [(LOAD, 0, 0, where)]
        if mask != INT:
            part.append((AND, 0, 0, mask))
        part.append((IF_EQUAL, equal, different, value))
        code = part + code
    return code
