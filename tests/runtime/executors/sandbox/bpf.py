"""The kernel's machine for filters of system calls, to run a filter of any architecture on any other."""

import struct
from collections.abc import Sequence

from djqueue.runtime.executors.sandbox.seccomp import Instruction


def answer(code: Sequence[Instruction], arch: int, number: int, arguments: Sequence[int] = ()) -> int:
    """Return the answer of a filter to a call, as `kernel/seccomp.c` computes it."""
    full = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number & 2**32 - 1, arch, 0, *(one & 2**64 - 1 for one in full))
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, operand)[0]
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x05:
            at += operand
        elif operation == 0x15:
            at += if_true if accumulator == operand else if_false
        elif operation == 0x35:
            at += if_true if accumulator >= operand else if_false
        elif operation == 0x45:
            at += if_true if accumulator & operand else if_false
        elif operation == 0x06:
            return operand
        else:
            raise AssertionError(f"unknown instruction {operation:#x}")
