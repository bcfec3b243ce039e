"""System calls pass whole registers, and errors arrive as exceptions."""

import ctypes
import errno
import os
import threading

import pytest

from djqueue.runtime.executors.sandbox.syscalls import (
    drop_capabilities,
    libc,
    prctl,
    set_dumpable,
    set_no_new_privileges,
    syscall,
    this_machine,
    threads,
)
from tests.runtime.executors.sandbox.attempts import USER, needs_sandbox
from tests.runtime.executors.sandbox.harness import run

pytestmark = needs_sandbox


def test_system_call_returns_its_result() -> None:
    assert syscall(this_machine().numbers["getpid"]) == os.getpid()


@pytest.mark.parametrize("argument", [-1, 2**64 - 1, 2**32 - 1])
def test_system_call_error_is_raised_with_its_number(argument: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        syscall(this_machine().numbers["close"], argument)
    assert caught.value.errno == errno.EBADF


def test_six_arguments_are_passed_as_64_bits() -> None:
    """`mmap` takes six arguments, and an offset that does not fit into 32 bits."""
    anonymous_private, nothing, offset = 0x22, 0, 2**40
    address = syscall(this_machine().numbers["mmap"], 0, 4_096, nothing, anonymous_private, -1, offset)

    assert address > 2**32
    assert syscall(this_machine().numbers["munmap"], address, 4_096) == 0


def test_unknown_prctl_option_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        prctl(12_345)


@USER
def test_privileges_cannot_be_regained(user: str) -> None:
    assert run(lambda: prctl(39), user=user).value == 0
    assert run(lambda: prctl(39), user=user, prepare=set_no_new_privileges).value == 1


@USER
def test_dropped_capabilities_cannot_be_regained(user: str) -> None:
    def capabilities() -> tuple[list[int], int]:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        data = (ctypes.c_uint32 * 6)()
        libc().capget(ctypes.byref(header), ctypes.byref(data))
        return list(data), sum(prctl(23, one) for one in range(41))

    def drop() -> None:
        set_no_new_privileges()
        drop_capabilities()

    assert run(capabilities, user=user, prepare=drop).value[0] == [0] * 6
    if os.geteuid() == 0 and user == "root":
        assert run(capabilities, user=user).value[0] != [0] * 6
        assert run(capabilities, user=user, prepare=drop).value[1] == 0


@USER
def test_process_can_be_hidden_from_others_of_its_user(user: str) -> None:
    def hide() -> int:
        set_dumpable(dumpable=False)
        return prctl(3)

    assert run(hide, user=user).value == 0


def test_threads_are_counted() -> None:
    def count() -> tuple[int, int]:
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        found = threads()
        release.set()
        thread.join()
        return 1, found

    assert run(threads).value == 1
    assert run(count).value == (1, 2)
