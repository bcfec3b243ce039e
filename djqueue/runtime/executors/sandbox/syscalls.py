"""System calls that Python has no function for, and the state of the process that a sandbox changes first."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

PR_SET_DUMPABLE = 4
PR_CAPBSET_READ, PR_CAPBSET_DROP = 23, 24
PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS = 38, 39
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_VERSION_3 = 0x20080522
HIGHEST_CAPABILITY = 63
TASKS = Path("/proc/self/task")


@cache
def libc() -> Any:
    """Return the C library of this process."""
    return ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: int) -> int:
    """Make a system call with up to six integers or addresses, and return its result.

    Raises OSError with the call's errno.
    """
    function = libc().syscall
    function.restype = ctypes.c_long
    # Each argument fills a register: ctypes would pass a bare integer as an int, with garbage above it.
    registers = [ctypes.c_ulong(value & 2**64 - 1) for value in (number, *arguments)]
    registers += [ctypes.c_ulong(0)] * (7 - len(registers))
    result = int(function(*registers))
    if result == -1:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))
    return result


def prctl(option: int, *arguments: int) -> int:
    """Call prctl with up to four integers. Raises OSError."""
    registers = [ctypes.c_ulong(value) for value in arguments]
    registers += [ctypes.c_ulong(0)] * (4 - len(registers))
    result = int(libc().prctl(ctypes.c_int(option), *registers))
    if result == -1:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))
    return result


def set_no_new_privileges() -> None:
    """Keep this process, and every program that it starts, from gaining privileges. Irreversible."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def set_dumpable(*, dumpable: bool) -> None:
    """Allow or forbid other processes of the same user to inspect this one.

    A supervisor that runs as an ordinary user can read the addresses of `connect` calls only if this is on.
    """
    prctl(PR_SET_DUMPABLE, int(dumpable))


def drop_capabilities() -> None:
    """Give up every capability for good, including those that a program started as root would regain.

    Requires no-new-privileges, which covers what a process without CAP_SETPCAP can't drop.
    """
    for capability in range(HIGHEST_CAPABILITY + 1):
        try:
            if prctl(PR_CAPBSET_READ, capability):
                prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            # Beyond the last capability of the kernel, or not permitted; see above for the latter.
            continue
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc().capset(ctypes.byref(header), ctypes.byref(nothing)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def threads() -> int:
    """Return the number of threads of this process. Raises OSError if /proc can't be read."""
    return len(os.listdir(TASKS))
