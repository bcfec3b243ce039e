"""A filter of system calls: an assembler for the kernel's BPF machine, and the call that installs it.

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

from .errors import SandboxError, SandboxUnavailableError
from .syscalls import set_no_new_privileges, syscall
from .tables import X86_64, Machine, this_machine

SET_MODE_FILTER, GET_ACTION_AVAILABLE, GET_NOTIFICATION_SIZES = 1, 2, 3
"""Operations of the seccomp call."""
TSYNC, NEW_LISTENER = 1 << 0, 1 << 3
"""Flags of SET_MODE_FILTER."""
ALLOW, NOTIFY, KILL, ERROR = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
"""Answers of a filter; the number of the error is added to the last one."""
X32_BIT = 0x40000000

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
        code = b"".join(struct.pack("=HBBI", *one) for one in self.instructions())
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
